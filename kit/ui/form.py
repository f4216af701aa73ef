"""The form of New run: inputs for some keys of the configuration.

The server writes into a box only when a click replaces the whole draft. Every event sends the values of all boxes and the draft
that filled them; a value that differs from that draft is an edit. The values used are therefore the values on the screen, even if
the answer to an earlier edit is still pending. The browser joins them into one JSON text, so that Gradio rejects no value before
this module reads it.
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
from kit.config.loading import lookup, parse_value
from kit.errors import ConfigError, KitError
from kit.ui import markup as m
from kit.ui.draft import FIRST, UNREADABLE, Draft, Tree, has_aliases, preset_tree
from kit.ui.site import QUIET, UNSEEN, Site

NULL = "null"
TO_JSON = "(...values) => JSON.stringify(values)"
CLEAR = """(sent) => {
  const values = JSON.parse(sent), question = JSON.stringify(NUMBERS.map(number => values[number]));
  const isSame = [undefined, question].includes(window.question);
  window.question = question;
  return Array(COUNT).fill(isSame ? {__type__: 'update'} : '');
}"""
"""JavaScript that clears results if the base or one of the values NUMBERS has changed."""
NO_QUESTION = ("run.", "optimisation.", "evaluation.")
"""Beginnings of keys that the results do not depend on."""
Kind = Literal["switch", "section", "choice", "text", "yaml"]


@dataclass(frozen=True)
class Box:
    """The input of one key. `kind` says how the value is entered: switch, section (on or off), choice, text or yaml."""

    name: str
    kind: Kind
    component: gr.components.Component


def shown(kind: Kind, value: Any) -> Any:
    """Return a configuration value as its input shows it. Numbers are entered in text boxes, so that 1e-5 stays 1e-5."""
    if kind in ("switch", "section"):
        return bool(value) if kind == "switch" else value is not None
    if value is None:
        return NULL if kind == "choice" else ""
    if isinstance(value, (Mapping, list)):
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=1000).strip()
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(kind: Kind, value: Any) -> Any:
    """Convert the value of an input to a configuration value. The configuration validates it later."""
    if kind in ("switch", "section"):
        return bool(value)
    if value is None or value == "" or (kind == "choice" and value == NULL):
        return None
    return parse_value(value) if kind == "yaml" and isinstance(value, str) and not has_aliases(value) else value


def stored_draft() -> gr.BrowserState:
    """Return the draft in the browser's storage, for every screen that reads or sets it."""
    # The draft is not confidential: the secret only has to be the same after a restart of the server.
    return gr.BrowserState(Draft().as_text(), storage_key="grpo-kit-draft", secret="grpo-kit")


