"""What all screens share: settings, runs, child processes, the run in the address, polling."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from kit.errors import RunError
from kit.runs.store import ALIVE, RUN_ID, RunDir, RunStore
from kit.ui import markup as m
from kit.ui.children import Benches, Job, Jobs
from kit.ui.settings import Settings

UNSEEN: dict[str, Any] = {"show_progress": "hidden", "show_progress_on": [], "api_visibility": "private"}
"""How an event is listened to of which nobody is to see that it runs: nothing blinks, no API.

Gradio's script tells each output of every event how it stands, hidden or not, and looks each up in the whole page: a third of the
time in which New run came up. With `show_progress_on` empty it tells none."""
QUIET: dict[str, Any] = {"queue": False} | UNSEEN
"""The same outside of the queue, for what takes milliseconds."""
SIGNAL = "kit.planning.signal"
"""The module of the signal check, with which the keys of its jobs begin."""
RUN_FROM_ADDRESS = "() => new URLSearchParams(window.location.search).get('run') || ''"
"""JavaScript for `Blocks.load(js=...)`: the id in `?run=<id>`."""


@dataclass
class Site:
    """One per server. Screens store nothing in it, so that two browsers see the same."""

    settings: Settings
    benches: Benches = field(default_factory=Benches)
    jobs: Jobs = field(default_factory=Jobs)
    idle: list[Callable[[], object]] = field(default_factory=list)
    """What ends idle processes of screens that hold a part of a GPU."""

    def make_room(self) -> None:
        """Gives what this server holds of a GPU to a run that is about to start, which plans with what is free."""
        self.jobs.stop(SIGNAL)
        self.benches.close_heavy()
        for end in self.idle:
            end()

    @property
    def store(self) -> RunStore:
        return RunStore(self.settings.root)

    def run(self, run_id: Any) -> RunDir:
        """The run of an id that a browser sent. Raises `RunError`; a path is no id, and a link leads elsewhere."""
        run = self.store.open(run_id if isinstance(run_id, str) else "")
        if run.path.is_symlink():
            raise RunError(
                f"'{run.id}' is a link to another folder, and the page shows what lies in {self.settings.root} itself. "
                "Start it with --root FOLDER for runs elsewhere, or move the run here."
            )
        return run

    def statuses(self) -> list[tuple[RunDir, dict[str, Any]]]:
        """All runs that can be opened here with their status, the latest first. Raises `RunError`."""
        return [(run, status) for run, status in self.store.statuses() if not run.path.is_symlink()]

    def runs(self) -> list[RunDir]:
        """Those runs alone. Raises `RunError`."""
        return [run for run, _ in self.statuses()]

    def choices(self, wanted: Any, first: Callable[[RunDir, dict[str, Any]], bool]) -> gr.Dropdown:
        """The list of runs: those that `first(run, status)` names above the others; chosen is `wanted`, else the uppermost."""
        try:
            runs = sorted(self.statuses(), key=lambda pair: not first(*pair))
        except RunError:
            runs = []
        ids = [run.id for run, _ in runs]
        return gr.Dropdown(choices=ids, value=wanted if is_id(wanted) else next(iter(ids), None))

    def live(self) -> list[str]:
        """The runs that wait or train. Raises `RunError`."""
        return [run.id for run, status in self.store.statuses() if status["state"] in ALIVE]

    def close(self) -> None:
        """Ends the children of this server; runs go on."""
        self.jobs.close()
        self.benches.close()


def is_id(value: Any) -> bool:
    """Whether a value from a browser has the form of a run id."""
    return isinstance(value, str) and RUN_ID.fullmatch(value) is not None


NO_RUNS = m.empty("No trained model yet", m.join([m.tag("a", "Train one", href="/new"), " first."]))
"""What stands where weights are needed and there is no run at all."""


def has_weights(run: RunDir, status: object = None) -> bool:
    """Whether there is something to chat with or to export."""
    return run.adapter.is_dir() or bool(run.checkpoints)


def run_box() -> gr.Textbox:
    """A box that is not shown: the id of the run that the address names."""
    return gr.Textbox(visible="hidden", elem_classes="hidden-box", label="run")


def to_address(screen: str) -> str:
    """JavaScript for the `input` of a list of runs: a reload, and a link that is passed on, show what is chosen now."""
    return (
        "(chosen) => { const ids = [chosen].flat().filter(Boolean).map(encodeURIComponent).join(','); "
        f"history.replaceState(null, '', '/{screen}' + (ids && '?run=' + ids)); }}"
    )


def address(screen: str, run_id: str | None = None) -> str:
    """`/run?run=<id>`."""
    return f"/{screen}" + (f"?run={run_id}" if run_id is not None else "")


def job_state(job: Job | None, title: str, waiting: str, done: Callable[[Any], str]) -> str:
    """Where a job is: its last line, why it failed, or `done(result)`."""
    if job is None:
        return ""
    if job.state == "running":
        return m.page(m.panel(m.tag("b", title), m.tag("p", m.tag("code", job.line or waiting), class_="dim")))
    if job.state == "done":
        return done(job.result)
    return m.error(job.error) if job.state == "failed" else m.page(m.note("Stopped."))


POLL_SECONDS = 2.0


def stamp(paths: Iterable[Path], extra: object = None) -> str:
    """A text that changes when one of the files does: time and size of each, or its absence."""
    parts = [repr(extra)]
    for path in paths:
        try:
            state = os.stat(path)
            parts.append(f"{state.st_mtime_ns}:{state.st_size}")
        except OSError:
            parts.append("-")
    return "|".join(parts)


def poll(tick: Callable[..., Any], inputs: list[Any], outputs: list[Any]) -> None:
    """Call `tick` every `POLL_SECONDS`, outside the queue."""
    gr.Timer(POLL_SECONDS).tick(tick, inputs, outputs, **QUIET)
