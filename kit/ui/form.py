"""The form, made from the configuration's schema: a new key appears by itself, with its words, range and choices."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import gradio as gr
import yaml
from pydantic.fields import FieldInfo

import rewards
from kit.config import RunConfig, Section
from kit.config.loading import parse_value
from kit.config.schema import document
from kit.errors import ConfigError
from kit.ui.draft import Draft, lookup, refuse_aliases

NULL = "null"
HIDDEN = frozenset({"run.root"})
"""Keys that the server decides."""


def _recipes() -> list[str]:
    from kit.objective.recipes import recipe_names

    return list(recipe_names())


NAMES: dict[str, Callable[[], list[str]]] = {
    "objective.recipe": _recipes,
    "reward.preset": rewards.names,
    "evaluation.checker": rewards.names,
}
"""Texts of the schema that are names of something registered."""


@dataclass(frozen=True)
class Key:
    """One leaf of the schema."""

    name: str
    field: FieldInfo

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def label(self) -> str:
        """Section and key, as the command and the YAML have them: `every` alone says nothing."""
        return self.name

    @property
    def members(self) -> list[Any]:
        return list(_members(self.field.annotation))

    @property
    def optional(self) -> bool:
        return type(None) in self.members

    @property
    def kind(self) -> str:
        """choice, section, switch, whole, number, text or yaml: which component stands for it."""
        if self.nested is not None:
            return "section"
        if self.name in NAMES:
            return "choice"
        plain = [_bare(one) for one in self.members if one is not type(None)]
        if all(get_origin(one) is Literal for one in plain) or (plain == [bool] and self.optional):
            return "choice"
        simple = {bool: "switch", int: "whole", float: "number", str: "text"}
        return simple.get(plain[0], "yaml") if len(plain) == 1 else "yaml"

    @property
    def nested(self) -> type[Section] | None:
        """The section that may be null, for a key that stands for one."""
        return next((one for one in self.members if isinstance(one, type) and issubclass(one, Section)), None)

    @property
    def choices(self) -> list[str]:
        if self.name in NAMES:
            return [NULL] * self.optional + NAMES[self.name]()
        found = [str(value) for one in self.members if get_origin(one) is Literal for value in get_args(one)]
        found = found or ["true", "false"]
        return [NULL, *found] if self.optional else found


def keys(model: type[Section] = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Every leaf of the schema, in order; sections that may be null are entered, too."""
    for name, field in model.model_fields.items():
        nested = [one for one in _members(field.annotation) if isinstance(one, type) and issubclass(one, Section)]
        if nested:
            if type(None) in list(_members(field.annotation)):
                yield Key(f"{prefix}{name}", field)
            yield from keys(nested[0], f"{prefix}{name}.")
        elif f"{prefix}{name}" not in HIDDEN:
            yield Key(f"{prefix}{name}", field)


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _members(one)
    else:
        yield annotation


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def component(key: Key, value: Any, **changes: Any) -> gr.components.Component:
    """The input of one key, showing `value`."""
    common: dict[str, Any] = {
        "label": key.label,
        "info": document(key.field),
        "value": shown(key, value),
        "elem_id": f"key-{key.name.replace('.', '-')}",
        "interactive": True,
        "min_width": 220,
    } | changes
    if key.kind == "choice" or "choices" in changes:
        return gr.Dropdown(**({"choices": key.choices} | common))
    if key.kind in ("switch", "section"):
        return gr.Checkbox(**common)
    lines = common["value"].count("\n") + 1
    return gr.Textbox(
        **({"lines": min(lines, 6), "max_lines": 12, "placeholder": NULL if key.optional else ""} | common)
    )


def shown(key: Key, value: Any) -> Any:
    """A value of the configuration as the component shows it. Numbers stand in text boxes: 1e-5 stays 1e-5."""
    if key.kind == "choice":
        return NULL if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if key.kind in ("switch", "section"):
        return bool(value) if key.kind == "switch" else value is not None
    if value is None:
        return ""
    if key.kind == "yaml" and not isinstance(value, str):
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=1000).strip()
    return str(value)


def read(key: Key, value: Any) -> Any:
    """From what the component sent to a value of the configuration. Raises `ConfigError`."""
    if key.kind == "switch":
        return bool(value)
    if key.nested is not None:
        return key.nested().model_dump(mode="json") if value else None
    if value is None or value == "" or (key.kind == "choice" and value == NULL):
        if key.optional:
            return None
        return "" if key.kind == "text" else _refuse(key, "a value")
    if not isinstance(value, str):
        return value
    if key.kind == "choice":
        return value == "true" if key.choices[-2:] == ["true", "false"] else value
    if key.kind in ("whole", "number"):
        try:
            return int(value) if key.kind == "whole" else float(value)
        except ValueError:
            return _refuse(key, "a whole number" if key.kind == "whole" else "a number", value)
    if key.kind == "yaml":
        refuse_aliases(value)
        return parse_value(value)
    return value


def _refuse(key: Key, wanted: str, seen: str = "") -> Any:
    raise ConfigError(f"{key.name}: expected {wanted}" + (f" (seen: {seen[:80]!r})" if seen else "") + ".")


class Fields:
    """Components of keys, wherever on a screen they stand: a key may have several, and all show the draft."""

    def __init__(self) -> None:
        self.known = {key.name: key for key in keys()}
        self._made: list[tuple[Key, Any]] = []
        self._first = Draft().tree()

    def add(self, name: str, **changes: Any) -> gr.components.Component:
        """A component for the key `name`; `changes` are arguments that it gets instead of its own."""
        key = self.known[name]
        made = component(key, lookup(self._first, name), **changes)
        self._made.append((key, made))
        return made

    @property
    def components(self) -> list[gr.components.Component]:
        return [made for _, made in self._made]

    def values(self, draft: Draft) -> list[Any]:
        """What each component shows for a draft."""
        tree = draft.tree()
        return [shown(key, lookup(tree, key.name)) for key, _ in self._made]

    def wire(
        self,
        change: Callable[[Key, int], Callable[..., Any]],
        script: Callable[[Key, int], str],
        inputs: list[Any],
        outputs: list[Any],
    ) -> None:
        """Calls `change(key, place)` with the inputs and the new value: lists and boxes at once, texts when they are left.

        `script(key, place)` is what the browser runs first. `place` is that of the component in `components`.
        """
        for place, (key, made) in enumerate(self._made):
            listen: dict[str, Any] = {
                "inputs": [*inputs, made],
                "outputs": outputs,
                "show_progress": "hidden",
                "queue": False,
                "trigger_mode": "multiple",  # an edit during the answer to the last one counts, too
                "js": script(key, place),
            }
            events = [made.input] if isinstance(made, (gr.Dropdown, gr.Checkbox)) else [made.blur, made.submit]
            for event in events:
                event(change(key, place), **listen, api_visibility="private")


def changed(draft: Draft, key: Key, value: Any) -> Draft:
    """The draft after an edit of one component. Raises `ConfigError` for what is no value of the key."""
    return draft.change(key.name, read(key, value))
