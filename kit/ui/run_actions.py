"""What can be done to a run: stop and save, stop now, save a checkpoint, resume, write the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from kit.errors import KitError, RunError
from kit.runs.store import ALIVE
from kit.ui import markup as m
from kit.ui.home import ask_to_stop
from kit.ui.site import Site, is_id

BUTTONS = ("stop", "save", "now", "resume", "force", "report")
RESUME, AGAIN = "Resume", "Start again from the beginning"


def buttons(status: Mapping[str, Any] | None, *, anew: bool = False) -> list[Any]:
    """Which of `BUTTONS` a run in this state has. `anew`: it has no checkpoint to go on from."""
    live = status is not None and status["state"] in ALIVE
    ended = status is not None and not live
    resumable = ended and status is not None and status["state"] != "finished"
    return [
        gr.Button(visible=live),
        gr.Button(visible=live),
        gr.Button(visible=live),
        gr.Button(AGAIN if anew else RESUME, visible=resumable),
        gr.Checkbox(visible=resumable and bool(status and status.get("refused"))),
        gr.Button(visible=status is not None),
    ]


def build(site: Site, chosen: gr.Dropdown) -> tuple[list[Any], list[Any]]:
    """The row of buttons, in the order of `BUTTONS`, and the events after which the run is another."""
    with gr.Row(elem_classes="tight"):
        stop = gr.Button(
            "Stop & save", variant="stop", visible=False, size="md", scale=0, min_width=130, elem_id="run-stop"
        )
        save = gr.Button("Save a checkpoint now", visible=False, size="md", scale=0, min_width=210, elem_id="run-save")
        now = gr.Button("Stop now …", visible=False, size="md", scale=0, min_width=120, elem_id="run-now")
        resume = gr.Button(
            RESUME, variant="primary", visible=False, size="md", scale=0, min_width=120, elem_id="run-resume"
        )
        force = gr.Checkbox(
            label="Resume although that has changed (it is recorded)", visible=False, elem_id="run-force"
        )
        report = gr.Button("Write report.html", visible=False, size="md", scale=0, min_width=160, elem_id="run-report")
    asked = gr.State("")  # the run that the confirmation names
    with gr.Group(visible=False, elem_classes="danger-zone") as sure:
        warning = gr.HTML(elem_id="run-now-asked")
        with gr.Row():
            yes = gr.Button("Yes, stop it now", variant="stop", size="sm", elem_id="run-now-yes")
            no = gr.Button("No, let it run", size="sm", elem_id="run-now-no")
    said = gr.HTML(elem_id="run-said")
    listen: dict[str, Any] = {"api_visibility": "private"}
    stopped = stop.click(lambda run_id: ask_to_stop(site, run_id), [chosen], [said], queue=False, **listen)
    save.click(lambda run_id: save_now(site, run_id), [chosen], [said], queue=False, **listen)
    now.click(confirmation, [chosen], [sure, warning, asked], queue=False, **listen)
    no.click(lambda: gr.Group(visible=False), [], [sure], queue=False, **listen)
    killed = yes.click(lambda: gr.Group(visible=False), [], [sure], queue=False, **listen).then(
        lambda run_id: stop_now(site, run_id), [asked], [said], concurrency_limit=2, **listen
    )
    # Forced once: what is refused the next time may be something else.
    resumed = resume.click(
        lambda run_id, forced: [go_on(site, run_id, forced), False],
        [chosen, force],
        [said, force],
        concurrency_limit=1,
        **listen,
    )
    # Nothing that was opened, ticked or said of one run is there for the next.
    chosen.input(
        lambda: [gr.Group(visible=False), "", False, ""],
        [],
        [sure, asked, force, said],
        queue=False,
        show_progress="hidden",
        **listen,
    )
    written = report.click(lambda run_id: write_report(site, run_id), [chosen], [said], concurrency_limit=1, **listen)
    return [stop, save, now, resume, force, report], [stopped, killed, resumed, written]


def confirmation(run_id: Any) -> list[Any]:
    """[the question, its words, the run that it is about]."""
    if not is_id(run_id):
        return [gr.Group(visible=False), "", ""]
    words = (
        f"Stop {run_id} now? It ends the process at once. What was learned since the last checkpoint is lost. Stop & save "
        "ends after the step in progress and loses nothing."
    )
    return [gr.Group(visible=True), m.page(m.note(words, "fail")), run_id]


def save_now(site: Site, run_id: Any) -> str:
    """Leaves the sentinel for a checkpoint after this step."""
    try:
        run = site.run(run_id)
        if run.status()["state"] not in ALIVE:
            return m.page(m.note(f"{run.id} has ended already."))
        run.write_text("control/save", "page\n")
    except KitError as problem:
        return m.error(problem)
    return m.page(m.note("A checkpoint is written when the next step ends; see Checkpoints.", "ok"))


def stop_now(site: Site, run_id: Any) -> str:
    """Ends the run at once, by signals. Waits until it has ended, a few seconds."""
    from kit.runs.stopping import stop

    try:
        run = site.run(run_id)
        status = stop(run, now=True)
    except KitError as problem:
        return m.error(problem)
    return m.page(m.note(f"{run.id} has ended: {status['state']}.", "ok"))


def go_on(site: Site, run_id: Any, forced: Any) -> str:
    """Resumes a run in a process of its own. What is refused at once is said here, the rest above, by its status.

    `forced` counts only for a run whose resumption was refused: what to resume "although" must have been seen.
    """
    from kit.api.launch import resume

    try:
        run = site.run(run_id)
        force = forced is True and bool(run.status().get("refused"))
        where = run.where_resumed()  # asked before: the run may write its first checkpoint at any moment from now on
        resume(run.id, site.settings.root, force=force, detach=True)
    except KitError as problem:
        return m.error(problem)
    return m.page(m.note(f"{run.id} {where}.", "ok"))


def write_report(site: Site, run_id: Any) -> str:
    """Makes report.html anew of what there is now."""
    from kit.report.run_report import write_report as write

    try:
        run = site.run(run_id)
        if not run.config.is_file():
            raise RunError(f"Run '{run.id}' has no config.yaml, so there is nothing to report.")
        write(run)
    except KitError as problem:
        return m.error(problem)
    link = m.tag("a", "Open it", href=f"/runs/{run.id}/report.html", target="_blank", rel="noopener")
    return m.page(m.note(m.join(["The report is written. ", link]), "ok"))
