"""Objective: what a recipe, or a run's own objective, does to one token, and the same with one part changed: of a run, and of
what is put together on New run, where the clip's parameters are fields.

The curves come from the hooks themselves, evaluated by a child process (`kit.objective.curves`), as this one has no torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import gradio as gr
import numpy as np
from markupsafe import Markup

from kit.errors import ConfigError, KitError
from kit.objective.recipes import recipe, recipe_names, resolve
from kit.report.charts import svg
from kit.report.panels import Numbers, Panel, Series
from kit.report.record import read_tree
from kit.runs.store import RunDir
from kit.ui import markup as m
from kit.ui.curves import Library
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.reward import Field
from kit.ui.site import QUIET, Site, number_of
from rewards.parameters import Parameter

AS_TRAINED, AS_IT_IS = "as this run was trained", "the same clip"
CLIPS = tuple(dict.fromkeys([*(recipe(name)["clip"]["name"] for name in recipe_names()), "two_sided", "dual_clip"]))
QUANTILES = {f"p{level:02}": level / 100 for level in (1, 5, 10, 25, 50, 75, 90, 95, 99)}
"""Of the logged ratios; an older run has logged five of them."""
LATEST = 50
"""Steps whose ratios are laid over the curves."""
RATIO = "new probability ÷ old probability"
SLOW: dict[str, Any] = {"concurrency_limit": 2, "api_visibility": "private"}
"""How an event is listened to that asks a child process."""
LISTS = ("weights", "regularizers")


class ObjectiveTab:
    """The tab. `look` fills the one part that it has."""

    inputs: list[Any]
    outputs: list[Any]

    def __init__(self, site: Site, library: Library) -> None:
        self.site, self.library = site, library

    def look(self, run_id: Any, base: Any, clip: Any, low: Any, high: Any, coef: Any) -> str:
        """Curves of the base, and of what is changed beside it."""
        try:
            run = self.site.run(run_id)
            spec = own_spec(run) if base not in recipe_names() else {"recipe": base}
            changed = change(spec, clip, low, high, coef)
            specs = [spec] if changed is None else [spec, changed]
            found = self.site.benches.ask("curves", specs=specs)
            columns = self.library.columns(run)
        except KitError as problem:
            return m.error(problem)
        return show(found, density(columns), columns)


def own_spec(run: RunDir) -> dict[str, Any]:
    """The objective of a run's configuration. Raises `ConfigError` for one with a hook of the user's own."""
    return registered_only(read_tree(run.config).get("objective"), "This run's objective")


def registered_only(tree: Any, whose: str) -> dict[str, Any]:
    """The keys of an objective that are set. Raises `ConfigError` for one with a hook of the user's own."""
    spec = {key: part for key, part in tree.items() if part is not None} if isinstance(tree, dict) else {}
    hooks = [part for part in spec.values() if isinstance(part, dict)]
    hooks += [each for key in LISTS for each in spec.get(key) or [] if isinstance(each, dict)]
    own = [str(hook.get("name")) for hook in hooks if not str(hook.get("name", "recipes")).replace("_", "").isalnum()]
    if own:
        raise ConfigError(
            f"{whose} has a hook of its own ({', '.join(own)}), and the page runs no such code. Choose a recipe "
            "above, or evaluate it with kit.objective.curves.curves(...) in Python."
        )
    return spec


def change(spec: Mapping[str, Any], clip: Any, low: Any, high: Any, coef: Any) -> dict[str, Any] | None:
    """The specification with what was asked for in place; None where nothing was. Raises `ConfigError`."""
    bounds = {"eps_low": number_of(low, "Lower bound", 0, 100), "eps_high": number_of(high, "Upper bound", 0, 100)}
    given = {name: value for name, value in bounds.items() if value is not None}
    weight = number_of(coef, "KL coefficient", 0, 100)
    if clip not in CLIPS and not given and weight is None:
        return None
    changed, parts = dict(spec), resolve(spec)
    if clip in CLIPS:
        changed["clip"] = {"name": clip, **given}
    elif given:
        changed["clip"] = _named(parts["clip"]) | given
    if weight is not None:
        changed["regularizers"] = with_kl(parts["regularizers"], weight)
    return changed


def with_kl(regularizers: Sequence[Any], weight: float) -> list[dict[str, Any]]:
    """The regularizers with that coefficient of the KL, which is added where there is none."""
    hooks = [_named(each) for each in regularizers]
    own = _pulling(hooks)
    if own is None:
        hooks.append({"name": "kl", "coef": weight})
    else:
        own["coef"] = weight
    return hooks


