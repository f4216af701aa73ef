"""The form of New run: inputs for some keys of the configuration, made from its schema.

The server writes into a box only when a click replaces the whole draft. Every click sends all boxes as they are at that moment,
and the draft that they were filled from; what differs between the two is what the user has changed. So the values used are the
values on the screen, even where the answer to an earlier edit is still under way. The browser puts them into one text, so that
Gradio refuses no value before it is read here.
"""

from __future__ import annotations

import functools
import json
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import gradio as gr
import yaml
from pydantic.fields import FieldInfo

import rewards
from kit.config import RunConfig, Section
from kit.config.loading import parse_value
from kit.config.schema import document
from kit.errors import ConfigError, KitError
from kit.ui import markup as m
from kit.ui.draft import FIRST, UNREADABLE, Draft, Tree, lookup, preset_tree, refuse_aliases
from kit.ui.site import QUIET, UNSEEN, Site

NULL = "null"
TOGETHER = "(...given) => JSON.stringify(given)"
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
        if float in plain and self.words:
            return "number"
        return simple.get(plain[0], "yaml") if len(plain) == 1 else "yaml"

    @property
    def words(self) -> list[str]:
        """What a number may say instead, such as `auto`."""
        return [str(value) for one in self.members if get_origin(one) is Literal for value in get_args(one)]

    @property
    def nested(self) -> type[Section] | None:
        """The section that may be null, for a key that stands for one."""
        return next((one for one in self.members if isinstance(one, type) and issubclass(one, Section)), None)

    @property
    def choices(self) -> list[str]:
        if self.name in NAMES:
            return [NULL] * self.optional + NAMES[self.name]()
        found = self.words or ["true", "false"]
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
    return gr.Textbox(**({"lines": min(lines, 6), "max_lines": 12, "placeholder": ""} | common))


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
        if value in key.words:
            return value
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


def kept_draft() -> gr.BrowserState:
    """The draft as the browser keeps it, for every screen that reads or sets it."""
    # The secret only has to be the same after a restart of the server; what is kept is no secret.
    return gr.BrowserState(Draft().as_text(), storage_key="grpo-kit-draft", secret="grpo-kit")


