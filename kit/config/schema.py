"""The schema of the configuration as commented YAML and as JSON Schema."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from kit.config import RunConfig, Section

WIDTH = 100
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the configuration, for editors and other programs."""
    schema = RunConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "grpo-kit run"} | schema


def commented_yaml(config: RunConfig) -> str:
    """YAML of `config` with the meaning and the valid values of every key. `load_config` reads it back unchanged."""
    head = _comment(
        "A run of grpo-kit. Every key is optional. The values below are those of a preset; a key that you delete gets its "
        "default. Check the file with `grpo-kit validate FILE`, start it with `grpo-kit train FILE`.",
        indent=0,
    )
    return "\n".join([*head, *_section(config, 0)]) + "\n"


def _section(section: Section, indent: int) -> Iterator[str]:
    pad = " " * indent
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if indent == 0:
            yield ""
        yield from _comment(document(field, value), indent)
        if isinstance(value, Section):
            yield f"{pad}{name}:"
            yield from _section(value, indent + 2)
        else:
            yield from (pad + line for line in _leaf(name, section.model_dump(mode="json", include={name})[name]))


def _leaf(name: str, value: Any) -> list[str]:
    def dump(content: Any, flow: bool) -> str:
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=flow)
        return text.rstrip("\n")

    if isinstance(value, (list, dict)):
        line = f"{name}: {dump(value, True)}"
        if len(line) <= WIDTH - 20 and "\n" not in line:
            return [line]
    return dump({name: value}, False).split("\n")


def document(field: FieldInfo, value: Any = None) -> str:
    """The meaning of a field and its valid values: `Sampling temperature. [> 0]`."""
    text = field.description or (type(value).__doc__ if isinstance(value, Section) else "") or ""
    valid = valid_values(field)
    return f"{' '.join(text.split())} [{valid}]" if valid else " ".join(text.split())


def valid_values(field: FieldInfo) -> str:
    """The range or the choices of a field in words, or an empty string."""
    parts = _parts(field.annotation)
    marks = [*field.metadata, *(mark for part in parts for mark in _marks(part))]
    bounds = [f"{sign} {getattr(mark, key)}" for key, sign in _BOUNDS.items() for mark in marks if hasattr(mark, key)]
    choices = [str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    words = [" and ".join(bounds)] if bounds else []
    words += [" | ".join(choices)] if choices else []
    words += ["or null"] if words and type(None) in parts else []
    return " ".join(words)


def _parts(annotation: Any) -> list[Any]:
    """Members of a union, types of a list's items, or the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for member in get_args(annotation) for part in _parts(member)]
    if get_origin(annotation) is list:
        return [part for member in get_args(annotation) for part in _parts(member)]
    return [annotation]


def _marks(annotation: Any) -> Iterator[Any]:
    for mark in getattr(annotation, "__metadata__", ()):
        yield from mark.metadata if isinstance(mark, FieldInfo) else (mark,)


def _comment(text: str, indent: int) -> list[str]:
    lead = " " * indent + "# "
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=lead, break_on_hyphens=False)
