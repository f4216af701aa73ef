"""What stands above a run's tabs: state, progress, what to do next, alerts in plain words, and what is normal just now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from kit.runs.store import ALIVE, RunDir
from kit.ui import markup as m
from kit.ui.curves import Numbers
from kit.ui.home import phase, steps, time_left
from kit.ui.site import address

Event = Mapping[str, Any]
TITLES = {
    "zero_spread": "Most groups teach nothing",
    "truncated": "Completions are cut off",
    "length_collapse": "Completions have collapsed",
    "length_explosion": "Completions grow fast",
    "entropy_collapse": "Completions have become copies of each other",
    "kl_spike": "The policy has jumped away from the reference",
    "gradient_overflow": "Steps are skipped: the gradient overflows",
    "reward_hacking": "The reward may be hacked: training reward up, held-out score down",
}
LEVELS = {"error": "fail", "warning": "warn", "info": ""}
MOST_ALERTS = 6
FLAT_STEPS = 100
"""Steps within which a flat reward is no bad sign."""
EARLY = (
    "What counts now: groups whose rewards differ, and completions that are not cut off. A loss around 0 is right in GRPO "
    "and tells nothing."
)
EARLY_ALIKE = (
    "But most groups teach nothing so far: all completions of a group got the same reward. If that stays, the problems are "
    "too easy or too hard."
)
UNSCORED = (
    "The training reward is measured on what is trained on. Only the held-out score tells whether it has learned; set "
    "evaluation.every to see it during training."
)
AFTER_UNSCORED = (
    "There is no held-out score after training, so nothing tells whether it has learned more than its training prompts. "
    "Score it with: grpo-kit eval RUN_ID"
)
AFTER_FLAT = (
    "The training reward ends about where it began. Usual reasons: problems too hard or too easy (see groups without a "
    "lesson), too few steps, or too low a learning rate. The signal check on New run tells which."
)


def head(run: RunDir, status: Mapping[str, Any], columns: Mapping[str, Numbers], link: bool) -> str:
    """State, progress, figures, and what can be done with a run in this state. `link`: there is a report to read."""
    step, total, state = status.get("step"), status.get("total_steps"), str(status["state"])
    share = step / total if isinstance(step, int) and isinstance(total, int) and total else 0.0
    title = m.tag("div", m.tag("h2", run.id) + m.state_badge(state), class_="spread")
    level = {"finished": "ok", "failed": "fail", "interrupted": "warn", "stopped": "warn"}.get(state, "")
    cells = m.join(
        m.tag("div", m.tag("small", name) + m.tag("div", value, class_="big"))
        for name, value in figures(run, status, columns)
    )
    parts = [title, m.bar(share, level, f"{share:.0%} done"), m.tag("div", cells, class_="facts")]
    if status.get("reason"):
        parts.append(
            m.note(
                _reason(run, str(status["reason"])),
                "fail" if state == "failed" else "warn" if state == "interrupted" else "",
            )
        )
    if status.get("refused"):
        parts.append(m.note(m.tag("h4", "It was not resumed") + m.tag("div", str(status["refused"])), "fail"))
    parts.append(m.tag("p", _next(run, state, link), class_="row"))
    return m.page(m.card(*parts))


def _reason(run: RunDir, text: str) -> str:
    """The reason of an end; the sentinel's name is no word."""
    if text != "control/stop":
        return text
    if not run.checkpoints:
        return "It was asked to stop before it had made a step."
    return "It was asked to stop, finished its step and saved a checkpoint."


def figures(run: RunDir, status: Mapping[str, Any], columns: Mapping[str, Numbers]) -> list[tuple[str, str]]:
    """Names and values."""
    live = status["state"] in ALIVE
    begun, end = status.get("started"), status.get("ended") or status.get("heartbeat")
    taken = end - begun if isinstance(begun, (int, float)) and isinstance(end, (int, float)) else None
    found = [
        ("step", steps(status)),
        ("phase", phase(status)) if live else ("took", m.duration(taken)),
        ("time left", time_left(status)) if live else ("ended", m.ago(status.get("ended"))),
    ]
    known = _finite(columns.get("reward"))
    if len(known):
        found.append(("reward, mean of last 10", m.number(float(known[-10:].mean()))))
    seconds = _finite(columns.get("step_time"))
    if len(seconds):
        found.append(("a step", m.seconds(float(np.median(seconds[-20:])))))
    return found


