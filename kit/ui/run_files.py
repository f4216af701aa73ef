"""The tabs of a run that show its files: log, configuration, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from kit.config import RunConfig
from kit.runs.checkpoints import step_of, whole_checkpoints
from kit.runs.files import human_size
from kit.runs.secrets import redact
from kit.runs.store import RunDir
from kit.ui import markup as m

LOG_BYTES = 24_000
"""Of the end of a log, at most: a poll stays small."""
LARGEST_FILE = 2_000_000


def log(run: RunDir) -> str:
    """The end of what the run printed."""
    try:
        size = run.log.stat().st_size
        with open(run.log, "rb") as file:
            file.seek(max(0, size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return m.empty("No log yet", "What the run prints stands here as it comes.")
    cut = size > LOG_BYTES
    if cut:
        text = text.partition("\n")[2]
    where = m.tag("small", f"the last {human_size(LOG_BYTES)} of {run.log}" if cut else str(run.log))
    return m.page(where, m.tag("pre", redact(text).strip() or "(nothing printed yet)", class_="log", tabindex="0"))


def config(run: RunDir) -> tuple[str, str]:
    """(what was changed from the defaults, data and environment; YAML)."""
    text = _text(run.config)
    tree = _yaml(text)
    command = f"grpo-kit train {run.config} -o run.id=NAME"
    again = m.tag("div", m.join([m.tag("b", "The same again: "), m.tag("code", command)]), class_="note")
    return m.page(
        again, m.tag("h3", "Changed from the defaults"), _changed(tree), _data(run), _environment(run)
    ), redact(text)


def _changed(tree: Mapping[str, Any]) -> Markup:
    defaults = dict(flat(RunConfig().model_dump(mode="json")))
    rows = [
        [m.tag("code", key), shown(value), shown(defaults.get(key)) if key in defaults else "not set"]
        for key, value in flat(tree)
        if key not in ("run.id", "run.root") and (key not in defaults or defaults[key] != value)
    ]
    return m.table(["key", "this run", "default"], rows) if rows else m.note("Nothing: every key has its default.")


def flat(tree: Any, key: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of every leaf; lists and empty mappings are leaves."""
    if isinstance(tree, Mapping) and tree:
        return [pair for name, value in tree.items() for pair in flat(value, f"{key}.{name}" if key else str(name))]
    return [(key, tree)]


def shown(value: Any) -> str:
    """A value of a configuration in one line."""
    text = redact(value if isinstance(value, str) else json.dumps(value, default=str))
    return text if len(text) <= 160 else f"{text[:159]}…"


def _data(run: RunDir) -> Markup:
    found = _json(run.data)
    if not found:
        return Markup("")
    rows = [[m.tag("code", key), shown(value)] for key, value in list(flat(found))[:24]]
    return m.tag("details", m.tag("summary", "Data") + m.table(["", ""], rows))


def _environment(run: RunDir) -> Markup:
    found = _json(run.env)
    if not found:
        return Markup("")
    kept = {key: value for key, value in found.items() if key != "inputs"}
    rows = [[m.tag("code", key), shown(value)] for key, value in list(flat(kept))[:200]]
    return m.tag(
        "details", m.tag("summary", "Machine, packages, effective trainer arguments") + m.table(["", ""], rows)
    )


def checkpoints(run: RunDir, evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """Checkpoints with size, score and use."""
    scores = {int(one["step"]): one for one in evaluations.values() if isinstance(one.get("step"), int)}
    best = _json(run.path / "best.json").get("step")
    found = run.checkpoints
    usable = whole_checkpoints(found)
    rows = []
    for path in reversed(found):
        step = step_of(path)
        marks = [m.badge("best held-out", "ok")] if step == best else []
        if path not in usable:
            marks.append(m.badge("incomplete", "fail"))
        elif path == usable[-1]:
            marks.append(m.badge("resume goes on here", "live"))
        rows.append(
            [
                m.tag("code", path.name),
                m.number(step),
                _score(scores.get(step)),
                human_size(_size(path)),
                m.join(marks, " "),
            ]
        )
    if run.adapter.is_dir():
        rows.insert(
            0,
            [
                m.tag("code", "adapter"),
                "result",
                _score(evaluations.get("after")),
                human_size(_size(run.adapter)),
                m.badge("the run's result", "ok"),
            ],
        )
    if not rows:
        return m.empty(
            "No checkpoint yet", "The first comes after run.save_every steps, when you save one now, or at the end."
        )
    return m.page(m.table(["folder", "step", "held-out", "size", ""], rows, numbers={1, 3}))


def _score(scores: Mapping[str, Any] | None) -> str:
    for key in ("greedy_accuracy", "greedy_reward"):
        one = (scores or {}).get(key)
        if isinstance(one, Mapping) and isinstance(one.get("value"), (int, float)):
            return f"{one['value']:.3f} [{m.number(one.get('low'))}, {m.number(one.get('high'))}]"
    return "–"


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _text(path: Path) -> str:
    try:
        return path.read_bytes()[:LARGEST_FILE].decode("utf-8", "replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
