"""What is being put together on New run: a preset and what was changed in it (`Draft`), and the form that shows it (`Form`).

The form is made from the configuration's schema: a new key appears by itself, with its words, range and choices. A box is an
input like any other of Gradio's, and nobody writes into it but a click that replaces the whole draft. Every click sends all boxes
as they are at that moment, and the draft that they were filled from: what differs is what was changed since. So what is used
is what is seen, however late the answer to an edit comes.

What a browser sends may hold anything: `Draft.read` takes it to pieces, and `Draft.config` validates and guards it.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from kit.errors import ConfigError, KitError
from kit.runs.files import to_json
from kit.ui import guard
from kit.ui import markup as m
from kit.ui.settings import Settings
from kit.ui.site import QUIET, Site

KEY = re.compile(r"[a-z_]{1,40}(?:\.[A-Za-z0-9_@-]{1,60}){1,6}")
MOST_CHANGES, LONGEST_CHANGE, LONGEST_YAML, DEEPEST = 200, 20_000, 100_000, 12
FIRST = "quickstart"
UNREADABLE = "The draft of this page cannot be read; press 'Start over'."
Tree = dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """`changes` by dotted key, a whole section's before those of its keys. `trusted` is the
    repository whose code may run, `aside` the draft that this one took the place of, if that had changes."""

    preset: str = FIRST
    changes: dict[str, Any] = field(default_factory=dict)
    trusted: str | None = None
    aside: Draft | None = field(default=None, compare=False)

    @classmethod
    def read(cls, value: Any) -> Draft:
        """From what a browser sent. Raises `ConfigError` for what no page of this kit sends."""
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError(UNREADABLE)
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
        aside = None
        if isinstance(kept := value.get("aside"), Mapping):
            with suppress(ConfigError):  # one that no page has put aside is none
                aside = cls.read({name: kept[name] for name in ("preset", "changes", "trusted") if name in kept})
        return cls(preset, dict(changes), trusted if isinstance(trusted, str) else None, aside)

    def as_dict(self) -> Tree:
        """Plain, for the browser to keep."""
        found: Tree = {"preset": self.preset, "changes": self.changes, "trusted": self.trusted}
        return found | ({"aside": self.aside.as_dict()} if self.aside else {})

    def instead_of(self, other: Draft) -> Draft:
        """This draft in the place of another, which is put aside if it had changes; else what it had put aside stays so."""
        kept = replace(other, aside=None) if other.changes and other != self else other.aside
        return replace(self, aside=None if kept == self else kept)

    def change(self, key: str, value: Any) -> Draft:
        """With one key set; a value that the preset has anyway is no change."""
        below = {name: old for name, old in self.changes.items() if name != key and not name.startswith(f"{key}.")}
        if lookup(replace(self, changes=below).tree(), key) == value:
            return replace(self, changes=below)
        return replace(self, changes={**below, key: value})

    def tree(self) -> Tree:
        """All values, changes included, not validated: what the form shows while something is wrong."""
        tree = copy.deepcopy(preset_tree(self.preset))
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


@functools.cache
def preset_tree(name: str) -> Tree:
    """A preset's values; not to be changed."""
    return load_config(name).model_dump(mode="json")


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
    base = preset_tree(FIRST)
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