def _next(run: RunDir, state: str, link: bool) -> Markup:
    """Links to what comes next."""
    links = []
    if link:
        links.append(m.tag("a", "report.html", href=f"/runs/{run.id}/report.html", target="_blank", rel="noopener"))
    if run.adapter.is_dir() or any(run.checkpoints):
        links += [
            m.tag("a", "Chat with it", href=address("chat", run.id)),
            m.tag("a", "Export it", href=address("export", run.id)),
        ]
    links.append(m.tag("a", "Compare", href=address("compare", run.id)))
    return m.join(links, " ")


def alerts(events: Sequence[Event]) -> Markup:
    """The latest alert of each kind, the gravest first; how often it came."""
    found = [event for event in events if event.get("kind") == "alert"]
    if not found:
        return Markup("")
    latest: dict[str, Event] = {}
    counts: dict[str, int] = {}
    for event in found:
        name = str(event.get("name"))
        latest[name], counts[name] = event, counts.get(name, 0) + 1
    order = {"error": 0, "warning": 1}
    ranked = sorted(latest.items(), key=lambda pair: (order.get(str(pair[1].get("severity")), 2), -_step(pair[1])))
    notes = [_alert(name, event, counts[name]) for name, event in ranked[:MOST_ALERTS]]
    return m.tag("div", m.join(notes), class_="stack-notes")


def _alert(name: str, event: Event, count: int) -> Markup:
    times = f"step {m.number(event.get('step'))}" + (f", {count} times in all" if count > 1 else "")
    title = m.tag("h4", m.join([TITLES.get(name, name.replace("_", " ").capitalize()), " ", m.tag("small", times)]))
    level = LEVELS.get(str(event.get("severity")), "warn")
    return m.note(title + m.tag("div", str(event.get("message") or ""), class_="more"), level)


def _step(event: Event) -> int:
    step = event.get("step")
    return step if isinstance(step, int) else 0


def expectation(status: Mapping[str, Any], columns: Mapping[str, Numbers], scored: bool) -> str:
    """What a newcomer might worry about at this point, and need not; '' when there is nothing to say. `scored`: held-out
    scores after the first step are there."""
    state, steps = status["state"], _last(columns.get("step")) or 0
    if state in ("queued", "starting") or (state in ALIVE and not steps):
        return (
            "Before the first step: the model is loaded, and the held-out problems are scored once as it is, so that there is "
            "something to compare with. The first step is the slowest."
        )
    if state not in ALIVE:
        return _afterwards(state, columns, scored)
    if steps < FLAT_STEPS:
        spread = _finite(columns.get("groups/zero_spread", columns.get("frac_reward_zero_std")))
        alike = len(spread) > 0 and float(spread[-10:].mean()) >= 0.9
        return f"Flat or jumpy for the first {FLAT_STEPS} steps is normal. {EARLY_ALIKE if alike else EARLY}"
    return "" if scored else UNSCORED


def _afterwards(state: str, columns: Mapping[str, Numbers], scored: bool) -> str:
    if state != "finished":
        return ""
    if not scored:
        return AFTER_UNSCORED
    rewards = _finite(columns.get("reward"))
    if len(rewards) >= 20 and float(rewards[-10:].mean() - rewards[:10].mean()) < float(rewards[-10:].std()) + 1e-9:
        return AFTER_FLAT
    return ""


def _finite(values: Numbers | None) -> Numbers:
    return np.empty(0) if values is None else values[np.isfinite(values)]


def _last(values: Numbers | None) -> int | None:
    known = _finite(values)
    return int(known[-1]) if len(known) and math.isfinite(known[-1]) else None
