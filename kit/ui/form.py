"""The form of New run: inputs for some keys of the configuration.

The server writes into a box only when a click replaces the whole draft. Every click sends all boxes as they are at that moment,
and the draft that they were filled from; what differs between the two is what the user has changed. So the values used are the
values on the screen, even where the answer to an earlier edit is still under way. The browser puts them into one text, so that
Gradio refuses no value before it is read here.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gradio as gr
import yaml

from kit.config import RunConfig
from kit.config.loading import parse_value
from kit.errors import ConfigError, KitError
from kit.ui import markup as m
from kit.ui.draft import FIRST, UNREADABLE, Draft, Tree, has_aliases, lookup, preset_tree
from kit.ui.site import QUIET, UNSEEN, Site

NULL = "null"
TOGETHER = "(...given) => JSON.stringify(given)"
Kind = Literal["switch", "section", "choice", "text", "yaml"]


@dataclass(frozen=True)
class Box:
    """The input of one key. `kind` is how its value is written: switch, section (on or off), choice, text or yaml."""

    name: str
    kind: Kind
    made: gr.components.Component


def shown(kind: Kind, value: Any) -> Any:
    """A value of the configuration as its input shows it. Numbers stand in text boxes: 1e-5 stays 1e-5."""
    if kind in ("switch", "section"):
        return bool(value) if kind == "switch" else value is not None
    if value is None:
        return NULL if kind == "choice" else ""
    if isinstance(value, (Mapping, list)):
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=1000).strip()
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(kind: Kind, value: Any) -> Any:
    """From what an input sent to a value of the configuration. Whether it is one of its key is for the configuration to say."""
    if kind in ("switch", "section"):
        return bool(value)
    if value is None or value == "" or (kind == "choice" and value == NULL):
        return None
    return parse_value(value) if kind == "yaml" and isinstance(value, str) and not has_aliases(value) else value


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
        self.boxes: list[Box] = []
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
        self.timer: gr.Timer
        self.training: gr.Textbox

    def add(
        self, name: str, label: str, info: str = "", *, kind: Kind = "yaml", **more: Any
    ) -> gr.components.Component:
        """An input for the key `name`; `more` are arguments of its component."""
        common: dict[str, Any] = {
            "label": label,
            "info": info,
            "value": shown(kind, lookup(preset_tree(FIRST), name)),
            "elem_id": f"key-{name.replace('.', '-')}",
            "interactive": True,
            "min_width": 220,
        } | more
        made: gr.components.Component
        if "choices" in more:
            made = gr.Dropdown(**common)
        elif kind in ("switch", "section"):
            made = gr.Checkbox(**common)
        else:
            made = gr.Textbox(**({"lines": 1, "max_lines": 12} | common))
        self.boxes.append(Box(name, kind, made))
        return made

    def values(self, draft: Draft) -> list[Any]:
        """What each box shows for a draft."""
        tree = draft.tree()
        return [shown(box.kind, lookup(tree, box.name)) for box in self.boxes]

    def follows(self, work: Callable[..., Any], *outputs: Any, inputs: Sequence[Any] = (), **listen: Any) -> None:
        """Fills `outputs` with `work(draft, *inputs)`, whenever the draft is another; when the page is loaded it becomes one."""
        how = {"trigger_mode": "always_last"} | UNSEEN
        self.draft.change(work, [self.draft, *inputs], list(outputs), **how, **listen)

    @property
    def shown(self) -> list[Any]:
        """What `filled` gives values for."""
        return [self.base, self.preset, self.aside, self.back, *(box.made for box in self.boxes)]

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

        def call(sent: Sent, *values_sent: Any) -> list[Any]:
            try:
                draft, words, *values = work(sent, *values_sent)
            except KitError as problem:
                return [m.error(problem), *[gr.skip()] * (len(self.shown) + len(outputs))]
            return [words, *self.filled(draft, sent.boxes), *values]

        self._later.append(
            lambda: self._listen(event, call, inputs, [self.said, *self.shown, *outputs], **(QUIET | listen))
        )

    def _listen(
        self, event: Any, work: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], **listen: Any
    ) -> None:
        def call(*values: Any) -> Any:
            return work(Sent.of(self, values[-1]), *values[:-1])

        how = {"api_visibility": "private"} | listen
        gathered = event(None, [self.base, *(box.made for box in self.boxes)], [self.together], js=TOGETHER)
        gathered.then(call, [*inputs, self.together], list(outputs), **how)

    def filled(self, draft: Draft | None, boxes: Sequence[Any]) -> list[Any]:
        """[base, preset, what was put aside, the button that brings it back, *boxes] for a draft.

        Boxes that hold the right value already are left alone, as somebody may be typing in one.
        """
        if draft is None:
            return [gr.skip()] * (4 + len(self.boxes))
        # The base always changes, so that what follows from the boxes is made anew.
        base = json.dumps(draft.as_dict() | {"at": time.time_ns()})
        values = self.values(draft)
        return [base, draft.preset, *_put_aside(draft.aside),
                *(gr.skip() if old == new else new for old, new in zip(boxes, values, strict=True))]  # fmt: skip

    def wire(self, follow: Callable[..., Any], outputs: Sequence[Any]) -> None:
        """Registers the events that steps have asked for, and `follow(sent)`.

        `follow` is called when a box is left, a list or switch is used, or all is replaced: one call after the other, the last
        one with the latest values. It gives the `outputs` and the draft's text, None for none.
        """
        triggers = [self.base.change]
        for box in self.boxes:
            # A text's own `input` knows of keys that were pressed, and nothing of pasting.
            made: Any = box.made
            triggers += [made.input] if isinstance(made, (gr.Dropdown, gr.Checkbox)) else [made.blur, made.submit]
        for register in self._later:
            register()
        drafts = [self.draft, self.kept]
        how = QUIET | {"queue": True}  # the changes of a state are told by the queue alone

        def both(sent: Sent) -> list[Any]:
            *texts, text = follow(sent)
            return [*texts, *[gr.skip() if text is None else text] * len(drafts)]

        everything = functools.partial(gr.on, triggers)
        self._listen(everything, both, [], [*outputs, *drafts], trigger_mode="always_last", **how)

        def load(draft: Any) -> list[Any]:
            # The boxes hold what they were built with. What follows from them, edits from before this answer included, is
            # asked for by the base that changes.
            return self.filled(kept_or_new(draft), self.values(Draft()))

        self.blocks.load(load, [self.kept], self.shown, **QUIET)


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

    def draft(self) -> Draft:
        """What the boxes amount to; one that holds None is as it was. Raises `ConfigError` for what no page sends."""
        draft = self.before()
        edits = [
            (box, new)
            for box, old, new in zip(self.form.boxes, self.form.values(draft), self.boxes, strict=True)
            if new is not None and new != old
        ]
        for box, new in sorted(edits, key=lambda edit: edit[0].kind != "section"):  # sections before their keys
            value = read(box.kind, new)
            if box.kind == "section":
                value = (lookup(preset_tree(draft.preset), box.name) or {}) if value else None
            if not _in_null(draft.tree(), box.name):
                draft = draft.change(box.name, value)
        return Draft.read(draft.as_dict())

    def config(self) -> RunConfig:
        """Validated and guarded. Raises `ConfigError`."""
        return self.draft().config(self.form.site.settings)

    def valid(self) -> Draft:
        """The draft for clicks that replace it anyway; of what no page sends nothing is left."""
        try:
            return self.draft()
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
