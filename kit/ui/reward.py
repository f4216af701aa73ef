"""The reward without YAML: a preset, its parameters as fields, its weights as sliders, and what each part can earn.

A preset's own signature says which fields there are. They are a fixed set of inputs that change their labels, so that the
page works on after a restart of the server; what they hold is written into `reward.params`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import yaml
from markupsafe import Markup

import rewards
from kit.config.loading import parse_value
from kit.errors import ConfigError, KitError
from kit.runs.files import one_line
from kit.ui import markup as m
from kit.ui.draft import Draft, refuse_aliases
from kit.ui.form import NULL, Form, Sent
from kit.ui.guard import COMMAND_LINE_ONLY
from kit.ui.site import QUIET, Site
from rewards.parameters import Parameter

SLOTS = {"weight": 4, "choice": 6, "text": 12}
"""How many fields of each kind there are; parameters beyond them stand in the YAML alone."""
HIGHEST = 2.0
"""What a weight's slider goes up to; one above it is a number in a text box."""
UNSET = "(default)"
KINDS = {
    "numbers": ("gsm8k-reasoning", "gsm8k-hash", "gsm8k-xml", "countdown", "reasoning-gym"),
    "mathematics": ("math-verify", "math-match", "math-boxed", "math-cosine", "math-dapo", "math-kimi-length",
                    "math-length-budget", "r1-zero"),
    "code": ("code-stdio", "code-function", "code-contest", "sql-exec"),
    "JSON": ("json-schema", "tool-call"),
    "labels": ("classification-label", "mcq-letter"),
}  # fmt: skip
"""Rewards by what the reference holds; any other is about free text."""
FILES = (".csv", ".xlsx")
"""Files whose cells cannot hold the `entry` of a reasoning-gym task, which is a mapping."""
UNFIT = (
    "This reward asks the checker of a reasoning-gym task, and {} has no such task in its rows. Choose another reward above, "
    "such as math-match for numbers or qa-short for words."
)


@dataclass(frozen=True)
class Field:
    """A parameter, and which of the inputs shows it."""

    parameter: Parameter
    kind: str
    slot: int

    def shown(self, params: Mapping[str, Any]) -> Any:
        """What the input holds for these parameters."""
        given = params.get(self.parameter.name, self.parameter.default)
        if self.kind == "weight":
            return float(given)
        if self.kind == "choice":
            return UNSET if given is None else str(given).lower() if isinstance(given, bool) else str(given)
        if given is None:
            return ""
        if isinstance(given, (list, tuple, dict)):
            plain = list(given) if isinstance(given, tuple) else given
            return yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=1000).strip()
        return str(given)

    def read(self, value: Any) -> Any:
        """From the input to the parameter's value. Raises `ConfigError`."""
        kind, name = self.parameter.kind, self.parameter.name
        if value is None or value == "" or (self.kind == "choice" and value == UNSET):
            if self.parameter.optional:
                return None
            if self.parameter.required or self.parameter.default in (None, "", ()):
                return self.parameter.default
            raise ConfigError(f"{name}: expected {self.parameter.wanted}.")
        try:
            if kind == "whole":
                return int(str(value))
            if kind == "number":
                return float(value)
        except ValueError:
            raise ConfigError(f"{name}: expected {self.parameter.wanted} (seen: {str(value)[:60]!r}).") from None
        if kind == "switch":
            return str(value) == "true"
        if kind == "other" and isinstance(value, str):
            refuse_aliases(value)
            return parse_value(value)
        return str(value)

    def update(self, value: Any) -> Any:
        """The input as this parameter's field."""
        words = self.parameter.words[:1].upper() + self.parameter.words[1:]
        label = self.parameter.name.replace("_", " ")
        info = f"{words} {self.parameter.wanted[:1].upper()}{self.parameter.wanted[1:]}."
        if not self.parameter.required and self.parameter.default not in (None, "", ()):
            info += f" Default {_word(self.parameter.default)}."
        common: dict[str, Any] = {"visible": True, "label": label, "info": info, "value": value}
        if self.kind == "weight":
            return gr.Slider(**common)
        if self.kind == "choice":
            choices = list(self.parameter.choices) or ["true", "false"]
            return gr.Dropdown(choices=[UNSET] * self.parameter.optional + choices, **common)
        return gr.Textbox(placeholder="needed" if self.parameter.required else "", **common)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def fields(preset: Any, params: Mapping[str, Any]) -> list[Field]:
    """The fields of a preset; nothing for a name that is none. What the page does not take has none."""
    try:
        parameters = rewards.parameters(preset) if isinstance(preset, str) else []
    except rewards.RewardsError:
        return []
    found: list[Field] = []
    for parameter in parameters:
        if parameter.name in COMMAND_LINE_ONLY:
            continue
        kind = "choice" if parameter.kind in ("switch", "choice") else "text"
        given = params.get(parameter.name, parameter.default)
        if parameter.is_weight and isinstance(given, (int, float)) and 0 <= given <= HIGHEST:
            kind = "weight"
        slot = sum(one.kind == kind for one in found)
        if slot < SLOTS[kind]:
            found.append(Field(parameter, kind, slot))
    return found


