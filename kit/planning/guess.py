"""Guess columns, reward and system prompt from the rows of a file, each with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kit.config import DataConfig
from kit.errors import DataError

THINK = "Think step by step between <think> and </think>, then give the final answer between <answer> and </answer>."
BOXED = "Think step by step, then put the final answer in \\boxed{}."
NUMBER = re.compile(r"[-+$€]?[\d,.\s]*\d\s*%?")
MOST_LABELS, FEWEST_A_LABEL = 20, 2
SHORT = 60
"""Largest mean length of references, in characters, that counts as short answers."""


@dataclass(frozen=True)
class Guess:
    """Guessed values of the configuration, and the reason. `reward` is None if no column holds correct answers."""

    prompt: str
    reference: str | None
    reward: str | None
    params: Mapping[str, Any]
    system_prompt: str | None
    why: str


def guess(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Guess:
    """Guess from sample rows and the column names. Raises `DataError` if no column holds text."""
    prompt, reference = _roles(names, rows)
    if any(name in ("tests", "test_cases", "test_list") for name in names):
        return Guess(prompt, reference, "code-function", {}, None, "a column holds tests, which can run programs")
    values = [str(_as_text(row.get(reference))).strip() for row in rows if reference and row.get(reference) is not None]
    values = [value for value in values if value]
    if reference is None or not values:
        return Guess(prompt, None, None, {}, None, "no column holds right answers; choose a reward that needs none")
    reward, params, system, why = _by_values(values)
    return Guess(prompt, reference, reward, params, system, f"the right answers in '{reference}' {why}")


def _by_values(values: Sequence[str]) -> tuple[str, dict[str, Any], str, str]:
    """Return (reward, its parameters, system prompt, reason) for the texts of a reference column."""
    if all(_is_json(value) for value in values):
        params = {"schema": json.dumps(schema_of([json.loads(value) for value in values])), "partial": True}
        system = "Answer with one JSON value and nothing else."
        return "json-schema", params, system, "are JSON; the schema follows them"
    if all(re.fullmatch(r"\(?[A-J]\)?\.?", value) for value in values):
        letters = "".join(sorted({re.sub(r"\W", "", value) for value in values} | set("ABCD")))
        return "mcq-letter", {"letters": letters}, THINK.replace("final answer", "letter"), "are single letters"
    if all("####" in value for value in values) or all(NUMBER.fullmatch(value) for value in values):
        return "gsm8k-reasoning", {}, THINK, "are numbers"
    if sum(bool(re.search(r"\\[a-z]+|\^|[a-z0-9]\s*[=/]\s*[a-z0-9]", value)) for value in values) > len(values) / 2:
        return "math-verify", {}, BOXED, "are formulas"
    labels = sorted(set(values))
    if len(labels) <= min(MOST_LABELS, len(values) // FEWEST_A_LABEL) and max(map(len, labels)) <= SHORT:
        system = f"Give one of {', '.join(labels)} between <answer> and </answer>."
        return "classification-label", {"labels": labels}, system, f"are {len(labels)} labels"
    if sum(map(len, values)) / len(values) <= SHORT:
        return "qa-short", {}, "Give the answer in a few words between <answer> and </answer>.", "are a few words"
    return "text-overlap", {}, "Answer in plain words.", "are longer texts, which are compared by shared characters"


def _roles(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return (prompt column, reference column): by name, else the columns with the longest and the shortest texts."""
    from kit.data.rows import map_columns

    try:
        mapping = map_columns(list(names), DataConfig())
        if mapping.prompt is not None:
            return mapping.prompt, mapping.reference
    except DataError:
        pass
    lengths = {}
    for name in names:
        values = [str(_as_text(row[name])) for row in rows if row.get(name) not in (None, "")]
        lengths[name] = sum(map(len, values)) / len(values) if values else 0.0
    texts = sorted((name for name in names if lengths[name]), key=lambda name: -lengths[name])
    if not texts:
        raise DataError("No column holds text, and a prompt column is needed. Add one.")
    as_json = [name for name in texts if all(_is_json(str(_as_text(row.get(name)))) for row in rows)]
    reference = as_json[0] if as_json and len(texts) > 1 else texts[-1] if len(texts) > 1 else None
    return next(name for name in texts if name != reference), reference


TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    type(None): "null",
}


def schema_of(values: Sequence[Any]) -> dict[str, Any]:
    """Return a JSON schema that all values match. Keys that all objects have are required."""
    if not all(isinstance(value, dict) for value in values):
        kinds = sorted({TYPES.get(type(value), "object") for value in values})
        return {"type": kinds[0] if len(kinds) == 1 else kinds}
    names = dict.fromkeys(name for value in values for name in value)
    properties = {name: schema_of([value[name] for value in values if name in value]) for name in names}
    required = [name for name in names if all(name in value for value in values)]
    return {"type": "object", "properties": properties, "required": required}


def _as_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _is_json(value: str) -> bool:
    if not value.startswith(("{", "[")):
        return False
    try:
        json.loads(value)
    except ValueError:
        return False
    return True
