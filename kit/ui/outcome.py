"""The result of a run as a sentence, a chart and three answers; while it runs, its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kit.report.charts import intervals
from kit.report.record import read_tree
from kit.report.scores import difference, percent, sentence
from kit.runs.files import duration
from kit.runs.metrics import result_of
from kit.runs.store import RunDir, seconds_worked
from kit.ui import markup as m

SHOWN = 3
"""Problems whose answers before and after training are shown."""
LONGEST = 1200
"""Characters of a prompt or an answer that are shown."""
LEVELS = {"better": "ok", "worse": "fail", "not distinguishable": "warn"}
METRICS = ("greedy_accuracy", "greedy_reward")


def outcome(run: RunDir, evaluations: Mapping[str, Any]) -> Markup:
    """Show the result of a run: a sentence, a chart and answers; "" if it was not scored before and after."""
    name = result_of(evaluations)
    if name is None or "before" not in evaluations:
        return Markup("")
    before, after = read_tree(run.eval / "before.json"), read_tree(run.eval / f"{name}.json")
    key = next((key for key in METRICS if key in before and key in after), None)
    change = difference(key, before, after) if key else None
    if key is None or change is None:
        return Markup("")
    headline = m.tag("div", sentence(key, before, after, change), class_="big")
    gap = [percent(key, end, signed=True).replace(" %", "") for end in (change.value, change.low, change.high)]
    unit = " points" if key == "greedy_accuracy" else ""
    interval = Markup("")
    if not change.paired or change.better + change.worse:
        words = f"The difference is {gap[0]}, between {gap[1]} and {gap[2]}{unit} (95 % interval)."
        interval = m.tag("p", words, class_="dim")
    chart = _chart(key, {"before": before[key], "after": after[key]})
    result = m.tag("div", headline + interval + chart, class_=f"verdict {LEVELS[change.verdict]}")
    return result + _answers(before, after)


def _chart(key: str, sides: Mapping[str, Mapping[str, float]]) -> Markup:
    """Draw both scores with their intervals on one axis."""
    share = key == "greedy_accuracy"
    unit = "%" if share else "reward"

    def of(value: float) -> float:
        return float(round(100 * value)) if share else value

    rows = [(name, of(side["value"]), of(side["low"]), of(side["high"])) for name, side in sides.items()]
    return m.tag("div", intervals(rows, f"Held-out problems ({unit})"), class_="svgs")


def _answers(before: Mapping[str, Any], after: Mapping[str, Any]) -> Markup:
    """Show problems with the answer before and after, those whose reward changed most first."""
    old = {_problem(sample): sample for sample in before.get("samples") or []}
    pairs = [(old[_problem(sample)], sample) for sample in after.get("samples") or [] if _problem(sample) in old]
    pairs.sort(key=lambda pair: -abs((pair[1].get("reward") or 0.0) - (pair[0].get("reward") or 0.0)))
    rows = [
        [
            m.tag("div", str(new.get("prompt"))[:LONGEST], class_="said"),
            _answer(old_sample),
            _answer(new),
            m.tag("code", str(new.get("reference"))[:400]) if new.get("reference") is not None else "",
        ]
        for old_sample, new in pairs[:SHOWN]
    ]
    if not rows:
        return Markup("")
    table = m.table(["problem", "before", "after", "right answer"], rows)
    return m.tag(
        "details", m.tag("summary", f"{len(rows)} answers before and after") + table, open="", class_="answers"
    )


def _problem(sample: Mapping[str, Any]) -> tuple[str, str]:
    return str(sample.get("prompt")), str(sample.get("reference"))


def _answer(sample: Mapping[str, Any]) -> Markup:
    text = m.tag("div", str(sample.get("completion") or "(empty)")[:LONGEST], class_="said")
    return text + m.tag("small", f"reward {m.number(sample.get('reward'), 2)}")


def progress(status: Mapping[str, Any]) -> Markup:
    """Show the stages of a live run, its progress and the time left.

    Before the first step the time left is the forecast that the page made when it started the run, if it did.
    """
    step, total = status.get("step"), status.get("total_steps")
    done = step if isinstance(step, int) else 0
    scoring = status.get("phase") == "held-out score"
    is_after = isinstance(total, int) and total > 0 and done >= total
    if scoring and not done:
        at = 1
    elif not scoring and (status["state"] in ("queued", "starting") or total is None):
        at = 0
    else:
        at = 3 if is_after else 2
    step = f"step {done:,} of {total:,}" if isinstance(total, int) else "steps"
    names = ["loading", "scoring before", step, "scoring after"]
    if scoring and at == 2:
        names[at] += ", scoring"
    if scoring and isinstance(status.get("phase_done"), int) and isinstance(status.get("phase_total"), int):
        names[at] += f" {status['phase_done']:,} of {status['phase_total']:,}"
    stages = m.join(
        m.badge(name, "live" if place == at else "ok" if place < at else "") for place, name in enumerate(names)
    )
    passed = seconds_worked(status)
    left, with_steps = seconds_left(status, done, passed)
    scope = " in all" if with_steps else ", then the steps"
    clock = f"{duration(left)} left{scope}" if left > 0 else "time left: not known yet"
    clock = ("ends after this step" if at else "ends soon") if status["state"] == "stopping" else clock
    clock = str(status.get("reason") or "waits for a GPU") if status["state"] == "queued" else clock
    words = m.tag("p", m.join([m.tag("b", clock), f" · running for {duration(passed)}" * (passed >= 1)]), class_="num")
    share = passed / (passed + left) if with_steps and left > 0 else 0.0
    return m.tag("div", stages, class_="row") + m.bar(share, label=f"{share:.0%} done") + words


def seconds_left(status: Mapping[str, Any], done: int, passed: float) -> tuple[float, bool]:
    """Return (seconds until the end, 0.0 if unknown; whether they include the steps) after `done` steps."""
    left = status.get("eta_seconds")
    left = float(left) if isinstance(left, (int, float)) else 0.0
    forecast = status.get("forecast")
    if done or not isinstance(forecast, Mapping) or "steps" not in forecast:
        return left, bool(done)
    return (left + forecast["steps"] if left else max(0.0, sum(forecast.values()) - passed)), True


def course(rewards: Sequence[float], alarms: int) -> Markup:
    """Show the number of alarms of a live run, or how its training reward has changed."""
    if alarms:
        return m.tag("p", f"{alarms} alarm{'s' * (alarms != 1)}: see below.")
    if len(rewards) < 2:
        return Markup("")
    count = max(1, min(10, len(rewards) // 2))
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    return m.tag("p", f"No alarms. Training reward {first:.2f} at the start, {last:.2f} now.")