def choices() -> list[tuple[str, str]]:
    """The presets by kind, each with its first line: what a list shows, and the name."""
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    order = [*KINDS, "free text"]
    found = []
    for name in sorted(rewards.names(), key=lambda name: (order.index(kind_of.get(name, "free text")), name)):
        _, _, words = rewards.describe(name).strip().partition("\n\n")
        found.append((f"{name} · {kind_of.get(name, 'free text')}: {one_line(words.replace('`', ''), 70)}", name))
    return [*found, ("none (functions in the YAML alone)", NULL)]


def build(form: Form) -> None:
    """Preset, its fields, what its parts can earn."""
    form.add("reward.preset", label="Reward", info="", choices=choices())
    about = gr.HTML()
    form.follows(described, about, queue=False)
    shown = gr.Textbox("", visible="hidden", elem_classes="hidden-box", label="reward")
    with gr.Accordion("Parameters and weights", open=False):
        inputs = _inputs()
    everything = [one for kind in SLOTS for one in inputs[kind]]
    limits = gr.HTML()
    last = {**QUIET, "trigger_mode": "always_last"}
    form.draft.change(filled, [form.draft, shown], [shown, *everything], **last)
    seen = gr.Textbox("", visible="hidden", elem_classes="hidden-box", label="limits")
    form.draft.change(functools.partial(limited, form.site), [form.draft, seen], [seen, limits],
          **(last | {"queue": True, "concurrency_limit": 4}))  # fmt: skip
    used = [one.input for kind in ("weight", "choice") for one in inputs[kind]]  # of a slider: by mouse and by keyboard
    used += [event for one in inputs["text"] for event in (one.blur, one.submit)]
    form.replaces(functools.partial(gr.on, used), edited, [shown, *everything], [shown], trigger_mode="always_last")


def _inputs() -> dict[str, list[Any]]:
    """The fields, hidden until a preset needs them."""
    with gr.Row():
        sliders = [
            gr.Slider(0, HIGHEST, 0, step=0.01, visible=False, min_width=220, elem_id=f"reward-weight-{at}", buttons=[])
            for at in range(SLOTS["weight"])
        ]
    with gr.Row():
        choices = [
            gr.Dropdown([], visible=False, allow_custom_value=True, min_width=220, elem_id=f"reward-choice-{at}")
            for at in range(SLOTS["choice"])
        ]
    with gr.Row():
        texts = [gr.Textbox(visible=False, min_width=220, elem_id=f"reward-text-{at}") for at in range(SLOTS["text"])]
    return {"weight": sliders, "choice": choices, "text": texts}


def _place(field: Field) -> int:
    """Its place among all inputs."""
    kinds = list(SLOTS)
    return sum(SLOTS[kind] for kind in kinds[: kinds.index(field.kind)]) + field.slot


def filled(value: Any, before: Any) -> list[Any]:
    """[what is shown now, *inputs] for a draft: of the same preset only what has changed, as somebody may be typing."""
    nothing = [gr.skip()] * (1 + sum(SLOTS.values()))
    try:
        reward = Draft.read(value).tree()["reward"]
    except KitError:
        return nothing
    preset, params = reward["preset"], reward["params"]
    now = _as_shown(preset, params)
    if now == before:
        return nothing
    known, old = _shown(before)
    layout = fields(preset, params)
    same = known == preset and [(f.kind, f.slot) for f in fields(known, old)] == [(f.kind, f.slot) for f in layout]
    updates: list[Any] = [gr.skip() if same else gr.update(visible=False) for _ in range(sum(SLOTS.values()))]
    for field in layout:
        fresh = field.shown(params)
        if not same or field.shown(old) != fresh:
            updates[_place(field)] = field.update(fresh)
    return [now, *updates]


def _as_shown(preset: Any, params: Mapping[str, Any]) -> str:
    return json.dumps([preset, params], sort_keys=True, default=str)


def _shown(text: Any) -> tuple[Any, Mapping[str, Any]]:
    """(preset, parameters) that the fields show, as a browser sent it back."""
    try:
        preset, params = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None, {}
    return preset, params if isinstance(params, dict) else {}