class Form:
    """The boxes of keys, anywhere on the screen, and the draft that filled them.

    `base` is that draft as JSON. `draft` is the draft with the user's edits, updated when a box loses the focus; results on the
    screen are computed from it. `scored` and `planned` are the last drafts whose reward and plan raised no error. `stored` is
    `draft` in the browser's storage and survives a reload. Nothing listens to changes of `stored`: if two arrive at once,
    Gradio's script takes its own copies of the value for changes and loops forever.
    `sent` carries the base and the values of all boxes as JSON with every event. `message` shows the result of a click;
    `results` are cleared by the next edit of a setting that they depend on.
    """

    def __init__(self, site: Site, blocks: gr.Blocks) -> None:
        self.site, self.blocks = site, blocks
        self.boxes: list[Box] = []
        self.results: list[gr.HTML] = []
        self._registrations: list[Callable[[], Any]] = []
        self.draft, self.stored = gr.State(), stored_draft()
        self.scored, self.planned = gr.State(), gr.State()
        self.base = gr.Textbox(Draft().as_text(), visible="hidden", elem_classes="hidden-box", label="base")
        self.sent = gr.Textbox(visible="hidden", elem_classes="hidden-box", label="together")
        self.preset: gr.Dropdown
        self.aside: gr.HTML
        self.back: gr.Button
        self.message: gr.HTML
        self.tabs: gr.Tabs
        self.learns: gr.HTML
        self.suggested: gr.Button
        self.timer: gr.Timer
        self.training: gr.Textbox

    def add(
        self, name: str, label: str, info: str = "", *, kind: Kind = "yaml", **more: Any
    ) -> gr.components.Component:
        """Add an input for the key `name`; `more` are arguments of its component."""
        arguments: dict[str, Any] = {
            "label": label,
            "info": info,
            "value": shown(kind, lookup(preset_tree(FIRST), name)),
            "elem_id": f"key-{name.replace('.', '-')}",
            "interactive": True,
            "min_width": 220,
        } | more
        component: gr.components.Component
        if "choices" in more:
            component = gr.Dropdown(**arguments)
        elif kind in ("switch", "section"):
            component = gr.Checkbox(**arguments)
        else:
            component = gr.Textbox(**({"lines": 1, "max_lines": 12} | arguments))
        self.boxes.append(Box(name, kind, component))
        return component

    def values(self, draft: Draft) -> list[Any]:
        """Return the value of each box for a draft."""
        tree = draft.tree()
        return [shown(box.kind, lookup(tree, box.name)) for box in self.boxes]

    def follows(self, work: Callable[..., Any], *outputs: Any, inputs: Sequence[Any] = (), **listen: Any) -> None:
        """Fill `outputs` with `work(draft, *inputs)` whenever the draft changes, which includes loading the page."""
        self.draft.change(work, [self.draft, *inputs], list(outputs), trigger_mode="always_last", **UNSEEN, **listen)

    @property
    def shown(self) -> list[Any]:
        """The components that `filled` returns values for."""
        return [self.base, self.preset, self.aside, self.back, *(box.component for box in self.boxes)]

    def on(
        self,
        event: Any,
        work: Callable[..., Any],
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        **listen: Any,
    ) -> None:
        """Call `work(sent, *inputs)` at an event, with the form's values in the browser. The last output shows its `KitError`."""

        def call(*values: Any) -> Any:
            try:
                return work(*values)
            except KitError as problem:
                skipped = [gr.skip()] * (len(outputs) - 1)
                return [*skipped, m.error(problem)] if skipped else m.error(problem)

        # `wire` registers the event, once all steps are built: the event sends the boxes of all of them.
        self._registrations.append(lambda: self._listen(event, call, inputs, outputs, **listen))

    def replaces(
        self,
        event: Any,
        work: Callable[..., Any],
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        **listen: Any,
    ) -> None:
        """Replace the draft in the boxes at an event, by the result of `work(sent, *inputs)`.

        `work` returns (draft or None for no change, message, *outputs). A `KitError` is shown and changes nothing.
        """

        def call(sent: Sent, *arguments: Any) -> list[Any]:
            try:
                draft, message, *values = work(sent, *arguments)
            except KitError as problem:
                return [m.error(problem), *[gr.skip()] * (len(self.shown) + len(outputs))]
            return [message, *self.filled(draft, sent.boxes), *values]

        self._registrations.append(
            lambda: self._listen(event, call, inputs, [self.message, *self.shown, *outputs], **(QUIET | listen))
        )

    def _listen(
        self, event: Any, work: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], **listen: Any
    ) -> None:
        def call(*values: Any) -> Any:
            return work(Sent.of(self, values[-1]), *values[:-1])

        options = {"api_visibility": "private"} | listen
        collected = event(None, [self.base, *(box.component for box in self.boxes)], [self.sent], js=TO_JSON)
        collected.then(call, [*inputs, self.sent], list(outputs), **options)

    def filled(self, draft: Draft | None, boxes: Sequence[Any]) -> list[Any]:
        """Return [base, preset, note on the draft put aside, its Restore button, *boxes] for a draft.

        Boxes that hold the right value already are skipped, because the user may be typing in one.
        """
        if draft is None:
            return [gr.skip()] * (4 + len(self.boxes))
        # The time stamp changes the base even if the draft is equal, so that every result is computed again.
        base = json.dumps(draft.as_dict() | {"at": time.time_ns()})
        values = self.values(draft)
        return [base, draft.preset, *_put_aside(draft.aside),
                *(gr.skip() if old == new else new for old, new in zip(boxes, values, strict=True))]  # fmt: skip

    def wire(self, follow: Callable[..., Any], outputs: Sequence[Any]) -> None:
        """Register the events of the steps, and `follow(sent)` for every edit.

        `follow` is called when a box loses the focus, a list or switch is used, or the draft is replaced. Calls run one after the
        other, the last one with the latest values. It returns the `outputs` and the draft as JSON, or None for no draft.
        """
        triggers = [self.base.change]
        for box in self.boxes:
            # The `input` event of a text box does not fire for pasted text.
            component: Any = box.component
            is_list_or_switch = isinstance(component, (gr.Dropdown, gr.Checkbox))
            triggers += [component.input] if is_list_or_switch else [component.blur, component.submit]
        for register in self._registrations:
            register()
        numbers = [0, *(at for at, box in enumerate(self.boxes, 1) if not box.name.startswith(NO_QUESTION))]
        clear = CLEAR.replace("NUMBERS", str(numbers)).replace("COUNT", str(len(self.results)))
        self.sent.change(None, [self.sent], self.results, js=clear)
        drafts = [self.draft, self.stored]

        def call(sent: Sent) -> list[Any]:
            *values, draft = follow(sent)
            return [*values, *[gr.skip() if draft is None else draft] * len(drafts)]

        # A state fires `change` only through the queue.
        options = UNSEEN | {"trigger_mode": "always_last", "queue": True}
        self._listen(functools.partial(gr.on, triggers), call, [], [*outputs, *drafts], **options)

        def load(draft: Any) -> list[Any]:
            # The boxes hold the values that they were built with. The changed base triggers `follow`, which also reads edits
            # made before this answer arrived.
            return self.filled(stored_or_new(draft), self.values(Draft()))

        self.blocks.load(load, [self.stored], self.shown, **QUIET)


