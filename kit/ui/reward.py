"""The reward of New run: a preset with its parameters, and the range of each component."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import gradio as gr
from markupsafe import Markup

import rewards
from kit.errors import KitError
from kit.runs.files import one_line
from kit.ui import markup as m
from kit.ui.draft import Draft
from kit.ui.form import NULL, Form
from kit.ui.guard import COMMAND_LINE_ONLY
from kit.ui.site import Site

KINDS = {
    "numbers": ("gsm8k-reasoning", "gsm8k-hash", "gsm8k-xml", "countdown", "reasoning-gym"),
    "mathematics": ("math-verify", "math-dapo", "r1-zero"),
    "code": ("code-stdio", "code-function", "sql-exec"),
    "JSON": ("json-schema", "tool-call"),
    "labels": ("classification-label", "mcq-letter"),
}  # fmt: skip
"""Reward presets by the kind of reference; the others are for free text."""


def choices() -> list[tuple[str, str]]:
    """Return the presets by kind: (name with the first line of its description, name)."""
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    order = [*KINDS, "free text"]
    shown = []
    for name in sorted(rewards.names(), key=lambda name: (order.index(kind_of.get(name, "free text")), name)):
        _, _, words = rewards.describe(name).strip().partition("\n\n")
        shown.append((f"{name} · {kind_of.get(name, 'free text')}: {one_line(words.replace('`', ''), 50)}", name))
    return [*shown, ("none (only functions from the YAML)", NULL)]


def build(form: Form) -> None:
    """Build the list of presets, the description and parameters of the chosen one, and the ranges of its components."""
    form.add("reward.preset", "Reward", kind="choice", choices=choices())
    about = gr.HTML()
    with gr.Accordion("Parameters and weights", open=False):
        form.add(
            "reward.params",
            label="Parameters",
            info="As YAML, for example {partial: true}; {} means the defaults.",
            lines=2,
        )
        table = gr.HTML()
    limits = gr.HTML()
    form.follows(described, about, table, queue=False)
    form.follows(functools.partial(limited, form.site), limits, concurrency_limit=4)


def described(value: Any) -> list[str]:
    """Return [description, parameters] of the preset in a draft."""
    try:
        tree = Draft.read(value).tree()
        name = tree["reward"]["preset"]
        text = rewards.describe(name).strip() if name else ""
        parameters = rewards.parameters(name) if name else []
    except (KitError, rewards.RewardsError) as problem:
        return [m.error(problem), ""]
    if not text:
        return ["", ""]
    _, _, words = text.partition("\n\n")
    first, _, rest = words.strip().partition("\n")
    title = m.join(
        m.tag("code", part) if at % 2 else part for at, part in enumerate(first.replace("``", "`").split("`"))
    )
    more = m.tag("details", m.tag("summary", m.tag("b", title)) + m.tag("pre", rest.strip(), class_="said"))
    rows = [
        [
            m.tag("code", parameter.name, class_="nowrap"),
            "needed" if parameter.required else m.tag("code", str(parameter.default)),
            f"{parameter.words} {parameter.accepted_values}",
        ]
        for parameter in parameters
        if parameter.name not in COMMAND_LINE_ONLY
    ]
    return [m.page(more), m.page(m.table(["parameter", "default", "what it means"], rows))]


def limited(site: Site, value: Any) -> str:
    """Show the range of each component, and whether a wrong answer can win."""
    try:
        config = Draft.read(value).config(site.settings)
    except KitError:
        return ""  # `show_draft` reports the error
    try:
        return m.page(earnings(site.benches.ask("weights", config)))
    except KitError as problem:
        return m.error(problem)


def earnings(weights: Mapping[str, Any]) -> Markup:
    """Show the lowest and highest value that each component adds to the total."""
    ends = {part["name"]: _ends(part) for part in weights["parts"]}
    spans = {name: None if both is None else both[1] - both[0] for name, both in ends.items()}
    rows = []
    for part in weights["parts"]:
        both = ends[part["name"]]
        checker = part["name"] == weights["checker"]
        adds = "not limited" if both is None else f"{both[0]:.2f} to {both[1]:.2f}"
        name = m.tag("b", part["name"]) + (m.badge("decides right or wrong", "ok") if checker else "")
        rows.append([m.tag("div", name, class_="row"), f"{part['weight']:g}", adds])
    return m.panel(m.table(["component", "weight", "adds"], rows, numbers={1, 2}), _limit(weights, spans))


def _ends(part: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the lowest and highest value that a component adds: weight times range. None if the range is not limited."""
    if part["low"] is None or part["high"] is None:
        return None
    low, high = sorted(part["weight"] * end + 0.0 for end in (part["low"], part["high"]))  # + 0.0: no "-0.00"
    return low, high


def _limit(weights: Mapping[str, Any], spans: Mapping[str, float | None]) -> Markup:
    checker = weights["checker"]
    if checker is None or spans.get(checker) is None:
        return m.note("No component decides whether an answer is right, so shaping has no limit here.", "warn")
    limit = spans[checker] or 0.0
    shaping = [span for name, span in spans.items() if name != checker]
    if any(span is None for span in shaping):
        return m.note("A function without a declared range can outweigh a right answer. Check its weight.", "warn")
    total = sum(span or 0.0 for span in shaping)
    words = f"The other components can add {total:.2f}, a right answer ({checker}) adds {limit:.2f}"
    if total > limit + 1e-12:
        return m.note(f"{words}: a wrong answer can win. Lower the other weights.", "warn")
    return m.note(f"{words}: a wrong answer cannot win.", "ok")
