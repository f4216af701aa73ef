"""Child processes of the page: persistent ones that answer questions (`Bench`), and jobs of minutes (`Jobs`)."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kit.config import RunConfig
from kit.errors import KitError, RunError
from kit.runs.worker import MOST_BYTES, JobStopped, Worker, as_error, call_for_result, environment

MODULE = "kit.planning.workbench"
SECONDS = 120.0
"""The longest time of an answer, including the imports of the first one."""
IDLE_SECONDS = 600.0
HEAVY = frozenset({"lengths", "plan", "validate"})
"""Questions that import torch or transformers."""


class Bench:
    """One child process. It answers one question at a time; further ones wait.

    spares_gpu: hide the GPU from the child, because a reward model would take its memory from a run.
    """

    def __init__(self, *, spares_gpu: bool = False) -> None:
        self._hidden = {"CUDA_VISIBLE_DEVICES": ""} if spares_gpu else {}
        self._worker: Worker | None = None
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle: threading.Timer | None = None
        self._leaving = False

    def ask(self, request: Mapping[str, Any], seconds: float = SECONDS) -> Any:
        """Return the answer. Raises the `KitError` that the child reports, `RunError` if it ends or takes too long."""
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
            worker.send(request)  # a worker that has ended replies None
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise RunError(
                f"There was no answer within {seconds:g} s, so the process was ended. A reward or a data source may hang."
            ) from None
        if reply is None:
            self.close()
            if worker.too_long:
                raise RunError(f"The answer has more than {MOST_BYTES // 1024**2} MiB. Ask for fewer rows.")
            raise RunError(
                "The process that answers has died, perhaps because memory ran out. Ask for less, or see the server's output."
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
            self._worker = Worker(MODULE, on_message=self._replies.put, env=environment() | self._hidden)
        return self._worker

    def _rest(self) -> None:
        self._idle = threading.Timer(IDLE_SECONDS, self.leave)
        self._idle.daemon = True
        self._idle.start()

    def leave(self) -> None:
        """End the child, after its answer if it is answering."""
        self._leaving = True
        if self._lock.acquire(blocking=False):
            try:
                self._leaving = False
                self.close()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the child and its own children."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class Benches:
    """A light child, and a heavy one that imports torch."""

    def __init__(self) -> None:
        self._light, self._heavy = Bench(spares_gpu=True), Bench()

    def ask(self, question: str, config: RunConfig | None = None, *, seconds: float = SECONDS, **more: Any) -> Any:
        """Answer a question of `kit.planning.workbench.QUESTIONS`. Raises `KitError`."""
        bench = self._heavy if question in HEAVY else self._light
        tree = {} if config is None else config.model_dump(mode="json")
        return bench.ask({"question": question, "config": tree, **more}, seconds)

    def leave(self) -> None:
        """End both children, which may hold GPU memory, as `Bench.leave` does."""
        self._light.leave()
        self._heavy.leave()

    def close(self) -> None:
        self._light.close()
        self._heavy.close()


MOST_RUNNING, MOST_KEPT = 3, 20


@dataclass
class Job:
    """One child process and its result. `state` is running, done, failed or stopped."""

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
        """Return a text that changes if there is something new to show."""
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
        """Return the latest job whose key has this prefix, for a page that was reloaded."""
        with self._lock:
            return next((job for key, job in reversed(self._jobs.items()) if key.startswith(prefix)), None)

    def start(self, key: str, module: str, request: Mapping[str, Any]) -> Job:
        """Start `python -m module` with the request and the path of a result file, or return the running job of this key.

        Raises `RunError` if too many jobs run, or one of this key with another request.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and job.state == "running":
                if job.request != request:
                    raise RunError(
                        "The same job runs already with other settings, perhaps for another browser. Wait until it has "
                        "ended, or stop it."
                    )
                return job
            if sum(job.state == "running" for job in self._jobs.values()) >= MOST_RUNNING:
                raise RunError(
                    f"{MOST_RUNNING} checks are running already, perhaps for another browser. Wait, or stop one of them."
                )
            job = self._jobs[key] = Job(key, dict(request))
            self._jobs.move_to_end(key)
            ended = [name for name, each in self._jobs.items() if each.state != "running"]
            for name in ended[: max(0, len(self._jobs) - MOST_KEPT)]:
                del self._jobs[name]
        threading.Thread(
            target=self._work, args=(job, module, dict(request)), name=f"job {key[:20]}", daemon=True
        ).start()
        return job

    def _work(self, job: Job, module: str, request: dict[str, Any]) -> None:
        try:
            job.result = call_for_result(
                module,
                request,
                "It was stopped before it had a result.",
                started=lambda pid: _set_pid(job, pid),
                on_line=lambda line: setattr(job, "line", line.strip() or job.line),
            )
            job.state = "done" if job.state == "running" else job.state
        except JobStopped:
            job.state = "stopped"
        except KitError as error:
            job.error = str(error)
            if "crashed with exit code" in job.error and job.line:
                job.error += f"\n{job.line}"  # the last line that the process printed
            job.state = "failed" if job.state == "running" else job.state
        except Exception as error:
            job.error, job.state = f"The check broke: {type(error).__name__}: {error}", "failed"

    def stop(self, prefix: Any) -> None:
        """End the jobs whose keys have this prefix; an empty prefix ends none."""
        with self._lock:
            jobs = [job for key, job in self._jobs.items() if prefix and key.startswith(str(prefix))]
            running = [job for job in jobs if job.state == "running"]
        for job in running:
            job.state = "stopped"
            _end(job)

    def close(self) -> None:
        for key in list(self._jobs):
            self.stop(key)


def _set_pid(job: Job, pid: int) -> None:
    job.pid = pid
    if job.state == "stopped":  # before its process started
        _end(job)


def _end(job: Job) -> None:
    if job.pid is not None:
        with suppress(OSError):  # the process alone: from a terminal it is in the server's process group
            os.kill(job.pid, signal.SIGTERM)
