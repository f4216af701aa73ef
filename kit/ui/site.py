"""What all screens share: options, runs, the warm children, and the run that an address names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from kit.errors import RunError
from kit.runs.store import RUN_ID, RunDir, RunStore
from kit.ui.bench import Benches
from kit.ui.jobs import Jobs
from kit.ui.settings import Settings

RUN_FROM_ADDRESS = "() => new URLSearchParams(window.location.search).get('run') || ''"
"""JavaScript for `Blocks.load(js=...)`: the id in `?run=<id>`."""


@dataclass
class Site:
    """Made once a server; screens keep nothing of their own in it, so that two browsers see the same."""

    settings: Settings
    benches: Benches = field(default_factory=Benches)
    jobs: Jobs = field(default_factory=Jobs)

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

    def close(self) -> None:
        """Ends the children of this server; runs go on."""
        self.jobs.close()
        self.benches.close()


def is_id(value: Any) -> bool:
    return isinstance(value, str) and RUN_ID.fullmatch(value) is not None


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
