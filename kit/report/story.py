"""What happened during a run, in plain words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from kit.report import html
from kit.report.overview import clock
from kit.report.record import Record, Tree
from kit.report.scale import number
from kit.runs.files import human_size
from kit.runs.metrics import is_number

MOST_OF_A_KIND = 12
"""Events of one kind that are listed one by one; more are counted."""
ROUTINE = ("checkpoint", "evaluation", "memory")
"""Kinds of which only the number and the last are told."""


def story(record: Record) -> Markup:
    """Alerts and events by time; routine ones are summed up."""
    told = [*_listed(record), *unfinished_numbers(record)]
    routine = [_routine(kind, [e for e in record.events if e.get("kind") == kind]) for kind in ROUTINE[:2]]
    routine.append(_memory(record))
    sums = html.paragraph(" ".join(filter(None, routine)) or "No checkpoint and no evaluation in between is on record.")
    if not told:
        quiet = html.paragraph("Nothing out of the ordinary was recorded: no alert, no resume, no memory shortage.")
        return html.join([quiet, sums])
    return html.join([html.table(["time", "step", "what happened"], told, numbers=(0, 1)), sums])


def marks(record: Record) -> list[tuple[float, str]]:
    """(step, words) of what stands as a vertical line in the charts."""
    kinds = ("resumed", "early_stop", "rollback", "out_of_memory")
    chosen = [event for event in record.events if event.get("kind") in kinds and is_number(event.get("step"))]
    return [(float(event["step"]), words(event)) for event in chosen[:MOST_OF_A_KIND]]


def _listed(record: Record) -> list[list[str]]:
    start, counts = record.status.get("started"), defaultdict[str, int](int)
    rows = []
    for event in record.events:
        kind = f"{event.get('kind')} {event.get('name', '')}".strip()
        counts[kind] += 1
        if event.get("kind") in ROUTINE or counts[kind] > MOST_OF_A_KIND:
            continue
        when = event.get("time")
        since = clock(max(0.0, when - start)) if is_number(when) and is_number(start) else "–"
        rows.append([since, number(event.get("step"), 9), words(event)])
    more = [(kind, count - MOST_OF_A_KIND) for kind, count in counts.items() if count > MOST_OF_A_KIND]
    rows += [["", "", f"{count} more of '{kind}'"] for kind, count in more if kind not in ROUTINE]
    return rows


def words(event: Tree) -> str:
    """One event as a sentence."""
    phrase = PHRASES.get(str(event.get("kind")))
    if phrase is not None:
        return phrase(event)
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "kind", "step"))
    return f"{event.get('kind')}: {rest}" if rest else str(event.get("kind"))


def _resumed(event: Tree) -> str:
    changes = "; ".join(map(str, event.get("changes") or []))
    if event.get("checkpoint", "") is None:
        changed = f" Changed since then: {changes}." if changes else ""
        return f"Started again from the beginning, as no checkpoint of it was saved.{changed}"
    forced = f" Forced, although this had changed: {changes}." if event.get("forced") else ""
    return f"Resumed from {event.get('checkpoint', 'a checkpoint')}.{forced}"


def _out_of_memory(event: Tree) -> str:
    size = event.get("micro_batch_size")
    return f"Out of memory; went on with micro-batches of {size} completions and the same effective batch."


def _alert(event: Tree) -> str:
    return f"{str(event.get('severity') or 'alert').capitalize()}: {event.get('message') or event.get('name')}"


def _metric(event: Tree) -> str:
    return f"{str(event.get('metric', 'score')).replace('_', ' ')} {number(_number(event.get('value')))}"


def _early_stop(event: Tree) -> str:
    if event.get("cause") == "reward_hacking":
        return f"Stopped: the training reward rose while the held-out score fell ({_metric(event)})."
    return f"Stopped early: {_metric(event)}, no better than at step {event.get('best_step')}."


def _rollback(event: Tree) -> str:
    return f"Went back to the weights of step {event.get('to_step')} ({event.get('checkpoint')})."


PHRASES: dict[str, Callable[[Tree], str]] = {
    "resumed": _resumed,
    "out_of_memory": _out_of_memory,
    "alert": _alert,
    "best": lambda event: f"Best held-out score so far: {_metric(event)}.",
    "early_stop": _early_stop,
    "rollback": _rollback,
}


def unfinished_numbers(record: Record) -> list[list[str]]:
    """A row for every curve in which numbers are missing because they were not finite."""
    rows = []
    for key in ("loss", "grad_norm", "reward", "kl", "entropy"):
        steps = [line.get("step") for line in record.metrics if key in line and line[key] is None]
        if steps:
            rows.append(
                [
                    "",
                    number(_number(steps[0]), 9),
                    f"{key} was not a finite number in {len(steps)} line{'s' * (len(steps) > 1)}.",
                ]
            )
    return rows


def _routine(kind: str, events: list[Tree]) -> str:
    steps = [event["step"] for event in events if is_number(event.get("step"))]
    if not steps:
        return ""
    noun = {"checkpoint": "checkpoint", "evaluation": "evaluation in between"}[kind]
    many = {"checkpoint": "checkpoints", "evaluation": "evaluations in between"}[kind]
    return f"{len(steps)} {noun if len(steps) == 1 else many}, the last at step {number(steps[-1], 9)}."


def _memory(record: Record) -> str:
    last = next((event for event in reversed(record.events) if event.get("kind") == "memory"), {})
    names = {"peak_rss_bytes": "of the process", "peak_gpu_bytes": "of torch on the GPU"}
    peaks = [f"{human_size(last[key])} {name}" for key, name in names.items() if is_number(last.get(key))]
    return f"Most memory: {', '.join(peaks)}." if peaks else ""


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