class Form:
    """The boxes of keys, wherever on a screen they stand, and the draft that they were filled from.

    `base` is that draft, as JSON. `draft` is what the boxes amounted to when one was last left: what is shown beside them
    follows from it, and the browser keeps it over a reload. `said` is where a click says what it did.
    """

    def __init__(self, site: Site, blocks: gr.Blocks) -> None:
        self.site, self.blocks = site, blocks
        self.keys = {key.name: key for key in keys()}
        self.boxes: list[tuple[Key, Any]] = []
        self._later: list[Callable[[], Any]] = []
        # The secret only has to be the same after a restart of the server; what is kept is no secret.
        self.draft = gr.BrowserState(Draft().as_dict(), storage_key="grpo-kit-draft", secret="grpo-kit")
        self.base = gr.Textbox(json.dumps(Draft().as_dict()), visible="hidden", elem_classes="hidden-box", label="base")
        self.preset: gr.Dropdown
        self.aside: gr.HTML
        self.back: gr.Button
        self.said: gr.HTML
        self.tabs: gr.Tabs

    def add(self, name: str, **changes: Any) -> gr.components.Component:
        """A box for the key `name`, which may have several; `changes` are arguments that it gets instead of its own."""
        key = self.keys[name]
        made = component(key, lookup(preset_tree(FIRST), name), **changes)
        self.boxes.append((key, made))
        return made

    def values(self, draft: Draft) -> list[Any]:
        """What each box shows for a draft."""
        tree = draft.tree()
        return [shown(key, lookup(tree, key.name)) for key, _ in self.boxes]

    def follows(self, work: Callable[[Any], Any], output: Any, **listen: Any) -> None:
        """Fills `output` with `work(draft)`, when the page is loaded and whenever the draft is another."""
        events = [self.draft.change, self.blocks.load]
        how = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last"}
        gr.on(events, work, [self.draft], [output], **how, **listen)

    @property
    def shown(self) -> list[Any]:
        """What `filled` gives values for."""
        return [self.base, self.preset, self.aside, self.back, *(made for _, made in self.boxes)]

    def on(
        self,
        event: Any,
        work: Callable[..., Any],
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        **listen: Any,
    ) -> None:
        """Calls `work(sent, *inputs)` at an event, with the form as it is in the browser at that moment."""
        # Once all steps are built: their boxes go along with every event.
        self._later.append(lambda: self._listen(event, work, inputs, outputs, **listen))

    def replaces(
        self,
        event: Any,
        work: Callable[..., Any],
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        **listen: Any,
    ) -> None:
        """At an event the draft that `work(sent, *inputs)` gives takes the place of the one in the boxes; None changes nothing.

        `work` gives (draft, what is said, *outputs). A user's mistake is said, and changes nothing.
        """

        def call(sent: Sent, *given: Any) -> list[Any]:
            try:
                draft, words, *found = work(sent, *given)
            except KitError as problem:
                return [m.error(problem), *[gr.skip()] * (len(self.shown) + len(outputs))]
            return [words, *self.filled(draft, sent.boxes), *found]

        self._later.append(
            lambda: self._listen(event, call, inputs, [self.said, *self.shown, *outputs], **(QUIET | listen))
        )

    def _listen(
        self, event: Any, work: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], **listen: Any
    ) -> None:
        def call(*given: Any) -> Any:
            sent = Sent(self, given[len(inputs)], given[len(inputs) + 1 :])
            return work(sent, *given[: len(inputs)])

        boxes = [made for _, made in self.boxes]
        event(call, [*inputs, self.base, *boxes], list(outputs), **{"api_visibility": "private"} | listen)

    def filled(self, draft: Draft | None, boxes: Sequence[Any]) -> list[Any]:
        """[base, preset, what was put aside, the button that brings it back, *boxes] for a draft. Boxes that hold already what
        they should are left alone, as somebody may be typing in one."""
        if draft is None:
            return [gr.skip()] * (4 + len(self.boxes))
        # The base always changes, so that what follows from the boxes is made anew.
        base = json.dumps(draft.as_dict() | {"at": time.time_ns()})
        values = self.values(draft)
        return [base, draft.preset, *_put_aside(draft.aside),
                *(gr.skip() if old == new else new for old, new in zip(boxes, values, strict=True))]  # fmt: skip

    def wire(self, follow: Callable[..., Any], outputs: Sequence[Any]) -> None:
        """Registers the events that steps have asked for, and `follow(sent, self.draft)`, which is called when a box is left, a
        list or switch is used, or all is replaced: one call after the other, the last one with what stands there last."""
        triggers = [self.base.change]
        for key, made in self.boxes:
            # A text's own `input` knows of keys that were pressed, and nothing of pasting.
            events = [made.input] if isinstance(made, (gr.Dropdown, gr.Checkbox)) else [made.blur, made.submit]
            triggers += events
            if twins := [other for known, other in self.boxes if known is key and other is not made]:
                gr.on(events, None, [made], twins, js=f"(value) => Array({len(twins)}).fill(value)")
            if key.nested is not None:
                self._fill_when_switched_on(key, made)
        for register in self._later:
            register()
        self._listen(
            functools.partial(gr.on, triggers), follow, [self.draft], outputs, trigger_mode="always_last", **QUIET
        )

        def load(sent: Sent, kept: Any) -> list[Any]:
            draft = _kept(kept)
            base, *found = self.filled(draft, sent.boxes)
            return [base, *found, *follow(Sent(self, base, self.values(draft)), kept)]

        self._listen(self.blocks.load, load, [self.draft], [*self.shown, *outputs], **QUIET)

    def _fill_when_switched_on(self, section: Key, switch: Any) -> None:
        """Boxes of a section that was null are empty; switched on, they show what its keys begin with."""
        below = [(key, made) for key, made in self.boxes if key.name.startswith(f"{section.name}.")]
        assert section.nested is not None
        tree = section.nested().model_dump(mode="json")
        fresh = [shown(key, lookup(tree, key.name.removeprefix(f"{section.name}."))) for key, _ in below]

        def fill(on: Any, *boxes: Any) -> list[Any]:
            return [new if on and old in (None, "") else gr.skip() for old, new in zip(boxes, fresh, strict=True)]

        made = [one for _, one in below]
        switch.input(fill, [switch, *made], made, **QUIET)