def edited(sent: Sent, text: Any, *values: Any) -> tuple[Draft | None, str, Any]:
    """(the draft with what the fields hold among its parameters, nothing to say, what is shown now); a default is left out,
    and the draft is None where nothing differs. The fields are left as they are: somebody may be dragging one."""
    preset, old = _shown(text)
    draft = sent.draft()
    reward = draft.tree()["reward"]
    if preset is None or preset != reward["preset"]:
        return None, "", gr.skip()  # the fields are still those of another preset
    params = dict(reward["params"])
    for field in fields(preset, old):
        value = values[_place(field)]
        if value == field.shown(old):
            continue
        name, fresh = field.parameter.name, field.read(value)
        if fresh == field.parameter.default:
            params.pop(name, None)
        else:
            params[name] = fresh
    if params == reward["params"]:
        return None, "", gr.skip()
    return draft.change("reward.params", params), "", _as_shown(preset, params)


def described(value: Any) -> str:
    """What the preset rewards, in its own words, and whether it can score the data that is chosen."""
    try:
        tree = Draft.read(value).tree()
        name, source = tree["reward"]["preset"], str(tree["data"]["source"])
        text = rewards.describe(name).strip() if name else ""
    except (KitError, rewards.RewardsError) as problem:
        return m.error(problem)
    if not text:
        return ""
    _, _, words = text.partition("\n\n")
    first, _, rest = words.strip().partition("\n")
    title = m.join(
        m.tag("code", part) if at % 2 else part for at, part in enumerate(first.replace("``", "`").split("`"))
    )
    unfit = name == "reasoning-gym" and source.endswith(FILES)
    warning = m.note(UNFIT.format(Path(source).name), "fail") if unfit else Markup("")
    return m.page(
        warning, m.tag("details", m.tag("summary", m.tag("b", title)) + m.tag("pre", rest.strip(), class_="said"))
    )


# --- what the parts can earn ------------------------------------------------------------------------------------------


def limited(site: Site, value: Any, before: Any) -> list[Any]:
    """[what was looked at, what each part can earn and how far shaping is from its limit]."""
    try:
        draft = Draft.read(value)
        now = json.dumps(draft.tree()["reward"], sort_keys=True, default=str)
        if now == before:
            return [gr.skip()] * 2
        found = site.benches.ask("weights", draft.config(site.settings))
    except KitError as problem:
        return ["", m.error(problem)]
    return [now, m.page(earnings(found))]


def earnings(found: Mapping[str, Any]) -> Markup:
    """A row for each part: the least and the most it adds to the total, and a bar for the width between them."""
    parts = found["parts"]
    ends = {part["name"]: _ends(part) for part in parts}
    spans = {name: None if both is None else both[1] - both[0] for name, both in ends.items()}
    most = max([span for span in spans.values() if span is not None] or [1.0]) or 1.0
    rows = []
    for part in parts:
        both, span = ends[part["name"]], spans[part["name"]]
        checker = part["name"] == found["checker"]
        adds = "not limited" if both is None else f"{both[0]:.2f} to {both[1]:.2f}"
        bar = m.bar(span / most, "ok" if checker else "", f"{part['name']}: {adds}") if span is not None else ""
        bar = m.tag("div", bar, style="min-width:140px")
        name = m.tag("b", part["name"]) + (m.badge("decides right or wrong", "ok") if checker else "")
        rows.append([m.tag("div", name, class_="row"), f"{part['weight']:g}", bar, adds])
    return m.panel(m.table(["part", "weight", "", "adds"], rows, numbers={1, 3}), _limit(found, spans))


def _ends(part: Mapping[str, Any]) -> tuple[float, float] | None:
    """The least and the most that a part adds: its weight times its range. None where that has no end."""
    if part["low"] is None or part["high"] is None:
        return None
    low, high = sorted(part["weight"] * end + 0.0 for end in (part["low"], part["high"]))  # + 0.0: no "-0.00"
    return low, high


def _limit(found: Mapping[str, Any], spans: Mapping[str, float | None]) -> Markup:
    checker = found["checker"]
    if checker is None or spans.get(checker) is None:
        return m.note("No part says whether an answer is right, so shaping has no limit here.", "warn")
    limit = spans[checker] or 0.0
    shaping = [span for name, span in spans.items() if name != checker]
    if any(span is None for span in shaping):
        return m.note("A function without a range of its own can outweigh a right answer: watch its weight.", "warn")
    total = sum(span or 0.0 for span in shaping)
    words = f"The other parts can add {total:.2f}, being right ({checker}) {limit:.2f}"
    if total > limit + 1e-12:
        return m.note(f"{words}: a wrong answer can win. Lower the other weights.", "warn")
    return m.note(f"{words}: a wrong answer cannot win.", "ok")
