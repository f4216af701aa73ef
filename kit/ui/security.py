"""The gate: every request passes it first. It checks user, origin, path and size.

It is an ASGI middleware, so it covers all routes, including those of later Gradio versions: a path that is not listed does not
exist. With Gradio's `auth` and Starlette's TrustedHostMiddleware instead, 42 of the 82 tests of tests/ui/test_security_http.py
fail: uploads and other routes are open, other sites can post, bodies have no limit, other routes than Gradio's need no password.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from kit.ui import uploads
from kit.ui.settings import Settings, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGEST_BODY = 4 * 1024 * 1024
"""The most bytes of a request's body: the largest legitimate one is a list of pasted completions."""
UPLOAD = "/gradio_api/upload"
"""The only address that takes a file: its body may be larger, and it is refused if the folder of uploads is full."""
HEARTBEAT = "/gradio_api/heartbeat/"
"""Gradio's script keeps this stream open in every tab. A browser has six connections per host, so a seventh tab would not load.
The gate answers with no content, which the script takes for the end of the stream."""
WRONG_PASSWORD_SECONDS = 0.5
MOST_WAITING = 20
"""The most passwords that may wait to be checked."""
REALM = b'Basic realm="grpo-kit", charset="UTF-8"'

READ = re.compile(
    r"/(?:assets|static)/[\w./@+-]+"
    r"|/(?:config|theme\.css|favicon\.ico|manifest\.json|robots\.txt|health)/?"
    r"|/gradio_api/(?:info|app_id|startup-events|queue/data|theme\.css|heartbeat/\w+|user|login_check|upload_progress)/?"
    r"|/runs/[^/]+/(?:report\.html|export/.+)"
)
"""Paths for GET besides the screens. Gradio's files, proxies, recordings, monitoring and code editors are not among them."""
WRITE = re.compile(r"/gradio_api/(?:queue/join|run/predict|cancel|reset|heartbeat/\w+|upload)/?")
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
"""Gradio's scripts are inline and create functions from text; nothing is loaded from another host."""
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'; sandbox allow-scripts"
)
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


