"""Reads a run directory for reports, however damaged its files are, and puts its events into words.

A damaged file is listed in `Record.faults`; it raises nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    config_text: str
    env: Tree
    data: Tree
    metrics: list[Tree]
    events: list[Tree]
    evaluations: dict[str, Tree]
    faults: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """A value of the configuration by its dotted key, None where it has none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read(run: RunDir) -> Record:
    """Reads a run's directory. Any file in it may be missing or damaged."""
    faults: list[str] = []
    text = _text(run.config, faults)
    return Record(
        id=run.id,
        status=run.status(),
        config=_mapping(_yaml(text, faults)),
        config_text=text,
        env=_json(run.env, faults),
        data=_json(run.data, faults),
        metrics=_lines(run.metrics, run.metrics_file, faults),
        events=_lines(run.events, run.events_file, faults),
        evaluations={path.stem: _json(path, faults) for path in sorted(run.eval.glob("*.json"))},
        faults=faults,
    )


def read_tree(path: Path) -> Tree:
    """The mapping that a JSON or YAML file of a run holds; an empty one where it is missing or damaged."""
    faults: list[str] = []
    return _json(path, faults) if path.suffix == ".json" else _mapping(_yaml(_text(path, faults), faults))


def _text(path: Path, faults: list[str]) -> str:
    if path.exists() and not path.is_file():  # a device has no end
        faults.append(f"{path.name} is no file.")
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        faults.append(f"{path.name} cannot be read: {_reason(error)}.")
        return ""


def _json(path: Path, faults: list[str]) -> Tree:
    text = _text(path, faults)
    try:
        return _mapping(json.loads(text)) if text else {}
    except ValueError:
        faults.append(f"{path.name} is damaged: it is not JSON.")
        return {}


def _yaml(text: str, faults: list[str]) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        faults.append("config.yaml is damaged: it is not YAML.")
        return {}


def _lines(read_all: Callable[[], list[Tree]], path: Path, faults: list[str]) -> list[Tree]:
    """All lines; without the broken ones where there are some."""
    try:
        return [line for line in read_all() if isinstance(line, dict)]
    except RunError:
        lines, broken = [], 0
        for line in path.read_bytes().split(b"\n") if path.is_file() else []:
            try:
                record = json.loads(line) if line.strip() else {}
            except ValueError:
                broken += 1
                continue
            if isinstance(record, dict) and record:
                lines.append(record)
        faults.append(f"{path.name} is damaged: {broken} of its lines cannot be read and are left out.")
        return lines


def _mapping(value: Any) -> Tree:
    return value if isinstance(value, dict) else {}


def _reason(error: Exception) -> str:
    missing = isinstance(error, FileNotFoundError)
    return "it is missing" if missing else str(getattr(error, "strerror", None) or error)


def split(table: list[Tree], size: int) -> list[list[Tree]]:
    """Completions by group: `size` at a time, or neighbours with the same prompt where that does not fit."""
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
    """One event as a sentence."""
    phrase = PHRASES.get(str(event.get("kind")))
    if phrase is not None:
        return phrase(event)
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "kind", "step"))
    return f"{event.get('kind')}: {rest}" if rest else str(event.get("kind"))


def _resumed(event: Tree) -> str:
    changes = "; ".join(map(str, event.get("changes") or []))
    if event.get("checkpoint", "") is None:
        changed = f" Changed since then: {changes}." if changes else ""
        return f"Started again from the beginning, as no checkpoint of it was saved.{changed}"
    forced = f" Forced, although this had changed: {changes}." if event.get("forced") else ""
    return f"Resumed from {event.get('checkpoint', 'a checkpoint')}.{forced}"


def _out_of_memory(event: Tree) -> str:
    size = event.get("micro_batch_size")
    return f"Out of memory; went on with micro-batches of {size} completions and the same effective batch."


def _alert(event: Tree) -> str:
    return f"{str(event.get('severity') or 'alert').capitalize()}: {event.get('message') or event.get('name')}"


def _metric(event: Tree) -> str:
    return f"{str(event.get('metric', 'score')).replace('_', ' ')} {number(_number(event.get('value')))}"


def _early_stop(event: Tree) -> str:
    if event.get("cause") == "reward_hacking":
        return f"Stopped: the training reward rose while the held-out score fell ({_metric(event)})."
    return f"Stopped early: {_metric(event)}, no better than at step {event.get('best_step')}."


def _rollback(event: Tree) -> str:
    return f"Went back to the weights of step {event.get('to_step')} ({event.get('checkpoint')})."


PHRASES: dict[str, Callable[[Tree], str]] = {
    "resumed": _resumed,
    "out_of_memory": _out_of_memory,
    "alert": _alert,
    "best": lambda event: f"Best held-out score so far: {_metric(event)}.",
    "early_stop": _early_stop,
    "rollback": _rollback,
}


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
