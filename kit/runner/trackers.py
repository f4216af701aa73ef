"""Trackers (`run.report_to`) mirror a run and can do nothing to it: each has a process of its own that reads the run's files.

One that fails, at import, at its start, in a call, at its end, or that hangs, is let go: a warning, an `alert` among the
events, and the run goes on. Training waits for none of them; at the end they get `FINISH_SECONDS`, all together.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kit.errors import RunError
from kit.runs.secrets import redact, redacted

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.runs.store import RunDir

log = logging.getLogger("kit")
STALL_SECONDS = 60.0
"""Seconds that one call of a tracker may take."""
FINISH_SECONDS = 20.0
"""Seconds that trackers have for what is left when the run has ended."""
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}


class Trackers:
    """The mirrors of a run, as a context: started by `start`, ended in order at its end, however that comes."""

    def __init__(
        self,
        run: RunDir,
        tell: Callable[[str], None] = log.warning,
        *,
        stall: float = STALL_SECONDS,
        finish: float = FINISH_SECONDS,
    ) -> None:
        self.run, self.tell, self.stall, self.finish = run, tell, stall, finish
        self.mirrors: list[Mirror] = []

    def start(self, config: RunConfig) -> None:
        """Starts one process a tracker of `run.report_to`. Raises nothing for a tracker's sake."""
        if self.mirrors or int(os.environ.get("RANK", "0")):
            return
        content = redacted(config.model_dump(mode="json"))
        self.mirrors = [Mirror(name, self, content) for name in dict.fromkeys(config.run.report_to)]

    def give_up(self, name: str, step: int, reason: str) -> None:
        """Says once that a tracker is left out from now on. A disk that refuses even that is not a tracker's matter."""
        message = redact(
            f"The tracker {name} failed and is left out from here on: {reason.rstrip('.')}. The run goes on; its own files have "
            f"everything. Details: trackers/{name}.log"
        )
        try:
            self.tell(f"Warning: {message}")
            self.run.append_event("alert", step=step, name=f"tracker {name}", message=message, severity="warning")
        except (RunError, RuntimeError) as error:
            log.warning("%s (%s)", message, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + self.finish
        for mirror in self.mirrors:
            mirror.end_input()
        for mirror in self.mirrors:
            mirror.wait(deadline)


class Mirror:
    """One tracker's process, watched by a thread."""

    def __init__(self, name: str, owner: Trackers, config: dict[str, Any]) -> None:
        self.name, self.owner = name, owner
        self.step, self.reason, self.busy_since = 0, "", time.monotonic()
        self.busy: str | None = "start"
        self.done = False
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.process = self._spawn(config)
        except (OSError, RunError) as error:
            owner.give_up(name, 0, f"its process cannot be started: {error}")
            return
        self.thread = threading.Thread(target=self._watch, name=f"tracker-{name}", daemon=True)
        self.thread.start()

    def _spawn(self, config: dict[str, Any]) -> subprocess.Popen[bytes]:
        run = self.owner.run
        folder = run.path.resolve() / "trackers"
        folder.mkdir(exist_ok=True)
        request = json.dumps({"tracker": self.name, "run_dir": str(run.path.resolve()), "config": config}).encode()
        with (folder / f"{self.name}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "kit.runner.tracker_process"],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**QUIET, **os.environ},
            )
        assert process.stdin is not None
        # A writer of its own: a process that never reads may not hold up the run by a full pipe.
        content = b"%-16d" % len(request) + request
        self.writer = threading.Thread(target=_write, args=(process.stdin, content), daemon=True)
        self.writer.start()
        return process

    def _watch(self) -> None:
        """Reads the answers until the process ends, and ends it when one call takes too long."""
        assert self.process is not None
        assert self.process.stdout is not None
        descriptor, rest = self.process.stdout.fileno(), b""
        while True:
            if select.select([descriptor], [], [], 0.2)[0]:
                block = os.read(descriptor, 65536)
                if not block:
                    break
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._hear(line)
            elif self.busy and time.monotonic() - self.busy_since > self.owner.stall:
                self.reason = self.reason or f"no answer to '{self.busy}' in {self.owner.stall:.0f} s"
                self.process.kill()
        code = self.process.wait()
        if not self.done:
            self.owner.give_up(self.name, self.step, self.reason or f"its process ended with code {code}")

    def _hear(self, line: bytes) -> None:
        answer = json.loads(line)
        self.busy, self.busy_since = answer.get("busy"), time.monotonic()
        self.step = max(self.step, answer.get("sent", 0))
        self.reason = answer.get("failed") or self.reason
        self.done = self.done or bool(answer.get("done"))

    def end_input(self) -> None:
        """Tells the process that the run has ended."""
        if self.process is None or self.process.stdin is None:
            return
        self.writer.join(1.0)
        if self.writer.is_alive():
            return  # it does not even read
        _write(self.process.stdin, b"end\n")  # in words, too: a forked process may hold the pipe open
        self.process.stdin.close()

    def wait(self, deadline: float) -> None:
        """Waits until the process has ended, or ends it at `deadline` (by the monotonic clock)."""
        if self.process is None:
            return
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            self.reason = self.reason or f"it was not done {self.owner.finish:.0f} s after the run's end"
            self.process.kill()
            self.thread.join(5.0)


def _write(stream: Any, content: bytes) -> None:
    try:
        while content:
            content = content[stream.write(content) :]
    except (OSError, ValueError):
        return  # the process has gone: the watcher says so