class Refusal(Exception):
    """A refused request: a status and one line of text."""

    def __init__(self, status: int, text: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers


class Gate:
    """The middleware.

    New passwords are checked one after the other, and a wrong one takes half a second, so that parallel guesses are not
    faster. Users who are logged in do not wait.
    """

    def __init__(self, app: App, settings: Settings, screens: Sequence[str] = ()) -> None:
        self.app, self.settings, self.screens = app, settings, frozenset(("", *screens))
        self._one, self._waiting = asyncio.Lock(), 0
        self._admitted: set[bytes] = set()  # digests of headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket, which nothing here uses
        try:
            await self._check(scope)
            if scope["path"].startswith(HEARTBEAT):
                raise Refusal(204, "")
            if scope["path"].rstrip("/") == UPLOAD and not uploads.has_room(self.settings.root):
                raise Refusal(
                    507,
                    f"{uploads.folder(self.settings.root)} holds {uploads.MOST_BYTES // 1024**3} GiB already. Remove some files.",
                )
            body = Body(receive, largest(scope["path"]))
            await self.app(scope, body.receive, with_headers(send, scope["path"], body))
        except Refusal as refusal:
            await refuse(send, refusal)

    async def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        # Without accounts, a foreign host name that resolves to 127.0.0.1 (DNS rebinding) is refused.
        if not self.settings.accounts and not is_loopback(host_name(headers.get(b"host", b""))):
            raise Refusal(403, "This page answers to localhost only.")
        if self.settings.accounts and not await self._is_admitted(headers.get(b"authorization")):
            raise Refusal(401, "Log in first.", ((b"www-authenticate", REALM),))
        self._check_origin(scope["method"], headers)
        check_target(scope, self.screens)
        check_length(headers, largest(scope["path"]))

    async def _is_admitted(self, header: bytes | None) -> bool:
        """Whether the header names an account. Raises `Refusal` if too many passwords wait."""
        if header is None:
            return False
        digest = hashlib.sha256(header).digest()
        if digest in self._admitted:
            return True
        if self._waiting >= MOST_WAITING:
            raise Refusal(429, "Too many passwords are waiting to be checked. Try again in a few seconds.")
        self._waiting += 1
        try:
            async with self._one:
                if not admitted(self.settings, header):
                    await asyncio.sleep(WRONG_PASSWORD_SECONDS)
                    return False
        finally:
            self._waiting -= 1
        self._admitted.add(digest)
        return True

    def _check_origin(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Refuse forms and scripts of other web sites, with which a browser would send the password."""
        if headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none") and method != "GET":
            raise Refusal(403, "Requests of other sites are refused.")
        origin = headers.get(b"origin")
        if origin is None or (method in ("GET", "HEAD") and origin == b"null"):
            return
        names = (b"host", b"x-forwarded-host") if self.settings.proxy else (b"host",)
        served = {headers.get(name, b"").decode("latin-1") for name in names}
        if urlsplit(origin.decode("latin-1")).netloc not in served - {""}:
            raise Refusal(403, "Requests of other sites are refused.")


def host_name(value: bytes) -> str:
    """`[::1]:7860` -> `::1`."""
    try:
        return urlsplit(f"//{value.decode('latin-1')}").hostname or ""
    except ValueError:
        return ""


def admitted(settings: Settings, header: bytes | None) -> bool:
    """Whether an `Authorization: Basic` header names an account."""
    kind, _, encoded = (header or b"").partition(b" ")
    if kind.lower() != b"basic":
        return False
    try:
        name, _, password = base64.b64decode(encoded.strip(), validate=True).decode("utf-8").partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return False
    return settings.admits(name, password)


def check_target(scope: Scope, screens: Collection[str]) -> None:
    """Refuse paths that are neither a screen's nor listed, and ambiguous ones."""
    path = scope["path"]
    parts = path.split("/")
    if ".." in parts or "." in parts or "\\" in path or "\0" in path or "//" in path:
        raise Refusal(404, "There is no such page.")
    method = scope["method"]
    known = READ if method in ("GET", "HEAD") else WRITE if method == "POST" else None
    if known is None:
        raise Refusal(405, "This method is not allowed.")
    if not known.fullmatch(path) and (known is WRITE or path.strip("/") not in screens):
        raise Refusal(404, "There is no such page.")


def largest(path: str) -> int:
    """Return the most bytes of a body for this address."""
    return uploads.LARGEST + uploads.MULTIPART if path.rstrip("/") == UPLOAD else LARGEST_BODY


def check_length(headers: dict[bytes, bytes], limit: int) -> None:
    """Refuse a body whose declared length is too large."""
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > limit:
        raise Refusal(413, f"More than {limit // 1024**2} MiB at once are refused.")


class Body:
    """Counts a request's body: one that is longer than the limit ends early and is answered with 413."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._length, self._limit = receive, 0, limit

    @property
    def too_long(self) -> bool:
        return self._length > self._limit

    async def receive(self) -> Message:
        message = await self._receive()
        self._length += len(message.get("body", b""))
        return {"type": "http.disconnect"} if self.too_long else message


def with_headers(send: Send, path: str, body: Body) -> Send:
    """Return a `send` that adds the security headers to the answer."""
    policy = REPORT_POLICY if path.startswith("/runs/") else POLICY

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            removed = {b"content-security-policy", b"server", b"access-control-allow-origin", *dict(HEADERS)}
            headers = [(name, value) for name, value in message["headers"] if name.lower() not in removed]
            message["status"] = 413 if body.too_long else message["status"]
            message["headers"] = [*headers, *HEADERS, (b"content-security-policy", policy.encode())]
        await send(message)

    return sending


async def refuse(send: Send, refusal: Refusal) -> None:
    """Answer with the refusal; a 404, which people may see, has a link to Home."""
    is_page = refusal.status == 404
    body = (f'<!doctype html><p>{refusal.text} <a href="/">Home</a></p>' if is_page else refusal.text).encode()
    kind = b"text/html" if is_page else b"text/plain"
    headers = [(b"content-type", kind + b"; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send(
        {"type": "http.response.start", "status": refusal.status, "headers": [*headers, *HEADERS, *refusal.headers]}
    )
    await send({"type": "http.response.body", "body": body})
