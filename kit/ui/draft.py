"""What is being put together on the page, a preset's name and what was changed in it, and the form that shows it.

The browser keeps the draft (it outlives the server and a reload) and sends it with every click, so that it may hold
anything; `Draft.read` takes it to pieces, and `Draft.config` validates and guards it. The form is made from the
configuration's schema: a new key appears by itself, with its words, range and choices.
"""

from __future__ import annotations

import json
import re
import shlex
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import gradio as gr
import yaml
from pydantic.fields import FieldInfo

import rewards
from kit.config import RunConfig, Section, load_config, preset_names
from kit.config.loading import apply_override, parse_value, parse_yaml
from kit.config.schema import document
from kit.errors import ConfigError
from kit.runs.files import to_json
from kit.ui import guard
from kit.ui.settings import Settings

KEY = re.compile(r"[a-z_]{1,40}(?:\.[A-Za-z0-9_@-]{1,60}){1,6}")
MOST_CHANGES, LONGEST_CHANGE, LONGEST_YAML, DEEPEST = 200, 20_000, 100_000, 12
FIRST = "quickstart"
Tree = dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """`changes` by dotted key, in the order in which they were made; a change of a whole section comes first."""

    preset: str = FIRST
    changes: dict[str, Any] = field(default_factory=dict)
    trusted: str | None = None

    @classmethod
    def read(cls, value: Any) -> Draft:
        """From what a browser sent. Raises `ConfigError` for what no page of this kit sends."""
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError("The draft of this page cannot be read; press 'Start over'.")
        preset, changes, trusted = value.get("preset", FIRST), value.get("changes", {}), value.get("trusted")
        if preset not in preset_names():
            raise ConfigError(f"There is no preset '{str(preset)[:60]}'. Presets: {', '.join(preset_names())}.")
        if not isinstance(changes, Mapping) or len(changes) > MOST_CHANGES:
            raise ConfigError(f"Expected at most {MOST_CHANGES} changes by key.")
        for key, change in changes.items():
            if not isinstance(key, str) or not KEY.fullmatch(key):
                raise ConfigError(f"'{str(key)[:60]}' is no key of the configuration.")
            if deeper(change, DEEPEST):
                raise ConfigError(f"{key}: nested deeper than {DEEPEST} levels.")
            if len(json.dumps(change, default=str)) > LONGEST_CHANGE:
                raise ConfigError(f"{key}: longer than {LONGEST_CHANGE} letters.")
        return cls(preset, dict(changes), trusted if isinstance(trusted, str) else None)

    def as_dict(self) -> Tree:
        """Plain, for the browser to keep."""
        return {"preset": self.preset, "changes": self.changes, "trusted": self.trusted}

    def change(self, key: str, value: Any) -> Draft:
        """With one key set; a value that the preset has anyway is no change."""
        below = {name: old for name, old in self.changes.items() if name != key and not name.startswith(f"{key}.")}
        if lookup(replace(self, changes=below).tree(), key) == value:
            return replace(self, changes=below)
        return replace(self, changes={**below, key: value})

    def tree(self) -> Tree:
        """All values, changes included, not validated: what the form shows while something is wrong."""
        tree: Tree = load_config(self.preset).model_dump(mode="json")
        for override in self.overrides():
            apply_override(tree, override)
        return tree

    def apply(self, given: list[str]) -> Draft:
        """With overrides of the command line's form, such as plan and doctor suggest."""
        draft = self
        for override in given:
            tree: Tree = {}
            apply_override(tree, override)
            key = override.partition("=")[0].strip()
            draft = draft.change(key, lookup(tree, key))
        return draft

    def overrides(self) -> list[str]:
        """`section.key=value`, as the command line takes them."""
        return overrides(self.changes)

    def config(self, settings: Settings) -> RunConfig:
        """The configuration, validated and guarded. Raises `ConfigError`."""
        if any(key.startswith("run.root") for key in self.changes):
            raise ConfigError(f"run.root: runs of this page lie in {settings.root}; start it with --root for others.")
        rooted = [] if str(settings.root) == "runs" else [f"run.root={to_json(str(settings.root))}"]
        config = load_config(self.preset, [*self.overrides(), *rooted])
        guard.check(config, settings, self.trusted)
        return config

    def command(self, settings: Settings, verb: str = "train") -> str:
        """The command that does the same, for a POSIX shell."""
        given = self.overrides()
        if str(settings.root) != "runs":
            given = [*given, f"run.root={to_json(str(settings.root))}"]
        return " ".join(["grpo-kit", verb, self.preset, *(f"-o {shlex.quote(one)}" for one in given)])


def overrides(changes: Mapping[str, Any]) -> list[str]:
    """`section.key=value`; JSON is YAML, so that a value comes back as it was."""
    return [f"{key}={_UNSAFE.sub(_escape, json.dumps(value, ensure_ascii=False))}" for key, value in changes.items()]


_UNSAFE = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""What YAML refuses or takes for the end of a line, and what no shell passes on."""


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def lookup(tree: Any, key: str) -> Any:
    """What stands at a dotted key; None where nothing does."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def from_yaml(text: str, settings: Settings) -> Draft:
    """A draft that amounts to this YAML: the quickstart preset, and every leaf that differs. Raises `ConfigError`."""
    if len(text) > LONGEST_YAML:
        raise ConfigError(f"A configuration has at most {LONGEST_YAML} letters here.")
    refuse_aliases(text)
    tree = parse_yaml(text)
    wanted = load_config(tree).model_dump(mode="json")
    base = load_config(FIRST).model_dump(mode="json")
    found = dict(differences(base, wanted))
    if "run.root" in found and Path(found["run.root"]) == settings.root:
        del found["run.root"]  # the page's own YAML has it, and `Draft.config` puts it there
    draft = Draft(FIRST, found)
    draft.config(settings)
    return draft


def refuse_aliases(text: str) -> None:
    """Raises `ConfigError` for YAML with anchors: a few lines of them can stand for gigabytes."""
    try:
        marked = any(isinstance(token, (yaml.AliasToken, yaml.AnchorToken)) for token in yaml.scan(text))
    except (yaml.YAMLError, RecursionError):
        return  # whoever parses it will say so
    if marked:
        raise ConfigError("Anchors and aliases (& and *) are not taken from the page.")


def deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested deeper than so many levels."""
    if not isinstance(value, (list, Mapping)):
        return False
    return levels == 0 or any(
        deeper(one, levels - 1) for one in (value.values() if isinstance(value, Mapping) else value)
    )


def differences(base: Tree, wanted: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    """(key, value) of every leaf of `wanted` that differs. Sections are entered where both sides have the same keys."""
    found: list[tuple[str, Any]] = []
    for name, value in wanted.items():
        key, old = f"{prefix}{name}", base.get(name)
        if value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict) and value.keys() == old.keys():
            found += differences(old, value, f"{key}.")
        else:
            found.append((key, value))
    return found


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
    for name, info in model.model_fields.items():
        nested = [one for one in _members(info.annotation) if isinstance(one, type) and issubclass(one, Section)]
        if nested:
            if type(None) in list(_members(info.annotation)):
                yield Key(f"{prefix}{name}", info)
            yield from keys(nested[0], f"{prefix}{name}.")
        elif f"{prefix}{name}" not in HIDDEN:
            yield Key(f"{prefix}{name}", info)


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
