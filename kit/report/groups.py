"""Training completions by group: what was sampled for one prompt, how it was rewarded, what was learned from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from kit.errors import RunError
from kit.report import html
from kit.report.comparison import shorten
from kit.report.record import Record, rows
from kit.report.scale import number

MOST_ROWS = 16
LONGEST = 1200
Row = dict[str, Any]


def groups(record: Record) -> Markup:
    """One group each of the first, the middle and the last batch on record."""
    if not record.batches:
        return html.paragraph(
            "No training completions are on record: run.save_completions was off, or no step was made.", "note"
        )
    count = len(record.batches)
    chosen = sorted({0, count // 2, count - 1})
    parts: list[str] = [
        html.paragraph(
            "Completions of one prompt are compared with each other: those above their group's mean get a positive advantage "
            "and are made more likely. Shown is the first group of a batch whose rewards differ, or the first if none does.",
            "note",
        )
    ]
    for number_of in chosen:
        parts.append(
            _batch(record.batches[number_of], int(record.value("generation.num_generations") or 0), number_of == 0)
        )
    return html.join(parts)


def _batch(path: Path, size: int, opened: bool) -> Markup:
    try:
        table = rows(path)
    except RunError as error:
        return html.notice(f"{error}", "warning")
    found = split(table, size)
    if not found:
        return html.notice(f"{path.name} holds no completion.", "warning")
    index = next((i for i, group in enumerate(found) if _differ(group)), 0)
    summary = f"Step {table[0].get('step', '?')}, group {index + 1} of {len(found)}"
    return html.details(summary, _group(found[index]), opened=opened)


def split(table: list[Row], size: int) -> list[list[Row]]:
    """Rows by group: `size` at a time, or neighbours with the same prompt where that does not fit."""
    if size > 0 and len(table) % size == 0:
        whole = [table[start : start + size] for start in range(0, len(table), size)]
        if all(len({row.get("prompt") for row in group}) == 1 for group in whole):
            return whole
    found: list[list[Row]] = []
    for row in table:
        if not found or found[-1][0].get("prompt") != row.get("prompt"):
            found.append([])
        found[-1].append(row)
    return found


def _differ(group: list[Row]) -> bool:
    return len({row.get("advantage") for row in group}) > 1


def _group(group: list[Row]) -> Markup:
    shown, first = group[:MOST_ROWS], group[0]
    names = [key.removeprefix("reward/") for key in first if key.startswith("reward/") and key.count("/") == 1]
    head = ["completion", "advantage", *names, "tokens", "ended"]
    body = [[_text(row), _advantage(row), *(_component(row, name) for name in names), *_end(row)] for row in shown]
    parts: list[str] = [html.paragraph(shorten(str(first.get("prompt")), LONGEST), "prompt")]
    if first.get("reference") is not None:
        parts.append(html.paragraph(f"Reference: {shorten(str(first['reference']), 400)}", "note"))
    parts.append(html.table(head, body, numbers=(1,), kind="stack wide"))
    if len(group) > len(shown):
        parts.append(html.paragraph(f"{len(group) - len(shown)} more completions of this group are not shown.", "note"))
    return html.join(parts)


def _text(row: Row) -> Markup:
    return html.pre(shorten(str(row.get("completion")), LONGEST))


def _advantage(row: Row) -> str:
    value = row.get("advantage")
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")


def _component(row: Row, name: str) -> str:
    """A component's value with its status where there is more to say than ok or wrong."""
    value, status = row.get(f"reward/{name}"), row.get(f"reward/{name}/status")
    text = number(value)
    return text if status in (None, "ok", "wrong") else f"{text} ({status})"


def _end(row: Row) -> list[str]:
    ended = {"stop": "by itself", "length": "cut at the limit"}
    return [number(row.get("tokens"), 6), ended.get(str(row.get("finish_reason")), str(row.get("finish_reason")))]
