"""How a run ended, in words, and its main figures."""

from __future__ import annotations

import time
from typing import Any

from markupsafe import Markup

from kit.report import html
from kit.report.record import Record
from kit.report.scale import number
from kit.runs.metrics import is_number, last_step, placed, points, result_of

MOST_ALERTS = 4
LAST = 10
"""Steps over which the reward at the end is averaged."""
STATES = {
    "queued": ("info", "waits for its turn"),
    "starting": ("info", "is starting"),
    "running": ("info", "is running; what follows is what there was when this report was made"),
    "stopping": ("info", "is about to stop; what follows is what there was when this report was made"),
    "finished": ("good", "ran to its end"),
    "stopped": ("warning", "was stopped before its end"),
    "failed": ("error", "failed"),
    "interrupted": ("error", "was interrupted: its process ended without a word"),
}


def subtitle(record: Record) -> str:
    """Model, data, reward and objective in one line."""
    said = (
        record.value("model.name"),
        record.data.get("source") or record.value("data.source"),
        reward_name(record),
        record.value("objective.recipe"),
    )
    names = ("model", "data", "reward", "objective")
    parts = [f"{name} {value}" for name, value in zip(names, said, strict=True) if value]
    return " · ".join(parts)


def reward_name(record: Record) -> str:
    """The preset and the functions that are rewarded."""
    functions = record.value("reward.functions") or []
    own = [str(each.get("path")) for each in functions if isinstance(each, dict)]
    return " + ".join([*filter(None, [record.value("reward.preset")]), *own])


def overview(record: Record) -> Markup:
    """The state with its reason, what could not be read, and tiles with the main figures."""
    kind, words = STATES.get(str(record.status.get("state")), ("warning", f"is '{record.status.get('state')}'"))
    reason = record.status.get("reason")
    end = f"This run {words}{_progress(record)}." + (f" Reason: {_sentence(reason)}" if reason else "")
    parts = [html.notice(end, kind)]
    parts += [html.notice(f"{fault} This report does without.", "warning") for fault in record.faults]
    return html.join([*parts, *alerts(record), html.tiles(figures(record))])


def alerts(record: Record) -> list[Markup]:
    """The first alert of each name; all of them stand under Events."""
    alerts = [e for e in record.events if e.get("kind") == "alert" and e.get("severity") in ("warning", "error")]
    first = {alert.get("name"): alert for alert in reversed(alerts)}
    return [
        html.notice(f"Step {alert.get('step', '?')}: {_sentence(str(alert.get('message') or name))}", alert["severity"])
        for name, alert in list(reversed(first.items()))[:MOST_ALERTS]
    ]


def _progress(record: Record) -> str:
    step, total = record.status.get("step"), record.status.get("total_steps")
    if step is None:
        return ", without a step"
    return f" after {number(step, 9)} of {number(total, 9)} steps" if is_number(total) else f" after {step} steps"


def figures(record: Record) -> list[tuple[str, str]]:
    """Labels and values of the tiles."""
    tiles = [("State", str(record.status.get("state")))]
    step, total = record.status.get("step"), record.status.get("total_steps")
    if is_number(step):
        tiles.append(("Optimiser steps", f"{number(step, 9)} / {number(total, 9)}" if total else number(step, 9)))
    if seconds := duration(record):
        tiles.append(("Wall-clock time", clock(seconds)))
    rewards = [value for _, value in points(record.metrics, "reward")]
    if rewards:
        last = rewards[-LAST:]
        tiles.append((f"Reward: first, mean of last {len(last)}", f"{rewards[0]:.3f} → {sum(last) / len(last):.3f}"))
    tiles += _heldout(record)
    tokens = points(record.metrics, "num_tokens")
    if tokens:
        tiles.append(("Tokens seen", number(tokens[-1][1], 9)))
    backend = record.env.get("backend") or {}
    if device := record.env.get("gpu") or backend.get("device"):
        tiles.append(("Device", str(device)))
    if is_number(record.value("run.seed")):
        tiles.append(("Seed", str(record.value("run.seed"))))
    return tiles


def _heldout(record: Record) -> list[tuple[str, str]]:
    scores = [score for _, score in placed(record.metrics, record.evaluations)]
    result = result_of(record.evaluations, last_step(record.metrics))
    if result is not None:  # after a rollback it is not that of the highest step
        scores = [score for score in scores if score is not record.evaluations[result]] + [record.evaluations[result]]
    for key, name in {"greedy_accuracy": "Held-out accuracy", "greedy_reward": "Held-out reward"}.items():
        values = [_value(score.get(key)) for score in scores]
        known = [value for value in values if value is not None]
        if len(known) > 1:
            return [(f"{name}: first, last", f"{known[0]:.3f} → {known[-1]:.3f}")]
        if known:
            return [(name, f"{known[0]:.3f}")]
    return []


def _value(estimate: Any) -> float | None:
    value = estimate.get("value") if isinstance(estimate, dict) else None
    return float(value) if is_number(value) else None


def duration(record: Record) -> float | None:
    """Seconds from the start to the end, or to the last sign of life."""
    start, end = record.status.get("started"), record.status.get("ended") or record.status.get("heartbeat")
    return max(0.0, end - start) if is_number(start) and is_number(end) else None


def clock(seconds: float) -> str:
    """`0:42`, `1:05` or `2:03:10`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def date(seconds: Any) -> str:
    """Day and time, UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if is_number(seconds) else "unknown"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
