"""Reads a run directory for reports, even with damaged files, and describes its events.

A damaged file is listed in `Record.faults` and raises no error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.config.loading import lookup
from kit.errors import RunError
from kit.report.charts import number
from kit.runs.metrics import is_number
from kit.runs.store import RunDir

Tree = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """The content of a run directory when it was read."""

    id: str
    status: Tree
    config: Tree
    env: Tree
    data: Tree
    metrics: list[Tree]
    events: list[Tree]
    evaluations: dict[str, Tree]
    faults: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """A value of the configuration by its dotted key; None if it is missing."""
        return lookup(self.config, key)


def read(run: RunDir) -> Record:
    """Reads a run's directory. Any file in it may be missing or damaged."""
    faults: list[str] = []
    return Record(
        id=run.id,
        status=run.status(),
        config=read_tree(run.config, faults),
        env=read_tree(run.env, faults),
        data=read_tree(run.data, faults),
        metrics=_lines(run.metrics, faults),
        events=_lines(run.events, faults),
        evaluations={path.stem: read_tree(path, faults) for path in sorted(run.eval.glob("*.json"))},
        faults=faults,
    )


def read_tree(path: Path, faults: list[str] | None = None) -> Tree:
    """The mapping in a JSON or YAML file of a run. If it is missing or damaged: an empty one, and a fault."""
    import yaml

    name, faults = ("JSON" if path.suffix == ".json" else "YAML"), [] if faults is None else faults
    try:
        if path.exists() and not path.is_file():  # reading a device would not end
            raise OSError("it is not a file")
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if name == "JSON" else yaml.safe_load(text)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        faults.append(f"{path.name} cannot be read: {'it is missing' if missing else error.strerror or error}.")
        return {}
    except (ValueError, yaml.YAMLError, RecursionError):
        faults.append(f"{path.name} is damaged: it is not {name}.")
        return {}
    return tree if isinstance(tree, dict) else {}


def _lines(read_all: Callable[[], list[Tree]], faults: list[str]) -> list[Tree]:
    """All lines of a file. If it is damaged: none, and a fault."""
    try:
        return read_all()
    except RunError as error:
        faults.append(str(error))
        return []


def split(table: list[Tree], size: int) -> list[list[Tree]]:
    """Completions by group of `size`, or by equal prompts of neighbours if their number is not a multiple."""
    if size > 0 and len(table) % size == 0:
        equal = [table[start : start + size] for start in range(0, len(table), size)]
        if all(len({row.get("prompt") for row in group}) == 1 for group in equal):
            return equal
    groups: list[list[Tree]] = []
    for row in table:
        if not groups or groups[-1][0].get("prompt") != row.get("prompt"):
            groups.append([])
        groups[-1].append(row)
    return groups


def words(event: Tree) -> str:
    """A sentence about an event."""
    value = event.get("value")
    score = (
        f"{str(event.get('metric', 'score')).replace('_', ' ')} {number(float(value) if is_number(value) else None)}"
    )
    changes = "; ".join(map(str, event.get("changes") or []))
    match str(event.get("kind")):
        case "resumed" if event.get("checkpoint", "") is None:
            changed = f" Changed since the start: {changes}." if changes else ""
            return f"Started again from the beginning, because there was no checkpoint.{changed}"
        case "resumed":
            forced = f" Forced in spite of changes: {changes}." if event.get("forced") else ""
            return f"Resumed from {event.get('checkpoint', 'a checkpoint')}.{forced}"
        case "out_of_memory":
            size = event.get("micro_batch_size")
            return f"Out of memory; continued with micro-batches of {size} completions and the same effective batch."
        case "alert":
            return f"{str(event.get('severity') or 'alert').capitalize()}: {event.get('message') or event.get('name')}"
        case "best":
            return f"Best held-out score so far: {score}."
        case "early_stop" if event.get("cause") == "reward_hacking":
            return f"Stopped: the training reward rose while the held-out score fell ({score})."
        case "early_stop":
            return f"Stopped early: {score}, no better than at step {event.get('best_step')}."
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "kind", "step"))
    return f"{event.get('kind')}: {rest}" if rest else str(event.get("kind"))
