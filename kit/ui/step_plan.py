"""Step 5: memory by terms, what to change where it does not fit, everything checked, and the start."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import gradio as gr
from markupsafe import Markup

from kit.errors import KitError, RunError
from kit.runs.store import ALIVE
from kit.ui import markup as m
from kit.ui.edits import late, latest, whole
from kit.ui.live import said
from kit.ui.site import Site, address

if TYPE_CHECKING:
    from kit.ui.screen import Screen

MOST_LIVE = 8
"""Live runs below one root that the page starts, at most: the others wait for a GPU anyway."""
GO = "(place) => { if (place) window.location.href = place; }"
_STARTING = threading.Lock()


def build(screen: Screen) -> None:
    """The step."""
    check = gr.Button("Check and plan", variant="secondary", size="md")
    found = gr.HTML(
        m.empty("Not planned yet", "Everything that can be checked without running: keys, rows, reward, memory, time.")
    )
    fixes = gr.State([])
    apply = gr.Button("Make these changes", visible=False)
    with gr.Row():
        screen.fields.add(
            "run.id", label="Name of the run", elem_id="run-name", placeholder="made from preset and time"
        )
        start = gr.Button("Start", variant="primary", size="lg", elem_id="start")
    note = gr.HTML()
    place = gr.Textbox(visible="hidden", elem_classes="hidden-box")
    listen: dict[str, Any] = {"api_visibility": "private"}
    check.click(
        lambda draft: planned(screen, draft),
        [screen.draft],
        [found, fixes, apply],
        js=late(),
        concurrency_limit=2,
        **listen,
    )
    apply.click(
        lambda draft, given: said(
            lambda: [whole(screen.read(draft).apply(_texts(given)), draft), ""], lambda why: [gr.skip(), m.error(why)]
        ),
        [screen.draft, fixes],
        [screen.draft, screen.problem],
        js=late(2),
        **listen,
    ).then(lambda draft: planned(screen, draft), [screen.draft], [found, fixes, apply], **listen)
    start.click(
        lambda draft: launch(screen.site, draft),
        [screen.draft],
        [note, place],
        js=late(),
        concurrency_limit=2,
        trigger_mode="once",
        **listen,
    ).then(None, [place], [], js=GO)


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)][:20] if isinstance(value, list) else []


def planned(screen: Screen, value: Any) -> list[Any]:
    """[findings, overrides that make it fit, their button]."""
    site, hidden = screen.site, gr.Button(visible=False)
    try:
        draft = screen.read(value)
        config = draft.config(site.settings)
        plan = site.benches.plan(config, draft.preset, draft.overrides())
    except KitError as problem:
        return [m.error(problem), [], hidden]
    try:
        notes = site.benches.ask("validate", config, seconds=180.0)
        verdict = m.note("Everything checked; it can be started.", "ok") + _list(notes)
    except KitError as problem:
        verdict = m.note(str(problem), "fail")
    changes = plan["fixes"] or []
    button = gr.Button(visible=bool(changes), value=f"Make {len(changes)} change{'s' * (len(changes) != 1)} that fit")
    return [m.page(verdict, _memory(plan), _fixes(plan)), [one["override"] for one in changes], button]


def _list(notes: list[str]) -> Markup:
    items = m.join(m.tag("li", note) for note in notes)
    return m.tag("ul", items, style="margin:8px 0 8px 18px;list-style:disc")


def _memory(plan: dict[str, Any]) -> Markup:
    memory = plan["memory"]
    rows: list[list[Any]] = [["always", term, m.gib(size)] for term, size in memory["always"].items()]
    for phase, terms in memory["phases"].items():
        name = m.tag("b", f"{phase} (highest)") if phase == memory["phase"] else phase
        rows += [[name, term, m.gib(size)] for term, size in terms.items() if size > 1024**2]
    table = m.table(["when", "what", "size"], rows, numbers={2})
    head = f"Peak {m.gib(memory['peak_bytes'])} of {m.gib(plan['room_bytes'])}: {'fits' if plan['fits'] else 'does not fit'}"
    notes = m.join(m.tag("p", note, class_="dim") for note in plan["notes"])
    return m.card(m.tag("details", m.tag("summary", head) + table + notes))


def _fixes(plan: dict[str, Any]) -> Markup:
    if plan["fits"]:
        return Markup("")
    if not plan["fixes"]:
        return m.note(
            "No change of this configuration makes it fit: choose a smaller model or a larger machine.", "fail"
        )
    rows = [[m.tag("code", one["override"]), one["harm"]] for one in plan["fixes"]]
    return m.card(m.tag("h3", "What makes it fit, the least harm first"), m.table(["change", "what it costs"], rows))


def launch(site: Site, value: Any) -> list[str]:
    """[what happened, where to go]: starts a run in a process of its own, which outlives this server."""
    from kit.api.launch import start

    try:
        draft = latest(value)
        config = draft.config(site.settings)
        site.benches.ask("validate", config, seconds=180.0)
        with _STARTING:  # two browsers, or two clicks: one after the other, so that the limit holds
            live = [run.id for run, status in site.store.statuses() if status["state"] in ALIVE]
            if len(live) >= MOST_LIVE:
                raise RunError(f"{len(live)} runs are live already: {', '.join(live[:4])}, ... Stop one first.")
            if config.run.id is not None and (site.settings.root / config.run.id).exists():
                raise RunError(
                    f"There is a run '{config.run.id}' already. Give another name, or none: then it is made from preset and time."
                )
            if config.run.id is None:
                config.run.id = site.store.new_id(draft.preset)
            run = start(config)
    except KitError as problem:
        return [m.error(problem), ""]
    return [m.page(m.note(f"{run.id} has started.", "ok")), address("run", run.id)]
