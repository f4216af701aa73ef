"""Run: the result or the progress of a run, and below it Charts, Completions, Log and More. One timer polls for changes.

The server stores nothing about a run, so that two browsers, or a server that was restarted, show the same.
"""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr
import yaml

from kit.errors import KitError, RunError
from kit.report.panels import LEARNING, MACHINE, Numbers, columns_of, panels
from kit.report.record import read_tree, words
from kit.runs.store import ALIVE, RunDir
from kit.ui import explorer
from kit.ui import markup as m
from kit.ui.draft import from_yaml
from kit.ui.form import stored_draft, stored_or_new
from kit.ui.run_texts import alerts, checkpoint_table, configuration, head, log_tail
from kit.ui.site import POLL_SECONDS, QUIET, Site, is_id, run_box, stamp

BUTTONS = ("like", "stop", "now", "resume", "delete")
RESUME, AGAIN = "Resume", "Start again"
TABS = ("charts", "completions", "log", "more")
FIRST_CHARTS = 5
MARKED = ("resumed", "early_stop", "out_of_memory", "alert")
"""Events that are drawn as vertical lines in the charts."""
MOST_MARKS = 24
ENDED_POLL_SECONDS = 8.0
"""Seconds between two polls of a run that has ended. It changes only if somebody resumes it."""
FROM_ADDRESS = (
    "() => { const q = new URLSearchParams(location.search); return [q.get('run') || '', q.get('tab') || '']; }"
)
TO_RUN = "(id) => { const to = new URL(location); to.searchParams.set('run', id || ''); history.replaceState(null, '', to); }"
TO_TAB = (
    "() => {{ const to = new URL(location); to.searchParams.set('tab', '{}'); history.replaceState(null, '', to); }}"
)
"""JavaScript that writes the run and the tab into the address, so that a reload or a shared link shows the same."""


def buttons(status: Mapping[str, Any] | None, *, anew: bool = False) -> list[Any]:
    """Return the updates of `BUTTONS` for a run in this state. `anew`: it has no checkpoint to resume from."""
    state = status["state"] if status is not None else None
    live, ended = state in ALIVE, state is not None and state not in ALIVE
    return [
        gr.Button(visible=state is not None),
        gr.Button(visible=live and state != "stopping"),
        gr.Button(visible=live),
        gr.Button(AGAIN if anew else RESUME, visible=ended and state != "finished"),
        gr.Button(visible=ended),
    ]


def _build_actions(site: Site, chosen: gr.Dropdown) -> tuple[list[Any], gr.HTML, list[Any]]:
    """Build the row of buttons. Returns the buttons, the note on a click, and the events that change the run."""

    def button(name: str, label: str, width: int, variant: Any = "secondary") -> gr.Button:
        return gr.Button(
            label, variant=variant, visible=False, size="md", scale=0, min_width=width, elem_id=f"run-{name}"
        )

    with gr.Row(elem_classes="tight"):
        row: dict[str, Any] = {
            "like": button("like", "New run like this", 170),
            "stop": button("stop", "Stop & save", 130, "stop"),
            "now": button("now", "Stop now …", 120),
            "resume": button("resume", RESUME, 120, "primary"),
            "delete": button("delete", "Delete …", 110),
        }
    note = gr.HTML(elem_id="run-said")
    place = gr.Textbox("", visible="hidden", elem_classes="hidden-box", label="place")
    listen: dict[str, Any] = {"api_visibility": "private"}
    stopped = row["stop"].click(lambda run_id: ask_to_stop(site, run_id), [chosen], [note], queue=False, **listen)
    ended = row["now"].click(
        lambda run_id: stop_now(site, run_id),
        [chosen],
        [note],
        js=CONFIRM.format(SURE_STOP),
        concurrency_limit=2,
        **listen,
    )
    deleted = row["delete"].click(
        lambda run_id: delete(site, run_id),
        [chosen],
        [note, place],
        js=CONFIRM.format(SURE_DELETE),
        queue=False,
        **listen,
    )
    resumed = row["resume"].click(lambda run_id: go_on(site, run_id), [chosen], [note], concurrency_limit=1, **listen)
    chosen.input(lambda: "", [], [note], **QUIET)  # the note is about another run
    draft = stored_draft()
    row["like"].click(
        lambda run_id, old: like(site, run_id, old), [chosen, draft], [draft, note, place], queue=False, **listen
    )
    place.change(None, [place], [], js="(place) => { if (place) window.location.href = place; }")
    return [row[name] for name in BUTTONS], note, [stopped, ended, deleted, resumed]


CONFIRM = "(id) => confirm(`{}`.replaceAll('RUN', id)) ? id : null"
"""JavaScript that asks for confirmation. It sends the run's id, or null if the user cancels."""
SURE_STOP = (
    "Stop RUN now? It ends within seconds. It saves first where it can; else it goes back to its last checkpoint. "
    "Stop & save ends after the step in progress and loses nothing."
)
SURE_DELETE = "Delete RUN, with its weights, report and notes? This cannot be undone."


