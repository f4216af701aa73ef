"""A run at a glance, as a piece of HTML that stands in somebody else's page: the output of a notebook's cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from markupsafe import Markup

from kit.report import comparison, html, overview, story
from kit.report.record import Record, read
from kit.report.run_report import chart
from kit.runs.metrics import is_number, panels
from kit.runs.secrets import redact
from kit.runs.store import ALIVE, RunDir

CHARTS = ("Reward on training prompts", "Held-out problems solved", "Completion length", "Entropy")
"""The panels of the report that a card has room for."""
TRAINING = "Training"
_PROGRESS = re.compile(r"(?P<title>\S.*?)  (?P<done>\d+)/(?P<total>\d+)  (?P<note>.*)")


@dataclass(frozen=True)
class Progress:
    """A piece of long work: so much done of so much, and what was said of it."""

    title: str
    done: int
    total: int
    note: str = ""


def heard(line: str) -> Progress | None:
    """What a line that a run prints says of its progress: `Training  6/60  0:08  eta 1:09  reward 0.872`."""
    found = _PROGRESS.fullmatch(line.rstrip())
    return Progress(found["title"], int(found["done"]), int(found["total"]), found["note"]) if found else None


def card(run: RunDir, lines: Sequence[str] = (), *, over: bool = False) -> str:
    """The card of a run in whatever state it is, also before it has a directory; `lines` is what it has printed.

    `over`: nothing more will come, also where it never got a directory.
    """
    if not run.path.is_dir():
        parts = [] if over else [_bar(_latest(lines))]
        return around(run.id, [*parts, _said(lines, opened=over)])
    record = read(run)
    state = str(record.status.get("state"))
    alive = state in ALIVE
    parts = [overview.overview(record) if not alive else _alive(record, lines)]
    found = {panel.title: panel for panel in panels(record.metrics, record.evaluations)}
    drawn = [chart(found[title], story.marks(record)) for title in CHARTS if title in found]
    parts += [html.grid(drawn)] if drawn else []
    parts += [comparison.scores(record)] if record.evaluations and not alive else []
    parts.append(_said(lines, opened=state in ("failed", "interrupted")))
    return around(run.id, parts)


def around(title: str, parts: Sequence[str]) -> str:
    """Pieces below a title, with a style that reaches nothing else on the page; keys and tokens hidden."""
    body = html.join([Markup('<p class="name">{}</p>').format(title), *parts])
    return redact(f'<div class="grpo-kit"><style>{_style()}</style>{body}</div>')


@cache
def _style() -> str:
    return resources.files("kit.report").joinpath("card.css").read_text(encoding="utf-8")


def _alive(record: Record, lines: Sequence[str]) -> Markup:
    said, alerts = _latest(lines), overview.alerts(record)
    step, total, eta = (record.status.get(key) for key in ("step", "total_steps", "eta_seconds"))
    if record.status.get("state") == "queued":
        return html.notice(f"The run {record.status.get('reason') or 'waits'}.", "info")
    if is_number(step) and is_number(total) and (said is None or said.title == TRAINING):
        left = [f"about {overview.clock(eta)} left"] if is_number(eta) and step < total else []
        rewards = [line["reward"] for line in record.metrics[-1:] if is_number(line.get("reward"))]
        note = " · ".join([*left, *(f"reward {reward:.3f}" for reward in rewards)])
        said = Progress(TRAINING, int(step), int(total), note)
    return html.join([_bar(said), *alerts])


def _latest(lines: Sequence[str]) -> Progress | None:
    return next((found for line in reversed(lines) if (found := heard(line))), None)


def _bar(progress: Progress | None) -> Markup:
    if progress is None:
        return html.paragraph("Starting: reading the configuration, the data and the model …", "note")
    return Markup(
        '<p class="bar"><b>{}</b> <progress max="{}" value="{}"></progress> {}/{} <span>{}</span></p>'
    ).format(progress.title, max(progress.total, 1), progress.done, progress.done, progress.total, progress.note)


def _said(lines: Sequence[str], *, opened: bool) -> Markup:
    if not lines:
        return Markup("")
    return html.details("What it printed", html.pre("\n".join(line.rstrip("\n") for line in lines)), opened=opened)
