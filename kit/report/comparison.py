"""The table of held-out scores before and after, and the same problems answered before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from kit.report import charts, html
from kit.report.record import Record
from kit.report.scale import number
from kit.report.scores import Difference, Scores, difference, estimates
from kit.runs.metrics import last_step, result_of, step_of

SHOWN = 8
LONGEST = 2500
"""Letters of a text that are shown, at most."""


def ends(record: Record) -> tuple[Scores | None, Scores | None, str]:
    """The evaluation before training and that of the run's result, and what the latter is called."""
    first, name = record.evaluations.get("before"), result_of(record.evaluations, last_step(record.metrics))
    if name is None:
        return first, None, "after"
    last = record.evaluations[name]
    step = last.get("step", step_of(name, 0))
    return first, last, name if name == "after" else f"after step {step}"


def scores(record: Record) -> Markup:
    """Before, after, the difference, and whether it can be told from chance."""
    before, after, name = ends(record)
    if not before and not after:
        return html.paragraph(
            "This run has no held-out score: evaluation.before, after and every were off, or not reached.", "note"
        )
    keys = list(dict.fromkeys(key for side in (before, after) for key in estimates(side or {})))
    differences = {key: difference(key, before, after) for key in keys} if before and after else {}
    rows = [_row(key, before or {}, after or {}, differences.get(key)) for key in keys]
    rows += _plain_rows(before or {}, after or {})
    table = html.table(
        ["95 % intervals", "before", name, "difference", "verdict"], rows, numbers=(1, 2, 3), kind="stack"
    )
    beside = html.beside(table, _forest(differences))
    return html.join([*statement(differences), beside, _how(before or after or {}, differences)])


def _row(key: str, before: Scores, after: Scores, change: Difference | None) -> list[str]:
    cells = [key.replace("_", " "), interval(before.get(key)), interval(after.get(key))]
    if change is None:
        return [*cells, "–", "–"]
    return [*cells, signed(change.value, change.low, change.high), change.verdict]


def _plain_rows(before: Scores, after: Scores) -> list[list[str]]:
    rows = []
    names = {"completion_tokens_mean": "completion tokens", "truncated_share": "cut at the limit"}
    for key, label in {**names, "reward_failure_share": "rewards that failed"}.items():
        values = [side.get(key) for side in (before, after)]
        if key == "reward_failure_share" and not any(values):
            continue
        texts = ["–" if v is None else f"{v:.1f}" if key == "completion_tokens_mean" else f"{v:.1%}" for v in values]
        rows.append([label, *texts, "", ""])
    return rows


def statement(differences: Mapping[str, Difference | None]) -> list[Markup]:
    """The main score's difference in one sentence."""
    for key, change in differences.items():
        if change is None:
            continue
        name, size = key.replace("_", " "), signed(change.value, change.low, change.high)
        words = {
            "better": f"The trained model is better: {name} {size}",
            "worse": f"The trained model is worse: {name} {size}",
            "not distinguishable": f"Before and after are not distinguishable with {change.problems} problems: {name} {size}",
        }[change.verdict]
        kind = {"better": "good", "worse": "error"}.get(change.verdict, "warning")
        return [html.notice(f"{words}. {_evidence(change)}", kind)]
    return []


def _evidence(change: Difference) -> str:
    if not change.paired:
        return "The two evaluations cannot be compared problem by problem, which makes the interval wider than need be."
    counts = f"Of the same {change.problems} problems {change.better} became better and {change.worse} worse"
    if change.chance is None:
        return f"{counts}."
    chance = "below 0.0001" if change.chance < 1e-4 else f"{change.chance:.2g}"
    return f"{counts}; chance alone would split them so unevenly with a probability of {chance} (exact McNemar test)."


def _how(scores: Scores, differences: Mapping[str, Difference | None]) -> Markup:
    k = scores.get("k")
    checker = scores.get("checker")
    parts = [
        f"{scores.get('problems', '?')} held-out problems; greedy: one completion each without sampling; pass@1"
        + (f", pass@{k} and maj@{k} from {k} samples each at temperature {scores.get('temperature', '?')}" if k else "")
        + ".",
        f"What is right is said by {checker}." if checker else "",
        "Differences are of the same problems, one by one (bootstrap over problems)."
        if any(change and change.paired for change in differences.values())
        else "",
    ]
    return html.paragraph(" ".join(part for part in parts if part), "note")


def _forest(differences: Mapping[str, Difference | None]) -> Markup:
    rows = [(key.replace("_", " "), d.value, d.low, d.high) for key, d in differences.items() if d is not None]
    if not rows:
        return Markup("")
    return charts.intervals(rows, "Difference, after less before", reference=0.0)


def samples(record: Record) -> Markup:
    """The first held-out problems with what the model said before and after."""
    before, after, name = ends(record)
    sides = {"before": _samples(before), name: _samples(after)}
    prompts = list(dict.fromkeys(key for side in sides.values() for key in side))[:SHOWN]
    if not prompts:
        return html.paragraph("No completions of held-out problems are on record.", "note")
    parts: list[str] = [
        html.paragraph(f"The first held-out problems ({len(prompts)}), not chosen; greedy completions.", "note")
    ]
    for prompt, reference in prompts:
        parts.append(html.paragraph(shorten(prompt), "prompt"))
        if reference is not None:
            parts.append(html.paragraph(f"Reference: {shorten(reference, 400)}", "note"))
        cells = [_answer(which, side.get((prompt, reference))) for which, side in sides.items() if side]
        parts.append(html.grid(cells, "pair"))
    return html.join(parts)


def _samples(scores: Scores | None) -> dict[tuple[str, str | None], Mapping[str, Any]]:
    listed = (scores or {}).get("samples") or []
    return {
        (str(one.get("prompt")), None if one.get("reference") is None else str(one["reference"])): one for one in listed
    }


def _answer(which: str, sample: Mapping[str, Any] | None) -> Markup:
    if sample is None:
        return html.join([html.paragraph(which, "note"), html.paragraph("not on record", "note")])
    reward = sample.get("reward")
    head = which if reward is None else f"{which}, reward {number(reward)}"
    return html.join([html.paragraph(head, "note"), html.pre(shorten(str(sample.get("completion"))))])


def interval(estimate: Any) -> str:
    """`0.915 [0.868, 0.946]`, a dash without a value."""
    if not isinstance(estimate, Mapping) or estimate.get("value") is None:
        return "–"
    bounds = [estimate.get("low"), estimate.get("high")]
    if None in bounds:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]"


def signed(value: float, low: float, high: float) -> str:
    """`+0.845 [+0.790, +0.895]`."""
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]".replace("-", "−")


def shorten(text: str, limit: int = LONGEST) -> str:
    """The beginning of a long text, and how much is missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"
