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
"""The fields that tell how a run has ended."""


class Part:
    """A file or folder of the run, by its name. The path is built on access: a list of runs needs few of them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


class RunDir:
    """One run's directory. Made by `RunStore.create` or `RunStore.open`; several readers and one writer at a time."""

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
        """Folders checkpoint-STEP, whole or not, the earliest first."""
        return numbered(self.path)

    @property
    def last_checkpoint(self) -> Path | None:
        """The last complete checkpoint, from which a resumed run goes on; None where it starts again from the beginning."""
        return next(filter(is_complete, reversed(self.checkpoints)), None)

    def where_resumed(self) -> str:
        """Says where a resumed run goes on; the rest of a sentence that begins with its id."""
        last = self.last_checkpoint
        if last is None:
            return "starts again from the beginning, as no checkpoint of it was saved"
        return f"goes on from its last complete checkpoint, {last.name}"

    def write_status(self, state: str, **fields: Any) -> None:
        """Replaces status.json at once, keeping earlier fields that are not given again.

        `fields` are step, total_steps, eta_seconds, exit, reason and whatever else is worth telling. A live state is
        signed with the pid, creation time and host of this process unless `pid` is given. Raises `RunError` when the
        disk refuses.
        """
        self.change_status(lambda record: signed(record, state, fields))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Says in status.json what is done, while it is something else than training steps. Raises `RunError`."""
        blank = {"phase_done": None, "phase_total": None}
        self.change_status(lambda _: {"phase": name, **blank}, durable=False)
        yield
        self.change_status(lambda _: {"phase": None, **blank}, durable=False)

    def change_status(
        self, change: Callable[[dict[str, Any]], Mapping[str, Any] | None], *, durable: bool = True
    ) -> bool:
        """Replaces status.json by what `change` makes of it; no other process writes in between.

        `change` gets the record as it stands ({} when there is none to read) and returns the fields to set, or None to
        leave it. Returns whether it was replaced. `durable` as in `write_atomic`. Raises `RunError` when the disk refuses.
        """
        with self._lock, exclusive(self.path):
            record = self.record()
            fields = change(record)
            if fields is not None:
                write_atomic(self.status_file, to_json({**record, **fields}, indent=2) + "\n", durable=durable)
        return fields is not None

    def status(self) -> dict[str, Any]:
        """The status as it is, not as it was last claimed: a live state without a live process reads `interrupted`."""
        record = self.record()
        if not record:
            return {"state": "interrupted", "reason": "there is no readable status.json"}
        return effective_status(record)

    def settled(self, seconds: float = 5.0) -> dict[str, Any]:
        """The status; where a process has died this moment, after its supervisor had `seconds` to write how."""
        end = time.monotonic() + seconds
        while (status := self.status())["state"] == "interrupted":
            if time.monotonic() >= end or not runs(status.get("supervisor")):
                break
            time.sleep(0.02)
        return status

    def record(self) -> dict[str, Any]:
        """status.json as it was last written, true or not; {} when there is none to read, or one without a known state."""
        try:
            record = json.loads(self.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        known = isinstance(record, dict) and record.get("state") in ALIVE + ENDED
        return record if known else {}

    def claim(self, state: str = "starting", **fields: Any) -> None:
        """Takes a run that has ended, to go on with it: the status is this process's from here on.

        Of several that try exactly one succeeds. Old sentinels are removed; how the run had ended is kept as `before`.
        `face=True` says that this process only starts the one that trains, and is never to be signalled. Raises `RunError`
        when the run is live.
        """

        def take(record: dict[str, Any]) -> Mapping[str, Any]:
            now = self.status()
            if now["state"] in ALIVE:
                raise RunError(
                    f"The run '{self.id}' is {now['state']} (process {record.get('pid')} on {record.get('host')}); one run is "
                    f"trained by one process. Follow it with: grpo-kit logs -f {self.id}{self.root_option}"
                )
            for sentinel in ("stop", "save"):
                (self.control / sentinel).unlink(missing_ok=True)
            fresh = dict.fromkeys(("supervisor", "stop", "refused", "eta_seconds")) | {"adopted": False, "face": False}
            fresh["before"] = {key: now.get(key) for key in ENDING}
            return signed(record, state, fresh | fields)

        self.change_status(take)

    @property
    def root_option(self) -> str:
        """` --root FOLDER`, for commands that name the run; nothing where the folder is the default one."""
        return "" if self.path.parent == Path("runs") else f" --root {shlex.quote(str(self.path.parent))}"

    def adopt(self, **fields: Any) -> None:
        """Takes over a run that was claimed for this process: by its supervisor, which started it.

        Raises `RunError` when it was not, or when another process has taken it over.
        """

        def take(record: dict[str, Any]) -> Mapping[str, Any]:
            holder, supervisor = record.get("pid"), (record.get("supervisor") or {}).get("pid")
            waiting = record.get("state") in ("queued", "starting", "stopping") and not record.get("adopted")
            # By its number alone, the supervisor may be that of a later attempt, and this process an orphan of an earlier.
            if not waiting or not (holder == os.getpid() or holder == supervisor == os.getppid()):
                raise RunError(
                    f"The run '{self.id}' does not wait for this process: it is {self.status()['state']}, in the "
                    f"hands of process {holder}. Start a run of its own with: grpo-kit train CONFIG"
                )
            return signed(record, "starting", {"adopted": True, "face": False, "before": None} | fields)

        self.change_status(take)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Adds one line, visible to readers at once; NaN becomes null. Raises `RunError` when the disk refuses."""
        with self._lock:
            append_line(self.metrics_file, metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines so far, oldest first."""
        return read_lines(self.metrics_file)

    def last_reward(self) -> float | None:
        """The last training reward; None where there is none to read."""
        with contextlib.suppress(RunError):
            for line in read_last_lines(self.metrics_file):
                if isinstance(reward := line.get("reward"), (int, float)):
                    return float(reward)
        return None

    def append_event(self, kind: str, **fields: Any) -> None:
        """Adds one event with the time (seconds since the epoch). Raises `RunError` when the disk refuses."""
        with self._lock:
            append_line(self.events_file, {"time": time.time(), "kind": kind} | fields)

    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Held-out scores by name: `before`, `step-00050` and so on, `after`, then any others."""
        scores = {path.stem: read_result(path) for path in self.eval.glob("*.json")}
        steps = [name for name in scores if name.removeprefix("step-").isdigit()]
        order = ["before", *sorted(steps, key=lambda name: int(name.removeprefix("step-"))), "after"]
        return {name: scores[name] for name in dict.fromkeys([*order, *sorted(scores)]) if name in scores}

    def events(self) -> list[dict[str, Any]]:
        """All whole events so far, oldest first."""
        return read_lines(self.events_file)

    def write_json(self, name: str, content: Any) -> Path:
        """Writes `name` (relative to the run, folders are made) at once. Raises `RunError` when the disk refuses."""
        return self.write_text(name, to_json(content, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Like `write_json`, for text such as config.yaml."""
        write_atomic(self.path / name, text)
        return self.path / name

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

    def create(self, run_id: str, *, config: str | None = None, **status: Any) -> RunDir:
        """Makes the directory of a new run, in state `starting`: by one rename, with all that is given or not at all.

        So whatever is killed, a run that is there can be resumed. `config` is the text of config.yaml, `status` what else
        stands in status.json. Raises `RunError` when the id is not a plain name or is taken, or when the folder cannot be
        written.
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
                self.check_free(run_id)  # another process was quicker
            raise
        return RunDir(path)

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

    def statuses(self) -> list[tuple[RunDir, dict[str, Any]]]:
        """All runs with their status, the latest first. Each status is read once."""
        if not self.root.is_dir():
            if self.root.exists():
                raise RunError(f"{self.root} is a file; expected the folder that holds the runs, such as runs.")
            return []
        runs = [RunDir(path) for path in self.root.iterdir() if RUN_ID.fullmatch(path.name)]
        pairs = [(run, run.status()) for run in runs if run.status_file.is_file() or run.config.is_file()]
        return sorted(pairs, key=lambda pair: (pair[1].get("started") or 0, pair[0].id), reverse=True)

    def list(self) -> list[RunDir]:
        """All runs, the latest first. Other folders below the root are passed over."""
        return [run for run, _ in self.statuses()]

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


# --- checkpoints: which are there, and which of them are whole; kit.trainer.checkpoint_writer writes them -------------

MANIFEST = "manifest.json"
"""Sizes (bytes) of the files of a checkpoint."""
STATE = "trainer_state.json"
PREFIX = "checkpoint-"


def numbered(root: Path) -> list[Path]:
    """Folders `checkpoint-STEP` in `root`, whole or not, the earliest first."""
    folders = [path for path in root.glob(f"{PREFIX}*") if path.is_dir() and path.name.removeprefix(PREFIX).isdigit()]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Optimiser steps made before a folder `checkpoint-STEP` was written."""
    return int(checkpoint.name.removeprefix(PREFIX))


def is_complete(checkpoint: Path) -> bool:
    """Whether nothing of a checkpoint is missing: trainer_state.json reads, and all files have their noted sizes."""
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        noted = checkpoint / MANIFEST
        sizes = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else {}
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def complete_checkpoints(checkpoints: Iterable[Path]) -> list[Path]:
    """The checkpoints that training can go on from, the earliest first."""
    return sorted(filter(is_complete, checkpoints), key=step_of)


# --- status.json: how a state is signed, and whether a live one is believed -------------------------------------------

ALIVE = ("queued", "starting", "running", "stopping")
ENDED = ("finished", "failed", "stopped", "interrupted")
SILENCE_LIMIT = 300.0
"""Seconds without a heartbeat after which a run on another machine (its pid cannot be asked) reads as interrupted."""


def signed(record: Mapping[str, Any], state: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a new state; a live one names the process that answers for it."""
    now = time.time()
    change: dict[str, Any] = {"state": state, "heartbeat": now, "started": record.get("started") or now}
    if state in ALIVE:
        change |= identity(fields.get("pid")) | {"host": socket.gethostname(), "ended": None, "exit": None}
        change["reason"] = None
    else:
        change |= {"ended": now, "eta_seconds": None}
    if record.get("phase") is not None:  # what was done in the earlier state
        change["phase"] = None
    return {**change, **fields}


def is_elsewhere(record: Mapping[str, Any]) -> bool:
    """Whether a record is of another machine, whose processes cannot be looked up."""
    return record.get("host") not in (None, socket.gethostname())


def effective_status(record: dict[str, Any]) -> dict[str, Any]:
    """A live state is believed as long as the process that answers for it runs."""
    if record["state"] not in ALIVE:
        return record
    reason = f"the process ended without a word while the run was {record['state']}"
    interrupted = record | {"state": "interrupted", "reason": reason, "eta_seconds": None}
    if is_elsewhere(record):
        silence = abs(time.time() - (record.get("heartbeat") or 0.0))  # whichever way the clocks of two machines differ
        return record if silence < SILENCE_LIMIT else interrupted
    supervisor = record.get("supervisor")
    watched = runs(supervisor)
    if not runs(record):
        if watched and (record["state"] == "stopping" or record.get("stop")):
            return record | {"state": "stopping"}  # its supervisor is about to write how it ended
        return interrupted
    if supervisor and not watched and not record.get("reason"):
        return record | {"reason": f"its supervisor (process {supervisor.get('pid')}) died; the run goes on without it"}
    return record
