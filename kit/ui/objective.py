"""Objective: what a recipe, or the run's own objective, does to one token, and the same with one part changed.

The curves come from the hooks themselves, evaluated by a child process (`kit.objective.curves`), as this one has no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from kit.ui.site import Site, number_of

AS_TRAINED, AS_IT_IS = "as this run was trained", "the same clip"
CLIPS = tuple(dict.fromkeys([*(recipe(name)["clip"]["name"] for name in recipe_names()), "two_sided", "dual_clip"]))
QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
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
    tree = read_tree(run.config).get("objective")
    spec = {key: part for key, part in tree.items() if part is not None} if isinstance(tree, dict) else {}
    hooks = [part for part in spec.values() if isinstance(part, dict)]
    hooks += [each for key in LISTS for each in spec.get(key) or [] if isinstance(each, dict)]
    own = [str(hook.get("name")) for hook in hooks if not str(hook.get("name", "")).replace("_", "").isalnum()]
    if own:
        raise ConfigError(
            f"This run's objective has a hook of its own ({', '.join(own)}), and the page runs no such code. Choose a recipe "
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
        hooks = [_named(each) for each in parts["regularizers"]]
        own = [each for each in hooks if each.get("name") == "kl"]
        if not own:
            hooks.append({"name": "kl", "coef": weight})
        else:  # of several the one that pulls: one of coefficient 0 is there to be measured
            next((each for each in own if each.get("coef") != 0), own[0])["coef"] = weight
        changed["regularizers"] = hooks
    return changed


def _named(hook: Any) -> dict[str, Any]:
    """A hook's specification, which may be its bare name, as a mapping of its own."""
    return dict(hook) if isinstance(hook, Mapping) else {"name": hook}


def density(columns: Mapping[str, Numbers]) -> list[tuple[float, float, float]]:
    """(from, to, share of the tokens) between the quantiles of a run's ratios, mean of its latest steps; [] without any."""
    levels = list(QUANTILES.values())
    known = [columns.get(f"ratio/{name}", np.empty(0)) for name in QUANTILES]
    latest = [values[np.isfinite(values)][-LATEST:] for values in known]
    if not all(map(len, latest)):
        return []
    means = [float(values.mean()) for values in latest]
    return [
        (low, high, after - before)
        for low, high, before, after in zip(means, means[1:], levels, levels[1:], strict=False)
    ]


def show(found: list[dict[str, Any]], ratios: list[tuple[float, float, float]], columns: Mapping[str, Numbers]) -> str:
    """The curves with the run's ratios below them, and what is to be seen."""
    names = ["as it is", "changed"][: len(found)]
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
        panel("How hard the token is pulled" + (", changed" if len(found) > 1 else ""), "up or down", pulls),
    ]
    penalties = [
        Series(f"{name}, {which}", np.array(each["ratios"]), np.array(curve["gain"]))
        for which, each in zip(names, found, strict=True)
        for name, curve in each["penalties"].items()
    ]
    if penalties:
        charts.append(panel("Penalties, times their coefficient", "what is gained", penalties))
    notes = [m.note(note) for note in last["notes"]]
    words = m.tag("ul", m.join(m.tag("li", line) for line in (*told(last), said_of(ratios, columns))))
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
