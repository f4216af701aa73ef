"""Parsing of YAML and overrides to a tree of plain values, and pydantic's errors as sentences. For kit.config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from kit.errors import ConfigError
from kit.registry import did_you_mean

_UNION_TAG = re.compile(r"function-|constrained-|(str|int|float|bool)$|(list|dict|tuple)\[")


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads `1e-3` as a number; YAML 1.1 reads it as text.

    Python's own parser, not libyaml: ten times as slow, but text nested without end is a `RecursionError` here and ends
    the process there, and the page reads what people paste.
    """


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def _parse(text: str) -> Any:
    """Raises `yaml.YAMLError`, for text that is nested too deep as well."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep; a configuration has a handful of levels.") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file holds an empty one. Raises `ConfigError`."""
    if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet", ".xlsx"):
        raise ConfigError(
            f"{path.name} is data, not a configuration. Give a preset its rows: my-data -o data.source={path}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    return parse_yaml(text, path.name, empty={})


def parse_yaml(text: str, origin: str = "The text", *, empty: dict[str, Any] | None = None) -> dict[str, Any]:
    """The mapping that a YAML text holds, `empty` for one that holds nothing. Raises `ConfigError`."""
    try:
        tree = _parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {error}") from None
    tree = empty if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin} holds a {type(tree).__name__}; expected sections such as 'model:' and 'data:'.")
    return tree


def parse_value(text: str) -> Any:
    """A value as an override gives it: YAML where it is that, else the text itself."""
    try:
        return _parse(text)
    except yaml.YAMLError:
        return text


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `section.key=value` in `tree`; list items go by number, from 0. Raises `ConfigError`."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"'{override}' is not an override; write section.key=value, e.g. optimisation.steps=50.")
    value = parse_value(text)
    *parents, leaf = key.strip().split(".")
    node: Any = tree
    for parent in parents:
        slot: Any = _slot(node, parent, override)
        child = node[slot] if isinstance(node, list) else node.get(slot)
        if isinstance(child, str):  # a hook given by name only: `clip: ppo_clip` and then `clip.eps_high=0.28`
            child = {"name": child}
        if not isinstance(child, (dict, list)):
            child = {}
        node[slot] = child
        node = child
    node[_slot(node, leaf, override)] = value


def _slot(node: Any, part: str, override: str) -> str | int:
    if not isinstance(node, list):
        return part
    if part.isdigit() and int(part) < len(node):
        return int(part)
    raise ConfigError(f"'{override}': '{part}' is no item of that list; it has {len(node)}, counted from 0.")


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; a list, and an empty mapping, is one value."""
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def explain(error: ValidationError, origin: str, schema: type[BaseModel]) -> str:
    """All faults of a tree that `schema` refused, one line a key: what was seen and expected, the nearest name."""
    lines: dict[str, list[str]] = {}
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"] if not _UNION_TAG.match(str(part)))
        if fault["type"] == "extra_forbidden":
            section, _, key = where.rpartition(".")
            options = _keys(schema, section)
            message = f"there is no such key.{did_you_mean(key, options)} "
            message += f"{section or 'The top level'} has: {', '.join(options)}."
        elif fault["type"] == "model_type":
            message = f"expected keys below it, such as {_keys(schema, where)[0]} (seen: {fault['input']!r})"
        else:
            message = fault["msg"].removeprefix("Value error, ")
            message += "" if isinstance(fault["input"], (dict, BaseModel)) else f" (seen: {fault['input']!r})"
        messages = lines.setdefault(where, [])
        if message not in messages:
            messages.append(message)
    listed = [(f"{where}: " if where else "") + "; or: ".join(messages) for where, messages in lines.items()]
    return f"{origin} cannot be run:\n  " + "\n  ".join(listed)


def _keys(schema: type[BaseModel], section: str) -> list[str]:
    """Names of the keys of a section given by its dotted path, which names list items by number and unions by their `type`."""
    kinds = [schema]
    for part in filter(None, section.split(".")):
        fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
        typed = [kind for kind in kinds if "type" in kind.model_fields and part == kind.model_fields["type"].default]
        kinds = [model for field in fields for model in _models(field.annotation)] or typed or kinds
    return list(kinds[0].model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """All models in an annotation: of unions, lists and the values of mappings, too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
