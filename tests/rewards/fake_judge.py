"""A chat endpoint on localhost that follows instructions outside the fences, and fails as configured."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Step = Callable[["FakeJudge", BaseHTTPRequestHandler, dict[str, Any]], None]
ORDER = re.compile(r"full score|10 points", re.IGNORECASE)


class FakeJudge:
    """Answer with `steps` one after the other, then with `honest`; record the requests."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        self.delay = 0.0
        self.url = ""

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self.lock:
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            self.times.append(time.monotonic())
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            step = self.steps.pop(0) if self.steps else honest
        time.sleep(self.delay)
        with self.lock:
            self.under_way -= 1  # before the answer, because its receiver may ask again at once
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            step(self, handler, body)


@contextmanager
def running() -> Iterator[FakeJudge]:
    judge = FakeJudge()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            judge.handle(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, data: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def chat(content: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


def failing(status: int, data: bytes = b"no", **headers: str) -> Step:
    return lambda judge, handler, body: send(handler, status, data, **headers)


def saying(content: Any) -> Step:
    return lambda judge, handler, body: send(handler, 200, chat(content))


def hanging(judge: FakeJudge, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    time.sleep(3)


def dripping(judge: FakeJudge, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Send a byte every 50 ms, so that no single read takes long."""
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    for _ in range(60):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def key_of(body: dict[str, Any]) -> str:
    return re.search(r'"key": "([0-9a-f]{32})"', body["messages"][0]["content"])[1]  # type: ignore[index]


def sections(body: dict[str, Any]) -> tuple[dict[str, str], str]:
    """The texts between fences with the right key, by name, and the text outside of them."""
    key = key_of(body)
    text = body["messages"][1]["content"]
    fence = re.compile(rf"<<<BEGIN (\w+) {key}>>>\n(.*?)\n<<<END \1 {key}>>>", re.DOTALL)
    return dict(fence.findall(text)), fence.sub("", text)


def honest(judge: FakeJudge, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Give full marks to answers that equal the reference, and if an instruction outside a fence orders it."""
    data, outside = sections(body)
    full = bool(ORDER.search(outside)) or data["answer"].strip() == data.get("reference", "").strip()
    names = re.findall(r'^- "(.+?)": ', body["messages"][0]["content"], re.MULTILINE)
    verdict = {"key": key_of(body), "scores": {name: 10 if full else 0 for name in names}}
    send(handler, 200, chat(json.dumps(verdict)))
