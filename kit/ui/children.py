"""Child processes of the page: persistent ones that answer questions (`Bench`), and jobs that take minutes (`Jobs`)."""

from __future__ import annotations

import json
import os
import queue
import signal
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.config import RunConfig
from kit.errors import KitError, RunError
from kit.runs.worker import MOST_BYTES, STOPPED, Worker, as_error, call

MODULE = "kit.planning.workbench"
SECONDS = 120.0
"""An answer takes no longer, the first one's imports included."""
IDLE_SECONDS = 600.0
HEAVY = frozenset({"lengths", "plan", "validate"})
"""Questions that import torch or transformers."""


class Bench:
    """One child process. It answers one question at a time; further ones wait."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle: threading.Timer | None = None
        self._leaving = False

    def ask(self, request: Mapping[str, Any], seconds: float = SECONDS) -> Any:
        """The answer. Raises the `KitError` that the child reports, `RunError` when it ends or takes too long."""
        if not self._lock.acquire(timeout=seconds):
            raise RunError("Another question is still being answered; try again in a moment.")
        try:
            return self._ask(request, seconds)
        finally:
            self._rest()
            self._lock.release()
            if self._leaving:
                self.leave()

    def _ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        worker = self._alive()
        try:
            worker.send(request)  # one that has ended says so in place of an answer
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise RunError(
                "There was no answer in time, so the process was ended: a reward or a source hangs."
            ) from None
        if reply is None:
            self.close()
            if worker.too_long:
                raise RunError(f"The answer has more than {MOST_BYTES // 1024**2} MiB. Ask for fewer rows.")
            raise RunError(
                "The process that answers has died, perhaps of memory. Ask for less, or look at the server's output."
            )
        if "error" in reply:
            raise as_error(reply["kind"], reply["error"])
        if "crash" in reply:
            raise RunError(f"That could not be answered: {reply['crash']}")
        return reply["answer"]

    def _alive(self) -> Worker:
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is None or self._worker.poll() is not None:
            self._replies = queue.SimpleQueue()
            self._worker = Worker(MODULE, on_message=self._replies.put)
        return self._worker

    def _rest(self) -> None:
        self._idle = threading.Timer(IDLE_SECONDS, self.leave)
        self._idle.daemon = True
        self._idle.start()

    def leave(self) -> None:
        """Ends the child, one that is answering once it has answered."""
        self._leaving = True
        if self._lock.acquire(blocking=False):
            try:
                self._leaving = False
                self.close()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Ends the child with whatever it has started."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class Benches:
    """A light child and a heavy one."""

    def __init__(self) -> None:
        self._light, self._heavy = Bench(), Bench()

    def ask(self, question: str, config: RunConfig | None = None, *, seconds: float = SECONDS, **more: Any) -> Any:
        """The answer to a question of `kit.planning.workbench.QUESTIONS`. Raises `KitError`."""
        bench = self._heavy if question in HEAVY else self._light
        tree = {} if config is None else config.model_dump(mode="json")
        return bench.ask({"question": question, "config": tree, **more}, seconds)

    def close_heavy(self) -> None:
        """Ends the child that may hold a part of a GPU, as `Bench.leave` does."""
        self._heavy.leave()

    def close(self) -> None:
        self._light.close()
        self._heavy.close()


MOST_RUNNING, MOST_KEPT = 3, 20


@dataclass
class Job:
    """One child and what came of it. `state` is running, done, failed or stopped."""

    key: str
    request: Mapping[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    state: str = "running"
    line: str = ""
    result: Any = None
    error: str = ""
    pid: int | None = None

    @property
    def stamp(self) -> str:
        """A text that changes when there is something new to show."""
        return f"{self.key}:{self.started}:{self.state}:{self.line}"


class Jobs:
    """Jobs by key, the latest few."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> Job | None:
        with self._lock:
            return self._jobs.get(key) if isinstance(key, str) else None

    def latest(self, prefix: str) -> Job | None:
        """The latest job whose key has that prefix: what a reloaded page should show."""
        with self._lock:
            return next((job for key, job in reversed(self._jobs.items()) if key.startswith(prefix)), None)

    def start(self, key: str, module: str, request: Mapping[str, Any]) -> Job:
        """Starts `python -m module` with the request and a `result` file to write; the same key while one runs is that one.

        Raises `RunError` when as many run already as may, or one of this key with another request.
        """
        with self._lock:
            known = self._jobs.get(key)
            if known is not None and known.state == "running":
                if known.request != request:
                    raise RunError(
                        "The same is running already with other settings, begun before or by another browser. Wait until "
                        "it has ended, or stop it."
                    )
                return known
            if sum(job.state == "running" for job in self._jobs.values()) >= MOST_RUNNING:
                raise RunError(
                    f"{MOST_RUNNING} checks are running already, perhaps for another browser. Wait, or stop one of them."
                )
            job = self._jobs[key] = Job(key, dict(request))
            self._jobs.move_to_end(key)
            for old in [name for name, one in self._jobs.items() if one.state != "running"][
                : max(0, len(self._jobs) - MOST_KEPT)
            ]:
                del self._jobs[old]
        threading.Thread(
            target=self._work, args=(job, module, dict(request)), name=f"job {key[:20]}", daemon=True
        ).start()
        return job

    def _work(self, job: Job, module: str, request: dict[str, Any]) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="grpo-kit-ui-") as folder:
                result = Path(folder, "result.json")
                outcome = call(
                    module,
                    request | {"result": str(result)},
                    started=lambda pid: _begun(job, pid),
                    on_line=lambda line: setattr(job, "line", line.strip() or job.line),
                )
                if outcome.error is not None:
                    raise outcome.error
                if outcome.code == STOPPED or not result.is_file():
                    job.state = "stopped"
                elif job.state == "running":
                    job.result = json.loads(result.read_text(encoding="utf-8"))
                    job.state = "done"
        except KitError as error:
            job.error = _with_line(error, job)
            job.state = "failed" if job.state == "running" else job.state
        except Exception as error:
            job.error, job.state = f"The check broke: {type(error).__name__}: {error}", "failed"

    def stop(self, prefix: Any) -> None:
        """Asks the jobs to end whose keys begin so; an empty text is none."""
        with self._lock:
            jobs = [job for key, job in self._jobs.items() if prefix and key.startswith(str(prefix))]
            running = [job for job in jobs if job.state == "running"]
        for job in running:
            job.state = "stopped"
            _end(job)

    def close(self) -> None:
        for key in list(self._jobs):
            self.stop(key)


def _begun(job: Job, pid: int) -> None:
    job.pid = pid
    if job.state == "stopped":  # before it had a process
        _end(job)


def _end(job: Job) -> None:
    if job.pid is not None:
        with suppress(OSError):  # below a terminal it is in this server's own process group
            os.kill(job.pid, signal.SIGTERM)


def _with_line(error: KitError, job: Job) -> str:
    """A crash says no more than its code; the last line that it printed says more."""
    text = str(error)
    return f"{text}\n{job.line}" if "crashed with exit code" in text and job.line else text