def _pulling(hooks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The KL among them; of several the one that pulls: one of coefficient 0 is there to be measured."""
    own = [each for each in hooks if each.get("name") == "kl"]
    return next((each for each in own if each.get("coef") != 0), own[0]) if own else None


def _named(hook: Any) -> dict[str, Any]:
    """A hook's specification, which may be its bare name, as a mapping of its own."""
    return dict(hook) if isinstance(hook, Mapping) else {"name": hook}


def density(columns: Mapping[str, Numbers]) -> list[tuple[float, float, float]]:
    """(from, to, share of the tokens) between the quantiles of a run's ratios, mean of its latest steps; [] without any."""
    known = {level: columns.get(f"ratio/{name}", np.empty(0)) for name, level in QUANTILES.items()}
    latest = {level: values[np.isfinite(values)][-LATEST:] for level, values in known.items()}
    means = [(level, float(values.mean())) for level, values in latest.items() if len(values)]
    return [(low, high, after - before) for (before, low), (after, high) in pairwise(means)]


def show(
    found: list[dict[str, Any]],
    ratios: list[tuple[float, float, float]],
    columns: Mapping[str, Numbers] | None,
    names: Sequence[str] = ("as it is", "changed"),
) -> str:
    """The curves with the run's ratios below them, and what is to be seen. columns: of the run; None before there is one."""
    names = names[: len(found)]
    low = min(each["ratios"][0] for each in found)
    high = max(each["ratios"][-1] for each in found)
    within = [box for box in ratios if box[1] > low and box[0] < high and box[1] > box[0]]

    def panel(title: str, label: str, series: list[Series], areas: Any = ()) -> Markup:
        drawn = svg(Panel(title, label, series, smooth=False), RATIO, areas=areas, density=within)
        return m.tag("div", drawn, class_="card")

    def series(which: str, key: str) -> list[Series]:
        return [
            Series(name, np.array(each["ratios"]), np.array(each["clip"][which][key]))
            for name, each in zip(names, found, strict=True)
        ]

    last = found[-1]
    pulls = [
        Series(name, np.array(last["ratios"]), np.array(last["clip"][which]["pull"]))
        for name, which in (("A = +1", "better"), ("A = −1", "worse"))
    ]
    pulls += [
        Series(f"{name}, any A", np.array(last["ratios"]), np.array(curve["pull"]))
        for name, curve in last["penalties"].items()
    ]
    charts = [
        panel("Better than its group (A = +1)", "what is gained", series("better", "gain"), active(last, "better")),
        panel("Worse than its group (A = −1)", "what is gained", series("worse", "gain"), active(last, "worse")),
        panel("How hard the token is pulled" + (f", {names[-1]}" if len(found) > 1 else ""), "up or down", pulls),
    ]
    penalties = [
        Series(f"{name}, {which}", np.array(each["ratios"]), np.array(curve["gain"]))
        for which, each in zip(names, found, strict=True)
        for name, curve in each["penalties"].items()
    ]
    if penalties:
        charts.append(panel("Penalties, times their coefficient", "what is gained", penalties))
    notes = [m.note(note) for note in last["notes"]]
    lines = [*told(last), *([] if columns is None else [said_of(ratios, columns)])]
    words = m.tag("ul", m.join(m.tag("li", line) for line in lines))
    return m.page(m.tag("div", m.join(charts), class_="svgs"), m.panel(m.tag("b", "What is to be seen"), words), *notes)


def active(found: Mapping[str, Any], which: str) -> list[tuple[float, float, str]]:
    """(from, to, words) of the stretches where the clip's bound is active."""
    stretches: list[tuple[float, float, str]] = []
    begun = None
    ratios, clipped = found["ratios"], found["clip"][which]["clipped"]
    for ratio, inside, following in zip(ratios, clipped, [*clipped[1:], False], strict=True):
        begun = ratio if inside and begun is None else begun
        if begun is not None and not following:
            stretches.append((begun, ratio, "the clip's bound is active"))
            begun = None
    return stretches


def told(found: Mapping[str, Any]) -> list[str]:
    """What the curves show, in sentences."""
    lines = []
    for which, sign, verb in (("better", "above", "likelier"), ("worse", "below", "less likely")):
        curve, stretches = found["clip"][which], active(found, which)
        token = f"A token of a completion {sign} its group's mean is made {verb}"
        if not stretches:
            lines.append(f"{token} at every ratio drawn: nothing is clipped.")
            continue
        pulled = any(abs(pull) > 1e-6 for pull, inside in zip(curve["pull"], curve["clipped"], strict=True) if inside)
        effect = "it is still pulled there, no harder" if pulled else "nothing pulls it there any more"
        spans = " and ".join(f"{low:.4g} to {high:.4g}" for low, high, _ in stretches)
        lines.append(f"{token}; from {spans} the clip's bound is active (red): {effect}.")
    if "kl" in found["penalties"]:
        lines.append("The KL pulls every token back towards the reference, whatever its advantage.")
    return lines


def said_of(ratios: list[tuple[float, float, float]], columns: Mapping[str, Numbers]) -> str:
    """What the run's own ratios say of the clip."""
    if not ratios:
        return "This run has logged no ratios yet."
    low, high = ratios[0][0], ratios[-1][1]
    if high - low < 1e-9:
        return (
            "This run's ratios are all 1: each batch makes one step, so that new and old policy are the same and the clip never "
            "acts. With optimisation.iterations of 2 or more it does."
        )
    clipped = columns.get("clip_fraction/region", np.empty(0))
    clipped = clipped[np.isfinite(clipped)][-LATEST:]
    share = f"; {clipped.mean():.2%} of the tokens were clipped" if len(clipped) else ""
    return f"The grey area is this run's ratios of its latest steps: 98 % of the tokens lie from {low:.4g} to {high:.4g}{share}."


def build(site: Site, chosen: gr.Dropdown, library: Library) -> ObjectiveTab:
    """The tab's parts; `look` with `inputs` fills `outputs`."""
    tab = ObjectiveTab(site, library)
    with gr.Row(elem_classes="tight"):
        base = gr.Dropdown([AS_TRAINED, *recipe_names()], value=AS_TRAINED, label="Recipe", scale=3, min_width=180,
                           elem_id="objective-base")  # fmt: skip
        clip = gr.Dropdown([AS_IT_IS, *CLIPS], value=AS_IT_IS, label="Change: clip", scale=3, min_width=150,
                           elem_id="objective-clip")  # fmt: skip
        low = gr.Textbox(label="Change: eps_low", placeholder="as it is", scale=2, min_width=110, max_length=20,
                         elem_id="objective-low")  # fmt: skip
        high = gr.Textbox(label="Change: eps_high", placeholder="as it is", scale=2, min_width=110, max_length=20,
                          elem_id="objective-high")  # fmt: skip
        coef = gr.Textbox(label="Change: KL coefficient", placeholder="as it is", scale=2, min_width=110, max_length=20,
                          elem_id="objective-coef")  # fmt: skip
    shown = gr.HTML(m.page(m.panel(m.tag("p", "Evaluating the objective …", class_="dim"))), elem_id="objective-shown")
    tab.inputs, tab.outputs = [chosen, base, clip, low, high, coef], [shown]
    for one in (base, clip):
        one.input(tab.look, tab.inputs, tab.outputs, **SLOW)
    for box in (low, high, coef):
        box.submit(tab.look, tab.inputs, tab.outputs, **SLOW)
        box.blur(tab.look, tab.inputs, tab.outputs, **SLOW)
    return tab


# --- before a run: on New run ----------------------------------------------------------------------------------------

OWN_CLIP = "the recipe's own"
SLOTS = {"choice": 1, "text": 5}
"""How many fields there are for the parameters of a clip."""
MEANING = {
    "eps_low": "How far below 1 the ratio may fall before the clip acts.",
    "eps_high": "How far above 1 the ratio may rise before the clip acts.",
    "level": "Whether it is the ratio of each token that is bounded, or the mean ratio of a completion (sequence).",
    "delta": "The most that a ratio counts where the advantage is negative; above 1 + eps_high.",
    "c": "The most that a token of a bad completion costs, in multiples of its advantage; above 1.",
    "cispo.eps_high": "The most that a ratio weighs: it bounds the ratio itself, and not its distance from 1.",
    "gmpo.eps_low": "How far a log ratio may fall, in nats, before it counts as that.",
    "gmpo.eps_high": "How far a log ratio may rise, in nats, before it counts as that.",
    "tau_pos": "How fast the gate closes where the advantage is positive; larger is faster.",
    "tau_neg": "How fast the gate closes where the advantage is negative; larger is faster.",
    "divergence": "What is measured between new and old probability: tv (their distance) or kl (in nats).",
    "delta_low": "Divergence from which a token of a bad completion is no longer pushed down.",
    "delta_high": "Divergence from which a token of a good completion is no longer pulled up.",
    "cap": "The most that a ratio weighs.",
    "k_pos": "How strongly a good completion that has become less likely is dampened.",
    "k_neg": "How strongly a bad completion that has become less likely is dampened.",
    "lambda_pos": "How strongly a good completion that has become likelier is dampened.",
    "lambda_neg": "How strongly a bad completion that has become likelier is dampened.",
    "sampler_cap": "The most that the ratio of the old policy to the generation engine counts.",
    "share": "Share of the tokens, those that cost the most entropy, that are held back.",
    "cov_low": "Least covariance of a token that may be held back.",
    "cov_high": "Highest covariance of a token that may be held back.",
    "kl_coef": "Weight of the penalty on the tokens that are held back.",
}
"""What the parameters of clips mean, by name; one that means something else in a clip also by the clip's."""


class BeforeARun:
    """The objective of the draft: its clip's parameters as fields, and its curves, looked at while they are open."""

    def __init__(self, form: Form) -> None:
        self.form, self._clips = form, dict[str, list[Parameter]]()
        opened = gr.State(False)
        self.seen = gr.Textbox("", visible="hidden", elem_classes="hidden-box", label="objective")
        with gr.Accordion("What the objective does to a token", open=False, elem_id="objective-before") as fold:
            with gr.Row(elem_classes="tight"):
                self.clip = gr.Dropdown([OWN_CLIP], value=OWN_CLIP, label="Clip", scale=2, min_width=200,
                                        elem_id="before-clip", info="What bounds the step of a token.")  # fmt: skip
                self.coef = gr.Textbox("", label="KL coefficient", placeholder="none", max_length=20, min_width=160,
                                       elem_id="before-coef", info="Pulls back to the reference.")  # fmt: skip
            with gr.Row():
                choices = [gr.Dropdown([], visible=False, min_width=220, elem_id=f"before-choice-{at}")
                           for at in range(SLOTS["choice"])]  # fmt: skip
                texts = [gr.Textbox(visible=False, max_length=20, min_width=220, elem_id=f"before-text-{at}")
                         for at in range(SLOTS["text"])]  # fmt: skip
            self.slots = [*choices, *texts]
            waits = m.page(m.panel(m.tag("p", "Evaluating the objective …", class_="dim")))
            self.shown = gr.HTML(waits, elem_id="before-shown")
        outputs = [self.seen, self.shown, self.clip, self.coef, *self.slots]
        how = QUIET | {"queue": True, "trigger_mode": "always_last"} | SLOW
        fold.expand(
            lambda draft, seen: [True, *self.look(draft, True, seen)],
            [form.draft, self.seen],
            [opened, *outputs],
            **how,
        )
        fold.collapse(lambda: False, [], [opened], **QUIET)
        form.draft.change(self.look, [form.draft, opened, self.seen], outputs, **how)
        used = [self.clip.input, *(one.input for one in choices)]
        used += [event for one in (self.coef, *texts) for event in (one.blur, one.submit)]
        form.replaces(
            functools.partial(gr.on, used), self.edited, [self.seen, self.clip, self.coef, *self.slots],
            trigger_mode="always_last", queue=True, concurrency_limit=2,
        )  # fmt: skip

    def look(self, value: Any, opened: Any, seen: Any) -> list[Any]:
        """[what was looked at, curves, clip, KL coefficient, *fields]; nothing while it is closed or the same as before."""
        same = [gr.skip()] * (4 + len(self.slots))
        if opened is not True:
            return same
        try:
            tree = Draft.read(value).tree()["objective"]
            now = json.dumps(tree, sort_keys=True)
            if now == seen:
                return same
            spec, plain = registered_only(tree, "The objective"), {"recipe": tree["recipe"]}
            specs = [spec] if spec == plain else [plain, spec]
            layout = self.fields(tree)
            found = self.form.site.benches.ask("curves", specs=specs)
        except KitError as problem:
            return ["", m.error(problem), *same[2:]]
        old = _tree_of(seen)
        before = [] if old is None else self.fields(old)
        stays = [_slot(one) for one, _ in before] == [_slot(one) for one, _ in layout] and clip_name(tree) == clip_name(
            old or {}
        )
        updates: list[Any] = [gr.skip() if stays else gr.update(visible=False) for _ in self.slots]
        held = {_slot(one): one.shown(params) for one, params in before}
        for field, params in layout:  # of the same clip only what has changed, as somebody may be typing
            fresh = field.shown(params)
            if not stays or held[_slot(field)] != fresh:
                updates[_slot(field)] = field.update(fresh)
        clip = gr.Dropdown(choices=[OWN_CLIP, *self.clips()], value=_chosen(tree))
        coef = gr.skip() if old is not None and _coef(old) == _coef(tree) else _coef(tree)
        return [
            now,
            show(found, [], None, (f"{tree['recipe']} as it is", "as set here")[-len(found) :]),
            clip,
            coef,
            *updates,
        ]

    def clips(self) -> dict[str, list[Parameter]]:
        """The parameters of each clip. Raises `KitError`."""
        if not self._clips:
            found = self.form.site.benches.ask("clips")
            self._clips = {
                clip: [
                    Parameter(**one | {"words": MEANING.get(f"{clip}.{one['name']}", MEANING.get(one["name"], ""))})
                    for one in parameters
                ]
                for clip, parameters in found.items()
            }
        return self._clips

    def fields(self, tree: Mapping[str, Any]) -> list[tuple[Field, dict[str, Any]]]:
        """(field, parameters of the clip) of each parameter of an objective's clip that has a place."""
        params = _named(resolve(registered_only(tree, "The objective"))["clip"])
        found: list[tuple[Field, dict[str, Any]]] = []
        for parameter in self.clips().get(clip_name(tree), []):
            kind = "choice" if parameter.kind in ("choice", "switch") else "text"
            slot = sum(one.kind == kind for one, _ in found)
            if slot < SLOTS[kind]:
                found.append((Field(parameter, kind, slot), params))
        return found

    def edited(self, sent: Sent, seen: Any, clip: Any, coef: Any, *values: Any) -> tuple[Draft | None, str]:
        """(the draft with what was changed in the fields, nothing to say); None where nothing differs. What they were filled from
        may be older than the draft: an edit in one follows soon on one in another."""
        draft, old = sent.draft(), _tree_of(seen)
        if old is None:
            return None, ""
        tree, fresh = draft.tree()["objective"], draft
        if clip != _chosen(old):
            if isinstance(clip, str) and (clip == OWN_CLIP or clip in self.clips()):
                fresh = fresh.change("objective.clip", None if clip == OWN_CLIP else {"name": clip})
        elif clip_name(old) == clip_name(tree):  # else the fields are those of another clip
            spec = {} if tree["clip"] is None else _named(tree["clip"])
            for field, params in self.fields(old):
                value, name = values[_slot(field)], field.parameter.name
                if value != field.shown(params):
                    spec = {key: one for key, one in spec.items() if key != name}
                    spec |= {} if value in (None, "") else {name: field.read(value)}
            fresh = fresh.change("objective.clip", spec or None)
        if coef != _coef(old):
            fresh = fresh.change("objective.regularizers", _with_coef(tree, coef))
        return (None if fresh == draft else fresh), ""


def clip_name(tree: Mapping[str, Any]) -> str:
    """Which clip an objective has."""
    spec = {key: part for key, part in tree.items() if part is not None}
    return str(_named(resolve(spec)["clip"]).get("name"))


def _slot(field: Field) -> int:
    return field.slot + (SLOTS["choice"] if field.kind == "text" else 0)


def _chosen(tree: Mapping[str, Any]) -> str:
    """What the list of clips shows."""
    clip = tree.get("clip")
    return OWN_CLIP if clip is None or "name" not in _named(clip) else str(_named(clip)["name"])


def _coef(tree: Mapping[str, Any]) -> str:
    """What the box of the KL's coefficient shows; a schedule stands in the YAML alone."""
    spec = {key: part for key, part in tree.items() if part is not None}
    own = _pulling([_named(each) for each in resolve(spec)["regularizers"]])
    return "" if own is None or not isinstance(own.get("coef"), (int, float)) else str(own["coef"])


def _with_coef(tree: Mapping[str, Any], coef: Any) -> list[Any] | None:
    """The regularizers for what the box holds; without a KL where it is empty. Raises `ConfigError`."""
    weight = number_of(coef, "KL coefficient", 0, 100)
    recipes = resolve({"recipe": tree["recipe"]})["regularizers"]
    hooks = recipes if tree["regularizers"] is None else tree["regularizers"]
    found = [one for one in map(_named, hooks) if one.get("name") != "kl"] if weight is None else with_kl(hooks, weight)
    return None if found == [_named(one) for one in recipes] else found


def _tree_of(text: Any) -> dict[str, Any] | None:
    """The objective that the fields show, as a browser sent it back; None for what no page sends."""
    try:
        tree = json.loads(text)
        resolve(registered_only(tree, "The objective"))
    except (TypeError, ValueError, AttributeError, RecursionError, KitError):
        return None
    return {"clip": None, "regularizers": None, **tree} if isinstance(tree, dict) else None
