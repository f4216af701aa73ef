"""The texts of the Run screen: state and figures, alerts, log, configuration, checkpoints."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from kit.evaluation import alarms
from kit.evaluation.alarms import AlertMonitor
from kit.evaluation.results import interval
from kit.report.panels import Numbers
from kit.report.record import read_tree
from kit.runs.files import duration, human_size
from kit.runs.secrets import redact
from kit.runs.store import ALIVE, RunDir, complete_checkpoints, seconds_worked, step_of
from kit.ui import markup as m
from kit.ui.home import steps
from kit.ui.outcome import course, outcome, progress
from kit.ui.site import address, has_weights

Event = Mapping[str, Any]
TITLES = {
    "zero_spread": "Most groups teach nothing",
    "truncated": "Completions are cut off",
    "length_collapse": "Completions have collapsed",
    "length_explosion": "Completions grow fast",
    "entropy_collapse": "Completions have become copies of each other",
    "kl_spike": "The policy has jumped away from the reference",
    "plateau": "The reward rises, right answers do not",
    "gradient_overflow": "Steps are skipped: the gradient overflows",
    "reward_hacking": "The reward may be hacked: training reward up, held-out score down",
}
LEVELS = {"error": "fail", "warning": "warn", "info": ""}
MOST_ALERTS = 6
LOG_BYTES = 24_000
"""Bytes of a log's end that are shown, so that a poll stays small."""
LONGEST_YAML = 2_000_000
"""Characters of config.yaml that are shown."""


def head(run: RunDir, status: Mapping[str, Any], columns: Mapping[str, Numbers], evaluations: Mapping[str, Any],
         alarms: int, link: bool) -> str:  # fmt: skip
    """Show the result of a run, or its progress, then figures and links. `link`: there is a report."""
    state = str(status["state"])
    title = m.tag("div", m.tag("h2", run.id) + m.state_badge(state), class_="spread")
    rewards = [float(value) for value in _finite(columns.get("reward"))]
    first = progress(status) + course(rewards, alarms) if state in ALIVE else outcome(run, evaluations)
    parts = [title]
    if status.get("reason"):
        level = "fail" if state == "failed" else "warn" if state == "interrupted" else ""
        parts.append(m.note(_reason(run, str(status["reason"])), level))
    if status.get("refused"):
        force = m.tag("code", f"grpo-kit resume {run.id} --force{run.root_option}")
        words = m.tag("p", m.join(["To resume it anyway: ", force]))
        parts.append(m.note(m.tag("h4", "It was not resumed") + m.tag("div", str(status["refused"])) + words, "fail"))
    cells = m.join(
        m.tag("div", m.tag("small", name) + m.tag("div", value, class_="num"))
        for name, value in figures(run, status, columns)
    )
    screens = ("Chat", "Export", "Compare") if has_weights(run) else ()
    links = [m.tag("a", name, href=address(name.lower(), run.id), class_="button") for name in screens]
    if link:
        path = f"/runs/{run.id}/report.html"
        links.append(m.tag("a", "Report", href=path, target="_blank", rel="noopener", class_="button"))
    parts += [first, m.tag("p", m.join(links, " "), class_="row"), m.tag("div", cells, class_="facts")]
    return m.page(m.panel(*parts))


def _reason(run: RunDir, text: str) -> str:
    """Why the run ended, in words; of a crash also the last line that its process printed."""
    last = f"saved at step {step_of(run.checkpoints[-1])}" if run.checkpoints else "nothing was saved"
    if text.startswith("control/stop"):
        return f"Stopped by you; {last}."
    if text.startswith(("SIGTERM", "SIGINT")):
        return f"Stopped at once ({text.partition(':')[0]}); {last}."
    if "crashed with exit code" in text:
        with suppress(OSError):
            lines = [line for line in _tail(run, 4000).splitlines() if line.strip() and "supervisor: " not in line]
            return "\n".join([text, *(redact(line.strip())[:500] for line in lines[-1:])])
    return text


def _tail(run: RunDir, size: int) -> str:
    """Read the end of log.txt. Raises `OSError`."""
    with open(run.log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size).decode("utf-8", "replace")


def figures(run: RunDir, status: Mapping[str, Any], columns: Mapping[str, Numbers]) -> list[tuple[str, str]]:
    """Return the figures of a run: (name, value)."""
    live = status["state"] in ALIVE
    elapsed = seconds_worked(status) if status.get("worked") is not None else None
    pairs = [("started", m.when(status.get("started")))]
    if not live:
        pairs = [("steps", steps(status)), *pairs, ("ended", m.when(status.get("ended"))), ("took", duration(elapsed))]
    rewards = _finite(columns.get("reward"))
    if len(rewards):
        pairs.append(("training reward, mean of last 10", m.number(float(rewards[-10:].mean()))))
    seconds = _finite(columns.get("step_time"))
    if len(seconds):
        pairs.append(("time per step, median of last 20", m.seconds(float(np.median(seconds[-20:])))))
    return pairs