def delete(site: Site, run_id: Any) -> list[str]:
    """Delete a run that has ended. Returns [error, address of Home]."""
    if run_id is None:
        return ["", ""]  # cancelled
    try:
        run = site.run(run_id)
        if run.status()["state"] in ALIVE:
            raise RunError(f"'{run.id}' is live; stop it first.")
        hidden = run.path.with_name(f".deleted-{run.id}-{time.time_ns()}")
        run.path.rename(hidden)  # out of the list of runs at once
        shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        return [m.error(f"The run could not be deleted: {error.strerror or error}."), ""]
    except KitError as problem:
        return [m.error(problem), ""]
    return ["", "/"]


def like(site: Site, run_id: Any, draft: Any) -> list[Any]:
    """Return [draft with this run's settings, error, address of New run]."""
    try:
        tree = read_tree(site.run(run_id).config)
        if not tree:
            raise RunError(f"config.yaml of '{run_id}' cannot be read.")
        tree["run"] = {key: value for key, value in tree.get("run", {}).items() if key not in ("id", "root")}
        fresh = from_yaml(yaml.safe_dump(tree), site.settings)
        return [fresh.instead_of(stored_or_new(draft)).as_text(), "", "/new"]
    except KitError as problem:
        return [gr.skip(), m.error(problem), ""]


def ask_to_stop(site: Site, run_id: Any) -> str:
    """Ask a run to finish its step, save and end. Returns a note at once."""
    from kit.runs.stopping import ask, stop, what_is_saved

    if not is_id(run_id):
        return m.error("Choose a run that is running.")
    try:
        run = site.run(run_id)
        status = run.status()
        if status["state"] not in ALIVE:
            return m.page(m.note(f"{run_id} has ended already."))
        if status["state"] in ("queued", "starting"):  # loading does not poll the request, so that signals follow
            threading.Thread(target=stop, args=(run,), name="stop", daemon=True).start()
        else:
            ask(run)
    except KitError as problem:
        return m.error(problem)
    return m.page(m.note(f"{run_id} stops: {what_is_saved(status)}.", "ok"))


def stop_now(site: Site, run_id: Any) -> str:
    """End a run by signals, and wait until it has ended, a few seconds. Returns an error note, or ""."""
    from kit.runs.stopping import stop

    if run_id is None:
        return ""  # cancelled
    try:
        stop(site.run(run_id), now=True)
    except KitError as problem:
        return m.error(problem)
    return ""


def go_on(site: Site, run_id: Any) -> str:
    """Resume a run in a process of its own. Returns a note; a later refusal is in the run's status."""
    from kit.api import resume

    try:
        run = site.run(run_id)
        where = run.where_resumed()  # before the start: the resumed run may write a checkpoint at any moment
        site.make_room()
        resume(run.id, site.settings.root, detach=True)
    except KitError as problem:
        return m.error(problem)
    return m.page(m.note(f"{run.id} {where}.", "ok"))


class View:
    """Fills the parts of the screen. `parts` are their names in order."""

    parts = ("head", "notes", "charts", "more", "log", "note", "timer")

    def __init__(self, site: Site) -> None:
        self.site = site

    def look(self, run_id: Any, tab: Any, last_stamp: Any) -> list[Any]:
        """Return [stamp, *parts, *buttons]. All are skipped if the stamp equals `last_stamp`, and closed tabs always are."""
        nothing = [gr.skip()] * (1 + len(self.parts) + len(BUTTONS))
        try:
            if not run_id and self.site.statuses():
                return nothing  # the browser has not sent the address yet
            run = self.site.run(run_id)
            at = tab if tab in TABS else TABS[0]
            status = run.status()
            files = [run.status_file, run.metrics_file, run.events_file, run.config, run.adapter]
            files += [
                run.path / "report.html",
                run.path / "best.json",
                *sorted(run.eval.glob("*.json")),
                *run.checkpoints,
            ]
            files += [run.log] if at == "log" else []
            now = stamp(files, (run.id, at, status["state"], status.get("reason"), status.get("refused")))
            return nothing if now == last_stamp else [now, *self._fresh(run, status, at)]
        except KitError as problem:
            return nothing if last_stamp == str(problem) else [str(problem), *self._problem(run_id, str(problem))]

    def _problem(self, run_id: Any, text: str) -> list[Any]:
        start = m.join(["Start one on ", m.tag("a", "New run", href="/new"), "."])
        head = m.error(text) if run_id else m.empty("No run yet", start)
        return [head, *["" for _ in self.parts[2:]], gr.Timer(ENDED_POLL_SECONDS), *buttons(None)]

    def _fresh(self, run: RunDir, status: dict[str, Any], tab: str) -> list[Any]:
        columns, scores, events, problems = _read(run)
        warnings, holding = alerts(events, columns)
        notes = [*(m.note(problem, "fail") for problem in problems), warnings]
        live = status["state"] in ALIVE
        drawn = panels(columns, scores)
        learning = [panel for panel in drawn if panel.topic == LEARNING]
        shown: dict[str, Any] = {
            "head": head(run, status, columns, scores, holding, (run.path / "report.html").is_file()),
            "notes": m.page(m.tag("div", m.join(notes), class_="stack-notes")) if any(notes) else "",
            "timer": gr.Timer(POLL_SECONDS if live else ENDED_POLL_SECONDS),
        }
        if not live:
            shown["note"] = ""  # that it stops or resumes
        if tab == "log":
            shown["log"] = log_tail(run)
        if tab == "charts":
            shown["charts"] = m.charts(learning[:FIRST_CHARTS], _marks(events)) or (
                m.empty("No step yet", "Charts begin with the first step.")
                if live
                else m.empty("No step was made", "The run ended before its first step.")
            )
        if tab == "more":
            machine = [panel for panel in drawn if panel.topic == MACHINE]
            folds = m.page(checkpoint_table(run, scores), configuration(run))
            shown["more"] = folds + m.charts([*learning[FIRST_CHARTS:], *machine], _marks(events))
        anew = not live and run.last_checkpoint is None
        return [*(shown.get(name, gr.skip()) for name in self.parts), *buttons(status, anew=anew)]


