"""Send concurrent requests to an OpenAI-compatible endpoint; a failed request does not affect the others.

Requests share a connection pool and a concurrency limit. Every attempt has one deadline from connecting to the last
byte, which also ends replies that arrive byte by byte. 408, 409, 425, 429, 5xx, broken connections and timeouts are
retried after exponential backoff with jitter, or after `Retry-After` if that is longer. A rejected key or a wrong address
stops the batch at once. Redirects are not followed.
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


_RETRIED = frozenset({408, 409, 425, 429})
_FATAL = frozenset({401, 403, 404, 405})
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An endpoint with its timeouts and retries. Raises PresetError for a value that is not usable.

    Args:
        base_url: URL before `/chat/completions`, for example `http://localhost:8000/v1`.
        api_key_env: environment variable that holds the key, which is not stored here; None sends no key.
        timeout: seconds for one attempt, from connecting to the last byte.
        retries: further attempts after a transient failure.
        concurrency: the most requests in flight.
        backoff: seconds before the first retry, doubled for each further one, times a jitter of 0.5 to 1.5.
        max_wait: the longest wait before a retry in seconds, also for `Retry-After`.
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
            raise PresetError(f"base_url is {self.base_url!r}. Pass a URL such as http://localhost:8000/v1.")
        if parts.username or parts.password or parts.query:
            raise PresetError(
                "base_url contains a user name, password or query, which would appear in logs. "
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
    """The content of the reply, or None and the problem; `attempts` counts the requests that were sent."""

    content: str | None
    problem: str | None = None
    attempts: int = 1


@dataclass
class Chat:
    """The requests of one batch to an endpoint; an async context manager.

    `may_ask` is called before every request; after it returns False, no more requests are sent.
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
        is_local = urlsplit(self.endpoint.base_url).hostname in _LOOPBACK  # a proxy cannot reach ports of this machine
        # Without TLS, certificates are not read: reading them takes longer than many batches.
        is_encrypted = self.endpoint.base_url.startswith("https:")
        self._client = httpx.AsyncClient(timeout=None, headers=headers, trust_env=not is_local, verify=is_encrypted)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, body: dict[str, Any]) -> Reply:
        """Return the reply to one request. Raises only `asyncio.CancelledError`."""
        problem, sent = "not sent", 0
        for attempt in range(self.endpoint.retries + 1):
            async with self._slots:
                if self.stopped is not None:
                    return Reply(None, self.stopped, sent)
                if not self.may_ask():
                    self.stopped = "the budget of requests is used up"
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
        """Return content, problem and the minimum wait before a retry in seconds; None as wait means that a retry is useless."""
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
        # A 200 without a chat completion comes from a proxy or an overloaded server: retry.
        return content, "" if content is not None else f"no chat completion: {response.content[:100]!r}", 0.0

    def _refusal(self, response: "httpx.Response") -> tuple[str, float | None]:
        status = response.status_code
        problem = f"HTTP {status}: {response.content[:150].decode('utf-8', 'replace')}"
        if status in _FATAL:
            self.stopped = self._redacted(problem)
        if status in _RETRIED or status >= 500:
            seconds = response.headers.get("retry-after", "").strip()
            return problem, float(seconds) if seconds.replace(".", "", 1).isdecimal() else 0.0
        return problem, None

    def _redacted(self, text: str) -> str:
        return (text.replace(self._key, "***") if self._key else text)[:300]


def _content(data: bytes) -> str | None:
    """Return the text of the first choice in a chat completion; None if it has another form."""
    try:
        content = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return content if isinstance(content, str) else None
