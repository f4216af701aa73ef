"""The run directory: the only truth about a run. Command line, notebook and web page are readers of it.

runs/<id>/
    config.yaml     the validated configuration       metrics.jsonl   one line a step
    env.json        packages, machine, seeds          events.jsonl    phases, alerts, checkpoints
    data.json       source, rows, hash, split         completions/    *.parquet
    status.json     state, pid, heartbeat, step       eval/           held-out scores
    log.txt         what the process printed          control/        sentinels: stop, save
    checkpoint-*/   to resume from                    adapter/        the result
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

from kit.errors import RunError
from kit.runs.files import append_line, disk_errors, free_bytes, human_size, read_lines, to_json, write_atomic
from kit.runs.process import create_time, is_alive

RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
ALIVE = ("queued", "starting", "running", "stopping")
ENDED = ("finished", "failed", "stopped", "interrupted")
SILENCE_LIMIT = 900.0
"""Seconds without a heartbeat after which a run on another machine (its pid cannot be asked) reads as interrupted."""


class RunDir:
    """One run's directory. Made by `RunStore.create` or `RunStore.open`; several readers and one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.config = path / "config.yaml"
        self.env = path / "env.json"
        self.data = path / "data.json"
        self.status_file = path / "status.json"
        self.metrics_file = path / "metrics.jsonl"
        self.events_file = path / "events.jsonl"
        self.log = path / "log.txt"
        self.completions = path / "completions"
        self.eval = path / "eval"
        self.control = path / "control"
        self.adapter = path / "adapter"
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def checkpoints(self) -> list[Path]:
        """Folders checkpoint-STEP, the earliest first."""
        numbered = [(p.name.partition("-")[2], p) for p in self.path.glob("checkpoint-*") if p.is_dir()]
        return [path for _, path in sorted((int(step), path) for step, path in numbered if step.isdigit())]

    def write_status(self, state: str, **fields: Any) -> None:
        """Replaces status.json at once, keeping earlier fields that are not given again.

        `fields` are step, total_steps, eta_seconds, exit, reason and whatever else is worth telling. A live state is
        signed with the pid, creation time and host of this process unless `pid` is given. Raises `RunError` when the
        disk refuses, `ValueError` for an unknown state.
        """
        if state not in ALIVE + ENDED:
            raise ValueError(f"unknown state {state!r}; one of {', '.join(ALIVE + ENDED)}")
        with self._lock:
            record, now = self._raw_status() or {}, time.time()
            record |= {"state": state, "heartbeat": now}
            record.setdefault("started", now)
            if state in ALIVE:
                pid = fields.get("pid", os.getpid())
                record |= {"pid": pid, "create_time": create_time(pid), "host": socket.gethostname(), "ended": None}
                record |= {"exit": None, "reason": None}
            else:
                record |= {"ended": now, "eta_seconds": None}
            self._replace(self.status_file, record | fields)

    def status(self) -> dict[str, Any]:
        """The status as it is, not as it was last claimed: a live state without a live process reads `interrupted`."""
        record = self._raw_status()
        if record is None:
            return {"state": "interrupted", "reason": "there is no readable status.json"}
        if record.get("state") in ALIVE and not self._runs(record):
            reason = f"the process ended without a word while the run was {record['state']}"
            return record | {"state": "interrupted", "reason": reason, "eta_seconds": None}
        return record

    @staticmethod
    def _runs(record: dict[str, Any]) -> bool:
        if record.get("host") not in (None, socket.gethostname()):
            return time.time() - float(record.get("heartbeat") or 0) < SILENCE_LIMIT
        pid = record.get("pid")
        return isinstance(pid, int) and pid > 0 and is_alive(pid, record.get("create_time"))

    def _raw_status(self) -> dict[str, Any] | None:
        try:
            record = json.loads(self.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Adds one line, visible to readers at once; NaN becomes null. Raises `RunError` when the disk refuses."""
        with self._lock:
            append_line(self.metrics_file, metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines so far, oldest first."""
        return read_lines(self.metrics_file)

    def append_event(self, kind: str, **fields: Any) -> None:
        """Adds one event with the time (seconds since the epoch). Raises `RunError` when the disk refuses."""
        with self._lock:
            append_line(self.events_file, {"time": time.time(), "kind": kind} | fields)

    def events(self) -> list[dict[str, Any]]:
        """All whole events so far, oldest first."""
        return read_lines(self.events_file)

    def write_json(self, name: str, content: Any) -> Path:
        """Writes `name` (relative to the run, folders are made) at once. Raises `RunError` when the disk refuses."""
        return self._replace(self._inside(name), content)

    def write_text(self, name: str, text: str) -> Path:
        """Like `write_json`, for text such as config.yaml."""
        path = self._inside(name)
        write_atomic(path, text)
        return path

    def _replace(self, path: Path, content: Any) -> Path:
        write_atomic(path, to_json(content, indent=2) + "\n")
        return path

    def _inside(self, name: str) -> Path:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise RunError(f"'{name}' is not a path inside the run directory {self.path}.")
        return self.path / pure

    def check_free_space(self, needed: int) -> None:
        """Raises `RunError` unless `needed` bytes are free where the run lies."""
        free = free_bytes(self.path)
        if free is not None and free < needed:
            raise RunError(
                f"{self.path} has {human_size(free)} free, but {human_size(needed)} are needed. Free some space, "
                f"lower run.keep_checkpoints, or set run.root to a folder on another disk."
            )


class RunStore:
    """All runs below one folder, by id. An id is a plain name and never a path."""

    def __init__(self, root: str | Path = "runs") -> None:
        self.root = Path(root)

    def create(self, run_id: str) -> RunDir:
        """Makes the directory of a new run, in state `starting`.

        Raises `RunError` when the id is not a plain name or is taken, or when the folder cannot be written.
        """
        path = self._path(run_id)
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        try:
            with disk_errors(path):
                path.mkdir()
        except RunError as error:
            if isinstance(error.__cause__, FileExistsError):
                self.check_free(run_id)
            raise
        run = RunDir(path)
        try:
            run.write_status("starting")
        except RunError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return run

    def check_free(self, run_id: str) -> None:
        """Raises `RunError` when the id is not a plain name or is taken; `create` alone can promise that it stays free."""
        path = self._path(run_id)
        if path.exists():
            raise RunError(
                f"There is already a run '{run_id}' in {self.root}. Choose another name with -o run.id=NAME, leave "
                f"run.id out for a name with the time, or remove {path}."
            ) from None

    def open(self, run_id: str) -> RunDir:
        """The directory of an existing run. Raises `RunError` when there is none of that id."""
        path = self._path(run_id)
        if not path.is_dir():
            names = [run.id for run in self.list()][:5]
            known = f"The latest there: {', '.join(names)}." if names else "There are no runs there yet."
            raise RunError(f"There is no run '{run_id}' in {self.root}. {known}")
        return RunDir(path)

    def list(self) -> list[RunDir]:
        """All runs, the latest first. Other folders below the root are passed over."""
        if not self.root.is_dir():
            return []
        runs = [RunDir(path) for path in self.root.iterdir() if RUN_ID.fullmatch(path.name) and _is_run(path)]
        return sorted(runs, key=lambda run: (run.status().get("started") or 0, run.id), reverse=True)

    def new_id(self, stem: str) -> str:
        """`STEM-YYYYMMDD-HHMMSS`, with a number behind it when that is taken."""
        plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-") or "run"
        first = name = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
        number = 2
        while (self.root / name).exists():
            name, number = f"{first}-{number}", number + 1
        return name

    def _path(self, run_id: str) -> Path:
        if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id):
            raise RunError(
                f"{run_id!r} is not a run id: 1 to 64 lower-case letters, digits and dashes, "
                f"starting and ending without a dash."
            )
        return self.root / run_id


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("status.json", "config.yaml"))
