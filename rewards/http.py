"""Asking an OpenAI-compatible endpoint many things at once, and never failing because one of them does.

Requests share a connection pool and a concurrency limit. Every attempt has one deadline from connecting to the last
byte, so that a server which drips is cut off like one that hangs. 408, 409, 425, 429, 5xx, broken connections and
overruns are tried again after exponential backoff with jitter, or after `Retry-After` when that is longer. A refused
key or a wrong address stops the batch at once. Redirects are not followed.
"""

import asyncio
import json
import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rewards.errors import PresetError
from rewards.protocol import failure_reason

if TYPE_CHECKING:
    import httpx


_AGAIN = frozenset({408, 409, 425, 429})
_HOPELESS = frozenset({401, 403, 404, 405})
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An endpoint with its timeouts and retries. Holds the name of the variable with the key, never the key.

    Args:
        base_url: up to and without `/chat/completions`, for instance `http://localhost:8000/v1`.
        api_key_env: environment variable that holds the key; None sends none.
        timeout: seconds for one attempt, from connecting to the last byte.
        retries: further attempts after one that failed in a way that may pass.
        concurrency: attempts under way at once.
        backoff: seconds before the first retry, doubled for each further one, times a jitter of 0.5 to 1.5.
        max_wait: seconds that no wait exceeds, whatever `Retry-After` says.
    """

    base_url: str
    api_key_env: str | None = None
    timeout: float = 60.0
    retries: int = 3
    concurrency: int = 8
    backoff: float = 0.5
    max_wait: float = 30.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PresetError(f"base_url is {self.base_url!r}. Give one like http://localhost:8000/v1.")
        if parts.username or parts.password or parts.query:
            raise PresetError(
                "base_url carries a user name, password or query, which would end up in logs. "
                "Put the key into an environment variable and name it in api_key_env."
            )
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise PresetError(
                f"Environment variable {self.api_key_env!r}, named by api_key_env, is not set. "
                "Export the key under that name, or pass api_key_env=None for a server without keys."
            )
        if self.timeout <= 0 or self.retries < 0 or self.concurrency < 1 or self.backoff < 0 or self.max_wait < 0:
            raise PresetError(
                "An endpoint needs timeout > 0, retries >= 0, concurrency >= 1, backoff >= 0 and max_wait >= 0, got "
                f"{self.timeout}, {self.retries}, {self.concurrency}, {self.backoff}, {self.max_wait}."
            )

    @property
    def url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"


@dataclass(frozen=True)
class Reply:
    """The message's content, or None and what went wrong; `attempts` counts requests sent."""

    content: str | None
    problem: str | None = None
    attempts: int = 1


@dataclass
class Chat:
    """One batch's conversations with an endpoint; an async context manager.

    `may_ask` is called before every request; once it says no, nothing more is sent.
    """

    endpoint: Endpoint
    seed: int = 0
    may_ask: Any = field(default=lambda: True, repr=False)
    stopped: str | None = None

    async def __aenter__(self) -> "Chat":
        import httpx

        self._random = random.Random(self.seed)
        self._slots = asyncio.Semaphore(self.endpoint.concurrency)
        self._key = os.environ.get(self.endpoint.api_key_env or "", "")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        is_local = urlsplit(self.endpoint.base_url).hostname in _LOOPBACK  # a proxy cannot reach this machine's ports
        # Reading certificates takes longer than many a batch.
        is_encrypted = self.endpoint.base_url.startswith("https:")
        self._client = httpx.AsyncClient(timeout=None, headers=headers, trust_env=not is_local, verify=is_encrypted)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, body: dict[str, Any]) -> Reply:
        """The reply to one request. Raises nothing but cancellation."""
        problem, sent = "not asked", 0
        for attempt in range(self.endpoint.retries + 1):
            async with self._slots:
                if self.stopped is not None:
                    return Reply(None, self.stopped, sent)
                if not self.may_ask():
                    self.stopped = "the budget of requests is spent"
                    return Reply(None, self.stopped, sent)
                sent += 1
                content, problem, wait = await self._attempt(body)
            if content is not None:
                return Reply(content, None, sent)
            if wait is None:
                break
            if attempt < self.endpoint.retries:
                jittered = self.endpoint.backoff * 2**attempt * (0.5 + self._random.random())
                await asyncio.sleep(min(self.endpoint.max_wait, max(jittered, wait)))
        return Reply(None, self._redacted(problem), sent)

    async def _attempt(self, body: dict[str, Any]) -> tuple[str | None, str, float | None]:
        """Content, else the problem and the least seconds to wait before asking again; None where that is no use."""
        import httpx

        try:
            async with asyncio.timeout(self.endpoint.timeout):
                response = await self._client.post(self.endpoint.url, json=body)
        except TimeoutError:
            return None, f"no reply within {self.endpoint.timeout:g} s", 0.0
        except httpx.TransportError as failure:
            return None, failure_reason(failure), 0.0
        except (httpx.HTTPError, ValueError, OSError) as failure:
            return None, failure_reason(failure), None
        if response.status_code != 200:
            return None, *self._refusal(response)
        content = _content(response.content)
        # A 200 that is no chat completion comes from a proxy or a server about to fall over: worth another try.
        return content, "" if content is not None else f"no chat completion: {response.content[:100]!r}", 0.0

    def _refusal(self, response: "httpx.Response") -> tuple[str, float | None]:
        status = response.status_code
        problem = f"HTTP {status}: {response.content[:150].decode('utf-8', 'replace')}"
        if status in _HOPELESS:
            self.stopped = self._redacted(problem)
        if status in _AGAIN or status >= 500:
            seconds = response.headers.get("retry-after", "").strip()
            return problem, float(seconds) if seconds.replace(".", "", 1).isdecimal() else 0.0
        return problem, None

    def _redacted(self, text: str) -> str:
        return (text.replace(self._key, "***") if self._key else text)[:300]


def _content(data: bytes) -> str | None:
    """The first choice's text in a chat completion."""
    try:
        content = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return content if isinstance(content, str) else None
