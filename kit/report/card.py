"""A run at a glance, as a piece of HTML that stands in somebody else's page: the output of a notebook's cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kit.report.page import piece
from kit.report.record import Record, read
from kit.report.run_report import alerts, chart, clock, marks, scores, section, summary
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
        parts = [] if over else [section("progress", _latest(lines))]
        return around(run.id, [*parts, section("printed", lines, over)])
    record = read(run)
    state = str(record.status.get("state"))
    alive = state in ALIVE
    parts = [_alive(record, lines) if alive else summary(record)]
    found = {panel.title: panel for panel in panels(record.metrics, record.evaluations)}
    drawn = [chart(found[title], marks(record)) for title in CHARTS if title in found]
    parts += [piece("parts.html", "grid", drawn)] if drawn else []
    parts += [scores(record)] if record.evaluations and not alive else []
    return around(run.id, [*parts, section("printed", lines, state in ("failed", "interrupted"))])


def around(title: str, parts: Sequence[Markup]) -> str:
    """Pieces below a title, with a style that reaches nothing else on the page; keys and tokens hidden."""
    return redact(section("card", title, Markup("\n").join(parts)))


def _alive(record: Record, lines: Sequence[str]) -> Markup:
    said = _latest(lines)
    step, total, eta = (record.status.get(key) for key in ("step", "total_steps", "eta_seconds"))
    if record.status.get("state") == "queued":
        return piece("parts.html", "notice", f"The run {record.status.get('reason') or 'waits'}.")
    if is_number(step) and is_number(total) and (said is None or said.title == TRAINING):
        left = [f"about {clock(eta)} left"] if is_number(eta) and step < total else []
        rewards = [line["reward"] for line in record.metrics[-1:] if is_number(line.get("reward"))]
        note = " · ".join([*left, *(f"reward {reward:.3f}" for reward in rewards)])
        said = Progress(TRAINING, int(step), int(total), note)
    return section("progress", said) + section("alerts", alerts(record))


def _latest(lines: Sequence[str]) -> Progress | None:
    return next((found for line in reversed(lines) if (found := heard(line))), None)