class Form:
    """The boxes of keys, wherever on a screen they stand, and the draft that they were filled from.

    `base` is that draft, as JSON. `draft` is what the boxes amounted to when one was last left: what is shown beside them
    follows from it. `kept` is the same in the browser, over a reload; nothing listens to its changes, as Gradio's script, which
    copies a component's value between two places, takes the copies of two that come at once for changes, and does not end.
    `together` is what a click sends: the base and all boxes, as JSON.
    `said` is where a click says what it did.
    """

    def __init__(self, site: Site, blocks: gr.Blocks) -> None:
        self.site, self.blocks = site, blocks
        self.keys = {key.name: key for key in keys()}
        self.boxes: list[tuple[Key, Any]] = []
        self._later: list[Callable[[], Any]] = []
        self.draft, self.kept = gr.State(), kept_draft()
        self.base = gr.Textbox(Draft().as_text(), visible="hidden", elem_classes="hidden-box", label="base")
        self.together = gr.Textbox(visible="hidden", elem_classes="hidden-box", label="together")
        self.preset: gr.Dropdown
        self.aside: gr.HTML
        self.back: gr.Button
        self.said: gr.HTML
        self.tabs: gr.Tabs
        self.learns: gr.HTML
        self.suggested: gr.Button

    def add(self, name: str, **changes: Any) -> gr.components.Component:
        """A box for the key `name`; `changes` are arguments that it gets instead of its own."""
        key = self.keys[name]
        made = component(key, lookup(preset_tree(FIRST), name), **changes)
        self.boxes.append((key, made))
        return made

    def values(self, draft: Draft) -> list[Any]:
        """What each box shows for a draft."""
        tree = draft.tree()
        return [shown(key, lookup(tree, key.name)) for key, _ in self.boxes]

    def follows(self, work: Callable[..., Any], *outputs: Any, inputs: Sequence[Any] = (), **listen: Any) -> None:
        """Fills `outputs` with `work(draft, *inputs)`, whenever the draft is another; when the page is loaded it becomes one."""
        how = {"trigger_mode": "always_last"} | UNSEEN
        self.draft.change(work, [self.draft, *inputs], list(outputs), **how, **listen)

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
            return work(Sent.of(self, given[-1]), *given[:-1])

        how = {"api_visibility": "private"} | listen
        gathered = event(None, [self.base, *(made for _, made in self.boxes)], [self.together], js=TOGETHER)
        gathered.then(call, [*inputs, self.together], list(outputs), **how)

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
        """Registers the events that steps have asked for, and `follow(sent)`, which is called when a box is left, a list or
        switch is used, or all is replaced: one call after the other, the last one with what stands there last. It gives the
        `outputs` and the draft's text, None for none."""
        triggers = [self.base.change]
        for key, made in self.boxes:
            # A text's own `input` knows of keys that were pressed, and nothing of pasting.
            events = [made.input] if isinstance(made, (gr.Dropdown, gr.Checkbox)) else [made.blur, made.submit]
            triggers += events
            if key.nested is not None:
                self._fill_when_switched_on(key, made)
        for register in self._later:
            register()
        drafts = [self.draft, self.kept]
        how = QUIET | {"queue": True}  # the changes of a state are told by the queue alone

        def both(sent: Sent) -> list[Any]:
            *found, text = follow(sent)
            return [*found, *[gr.skip() if text is None else text] * len(drafts)]

        everything = functools.partial(gr.on, triggers)
        self._listen(everything, both, [], [*outputs, *drafts], trigger_mode="always_last", **how)

        def load(kept: Any) -> list[Any]:
            # The boxes hold what they were built with. What follows from them, edits from before this answer included, is
            # asked for by the base that changes.
            return self.filled(kept_or_new(kept), self.values(Draft()))

        self.blocks.load(load, [self.kept], self.shown, **QUIET)

    def _fill_when_switched_on(self, section: Key, switch: Any) -> None:
        """Boxes of a section that was null are empty; switched on, they show what its keys begin with."""
        below = [(key, made) for key, made in self.boxes if key.name.startswith(f"{section.name}.")]
        assert section.nested is not None
        tree = section.nested().model_dump(mode="json")
        fresh = [shown(key, lookup(tree, key.name.removeprefix(f"{section.name}."))) for key, _ in below]

        def fill(on: Any, *boxes: Any) -> Any:
            found = [new if on and old in (None, "") else gr.skip() for old, new in zip(boxes, fresh, strict=True)]
            return found if len(found) > 1 else found[0]

        made = [one for _, one in below]
        switch.input(fill, [switch, *made], made, **QUIET)


@dataclass(frozen=True)
class Sent:
    """The form as a browser sent it: what its boxes hold, and the draft that they were filled from."""

    form: Form
    base: Any
    boxes: Sequence[Any]

    @classmethod
    def of(cls, form: Form, together: Any) -> Sent:
        """From the text that the browser made; of one that no page makes, boxes and base are unreadable."""
        try:
            base, *boxes = json.loads(together)
            if len(boxes) == len(form.boxes):
                return cls(form, base, boxes)
        except (ValueError, TypeError, RecursionError):
            pass
        return cls(form, UNREADABLE, [None] * len(form.boxes))

    def before(self) -> Draft:
        """What the boxes were filled from. Raises `ConfigError` for what no page sends."""
        return Draft.read(self.base if isinstance(self.base, str) else None)

    def edited(self) -> tuple[Draft, list[str]]:
        """What the boxes amount to, and what is wrong with those that hold no value of their key and are left out; one that
        holds None is as it was. Raises `ConfigError` for what no page sends."""
        draft, keys = self.before(), self.form.keys
        given: dict[str, Any] = {}
        for (key, _), old, new in zip(self.form.boxes, self.form.values(draft), self.boxes, strict=True):
            if new is not None and new != old:
                given.setdefault(key.name, new)
        faults, tree = list[str](), draft.tree()
        for name in sorted(given, key=lambda name: keys[name].kind != "section"):  # sections before their keys
            if not _in_null(tree, name):
                try:
                    draft = Draft.read(changed(draft, keys[name], given[name]).as_dict())
                except ConfigError as problem:
                    faults.append(str(problem))
                else:
                    tree = draft.tree()
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


def kept_or_new(value: Any) -> Draft:
    """The draft that a browser kept; a new one for what cannot be read."""
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
    return [m.page(m.note(words, "warn")), gr.Button(visible=True)]


def changed(draft: Draft, key: Key, value: Any) -> Draft:
    """The draft after an edit of one component. Raises `ConfigError` for what is no value of the key."""
    return draft.change(key.name, read(key, value))
