"""The run directory, which contains the complete state of a run. Command line, notebook and web page read it.

runs/<id>/
    config.yaml     the validated configuration       metrics.jsonl   one line per step
    env.json        packages, machine, seeds          events.jsonl    phases, alerts, checkpoints
    data.json       source, rows, hash, split         completions/    *.parquet
    status.json     state, pid, heartbeat, step       eval/           held-out scores
    log.txt         output of the process              control/        sentinels: stop, save
    checkpoint-*/   for resuming                      adapter/        the result
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.errors import RunError
from kit.runs.files import (
    append_line,
    disk_errors,
    free_bytes,
    human_size,
    read_json,
    read_last_lines,
    read_lines,
    read_result,
    to_json,
    write_atomic,
)
from kit.runs.lock import exclusive
from kit.runs.process import identity, runs

RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
ENDING = ("state", "reason", "exit", "ended")
"""Status fields about the end of a run."""


class Part:
    """A descriptor for the path of a file or folder of the run. The path is built on access, because a list of runs uses few."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


class RunDir:
    """The directory of a run, from `RunStore.create` or `RunStore.open`. It has several readers and one writer at a time."""

    config = Part("config.yaml")
    env = Part("env.json")
    data = Part("data.json")
    heldout = Part("heldout.parquet")
    status_file = Part("status.json")
    metrics_file = Part("metrics.jsonl")
    events_file = Part("events.jsonl")
    log = Part("log.txt")
    completions = Part("completions")
    eval = Part("eval")
    control = Part("control")
    adapter = Part("adapter")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[RunDir], tuple[Path]]:
        return type(self), (self.path,)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def checkpoints(self) -> list[Path]:
        """Folders checkpoint-STEP, complete or not, in order of their steps."""
        return numbered(self.path)

    @property
    def last_checkpoint(self) -> Path | None:
        """The last complete checkpoint, from which a run is resumed; None if it would start again from the beginning."""
        return next(filter(is_complete, reversed(self.checkpoints)), None)

    def where_resumed(self) -> str:
        """Where a resumed run continues, as the predicate of a sentence about the run."""
        last = self.last_checkpoint
        if last is None:
            return "starts again from the beginning, because it has no checkpoint"
        return f"continues from its last complete checkpoint, {last.name}"

    def write_status(self, state: str, **fields: Any) -> None:
        """Updates the state and some fields of status.json atomically. Other fields do not change.

        `fields` are e.g. step, total_steps, eta_seconds, exit and reason. With a live state, pid, creation time and host of this
        process are recorded unless `pid` is passed. Raises `RunError` if writing fails.
        """
        self.change_status(lambda record: signed(record, state, fields))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records in status.json that the run is in a phase other than training inside the block. Raises `RunError`."""
        blank = {"phase_done": None, "phase_total": None}
        self.change_status(lambda _: {"phase": name, **blank}, durable=False)
        yield
        self.change_status(lambda _: {"phase": None, **blank}, durable=False)

    def change_status(
        self, change: Callable[[dict[str, Any]], Mapping[str, Any] | None], *, durable: bool = True
    ) -> bool:
        """Updates status.json under a lock, so that no other process writes in between.

        `change` receives the current record ({} if there is none) and returns the fields to set, or None for no change.
        Returns whether the file was replaced. `durable`: see `write_atomic`. Raises `RunError` if writing fails.
        """
        with self._lock, exclusive(self.path):
            record = self.record()
            fields = change(record)
            if fields is not None:
                write_atomic(self.status_file, to_json({**record, **fields}, indent=2) + "\n", durable=durable)
        return fields is not None

    def status(self) -> dict[str, Any]:
        """The verified status: a live state without a live process becomes `interrupted`."""
        record = self.record()
        if not record:
            return {"state": "interrupted", "reason": "there is no readable status.json"}
        return effective_status(record)

    def settled(self, seconds: float = 5.0) -> dict[str, Any]:
        """The status. If a process has just died, waits up to `seconds` for its supervisor to record how."""
        end = time.monotonic() + seconds
        while (status := self.status())["state"] == "interrupted":
            if time.monotonic() >= end or not runs(status.get("supervisor")):
                break
            time.sleep(0.02)
        return status

    def record(self) -> dict[str, Any]:
        """status.json as written, not verified; {} if it cannot be read or has no known state."""
        record = read_json(self.status_file)
        return record if record.get("state") in ALIVE + ENDED else {}

    def claim(self, state: str = "starting", **fields: Any) -> None:
        """Claims an ended run for this process, to continue it.

        If several try, one succeeds. Old sentinels are removed, and `before` records how the run had ended. `face=True`: this
        process only starts the training process and must not be signalled. Raises `RunError` if the run is live.
        """

        def take(record: dict[str, Any]) -> Mapping[str, Any]:
            now = self.status()
            if now["state"] in ALIVE:
                raise RunError(
                    f"The run '{self.id}' is {now['state']} (process {record.get('pid')} on {record.get('host')}). Only "
                    f"one process can train a run. Follow it with: grpo-kit logs -f {self.id}{self.root_option}"
                )
            for sentinel in ("stop", "save"):
                (self.control / sentinel).unlink(missing_ok=True)
            fresh = dict.fromkeys(("supervisor", "stop", "refused", "eta_seconds")) | {"adopted": False, "face": False}
            fresh["before"] = {key: now.get(key) for key in ENDING}
            return signed(record, state, fresh | fields)

        self.change_status(take)

    @property
    def root_option(self) -> str:
        """` --root FOLDER` for commands about the run; empty for the default folder."""
        return "" if self.path.parent == Path("runs") else f" --root {shlex.quote(str(self.path.parent))}"

    def adopt(self, **fields: Any) -> None:
        """Takes over a run that the supervisor of this process has claimed for it.

        Raises `RunError` if it has not, or if another process has taken the run over.
        """

        def take(record: dict[str, Any]) -> Mapping[str, Any]:
            holder, supervisor = record.get("pid"), (record.get("supervisor") or {}).get("pid")
            waiting = record.get("state") in ("queued", "starting", "stopping") and not record.get("adopted")
            # The pid alone is not enough: this process may be an orphan of an earlier attempt.
            if not waiting or not (holder == os.getpid() or holder == supervisor == os.getppid()):
                raise RunError(
                    f"The run '{self.id}' was not claimed for this process: it is {self.status()['state']} and belongs "
                    f"to process {holder}. Start a separate run with: grpo-kit train CONFIG"
                )
            return signed(record, "starting", {"adopted": True, "face": False, "before": None} | fields)

        self.change_status(take)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Appends one line. NaN becomes null. Raises `RunError` if writing fails."""
        with self._lock:
            append_line(self.metrics_file, metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """All complete lines, in order."""
        return read_lines(self.metrics_file)

    def last_reward(self) -> float | None:
        """The last training reward; None if there is none."""
        with contextlib.suppress(RunError):
            for line in read_last_lines(self.metrics_file):
                if isinstance(reward := line.get("reward"), (int, float)):
                    return float(reward)
        return None

    def append_event(self, kind: str, **fields: Any) -> None:
        """Appends one event with the time (seconds since the epoch). Raises `RunError` if writing fails."""
        with self._lock:
            append_line(self.events_file, {"time": time.time(), "kind": kind} | fields)

    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Held-out scores by name: `before`, `step-00050` and so on, `after`, then any others."""
        scores = {path.stem: read_result(path) for path in self.eval.glob("*.json")}
        steps = [name for name in scores if name.removeprefix("step-").isdigit()]
        order = ["before", *sorted(steps, key=lambda name: int(name.removeprefix("step-"))), "after"]
        return {name: scores[name] for name in dict.fromkeys([*order, *sorted(scores)]) if name in scores}

    def events(self) -> list[dict[str, Any]]:
        """All complete events, in order."""
        return read_lines(self.events_file)

    def write_json(self, name: str, content: Any) -> Path:
        """Writes the file `name` (relative to the run) atomically and creates its folder. Raises `RunError` if writing fails."""
        return self.write_text(name, to_json(content, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Like `write_json`, for text such as config.yaml."""
        write_atomic(self.path / name, text)
        return self.path / name

    def check_free_space(self, needed: int) -> None:
        """Raises `RunError` unless `needed` bytes are free on the disk of the run."""
        free = free_bytes(self.path)
        if free is not None and free < needed:
            raise RunError(
                f"{self.path} has {human_size(free)} free, but {human_size(needed)} are needed. Free some space, "
                f"lower run.keep_checkpoints, or set run.root to a folder on another disk."
            )


class RunStore:
    """All runs in a folder, by id. An id is a name and never a path."""

    def __init__(self, root: str | Path = "runs") -> None:
        self.root = Path(root)

    def create(self, run_id: str, *, config: str | None = None, **status: Any) -> RunDir:
        """Creates the directory of a new run in state `starting`, atomically by a rename.

        An existing run can therefore always be resumed. `config` is the text of config.yaml, `status` further fields of
        status.json. Raises `RunError` if the id is invalid or taken, or if the folder is not writable.
        """
        path = self._path(run_id)
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        self.check_free(run_id)
        made = RunDir(self.root / f".{run_id}.{os.getpid()}-{threading.get_ident()}.new")
        try:
            with disk_errors(path):
                made.path.mkdir(exist_ok=True)
            if config is not None:
                made.write_text("config.yaml", config)
            made.write_status("starting", **status)
            with disk_errors(path):
                made.path.rename(path)
        except BaseException as error:
            shutil.rmtree(made.path, ignore_errors=True)
            if isinstance(error.__cause__, OSError):
                self.check_free(run_id)  # another process has created it in the meantime
            raise
        return RunDir(path)

    def check_free(self, run_id: str) -> None:
        """Raises `RunError` if the id is invalid or taken. Another process may still take it before `create`."""
        path = self._path(run_id)
        if path.exists():
            raise RunError(
                f"There is already a run '{run_id}' in {self.root}. Choose another name with -o run.id=NAME, leave "
                f"run.id out for a name with the time, or remove {path}."
            ) from None

    def open(self, run_id: str) -> RunDir:
        """The directory of an existing run. Raises `RunError` if there is none with that id."""
        path = self._path(run_id)
        if not path.is_dir():
            names = [run.id for run in self.list()][:5]
            known = f"The latest there: {', '.join(names)}." if names else "There are no runs there yet."
            raise RunError(f"There is no run '{run_id}' in {self.root}. {known}")
        return RunDir(path)

    def statuses(self) -> list[tuple[RunDir, dict[str, Any]]]:
        """All runs with their status, the latest first. Each status is read once."""
        if not self.root.is_dir():
            if self.root.exists():
                raise RunError(f"{self.root} is a file; expected the folder of the runs, e.g. runs.")
            return []
        runs = [RunDir(path) for path in self.root.iterdir() if RUN_ID.fullmatch(path.name)]
        pairs = [(run, run.status()) for run in runs if run.status_file.is_file() or run.config.is_file()]
        return sorted(pairs, key=lambda pair: (pair[1].get("started") or 0, pair[0].id), reverse=True)

    def list(self) -> list[RunDir]:
        """All runs, the latest first, without other folders in the root."""
        return [run for run, _ in self.statuses()]

    def new_id(self, stem: str) -> str:
        """`STEM-YYYYMMDD-HHMMSS`, with a number appended if it is taken."""
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


# --- reading checkpoints; kit.trainer.checkpoint_writer writes them ---------------------------------------------------

MANIFEST = "manifest.json"
"""Sizes (bytes) of the files of a checkpoint."""
STATE = "trainer_state.json"
PREFIX = "checkpoint-"


def numbered(root: Path) -> list[Path]:
    """Folders `checkpoint-STEP` in `root`, complete or not, in order of their steps."""
    folders = [path for path in root.glob(f"{PREFIX}*") if path.is_dir() and path.name.removeprefix(PREFIX).isdigit()]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Number of optimiser steps of a folder `checkpoint-STEP`."""
    return int(checkpoint.name.removeprefix(PREFIX))


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: trainer_state.json is valid, and all files have their recorded sizes."""
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        noted = checkpoint / MANIFEST
        sizes = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else {}
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def complete_checkpoints(checkpoints: Iterable[Path]) -> list[Path]:
    """The checkpoints from which training can continue, in order of their steps."""
    return sorted(filter(is_complete, checkpoints), key=step_of)


# --- status.json: recording the process of a state, and verifying it --------------------------------------------------

ALIVE = ("queued", "starting", "running", "stopping")
ENDED = ("finished", "failed", "stopped", "interrupted")
SILENCE_LIMIT = 300.0
"""Seconds without a heartbeat after which a run on another machine, whose pid cannot be checked, counts as interrupted."""


def signed(record: Mapping[str, Any], state: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a new state. A live state includes the identity of its process."""
    now = time.time()
    change: dict[str, Any] = {"state": state, "heartbeat": now, "started": record.get("started") or now}
    change |= {"worked": seconds_worked(record), "since": now if state in ALIVE and state != "queued" else None}
    if state in ALIVE:
        change |= identity(fields.get("pid")) | {"host": socket.gethostname(), "ended": None, "exit": None}
        change["reason"] = None
    else:
        change |= {"ended": now, "eta_seconds": None}
    if record.get("phase") is not None:  # the phase belongs to the earlier state
        change["phase"] = None
    return {**change, **fields}


def seconds_worked(record: Mapping[str, Any]) -> float:
    """Seconds in which processes of the run worked, without its time in a queue and the pauses before it was resumed."""
    worked = float(record.get("worked") or 0.0)
    if (since := record.get("since")) is not None:
        worked += max(0.0, (time.time() if runs(record) else record.get("heartbeat") or since) - since)
    return worked


def is_elsewhere(record: Mapping[str, Any]) -> bool:
    """Whether a record is from another machine, whose processes cannot be checked."""
    return record.get("host") not in (None, socket.gethostname())


def effective_status(record: dict[str, Any]) -> dict[str, Any]:
    """The record, where a live state without a running process is replaced by `interrupted`."""
    if record["state"] not in ALIVE:
        return record
    reason = f"the process ended without a message while the run was {record['state']}"
    interrupted = record | {"state": "interrupted", "reason": reason, "eta_seconds": None}
    if is_elsewhere(record):
        silence = abs(time.time() - (record.get("heartbeat") or 0.0))  # clocks of two machines may differ
        return record if silence < SILENCE_LIMIT else interrupted
    supervisor = record.get("supervisor")
    watched = runs(supervisor)
    if not runs(record):
        if watched and (record["state"] == "stopping" or record.get("stop")):
            return record | {"state": "stopping"}  # its supervisor will record how it ended
        return interrupted
    if supervisor and not watched and not record.get("reason"):
        return record | {"reason": f"its supervisor (process {supervisor.get('pid')}) died; the run continues"}
    return record
