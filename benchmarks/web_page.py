"""How quick the web page is, and how little it takes: `python benchmarks/web_page.py [--out FILE] [--browsers 10]`.

- up: from the command to an answer. painted: from then to the first thing seen in a browser (headless Chromium).
- poll: what the Run page asks every two seconds of a run of 5,000 and of 10,000 steps to which a line was added: time of
  the server in milliseconds and bytes, best and median; unchanged: the same where nothing is new.
- idle: share of a core that the server takes while pages are open on a finished run, and the browser's own processes.
- crowd: so many browsers on a run that grows by a line a second: poll times as they see them, share of a core.

Wall-clock times of a machine that may be busy: see `load`. Exits with 1 if one of the limits is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ui")]
LIMITS = {"up_seconds": 8.0, "painted_seconds": 2.0, "poll_ms": 50.0, "poll_bytes": 40 * 1024, "idle_share": 0.02}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """The page over a folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.port, begun = free_port(), time.perf_counter()
        command = [sys.executable, str(ROOT / "app.py"), "--port", str(self.port)]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                self.get("/health")
                break
            except OSError:
                time.sleep(0.02)
        self.up = time.perf_counter() - begun

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, target: str) -> bytes:
        with urllib.request.urlopen(self.url + target, timeout=60) as answer:
            return bytes(answer.read())

    def predict(self, event: int, data: list[Any], session: str) -> tuple[float, int, float]:
        """(seconds as seen from outside, bytes, seconds in the handler) of one event."""
        body = json.dumps({"fn_index": event, "data": data, "session_hash": session, "trigger_id": None}).encode()
        request = urllib.request.Request(
            f"{self.url}/gradio_api/run/predict", body, {"Content-Type": "application/json"}
        )
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return time.perf_counter() - begun, len(text), float(json.loads(text).get("duration") or 0.0)

    def cpu(self) -> float:
        process = psutil.Process(self.process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def poll_event(server: Server) -> int:
    """The event that fills the head of the Run page."""
    config = json.loads(server.get("/config"))
    head = next(one["id"] for one in config["components"] if one["props"].get("elem_id") == "run-head")
    return int(next(one["id"] for one in config["dependencies"] if head in one["outputs"] and len(one["inputs"]) > 1))


def spread(values: list[float], digits: int = 2) -> dict[str, float]:
    return {"best": round(min(values), digits), "median": round(statistics.median(values), digits),
            "worst": round(max(values), digits)}  # fmt: skip


def measure_poll(server: Server, run: Any, steps: int, tries: int = 12) -> dict[str, Any]:
    """Polls of one browser: with a new line each, and without."""
    from made_runs import line

    event, session = poll_event(server), f"bench{steps}"
    data = [run.id, None, None]
    first, _, _ = server.predict(event, data, session)
    polls, quiet = [], []
    for number in range(tries):
        run.append_metrics(line(steps + 1 + number, steps))
        polls.append(server.predict(event, data, session))
        quiet.append(server.predict(event, data, session))
    return {
        "first_ms": round(1000 * first, 1),
        "handler_ms": spread([1000 * one[2] for one in polls]),
        "seen_ms": spread([1000 * one[0] for one in polls]),
        "bytes": max(one[1] for one in polls),
        "unchanged_ms": spread([1000 * one[0] for one in quiet]),
        "unchanged_bytes": max(one[1] for one in quiet),
    }


@contextmanager
def chromium() -> Any:
    from playwright.sync_api import sync_playwright

    path = Path("/usr/bin/chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(path) if path.exists() else None,
            args=["--no-sandbox", "--disable-background-networking"],
        )
        yield browser
        browser.close()


def share(server: Server, seconds: float) -> dict[str, float]:
    """Of a core: the server, and the browsers that this process has started."""

    def browsers() -> float:
        total = 0.0
        for one in psutil.Process().children(recursive=True):
            try:
                if one.pid != server.process.pid and "chrom" in one.name():
                    total += sum(one.cpu_times()[:2])
            except psutil.Error:
                continue
        return total

    before, theirs, begun = server.cpu(), browsers(), time.perf_counter()
    time.sleep(seconds)
    taken = time.perf_counter() - begun
    return {
        "server_share": round((server.cpu() - before) / taken, 4),
        "browser_share": round((browsers() - theirs) / taken, 4),
    }


def measure(browsers: int, seconds: float) -> dict[str, Any]:
    from made_runs import line, make

    with tempfile.TemporaryDirectory(prefix="web-page-") as place:
        folder = Path(place)
        runs = {steps: make(folder / "runs", f"run-{steps}", steps) for steps in (5_000, 10_000)}
        server = Server(folder)
        try:
            with chromium() as browser:
                begun = time.perf_counter()
                tab = browser.new_page()
                tab.goto(f"{server.url}/run?run=run-5000")
                tab.locator(".k").first.wait_for()
                painted = time.perf_counter() - begun
                tab.locator("#run-charts svg").first.wait_for()
                charts = time.perf_counter() - begun
                polls = {str(steps): measure_poll(server, run, steps) for steps, run in runs.items()}
                time.sleep(4)
                idle = share(server, seconds)
                tabs = [browser.new_context().new_page() for _ in range(browsers - 1)]
                for one in tabs:
                    one.goto(f"{server.url}/run?run=run-5000")
                for one in tabs:
                    one.locator("#run-charts svg").first.wait_for()
                crowd = grown(server, runs[5_000], lambda step: line(step, 5_000), seconds, browsers)
            return {"up_seconds": round(server.up, 2), "painted_seconds": round(painted, 2), "charts_seconds": round(charts, 2),
                    "poll": polls, "idle": idle, "crowd": crowd}  # fmt: skip
        finally:
            server.close()


def grown(server: Server, run: Any, make_line: Any, seconds: float, browsers: int) -> dict[str, Any]:
    """With all browsers open, a line a second."""
    done, event, seen = threading.Event(), poll_event(server), []

    def grow() -> None:
        step = 6_000
        while not done.wait(1.0):
            run.append_metrics(make_line(step := step + 1))
            seen.append(1000 * server.predict(event, [run.id, None, None], "crowd")[0])

    thread = threading.Thread(target=grow)
    thread.start()
    found = share(server, seconds)
    done.set()
    thread.join()
    return {"browsers": browsers, **found, "seen_ms": spread(seen)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--browsers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(arguments.browsers, arguments.seconds)
    long = found["poll"]["5000"]
    kept = {
        "up_seconds": found["up_seconds"] <= LIMITS["up_seconds"],
        "painted_seconds": found["painted_seconds"] <= LIMITS["painted_seconds"],
        "poll_ms": long["handler_ms"]["median"] <= LIMITS["poll_ms"],
        "poll_bytes": long["bytes"] <= LIMITS["poll_bytes"],
        "idle_share": found["idle"]["server_share"] <= LIMITS["idle_share"],
    }
    machine = {"cores": os.cpu_count(), "load": load, "python": platform.python_version()}
    text = json.dumps({"machine": machine, **found, "limits": LIMITS, "kept": kept}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