@dataclass(frozen=True)
class Sent:
    """The form as a browser sent it: what its boxes hold, and the draft that they were filled from."""

    form: Form
    base: Any
    boxes: Sequence[Any]

    def before(self) -> Draft:
        """What the boxes were filled from. Raises `ConfigError` for what no page sends."""
        try:
            return Draft.read(json.loads(self.base) if isinstance(self.base, str) else None)
        except (ValueError, RecursionError):
            raise ConfigError(UNREADABLE) from None

    def edited(self) -> tuple[Draft, list[str]]:
        """What the boxes amount to, and what is wrong with those that hold no value of their key and are left out; one that
        holds None is as it was. Raises `ConfigError` for what no page sends."""
        draft, keys = self.before(), self.form.keys
        given: dict[str, Any] = {}
        for (key, _), old, new in zip(self.form.boxes, self.form.values(draft), self.boxes, strict=True):
            if new is not None and new != old:
                given.setdefault(key.name, new)
        faults: list[str] = []
        for name in sorted(given, key=lambda name: keys[name].kind != "section"):  # sections before their keys
            if not _in_null(draft.tree(), name):
                try:
                    draft = Draft.read(changed(draft, keys[name], given[name]).as_dict())
                except ConfigError as problem:
                    faults.append(str(problem))
        return draft, faults

    def draft(self) -> Draft:
        """Raises `ConfigError` for what is no value of its key."""
        draft, faults = self.edited()
        if faults:
            raise ConfigError(faults[0])
        return draft

    def config(self) -> RunConfig:
        """Validated and guarded. Raises `ConfigError`."""
        return self.draft().config(self.form.site.settings)

    def valid(self) -> Draft:
        """The draft without what is no value, for clicks that replace it anyway; of what no page sends nothing is left."""
        try:
            return self.edited()[0]
        except ConfigError:
            return Draft()


def _in_null(tree: Tree, name: str) -> bool:
    """Whether a key belongs to a section that is null."""
    above, _, _ = name.rpartition(".")
    return bool(above) and (lookup(tree, above) is None or _in_null(tree, above))


def _kept(value: Any) -> Draft:
    try:
        return Draft.read(value)
    except ConfigError:
        return Draft()


def _put_aside(draft: Draft | None) -> list[Any]:
    """[what was put aside, the button that brings it back]."""
    if draft is None:
        return ["", gr.Button(visible=False)]
    number = len(draft.changes)
    several = number != 1
    words = f"Your {number} change{'s' * several} of '{draft.preset}' {'are' if several else 'is'} put aside."
    label = "Bring them back" if several else "Bring it back"
    return [m.page(m.note(words, "warn")), gr.Button(visible=True, value=label)]


def changed(draft: Draft, key: Key, value: Any) -> Draft:
    """The draft after an edit of one component. Raises `ConfigError` for what is no value of the key."""
    return draft.change(key.name, read(key, value))