def alerts(events: Sequence[Event], columns: Mapping[str, Numbers]) -> tuple[Markup, int]:
    """Return (alerts as text, number of alerts that still hold), the most severe first; only the latest of each kind.

    Alerts that have lapsed follow in one line.
    """
    raised = [event for event in events if event.get("kind") == "alert"]
    if not raised:
        return Markup(""), 0
    counts = Counter(str(event.get("name")) for event in raised)
    latest = {str(event.get("name")): event for event in raised}
    lapsed = _lapsed(columns, latest)
    order = {"error": 0, "warning": 1}

    def rank(event: Event) -> tuple[int, int]:
        step = event.get("step")
        return order.get(str(event.get("severity")), 2), -step if isinstance(step, int) else 0

    ranked = sorted(
        ((name, event) for name, event in latest.items() if name not in lapsed), key=lambda pair: rank(pair[1])
    )
    notes = [_alert(name, event, counts[name]) for name, event in ranked[:MOST_ALERTS]]
    if lapsed:
        words = "; ".join(
            f"{TITLES.get(name, name).lower()} (step {latest[name].get('step')})" for name in sorted(lapsed)
        )
        notes.append(m.tag("p", f"No longer true: {words}.", class_="dim"))
    return m.tag("div", m.join(notes), class_="stack-notes"), len(ranked)


def _lapsed(columns: Mapping[str, Numbers], names: Collection[str]) -> set[str]:
    """Return the training alerts whose condition no longer holds at the last line of metrics."""
    watch = AlertMonitor()
    needed = [name for keys in alarms.KEYS.values() for name in keys if name in columns] + ["grad_norm"]
    watched = {name: columns[name] for name in needed if name in columns}
    for at in range(max(map(len, watched.values()), default=0)):
        watch.take({name: value for name, values in watched.items() if (value := float(values[at])) == value})
    return {name for name in names if name in alarms.CONDITIONS and name not in watch.holding()} if watched else set()


def _alert(name: str, event: Event, count: int) -> Markup:
    times = f"step {m.number(event.get('step'))}" + (f", {count} times in all" if count > 1 else "")
    title = m.tag("h4", m.join([TITLES.get(name, name.replace("_", " ").capitalize()), " ", m.tag("small", times)]))
    level = LEVELS.get(str(event.get("severity")), "warn")
    return m.note(title + m.tag("div", str(event.get("message") or ""), class_="more"), level)


def _finite(values: Numbers | None) -> Numbers:
    return np.empty(0) if values is None else values[np.isfinite(values)]


def log_tail(run: RunDir) -> str:
    """Show the end of the run's log, in a box that opens at its end."""
    try:
        is_cut = run.log.stat().st_size > LOG_BYTES
        text = _tail(run, LOG_BYTES)
    except OSError:
        return m.empty("No log yet", "The output of the run appears here.")
    if is_cut:
        text = text.partition("\n")[2]
    title = m.tag("small", f"the last {human_size(LOG_BYTES)} of {run.log}" if is_cut else str(run.log))
    lines = m.tag("pre", redact(text).strip() or "(nothing printed yet)")
    return m.page(title, m.tag("div", lines, class_="log", tabindex="0"))


def configuration(run: RunDir) -> Markup:
    """Show the YAML of a run and the command that repeats it, in a fold."""
    command = f"grpo-kit train {run.config} -o run.id=NAME"
    again = m.tag("p", m.join([m.tag("small", "train it again: "), m.tag("code", command)]))
    text = run.config.read_text(encoding="utf-8", errors="replace") if run.config.is_file() else ""
    return m.fold("config.yaml", again, m.tag("pre", redact(text[:LONGEST_YAML]), class_="said"))


def checkpoint_table(run: RunDir, evaluations: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Show the checkpoints with their held-out scores."""
    scores = {int(score["step"]): score for score in evaluations.values() if isinstance(score.get("step"), int)}
    best = read_tree(run.path / "best.json").get("step")
    checkpoints = run.checkpoints
    usable = complete_checkpoints(checkpoints)

    def line(folder: Path, step: str, score: Mapping[str, Any] | None, *marks: Markup) -> list[Any]:
        return [m.tag("code", folder.name), step, _score(score), m.join(marks, " ")]

    rows = [line(run.adapter, "result", evaluations.get("after"), m.badge("the run's result", "ok"))]
    rows = rows if run.adapter.is_dir() else []
    for path in reversed(checkpoints):
        step = step_of(path)
        marks = [m.badge("best held-out", "ok")] if step == best else []
        if path not in usable:
            marks.append(m.badge("incomplete", "fail"))
        elif path == usable[-1]:
            marks.append(m.badge("Resume continues from here", "live"))
        rows.append(line(path, m.number(step), scores.get(step), *marks))
    if not rows:
        return m.fold("Checkpoints", m.note("None yet. The first is saved after run.save_every steps, or at the end."))
    return m.fold("Checkpoints", m.table(["folder", "step", "held-out", ""], rows, numbers={1}))


def _score(scores: Mapping[str, Any] | None) -> str:
    keys = ("greedy_accuracy", "greedy_reward")
    return interval(next((scores[key] for key in keys if key in scores), None)) if scores else "–"
