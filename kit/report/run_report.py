"""The report of one run: a single HTML file that can be read anywhere and attached to a paper."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kit.report import charts, comparison, groups, html, overview, setting, story
from kit.report.page import Section, page
from kit.report.record import Record, read
from kit.runs.files import write_atomic
from kit.runs.metrics import Panel, panels
from kit.runs.secrets import redact
from kit.runs.store import RunDir

NAME = "report.html"


def write_report(run: RunDir, path: str | Path | None = None, *, ending: Mapping[str, Any] | None = None) -> Path:
    """Writes the report of a run in whatever state it is; to `report.html` in its directory unless `path` is given.

    `ending` is what its status is about to say. Missing or damaged files of the run are named in the report. Raises
    `RunError` when the file cannot be written.
    """
    target = run.path / NAME if path is None else Path(path)
    record = read(run)
    if ending is not None:
        record.status.update(ending)
    write_atomic(target, render(record))
    return target


def render(record: Record) -> str:
    """The report as HTML, keys and tokens hidden."""
    parts: dict[str, Callable[[Record], Markup]] = {
        "Summary": overview.overview,
        "Held-out scores": comparison.scores,
        "Curves": curves,
        "Samples": comparison.samples,
        "Training completions": groups.groups,
        "Events": story.story,
        "Configuration": setting.configuration,
        "Data": setting.data,
        "Environment": setting.environment,
        "Reproduce": setting.reproduce,
        "About this report": _about,
    }
    sections = [Section(title, _part(make, record)) for title, make in parts.items()]
    return redact(page(record.id, sections, subtitle=overview.subtitle(record)))


def _part(make: Callable[[Record], Markup], record: Record) -> Markup:
    """A section; where the run's files hold what no run writes, words in its place."""
    try:
        return make(record)
    except Exception as error:  # whatever is odd in one file, the others are shown
        return html.notice(f"This part cannot be made of the run's files: {type(error).__name__}: {error}", "error")


def curves(record: Record) -> Markup:
    """Every panel that the run has numbers for."""
    found = panels(record.metrics, record.evaluations)
    if not found:
        return html.paragraph("No step is on record, so there is nothing to draw.", "note")
    marks = story.marks(record)
    return html.grid([chart(panel, marks) for panel in found])


def chart(panel: Panel, marks: list[tuple[float, str]]) -> Markup:
    """One panel as SVG."""
    return charts.lines(
        panel.lines,
        panel.title,
        "optimiser step",
        panel.y_label,
        panel.bands,
        whiskers=panel.whiskers,
        marks=marks,
        y_range=(panel.low, panel.high),
        smooth=panel.smooth,
    )


def _about(record: Record) -> Markup:
    made, began = overview.date(time.time()), overview.date(record.status.get("started"))
    return html.paragraph(
        f"Run {record.id}, begun {began}; report made {made} by grpo-kit from the files of the run's directory. Curves of "
        "more than 500 steps are drawn with the lowest and highest value of each stretch, and with a running mean from 150 "
        "steps on. The full numbers are in metrics.jsonl, eval/*.json and completions/*.parquet.",
        "note",
    )
