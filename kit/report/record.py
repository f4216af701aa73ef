"""What a run left on disk, read as far as it can be read: a damaged file becomes a fault that is told, not an end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import RunError
from kit.runs.store import RunDir

Tree = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """A run at the moment when it was read."""

    id: str
    status: Tree
    config: Tree
    config_text: str
    env: Tree
    data: Tree
    metrics: list[Tree]
    events: list[Tree]
    evaluations: dict[str, Tree]
    batches: list[Path]
    """Files with completions, one a generation batch, in order."""
    faults: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """A value of the configuration by its dotted key, None where it has none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read(run: RunDir) -> Record:
    """Reads a run's directory. Nothing in it is trusted to be there, or whole."""
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
        batches=sorted(run.completions.glob("*.parquet")),
        faults=faults,
    )


def rows(path: Path) -> list[Tree]:
    """The completions of one file. Raises `RunError` when it cannot be read."""
    import pyarrow.parquet as pq

    try:
        table: list[Tree] = pq.ParquetFile(path).read().to_pylist()  # pq.read_table would load pandas
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise RunError(f"{path.name} cannot be read: {error}") from error
    return table


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
    except yaml.YAMLError:
        faults.append("config.yaml is damaged: it is not YAML.")
        return {}


def _lines(whole: Callable[[], list[Tree]], path: Path, faults: list[str]) -> list[Tree]:
    """All lines, or where one of them is broken the others."""
    try:
        return [line for line in whole() if isinstance(line, dict)]
    except RunError:
        kept, broken = [], 0
        for line in path.read_bytes().split(b"\n") if path.is_file() else []:
            try:
                record = json.loads(line) if line.strip() else {}
            except ValueError:
                broken += 1
                continue
            if isinstance(record, dict) and record:
                kept.append(record)
        faults.append(f"{path.name} is damaged: {broken} of its lines cannot be read and are left out.")
        return kept


def _mapping(value: Any) -> Tree:
    return value if isinstance(value, dict) else {}


def _reason(error: Exception) -> str:
    missing = isinstance(error, FileNotFoundError)
    return "it is missing" if missing else str(getattr(error, "strerror", None) or error)