@dataclass(frozen=True)
class Sent:
    """The form as a browser sent it: the values of its boxes, and the draft that filled them."""

    form: Form
    base: Any
    boxes: Sequence[Any]

    @classmethod
    def of(cls, form: Form, text: Any) -> Sent:
        """Parse the text that the browser sent. For a malformed text, the base is unreadable and all boxes are None."""
        try:
            base, *boxes = json.loads(text)
            if len(boxes) == len(form.boxes):
                return cls(form, base, boxes)
        except (ValueError, TypeError, RecursionError):
            pass
        return cls(form, UNREADABLE, [None] * len(form.boxes))

    def before(self) -> Draft:
        """Return the draft that filled the boxes. Raises `ConfigError` for a malformed one."""
        return Draft.read(self.base if isinstance(self.base, str) else None)

    def draft(self) -> Draft:
        """Return the draft with the edits; a box with None is unedited. Raises `ConfigError` for malformed values."""
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
        """Return the validated and guarded configuration. Raises `ConfigError`."""
        return self.draft().config(self.form.site.settings)

    def valid(self) -> Draft:
        """Return the draft, or an empty one if it cannot be read: for clicks that replace it anyway."""
        try:
            return self.draft()
        except ConfigError:
            return Draft()


def _in_null(tree: Tree, name: str) -> bool:
    """Whether a key belongs to a section that is null."""
    section, _, _ = name.rpartition(".")
    return bool(section) and (lookup(tree, section) is None or _in_null(tree, section))


def stored_or_new(value: Any) -> Draft:
    """Return the draft in the browser's storage, or a new one if it cannot be read."""
    try:
        return Draft.read(value)
    except ConfigError:
        return Draft()


def _put_aside(draft: Draft | None) -> list[Any]:
    """Return [note on the draft that was put aside, its Restore button]."""
    if draft is None:
        return ["", gr.Button(visible=False)]
    number = len(draft.changes)
    several = number != 1
    text = f"Your {number} change{'s' * several} to '{draft.preset}' {'are' if several else 'is'} saved."
    return [m.page(m.note(text, "warn")), gr.Button(visible=True)]
