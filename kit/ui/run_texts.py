"""What the Run screen says in words: state and figures, alerts, what is normal now, log, configuration, checkpoints, machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from kit.config import RunConfig
from kit.config.loading import leaves
from kit.report.machine import MEANING, Spending
from kit.report.panels import Numbers
from kit.report.record import read_tree
from kit.runs.files import human_size
from kit.runs.secrets import redact
from kit.runs.store import ALIVE, RunDir, step_of, whole_checkpoints
from kit.ui import markup as m
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
LOG_BYTES = 24_000
"""Of the end of a log, at most: a poll stays small."""
LONGEST_YAML = 2_000_000
"""Letters of config.yaml that are shown, at most."""


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
    return m.page(m.panel(*parts))


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
    counts = Counter(str(event.get("name")) for event in found)
    latest = {str(event.get("name")): event for event in found}
    order = {"error": 0, "warning": 1}

    def rank(event: Event) -> tuple[int, int]:
        step = event.get("step")
        return order.get(str(event.get("severity")), 2), -step if isinstance(step, int) else 0

    ranked = sorted(latest.items(), key=lambda pair: rank(pair[1]))
    notes = [_alert(name, event, counts[name]) for name, event in ranked[:MOST_ALERTS]]
    return m.tag("div", m.join(notes), class_="stack-notes")


def _alert(name: str, event: Event, count: int) -> Markup:
    times = f"step {m.number(event.get('step'))}" + (f", {count} times in all" if count > 1 else "")
    title = m.tag("h4", m.join([TITLES.get(name, name.replace("_", " ").capitalize()), " ", m.tag("small", times)]))
    level = LEVELS.get(str(event.get("severity")), "warn")
    return m.note(title + m.tag("div", str(event.get("message") or ""), class_="more"), level)


def expectation(status: Mapping[str, Any], columns: Mapping[str, Numbers], scored: bool) -> str:
    """What a newcomer might worry about at this point, and need not; '' when there is nothing to say. `scored`: held-out
    scores after the first step are there."""
    state, done = status["state"], _finite(columns.get("step"))
    if state in ("queued", "starting") or (state in ALIVE and not (len(done) and done[-1])):
        return (
            "Before the first step: the model is loaded, and the held-out problems are scored once as it is, so that there is "
            "something to compare with. The first step is the slowest."
        )
    if state not in ALIVE:
        return _afterwards(state, columns, scored)
    if done[-1] < FLAT_STEPS:
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


def log_tail(run: RunDir) -> str:
    """The end of what the run printed."""
    try:
        size = run.log.stat().st_size
        with open(run.log, "rb") as file:
            file.seek(max(0, size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return m.empty("No log yet", "What the run prints stands here as it comes.")
    cut = size > LOG_BYTES
    if cut:
        text = text.partition("\n")[2]
    where = m.tag("small", f"the last {human_size(LOG_BYTES)} of {run.log}" if cut else str(run.log))
    return m.page(where, m.tag("pre", redact(text).strip() or "(nothing printed yet)", class_="log", tabindex="0"))


def configuration(run: RunDir) -> tuple[str, str]:
    """(what was changed from the defaults, data and environment; YAML)."""
    command = f"grpo-kit train {run.config} -o run.id=NAME"
    again = m.tag("div", m.join([m.tag("b", "The same again: "), m.tag("code", command)]), class_="note")
    title, environment = m.tag("h3", "Changed from the defaults"), read_tree(run.env)
    environment.pop("inputs", None)
    found = [
        _folded("Data", read_tree(run.data), 24),
        _folded("Machine, packages, effective trainer arguments", environment, 200),
    ]
    text = run.config.read_text(encoding="utf-8", errors="replace") if run.config.is_file() else ""
    return m.page(again, title, _changed(read_tree(run.config)), *found), redact(text[:LONGEST_YAML])


def _changed(tree: Mapping[str, Any]) -> Markup:
    defaults = dict(leaves(RunConfig().model_dump(mode="json")))
    rows = [
        [m.tag("code", key), shown(value), shown(defaults.get(key)) if key in defaults else "not set"]
        for key, value in leaves(tree)
        if key not in ("run.id", "run.root") and (key not in defaults or defaults[key] != value)
    ]
    return m.table(["key", "this run", "default"], rows) if rows else m.note("Nothing: every key has its default.")


def shown(value: Any) -> str:
    """A value of a configuration in one line."""
    text = redact(value if isinstance(value, str) else json.dumps(value, default=str))
    return text if len(text) <= 160 else f"{text[:159]}…"


def _folded(title: str, found: Mapping[str, Any], most: int) -> Markup:
    """The first `most` leaves of a file, below a title that unfolds them."""
    rows = [[m.tag("code", key), shown(value)] for key, value in leaves(found)][:most]
    return m.tag("details", m.tag("summary", title) + m.table(["", ""], rows)) if found else Markup("")


def checkpoint_table(run: RunDir, evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """Checkpoints with size, score and use."""
    scores = {int(one["step"]): one for one in evaluations.values() if isinstance(one.get("step"), int)}
    best = read_tree(run.path / "best.json").get("step")
    found = run.checkpoints
    usable = whole_checkpoints(found)

    def line(folder: Path, step: str, score: Mapping[str, Any] | None, *marks: Markup) -> list[Any]:
        return [m.tag("code", folder.name), step, _score(score), human_size(_size(folder)), m.join(marks, " ")]

    rows = [line(run.adapter, "result", evaluations.get("after"), m.badge("the run's result", "ok"))]
    rows = rows if run.adapter.is_dir() else []
    for path in reversed(found):
        step = step_of(path)
        marks = [m.badge("best held-out", "ok")] if step == best else []
        if path not in usable:
            marks.append(m.badge("incomplete", "fail"))
        elif path == usable[-1]:
            marks.append(m.badge("resume goes on here", "live"))
        rows.append(line(path, m.number(step), scores.get(step), *marks))
    if not rows:
        return m.empty(
            "No checkpoint yet", "The first comes after run.save_every steps, when you save one now, or at the end."
        )
    return m.page(m.table(["folder", "step", "held-out", "size", ""], rows, numbers={1, 3}))


def _score(scores: Mapping[str, Any] | None) -> str:
    for key in ("greedy_accuracy", "greedy_reward"):
        one = (scores or {}).get(key)
        if isinstance(one, Mapping) and isinstance(one.get("value"), (int, float)):
            return f"{one['value']:.3f} [{m.number(one.get('low'))}, {m.number(one.get('high'))}]"
    return "–"


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def time_spent(spent: Spending | None) -> str:
    """Where the seconds went, as one bar, the largest term with what to change."""
    if spent is None:
        return m.page(
            m.note("This run logged no seconds by phase: it was trained with TRL's own loss, or by an earlier kit.")
        )
    ordered = [phase for phase, seconds in spent.seconds.items() if seconds]
    parts = m.join(
        m.tag("i", "", style=f"width:{100 * spent.share(phase):.2f}%;background:{_color(spent, phase)}", title=phase)
        for phase in ordered
    )
    label = ", ".join(f"{phase} {spent.share(phase):.0%}" for phase in ordered)
    names = m.join(
        m.tag("span", m.join([m.tag("i", "", style=f"background:{_color(spent, phase)}"), f"{phase} ",
                              m.tag("b", f"{spent.share(phase):.0%}")]), title=MEANING[phase])
        for phase in ordered
    )  # fmt: skip
    words = m.tag("h3", spent.words)
    bar = m.tag("div", parts, class_="bar parts", role="img", aria_label=f"Of the time of a step: {label}")
    advice = m.tag("ul", m.join(m.tag("li", text) for text in spent.advice))
    left_out = m.tag("small", "Without the first step, evaluations and the start of the run.")
    return m.page(
        m.panel(words, bar, m.tag("div", names, class_="row keys"), m.tag("b", "What to change"), advice, left_out)
    )


def _color(spent: Spending, phase: str) -> str:
    """As in the chart, which has the phases that were measured."""
    return f"var(--series{1 + list(spent.seconds).index(phase)})"
