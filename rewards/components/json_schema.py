"""Check that a completion is JSON, follows the schema, and equals the expected value."""

import functools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import column
from rewards.components.json_values import find_json, parse_reference, same_json
from rewards.errors import PresetError
from rewards.isolation import IsolatedComponent, Task
from rewards.protocol import Context, ItemComponent, Sample, Score

_COMMENTS = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
)


@dataclass(frozen=True, kw_only=True)
class JsonSchema(IsolatedComponent):
    """1 for a value that follows the schema and equals the reference, if the row has one; else 0.

    `schema` applies to rows without a schema. With `partial`, a value that follows the schema earns the F1 over (path, leaf)
    pairs against the reference. A completion without JSON is `format`; an unusable schema or reference is `error`. The
    keyword `format` (dates, addresses) is checked, although JSON Schema itself does not require that.
    """

    name: str = "accuracy"
    schema: str | None = None
    strict: bool = True
    partial: bool = False

    def __post_init__(self) -> None:
        if self.schema is not None:
            status, reason = schema_problem(self.schema, None)
            if status == "error":
                raise PresetError(f"{reason}. Pass JSON text of a JSON Schema.")

    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        schema = _schema_text(column(sample, "schema", "json_schema"), self.schema)
        if schema is None:
            return Score(None, "error", {"reason": "no schema: give JSON text in column `schema`, or schema="})
        try:
            expected = parse_reference(sample.reference)
        except ValueError as failure:
            return Score(None, "error", {"reason": f"reference is not JSON: {failure}"[:200]})
        if expected is None and _allows_anything(schema):
            return Score(None, "error", {"reason": "the schema allows anything, and there is no reference"})
        answer = sample.once(find_json, self.strict)
        if answer.reason is not None:
            return Score(None, "format", {"reason": answer.reason})
        return Task("rewards.components.json_schema:schema_problem", (schema, answer.value))

    def verdict(self, sample: Sample, result: Any) -> Score:
        status, reason = result
        if status != "ok":
            return Score(None, status, {"reason": reason})
        expected = parse_reference(sample.reference)
        value = sample.once(find_json, self.strict).value
        if expected is None or same_json(expected, value):
            return Score(self.high, "ok")
        # Name up to three paths whose expected leaf is missing.
        missing = Counter(_leaves(expected)) - Counter(_leaves(value))
        paths = [".".join(str(part) for part in path) for path, _ in missing if path]
        where = f" at {', '.join(paths[:3])}"[:120] if paths else ""
        info = {"reason": f"follows the schema, but is not the expected value{where}"}
        return Score(leaf_f1(expected, value) if self.partial else None, "wrong", info)


@dataclass(frozen=True, kw_only=True)
class JsonFormat(ItemComponent):
    """1 for exactly one JSON value, which is an object or array if the schema allows nothing else."""

    name: str = "format"
    schema: str | None = None
    strict: bool = True

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        answer = sample.once(find_json, self.strict)
        reason = answer.reason
        if reason is None and not isinstance(answer.value, dict | list):
            schema = _schema_text(column(sample, "schema", "json_schema"), self.schema)
            reason = "no object or array" if _wants_container(schema) else None
        return Score(self.high) if reason is None else Score(None, "format", {"reason": reason})


def warm_up() -> None:
    """Import jsonschema in a worker before the first deadline begins."""
    import jsonschema  # noqa: F401
    import jsonschema_specifications  # noqa: F401


def schema_problem(schema: str, value: Any) -> tuple[str, str | None]:
    """Validate `value` by the schema in JSON text; return the status (ok, wrong, or error for a bad schema) and reason.

    References to other documents are never fetched.
    """
    from jsonschema.exceptions import SchemaError
    from referencing.exceptions import Unresolvable

    try:
        validator = _validator(schema)
    except (SchemaError, ValueError, TypeError) as failure:
        return "error", f"schema cannot be used: {str(failure).partition(chr(10))[0]}"[:200]
    try:
        problem = next(validator.iter_errors(value), None)
    except Unresolvable as failure:
        return "error", f"schema refers to a definition that it does not contain: {failure}"[:200]
    if problem is None:
        return "ok", None
    return "wrong", f"{problem.json_path}: {problem.message}"[:200]


def leaf_f1(expected: Any, value: Any) -> float:
    """Return F1 over (path, leaf) pairs; an array index is part of the path, an empty container is a leaf."""
    expected_leaves, leaves = Counter(_leaves(expected)), Counter(_leaves(value))
    return 2 * (expected_leaves & leaves).total() / (expected_leaves.total() + leaves.total())


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        number = isinstance(value, float) and value.is_integer()
        yield path, json.dumps(int(value) if number else value)


def _schema_text(schema: Any, fallback: str | None) -> str | None:
    """Return the schema as JSON text without OpenAI's `response_format` wrapping; text that is not JSON is unchanged."""
    if schema is None:
        return fallback
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except ValueError:
            return schema
        schema = parsed
    if isinstance(schema, dict) and schema.get("type") == "json_schema" and isinstance(schema.get("json_schema"), dict):
        schema = schema["json_schema"]
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict) and "type" not in schema:
        schema = schema["schema"]
    return json.dumps(schema)


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY

    parsed = json.loads(schema)
    kind: Any = validator_for(parsed, default=Draft202012Validator)
    kind.check_schema(parsed)
    # Without a registry, jsonschema would fetch references to other documents over the network.
    return kind(parsed, registry=REGISTRY, format_checker=kind.FORMAT_CHECKER)


@functools.lru_cache(maxsize=256)
def _wants_container(schema: str | None) -> bool:
    """Whether the schema's top-level `type` allows only objects or arrays."""
    try:
        kinds = json.loads(schema or "{}")["type"]
        return {"object", "array"} >= set([kinds] if isinstance(kinds, str) else kinds)
    except (ValueError, KeyError, TypeError):
        return False


@functools.lru_cache(maxsize=256)
def _allows_anything(schema: str) -> bool:
    """Whether the schema is `true` or contains only comments and definitions."""
    try:
        parsed = json.loads(schema)
    except ValueError:
        return False
    return parsed is True or (isinstance(parsed, dict) and parsed.keys() <= _COMMENTS)