def _read(run: RunDir) -> tuple[dict[str, Numbers], dict[str, dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return (metrics by column, held-out scores by name, events, errors of unreadable files)."""
    readers: tuple[Callable[[], Any], ...] = (lambda: columns_of(run.metrics()), run.evaluations, run.events)
    parts: list[Any] = [{}, {}, []]
    problems = []
    for at, read in enumerate(readers):
        try:
            parts[at] = read()
        except RunError as problem:
            problems.append(str(problem))
    return parts[0], parts[1], parts[2], problems


def _marks(events: list[dict[str, Any]]) -> list[tuple[float, str]]:
    chosen = [event for event in events if event.get("kind") in MARKED and isinstance(event.get("step"), int)]
    return [(event["step"], words(event)[:200]) for event in chosen[-MOST_MARKS:]]


def build(site: Site, blocks: gr.Blocks) -> None:
    """Build the screen."""
    view = View(site)
    named, named_tab, tab, last_stamp = (run_box() for _ in range(4))
    chosen = gr.Dropdown([], label="Run", allow_custom_value=True, elem_id="run-chosen", filterable=True)
    head = gr.HTML(m.page(m.panel(m.tag("p", "Reading the run …", class_="dim"))), elem_id="run-head")
    buttons, note, actions = _build_actions(site, chosen)
    notes = gr.HTML(elem_id="run-notes")
    timer = gr.Timer(POLL_SECONDS)
    with gr.Tabs(elem_id="run-tabs") as tabs:
        with gr.Tab("Charts", id="charts") as charts_tab:
            charts = gr.HTML(elem_id="run-charts")
        with gr.Tab("Completions", id="completions") as completions_tab:
            opened = explorer.build(site, chosen)
        with gr.Tab("Log", id="log") as log_tab:
            log = gr.HTML(elem_id="run-log")
        with gr.Tab("More", id="more") as more_tab:
            more = gr.HTML(elem_id="run-more")
    outputs = [last_stamp, head, notes, charts, more, log, note, timer, *buttons]
    inputs = [chosen, tab, last_stamp]
    look: dict[str, Any] = {"fn": view.look, "inputs": inputs, "outputs": outputs} | QUIET
    for name, each in zip(TABS, (charts_tab, completions_tab, log_tab, more_tab), strict=True):
        event = each.select(lambda name=name: name, [], [tab], **QUIET).then(**look)
        each.select(None, [], [], js=TO_TAB.format(name))
        if name == "completions":
            event.then(opened.look, opened.inputs, opened.outputs, **QUIET)
    # Opening the tab of the address triggers its `select` event, which fills the tab.
    read_address = functools.partial(_from_address, site)
    blocks.load(read_address, [named, named_tab], [chosen, tabs, tab], js=FROM_ADDRESS, **QUIET).then(**look)
    chosen.input(None, [chosen], [], js=TO_RUN)
    # Completions are filled if their tab is open, otherwise when it is opened.
    unchanged = [gr.skip()] * len(opened.outputs)
    chosen.input(**look).then(
        lambda tab, *inputs: opened.look(*inputs) if tab == "completions" else unchanged,
        [tab, *opened.inputs], opened.outputs, **QUIET,
    )  # fmt: skip
    for action in actions:
        action.then(**look)
    timer.tick(**look)


def _from_address(site: Site, run_id: Any, tab: Any) -> list[Any]:
    """Return [list of runs, tabs, name of the open tab] for the run and tab in the address."""
    at = tab if tab in TABS else TABS[0]
    runs = site.choices(run_id, lambda run, status: status["state"] in ALIVE)
    return [runs, gr.Tabs(selected=at), at]
