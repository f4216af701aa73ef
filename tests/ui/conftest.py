"""A real page server per test module, and requests that a browser would not send."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UP_SECONDS = 90.0


@dataclass
class Answer:
    """A response of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Page:
    """A server on its own port; `folder` is its working directory, `root` has its runs."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder / "runs"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, target: str, body: Any = None, **headers: str | None) -> Answer:
        """Send one request with the target as it is, without normalisation. A header of None is omitted."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        sent = {"Host": f"127.0.0.1:{self.port}", **self.headers}
        if isinstance(body, (dict, list)):
            sent["Content-Type"] = "application/json"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Content-Length": str(len(data))} if data is not None else {}).items():
            sent.setdefault(name, value)
        for name, value in sent.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders()
        if data is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server refused before all was sent
                connection.send(data)
        reply = connection.getresponse()
        answer = Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        connection.close()
        return answer

    @functools.cached_property
    def described(self) -> dict[str, Any]:
        """Gradio's description of the page: components and events."""
        return self.ask("GET", "/config").json()

    def event(self, target: str) -> dict[str, Any]:
        """The server's event that the component with this elem_id or text triggers, directly or after an event of the browser."""
        components, events = self.described["components"], self.described["dependencies"]
        ids = {box["id"] for box in components if target in (box["props"].get("elem_id"), box["props"].get("value"))}
        begun = [event for event in events if any(at in ids for at, _ in event["targets"])]
        begun += [event for event in events if event["trigger_after"] in {first["id"] for first in begun}]
        served = [event for event in begun if event.get("backend_fn")]
        assert served, f"no event of {target}"
        return dict(served[0])

    def events(self) -> list[dict[str, Any]]:
        return [event for event in self.described["dependencies"] if event.get("backend_fn")]

    def predict(self, event: int, data: list[Any], **headers: str | None) -> Answer:
        """Call an event outside the queue with any values, as a script can."""
        body = {"fn_index": event, "data": data, "session_hash": "forged", "event_data": None, "trigger_id": None}
        return self.ask("POST", "/gradio_api/run/predict", body, **headers)

    def queued(self, event: int, data: list[Any], seconds: float = 60.0) -> dict[str, Any]:
        """Call an event through the queue; return the last message of its stream."""
        session = f"forged{time.monotonic_ns()}"
        joined = self.ask(
            "POST",
            "/gradio_api/queue/join",
            {"fn_index": event, "data": data, "session_hash": session, "trigger_id": None},
        )
        assert joined.status == 200, joined.text
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        connection.request("GET", f"/gradio_api/queue/data?session_hash={session}", headers=self.headers)
        stream = connection.getresponse()
        while line := stream.readline():
            if line.startswith(b"data:"):
                message = json.loads(line[5:])
                if message["msg"] == "process_completed":
                    connection.close()
                    return dict(message)
        raise AssertionError("the stream ended without an answer")

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when it is out of memory."""
        assert self.process is not None, "the server runs in this process"
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Opener = Callable[..., Page]


@contextlib.contextmanager
def opening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """Yield a function that starts servers; all of them are stopped at the end."""
    opened: list[Page] = []

    def start(
        *options: str, environment: dict[str, str] | None = None, folder: Path | None = None, port: int = 0
    ) -> Page:
        place = folder or tmp_path_factory.mktemp("page")
        number = port or free_port()
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "app.py"), "--port", str(number), *options],
            cwd=place,
            env={**os.environ, "GRADIO_TEMP_DIR": str(place / "gradio"), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=(place / "server.log").open("ab"),
        )
        page = Page(number, place, process)
        opened.append(page)
        end = time.monotonic() + UP_SECONDS
        while time.monotonic() < end:
            assert process.poll() is None, (place / "server.log").read_text()
            try:
                if page.ask("GET", "/health").status in (200, 401):
                    return page
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server did not come up")

    yield start
    for page in opened:
        if page.process is not None and page.process.poll() is None:
            page.process.send_signal(signal.SIGINT)
            try:
                page.process.wait(15)
            except subprocess.TimeoutExpired:
                page.process.kill()


@pytest.fixture(scope="module")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """Yield `open_page("--auth", "FILE", environment={...}, folder=...)`, which starts a server until the module ends."""
    with opening(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The shared server of the browser tests."""
    with opening(tmp_path_factory) as start:
        yield start(environment={"OMP_NUM_THREADS": "1"})


CHROMIUM = ("/usr/bin/chromium-headless-shell", "/usr/bin/chromium")
"""The shell draws the same pages with two thirds of the work."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium whose tabs share one renderer process, to save their starts."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = next((path for path in CHROMIUM if Path(path).exists()), None)
        options = ["--no-sandbox", "--disable-background-networking", "--renderer-process-limit=1"]
        yield playwright.chromium.launch(executable_path=path, args=options)


@pytest.fixture(scope="session")
def known(browser: Any) -> Iterator[Any]:
    """A browser context with the page's files and compiled scripts in its cache, but without a draft."""
    context = browser.new_context()
    context.new_page()  # keep a window open, because opening one costs more than a tab
    yield context
    context.close()


@pytest.fixture(scope="module")
def serve_here() -> Iterator[Callable[..., Page]]:
    """Yield `serve_here(folder, accounts={...})`: the application in a thread of this process, which starts faster."""
    import threading

    import uvicorn

    from kit.ui.server import make_app
    from kit.ui.settings import Settings

    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(folder: Path, **options: Any) -> Page:
        port = free_port()
        settings = Settings(port=port, root=folder / "runs", folder=folder, **options)
        server = uvicorn.Server(
            uvicorn.Config(make_app(settings), port=port, log_level="error", ws="none", access_log=False)
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            time.sleep(0.02)
        return Page(port, folder)

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)
