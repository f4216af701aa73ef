"""Shared by all screens: settings, runs, child processes, the run in the address, polling."""

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
"""Options of an event that shows no progress and has no API.

Gradio's script reports the progress of an event to each of its outputs, which it looks up in the whole page. That took a third
of the loading time of New run. With an empty `show_progress_on` it reports to none."""
QUIET: dict[str, Any] = {"queue": False} | UNSEEN
"""`UNSEEN` outside of the queue, for events that take milliseconds."""
SIGNAL = "kit.planning.signal"
"""The module of the signal check. The keys of its jobs begin with this name."""
RUN_FROM_ADDRESS = "() => new URLSearchParams(window.location.search).get('run') || ''"
"""JavaScript for `Blocks.load(js=...)`: the id in `?run=<id>`."""


@dataclass
class Site:
    """The server's settings and child processes. Screens store nothing in it, so that two browsers see the same."""

    settings: Settings
    benches: Benches = field(default_factory=Benches)
    jobs: Jobs = field(default_factory=Jobs)
    sessions: list[Callable[..., object]] = field(default_factory=list)
    """Functions that end processes of screens, which may hold GPU memory; with `answering=True` also during an answer."""

    def make_room(self) -> None:
        """Free the GPU memory that this server's children hold. A run that is about to start plans with the free memory."""
        self.jobs.stop(SIGNAL)
        self.benches.leave()
        self.end_sessions(answering=True)

    def end_sessions(self, *, answering: bool = False) -> None:
        """End the processes of screens, so that their memory counts as free in a plan and can be used by a job."""
        for end in self.sessions:
            end(answering=answering)

    @property
    def store(self) -> RunStore:
        return RunStore(self.settings.root)

    def run(self, run_id: Any) -> RunDir:
        """Open the run of an id that a browser sent. Raises `RunError` for a path, an unknown id, or a symbolic link."""
        run = self.store.open(run_id if isinstance(run_id, str) else "")
        if run.path.is_symlink():
            raise RunError(
                f"'{run.id}' is a link to another folder, and the page shows what lies in {self.settings.root} itself. "
                "Start it with --root FOLDER for runs elsewhere, or move the run here."
            )
        return run

    def statuses(self) -> list[tuple[RunDir, dict[str, Any]]]:
        """Return all runs with their statuses, latest first, without symbolic links. Raises `RunError`."""
        return [(run, status) for run, status in self.store.statuses() if not run.path.is_symlink()]

    def choices(self, selected: Any, first: Callable[[RunDir, dict[str, Any]], bool]) -> gr.Dropdown:
        """Return the list of runs: those for which `first(run, status)` is true come first. `selected` or the first is chosen."""
        try:
            runs = sorted(self.statuses(), key=lambda pair: not first(*pair))
        except RunError:
            runs = []
        ids = [run.id for run, _ in runs]
        return gr.Dropdown(choices=ids, value=selected if is_id(selected) else next(iter(ids), None))

    def live(self) -> list[str]:
        """Return the ids of runs that train, then of those that wait for a GPU. Raises `RunError`."""
        live = [(status["state"], run.id) for run, status in self.store.statuses() if status["state"] in ALIVE]
        return [name for _, name in sorted(live, key=lambda pair: pair[0] == "queued")]

    def close(self) -> None:
        """End the child processes of this server. Runs continue."""
        self.jobs.close()
        self.benches.close()


def is_id(value: Any) -> bool:
    """Whether a value from a browser is a valid run id."""
    return isinstance(value, str) and RUN_ID.fullmatch(value) is not None


def whole(value: Any, most: int = 100_000_000) -> int:
    """Return a whole number from 0 to `most` for any value that a browser sends."""
    usable = isinstance(value, (int, float)) and value == value and abs(value) < 1e15
    return min(most, max(0, int(value))) if usable else 0


NO_RUNS = m.empty("No trained model yet", m.join([m.tag("a", "Train one", href="/new"), " first."]))
"""Shown by a screen that needs weights if there is no run."""


def has_weights(run: RunDir, status: object = None) -> bool:
    """Whether the run has weights to chat with or to export."""
    return run.adapter.is_dir() or bool(run.checkpoints)


def run_box() -> gr.Textbox:
    """Return a hidden box for the id of the run in the address."""
    return gr.Textbox(visible="hidden", elem_classes="hidden-box", label="run")


def to_address(screen: str) -> str:
    """Return JavaScript for the `input` event of a list of runs: it writes the chosen runs into the address."""
    return (
        "(chosen) => { const ids = [chosen].flat().filter(Boolean).map(encodeURIComponent).join(','); "
        f"history.replaceState(null, '', '/{screen}' + (ids && '?run=' + ids)); }}"
    )


def address(screen: str, run_id: str | None = None) -> str:
    """`/run?run=<id>`."""
    return f"/{screen}" + (f"?run={run_id}" if run_id is not None else "")


def job_state(job: Job | None, title: str, waiting: str, done: Callable[[Any], str]) -> str:
    """Describe a job: its last line while it runs, its error, or `done(result)`."""
    if job is None:
        return ""
    if job.state == "running":
        return m.page(m.panel(m.tag("b", title), m.tag("p", m.tag("code", job.line or waiting), class_="dim")))
    if job.state == "done":
        return done(job.result)
    return m.error(job.error) if job.state == "failed" else m.page(m.note("Stopped."))


POLL_SECONDS = 2.0


def stamp(paths: Iterable[Path], extra: object = None) -> str:
    """Return a text that changes if one of the files does: it has the time and size of each."""
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
