"""Children that take minutes: a signal check, completions of the base model. One of a kind and subject at a time.

A job is found again by its key after a reload, and by a second browser; it ends with the server. It is no run: nothing
of it is kept on disk.
"""

from __future__ import annotations

import json
import os
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

from kit.errors import KitError, RunError
from kit.runs.child import STOPPED, call

MOST_RUNNING, MOST_KEPT = 2, 20


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
        """Changes when there is something new to show."""
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
        """The job begun last among those whose key begins so: what a page that was loaded anew should show."""
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
                    hear=lambda line: setattr(job, "line", line.strip() or job.line),
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

    def stop(self, key: Any) -> None:
        """Asks a job to end."""
        job = self.get(key)
        if job is not None and job.state == "running":
            job.state = "stopped"
            _end(job)

    def close(self) -> None:
        with self._lock:
            running = [key for key, job in self._jobs.items() if job.state == "running"]
        for key in running:
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
