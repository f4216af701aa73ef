"""What stands in status.json: fields of the right type, how a state is signed, and whether a live one is believed."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kit.runs.process import identity, runs

ALIVE = ("queued", "starting", "running", "stopping")
ENDED = ("finished", "failed", "stopped", "interrupted")
SILENCE_LIMIT = 900.0
"""Seconds without a heartbeat after which a run on another machine (its pid cannot be asked) reads as interrupted."""
SILENT = 60.0
"""Seconds without a heartbeat after which a run on another machine may be taken over by force."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _two_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_whole, value))


FIELDS: dict[str, Callable[[Any], bool]] = (
    dict.fromkeys(("pid", "step", "total_steps", "exit"), _whole)
    | dict.fromkeys(("create_time", "heartbeat", "started", "ended", "eta_seconds", "time"), _finite)
    | dict.fromkeys(("host", "reason", "refused", "how", "id"), _text)
    | dict.fromkeys(("boot", "supervisor", "stop", "before"), _mapping)
    | {"dir": _two_numbers}
)
"""What a field must be to be read, there and in the mappings inside; null is allowed, and other fields are anything."""


def sound(record: Any) -> dict[str, Any] | None:
    """The record without fields of a wrong type; None for one without a known state."""
    if not isinstance(record, dict) or record.get("state") not in ALIVE + ENDED:
        return None
    fields = _fitting(record)
    if (fields.get("before") or {}).get("state", "failed") not in ALIVE + ENDED:
        del fields["before"]
    return fields


def _fitting(record: Mapping[str, Any]) -> dict[str, Any]:
    fit = {key: value for key, value in record.items() if value is None or key not in FIELDS or FIELDS[key](value)}
    return {key: _fitting(value) if FIELDS.get(key) is _mapping and value else value for key, value in fit.items()}


def signed(record: Mapping[str, Any], state: str, fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a new state; a live one names the process that answers for it, and the directory that it means."""
    now = time.time()
    change: dict[str, Any] = {"state": state, "heartbeat": now, "started": record.get("started") or now}
    if state in ALIVE:
        change |= identity(fields.get("pid")) | {"host": socket.gethostname(), "ended": None, "exit": None}
        change |= {"reason": None, "dir": place(folder)}
    else:
        change |= {"ended": now, "eta_seconds": None}
    if record.get("phase") is not None:  # what was done in the earlier state
        change["phase"] = None
    return {**change, **fields}


def place(folder: Path) -> list[int] | None:
    """Device and inode of a run's directory: a copy has others."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return [found.st_dev, found.st_ino]


def is_elsewhere(record: Mapping[str, Any]) -> bool:
    """True for a record of another machine, whose processes cannot be asked."""
    return record.get("host") not in (None, socket.gethostname())


def is_copy(record: Mapping[str, Any], folder: Path) -> bool:
    """True where the record of this machine was written in another directory than the one it lies in."""
    meant = record.get("dir")
    return bool(meant) and not is_elsewhere(record) and place(folder) not in (None, meant)


def silence(record: Mapping[str, Any]) -> float:
    """Seconds since the last sign of life, whichever way the clocks of two machines differ."""
    return abs(time.time() - (record.get("heartbeat") or 0.0))


def as_it_is(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A live state is believed as long as the process that answers for it runs."""
    if record["state"] not in ALIVE:
        return record
    if is_elsewhere(record):
        return record if silence(record) < SILENCE_LIMIT else record | _interrupted(record)
    if is_copy(record, folder):
        return record | _interrupted(record, "this is a copy of the directory of a live run, which is not here")
    supervisor = record.get("supervisor")
    watched = runs(supervisor)
    if not runs(record):
        if watched and (record["state"] == "stopping" or record.get("stop")):
            return record | {"state": "stopping"}  # its supervisor is about to write how it ended
        return record | _interrupted(record)
    if supervisor and not watched and not record.get("reason"):
        return record | {"reason": f"its supervisor (process {supervisor.get('pid')}) died; the run goes on without it"}
    return record


def _interrupted(record: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
    reason = reason or f"the process ended without a word while the run was {record['state']}"
    return {"state": "interrupted", "reason": reason, "eta_seconds": None}


def silent_words(record: Mapping[str, Any]) -> str | None:
    """Of a live run on another machine that has been silent: since when, and what that means. None for any other."""
    if record.get("state") not in ALIVE or not is_elsewhere(record) or (quiet := silence(record)) <= SILENT:
        return None
    left = max(0.0, SILENCE_LIMIT - quiet) / 60
    return (
        f"its last sign of life came {quiet:.0f} s ago, on {record['host']}; it is taken for dead in {left:.0f} min, or now "
        "with resume --force"
    )
