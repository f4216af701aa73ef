"""Beside every step: whether it can be run, its memory, the exact command, the YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gradio as gr
from markupsafe import Markup

from kit.config import RunConfig
from kit.errors import KitError
from kit.ui import markup as m
from kit.ui.draft import from_yaml
from kit.ui.edits import instead, late
from kit.ui.live import said

if TYPE_CHECKING:
    from kit.ui.screen import Screen


def build(screen: Screen) -> None:
    """The column."""
    memory = gr.HTML(m.page(m.card(m.tag("b", "Memory and time"), m.tag("p", "Counting …", class_="dim"))))
    state = gr.HTML()
    command = gr.Textbox(
        label="Command that does the same", lines=2, max_lines=8, interactive=False, buttons=["copy"], elem_id="command"
    )
    with gr.Accordion("YAML", open=False):
        gr.HTML(m.page(m.tag("small", "Live, every default written out. Paste or edit here, then take it over.")))
        yaml = gr.Code(language="yaml", lines=12, max_lines=28, interactive=True, elem_id="yaml", label="run.yaml")
        take = gr.Button("Take over this YAML", size="sm")
    site = screen.site

    def follow(draft: Any) -> list[Any]:
        return written(screen, draft)

    def count(draft: Any) -> str:
        return measured(screen, draft)

    for event in (screen.draft.change, screen.blocks.load):
        event(
            follow,
            [screen.draft],
            [state, command, yaml],
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        event(
            count,
            [screen.draft],
            [memory],
            show_progress="hidden",
            api_visibility="private",
            trigger_mode="always_last",
            concurrency_limit=4,
        )
    take.click(
        lambda draft, text: said(
            lambda: [instead(from_yaml(str(text), site.settings), draft), ""], lambda why: [gr.skip(), m.error(why)]
        ),
        [screen.draft, yaml],
        [screen.draft, screen.problem],
        js=late(2),
        queue=False,
        api_visibility="private",
    )


def written(screen: Screen, value: Any) -> list[Any]:
    """[what is wrong or that nothing is, command, YAML]."""
    settings = screen.site.settings
    try:
        draft = screen.read(value)
    except KitError as problem:
        return [m.error(problem), "", ""]
    command = draft.command(settings)
    try:
        config = draft.config(settings)
    except KitError as problem:
        return [m.error(problem), command, gr.skip()]
    changes = len(draft.changes)
    text = f"{draft.preset}, {changes} change{'s' * (changes != 1)}. The schema accepts it."
    return [m.page(m.note(text, "ok")), command, config.to_yaml()]


def measured(screen: Screen, value: Any) -> str:
    """The memory bar."""
    try:
        draft = screen.read(value)
        config = draft.config(screen.site.settings)
        found = screen.site.benches.plan(config, draft.preset, draft.overrides())
    except KitError as problem:
        return m.page(m.card(m.tag("b", "Memory and time"), m.tag("p", _short(problem), class_="dim")))
    return m.page(memory_card(config, found))


def _short(problem: KitError) -> str:
    text = str(problem)
    return text if len(text) < 300 else f"{text[:299]}…"


def memory_card(config: RunConfig, found: dict[str, Any]) -> Markup:
    """Planned peak against what is free, and how long it will take."""
    peak, room = found["memory"]["peak_bytes"], max(1, found["room_bytes"])
    share = peak / room
    level, word = (
        ("fail", "does not fit") if not found["fits"] else ("warn", "tight") if share > 0.9 else ("ok", "fits")
    )
    head = m.tag("div", m.tag("b", "Memory and time") + m.badge(word, level), class_="spread")
    scale = m.bar(share, level, f"{share:.0%} of the free memory")
    line = m.tag(
        "p",
        f"{m.gib(peak)} of {m.gib(room)} free on {found['place']}, highest in: {found['memory']['phase']}",
        class_="num",
    )
    step = found["seconds_per_step"]["step"]
    time = m.tag(
        "p",
        f"{found['model']['parameters'] / 1e6:,.1f} M weights. Estimated, not measured: {m.seconds(step)} a step, "
        f"{m.duration(3600 * found['hours'])} for {config.optimisation.steps} steps with completions of full length. "
        "The signal check (step 3) measures how long completions take; where they differ, believe the check.",
        class_="dim",
    )
    return m.card(head, scale, line, time)
