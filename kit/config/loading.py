"""Parse YAML and overrides into a tree of plain values, and turn pydantic's errors into sentences."""

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
    """A YAML loader that reads `1e-3` as a number, which YAML 1.1 reads as text, and refuses a key that occurs twice.

    It uses the parser in Python, which is ten times slower than libyaml: for deeply nested text, which can be pasted into the
    page, it raises `RecursionError`, while libyaml ends the process.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            first = lines.setdefault(key.value, line := key.start_mark.line + 1)
            if first != line and key.value != "<<":
                raise yaml.YAMLError(f"the key '{key.value}' is in lines {first} and {line}; join the two.")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def _parse(text: str) -> Any:
    """Parse YAML. Raises `yaml.YAMLError`, also for text that is nested too deeply."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply; a configuration has only a few levels.") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; an empty file gives an empty mapping. Raises `ConfigError`."""
    if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet", ".xlsx"):
        raise ConfigError(
            f"{path.name} is data, not a configuration. Use it with a preset: my-data -o data.source={path}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    return parse_yaml(text, path.name, empty={})


def parse_yaml(text: str, origin: str = "The text", *, empty: dict[str, Any] | None = None) -> dict[str, Any]:
    """Parse the mapping in a YAML text; an empty text gives `empty`. Raises `ConfigError`."""
    try:
        tree = _parse(text)
    except yaml.YAMLError as error:
        tabs = "\nIndent with spaces instead of tabs." if "\\t" in str(error) else ""
        text = str(error).replace('in "<unicode string>", ', "in ")
        raise ConfigError(f"{origin} is not valid YAML: {text}{tabs}") from None
    tree = empty if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{origin} is no configuration: expected sections such as 'model:' and 'data:', found a {type(tree).__name__}."
        )
    return tree


def parse_value(text: str) -> Any:
    """The value of an override: parsed as YAML, or the text itself if it is no YAML."""
    try:
        return _parse(text)
    except yaml.YAMLError:
        return text


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `tree`. Raises `ConfigError`."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"'{override}' is not an override; write section.key=value, e.g. optimisation.steps=50.")
    set_value(tree, key.strip(), parse_value(text))


def set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in `tree`. Items of lists are numbered from 0. Raises `ConfigError`."""
    *parents, leaf = key.split(".")
    node: Any = tree
    for parent in parents:
        slot: Any = _slot(node, parent, key)
        child = node[slot] if isinstance(node, list) else node.get(slot)
        if isinstance(child, str):  # a hook as a name alone: `clip: ppo_clip`, then `clip.eps_high=0.28`
            child = {"name": child}
        if not isinstance(child, (dict, list)):
            child = {}
        node[slot] = child
        node = child
    node[_slot(node, leaf, key)] = value


def _slot(node: Any, part: str, key: str) -> str | int:
    if not isinstance(node, list):
        return part
    if part.isdigit() and int(part) < len(node):
        return int(part)
    raise ConfigError(f"{key}: '{part}' is no item of that list; it has {len(node)}, counted from 0.")


def lookup(tree: Any, key: str) -> Any:
    """The value of a dotted key; None if there is none."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf. A list and an empty mapping count as one value."""
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def explain(error: ValidationError, origin: str, schema: type[BaseModel]) -> str:
    """All faults of a tree that `schema` refused, one line per key, with the value and what was expected."""
    lines: dict[str, list[str]] = {}
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"] if not _UNION_TAG.match(str(part)))
        if fault["type"] == "extra_forbidden":
            section, _, name = key.rpartition(".")
            options = _keys(schema, section)
            message = f"there is no such key.{did_you_mean(name, options)} "
            message += f"{section or 'The top level'} has: {', '.join(options)}."
        elif fault["type"] == "model_type":
            message = f"expected keys below it, such as {_keys(schema, key)[0]} (seen: {fault['input']!r})"
        else:
            message = fault["msg"].removeprefix("Value error, ")
            message += "" if isinstance(fault["input"], (dict, BaseModel)) else f" (seen: {fault['input']!r})"
        messages = lines.setdefault(key, [])
        if message not in messages:
            messages.append(message)
    listed = [(f"{key}: " if key else "") + "; or: ".join(messages) for key, messages in lines.items()]
    return f"{origin} is not valid:\n  " + "\n  ".join(listed)


def _keys(schema: type[BaseModel], section: str) -> list[str]:
    """Keys of a section by its dotted path, in which list items are numbers and members of unions are their `type`."""
    kinds = [schema]
    for part in filter(None, section.split(".")):
        fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
        typed = [kind for kind in kinds if "type" in kind.model_fields and part == kind.model_fields["type"].default]
        kinds = [model for field in fields for model in _models(field.annotation)] or typed or kinds
    return list(kinds[0].model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """All models in an annotation, also in unions, lists and values of mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
