"""The reward without YAML: a preset's parameters as fields, weights as sliders, further presets and functions beside it.

A preset's own signature says which fields there are, of the reward or of a further preset that is chosen above them. They
are a fixed set of inputs that change their labels, so that the page works on after a restart of the server; what they hold
is written into `reward.params`, which stands below as YAML, or among the further rewards.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import yaml
from markupsafe import Markup

import rewards
from kit.config.loading import parse_value
from kit.errors import ConfigError, KitError
from kit.ui import markup as m
from kit.ui.draft import Draft, refuse_aliases
from kit.ui.form import Form, Sent
from kit.ui.guard import COMMAND_LINE_ONLY
from kit.ui.site import QUIET, Site
from rewards.parameters import Parameter

SLOTS = {"weight": 4, "choice": 6, "text": 12}
"""How many fields of each kind there are; parameters beyond them stand in the YAML alone."""
HIGHEST = 2.0
"""What a weight's slider goes up to; one above it is a number in a text box."""
UNSET = "(default)"
PRESET = "preset:"
"""What the path of a further reward begins with when it is a preset."""
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


def build(form: Form) -> None:
    """Preset, its fields, what its parts can earn, further rewards, the YAML."""
    form.add("reward.preset", label="Reward", info="")
    about = gr.HTML()
    form.follows(described, about, queue=False)
    shown = gr.Textbox("", visible="hidden", elem_classes="hidden-box", label="reward")
    subject = gr.Dropdown([], visible=False, allow_custom_value=True, label="Parameters of", elem_id="reward-subject")
    inputs = _inputs()
    everything = [one for kind in SLOTS for one in inputs[kind]]
    limits = gr.HTML()
    with gr.Accordion("Further rewards: other presets, functions of yours", open=False):
        further = _further(form)
    with gr.Accordion("The parameters as YAML", open=False):
        form.add("reward.params", label="Parameters", info="YAML, e.g. {format_weight: 0.1}")
    last = {**QUIET, "trigger_mode": "always_last"}
    fill = [filled, [form.draft, shown, subject], [shown, *everything, subject]]
    form.draft.change(*fill, **last)
    subject.input(*fill, **last)
    seen = gr.State("")
    form.draft.change(functools.partial(limited, form.site), [form.draft, seen], [seen, limits, further],
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


def filled(value: Any, before: Any, subject: Any = "") -> list[Any]:
    """[what is shown now, *inputs, whose parameters they are] for a draft: of the same preset only what has changed, as
    somebody may be typing. subject: the path of a further preset; any other is the reward itself."""
    nothing = [gr.skip()] * (2 + sum(SLOTS.values()))
    try:
        reward = Draft.read(value).tree()["reward"]
    except KitError:
        return nothing
    path, preset, params = _subject(reward, subject)
    paths = [one["path"] for one in _further_presets(reward)]
    now = _as_shown(preset, params, path, paths)
    if now == before:
        return nothing
    known, old, of, listed = _shown(before)
    layout = fields(preset, params)
    same = (known, of) == (preset, path) and [(f.kind, f.slot) for f in fields(known, old)] == [
        (f.kind, f.slot) for f in layout
    ]
    updates: list[Any] = [gr.skip() if same else gr.update(visible=False) for _ in range(sum(SLOTS.values()))]
    for field in layout:
        fresh = field.shown(params)
        if not same or field.shown(old) != fresh:
            updates[_place(field)] = field.update(fresh)
    chooser: Any = gr.skip()
    if not same or listed != paths:
        first = [(str(reward["preset"]), "")] if reward["preset"] else []
        choices = [*first, *((one.removeprefix(PRESET), one) for one in paths)]
        chooser = gr.Dropdown(choices=choices, value=path, visible=len(choices) > 1)
    return [now, *updates, chooser]


def _further_presets(reward: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of `reward.functions` that are presets."""
    return [one for one in reward["functions"] if str(one["path"]).startswith(PRESET)]


def _subject(reward: Mapping[str, Any], path: Any) -> tuple[str, Any, Mapping[str, Any]]:
    """(its path, "" for the reward itself; the preset; its parameters). The first there is where `path` is none of them."""
    entries = _further_presets(reward)
    named = [one for one in entries if one["path"] == path] or (entries if not reward["preset"] else [])
    path, preset, params = (
        (named[0]["path"], named[0]["path"].removeprefix(PRESET), named[0].get("params"))
        if named
        else ("", reward["preset"], reward["params"])
    )
    return path, preset, params if isinstance(params, Mapping) else {}


def _as_shown(preset: Any, params: Mapping[str, Any], path: str, paths: Sequence[str]) -> str:
    return json.dumps([preset, params, path, paths], sort_keys=True, default=str)


def _shown(text: Any) -> tuple[Any, Mapping[str, Any], str, Any]:
    """(preset, parameters, path of a further preset or "", paths of all of these) that the fields show, as a browser sent
    it back."""
    try:
        preset, params, path, paths = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None, {}, "", None
    return preset, params if isinstance(params, dict) else {}, path if isinstance(path, str) else "", paths


def edited(sent: Sent, text: Any, *values: Any) -> tuple[Draft | None, str, Any]:
    """(the draft with what the fields hold among its parameters, nothing to say, what is shown now); a default is left out,
    and the draft is None where nothing differs. The fields are left as they are: somebody may be dragging one."""
    preset, old, of, paths = _shown(text)
    draft = sent.draft()
    reward = draft.tree()["reward"]
    path, chosen, before = _subject(reward, of)
    if preset is None or (path, chosen) != (of, preset):
        return None, "", gr.skip()  # the fields are still those of another preset
    params = dict(before)
    for field in fields(preset, old):
        value = values[_place(field)]
        if value == field.shown(old):
            continue
        name, fresh = field.parameter.name, field.read(value)
        if fresh == field.parameter.default:
            params.pop(name, None)
        else:
            params[name] = fresh
    if params == before:
        return None, "", gr.skip()
    now = _as_shown(preset, params, path, paths if isinstance(paths, list) else [])
    if not path:
        return draft.change("reward.params", params), "", now
    kept = [
        {**{name: one[name] for name in one if name != "params"}, **({"params": params} if params else {})}
        if one["path"] == path
        else one
        for one in reward["functions"]
    ]
    return draft.change("reward.functions", kept), "", now


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
    """[what was looked at, what each part can earn and how far shaping is from its limit, the further rewards]."""
    try:
        draft = Draft.read(value)
        now = json.dumps(draft.tree()["reward"], sort_keys=True, default=str)
        if now == before:
            return [gr.skip()] * 3
        listed = gr.Dropdown(choices=[_said(at, one) for at, one in enumerate(draft.tree()["reward"]["functions"])])
        found = site.benches.ask("weights", draft.config(site.settings))
    except KitError as problem:
        return ["", m.error(problem), gr.skip()]
    return [now, m.page(earnings(found)), listed]


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
    words = (
        f"All shaping together moves the total by at most {total:.2f}, and right or wrong ({checker}) by {limit:.2f}"
    )
    if total > limit + 1e-12:
        return m.note(f"{words}: a wrong answer could beat a right one. Lower the other weights.", "warn")
    return m.note(f"{words}: a wrong answer cannot beat a right one.", "ok")


# --- further rewards --------------------------------------------------------------------------------------------------


def _further(form: Form) -> gr.Dropdown:
    """Adds and removes entries of `reward.functions`. Gives the list of those there are."""
    named = [(f"preset {name}", f"{PRESET}{name}") for name in rewards.names()]
    own = [(f"function {path}", path) for path in functions(form.site.settings.hooks)]
    if not own:
        gr.HTML(m.page(m.tag("p", "Functions of your own are named here when the page is started with --hooks FILE.py; it takes "
                             "no code itself.", class_="dim")))  # fmt: skip
    with gr.Row(elem_classes="tight low"):
        chosen = gr.Dropdown([*own, *named], value=None, label="Add", min_width=200, elem_id="reward-add")
        weight = gr.Slider(0, HIGHEST, 0.1, step=0.01, label="Its weight", min_width=160, buttons=[])
        add = gr.Button("Add it", size="md", min_width=90)
    with gr.Row(elem_classes="tight low"):
        listed = gr.Dropdown([], label="Added", allow_custom_value=True, min_width=200, elem_id="reward-added")
        remove = gr.Button("Take it out", size="md", min_width=120)
    form.replaces(add.click, added, [chosen, weight])
    form.replaces(remove.click, removed, [listed], [listed])
    return listed


def functions(files: Sequence[Path]) -> list[str]:
    """`FILE.py:name` of the functions in the files that the page was started with; the files are parsed, not run."""
    found: list[str] = []
    for path in files:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
        found += [f"{path}:{name}" for name in names]
    return found


def added(sent: Sent, path: Any, weight: Any) -> tuple[Draft, str]:
    """The draft with one more reward."""
    if not isinstance(path, str) or not path:
        raise ConfigError("Choose what to add first.")
    draft = sent.draft()
    before = draft.tree()["reward"]["functions"]
    if any(one["path"] == path for one in before):
        raise ConfigError(f"{path} is among them already: take it out first to give it another weight.")
    value = float(weight) if isinstance(weight, (int, float)) else 0.1
    return draft.change("reward.functions", [*before, {"path": path, "weight": value}]), ""


def removed(sent: Sent, said: Any) -> tuple[Any, ...]:
    """The draft without one of them."""
    draft = sent.draft()
    before = draft.tree()["reward"]["functions"]
    kept = [one for at, one in enumerate(before) if _said(at, one) != said]
    if len(kept) == len(before):
        raise ConfigError("Choose which of the added ones to take out first.")
    return draft.change("reward.functions", kept), "", None


def _said(at: int, one: Mapping[str, Any]) -> str:
    return f"{at + 1}. {one.get('path')} × {one.get('weight', 1.0)}"
