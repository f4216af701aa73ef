"""The page of a comparison: verdicts, intervals, curves of the arms over one another, and only what differs in configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.report import charts, html
from kit.report.page import Section, page

LOOK = {"better": "good", "worse": "error", "not distinguishable": "warning", "not comparable": "error"}
LABELS = {
    "training reward": "reward",
    "completion length": "tokens",
    "entropy": "nats per token",
    "KL": "nats per token",
    "time a step": "seconds",
}
METHOD = (
    "Each difference is paired: the same held-out problems and, where the arms have the same seeds, the same seeds. Its error "
    "holds both the luck of the seed and the choice of problems; with one seed only the latter. The verdict is 'better' or "
    "'worse' when p, corrected for the number of arms (Holm), is below 0.05. Everything below the verdict is for reading: "
    "those intervals are not corrected for their number."
)


def comparison_page(found: Mapping[str, Any]) -> str:
    """A self-contained HTML page of what `compare_runs` returned."""
    names = [arm["name"] for arm in found["arms"]]
    metric = str(found["metric"]).replace("_", " ")
    sections = [
        Section("Verdict", _verdicts(found, metric)),
        Section("Scores", _scores(found, metric)),
        Section("What else differs", _quantities(found)),
        Section("Curves", _curves(found)),
        Section("Configuration", _configuration(found, names)),
        Section("How to read this", html.join([html.paragraph(METHOD), *map(html.paragraph, found["notes"])])),
    ]
    return page(" vs ".join(names), sections, subtitle=f"{metric} on {found['problems']} held-out problems")


def at_a_glance(found: Mapping[str, Any]) -> str:
    """Verdicts, what else differs, and curves: the page without its frame, for a page that stands already."""
    metric = str(found["metric"]).replace("_", " ")
    return html.join([_verdicts(found, metric), _scores(found, metric), _quantities(found), _curves(found)])


def _verdicts(found: Mapping[str, Any], metric: str) -> str:
    lines = [html.notice(warning, "warning") for warning in found["warnings"]]
    lines += [html.notice(each["text"], LOOK[each["verdict"]]) for each in found["comparisons"]]
    rows = [(each["arm"], *_estimate(each["difference"])) for each in found["comparisons"]]
    chart = charts.intervals(rows, f"Difference in {metric} to {found['baseline']}", reference=0.0)
    return html.join([*lines, html.grid([chart])])


def _estimate(estimate: Mapping[str, float]) -> tuple[float, float, float]:
    return estimate["value"], estimate["low"], estimate["high"]


def _scores(found: Mapping[str, Any], metric: str) -> str:
    rows = []
    for arm in found["arms"]:
        runs = ", ".join(f"{run} {value:.3f}" for run, value in zip(arm["runs"], arm["by_run"], strict=True))
        rows.append([arm["name"], f"{arm['value']:.3f}", str(len(arm["runs"])), runs])
    return html.table(["arm", metric, "seeds", "by run"], rows, numbers=[1, 2])


def _quantities(found: Mapping[str, Any]) -> str:
    first, *others = [arm["name"] for arm in found["arms"]]
    head = ["quantity", first, *(cell for other in others for cell in (other, "difference"))]
    rows = []
    for row in found["quantities"]:
        cells = [f"{row['name'].replace('_', ' ')} ({row['unit']})", _number(row["arms"][first])]
        for other in others:
            cells += [_number(row["arms"][other]), interval(row["differences"][other])]
        rows.append(cells)
    return html.table(head, rows, numbers=range(1, len(head)))


def interval(estimate: Mapping[str, float | None]) -> str:
    """`+0.12 [-0.01, +0.25]`, or the bare difference where nothing says how sure it is."""
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    text = _number(value, signed=True)
    return (
        text if low is None or high is None else f"{text} [{_number(low, signed=True)}, {_number(high, signed=True)}]"
    )


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    sign = "+" if signed and value else ""
    return f"{value:{sign}.0f}" if abs(value) >= 1000 else f"{value:{sign}.3g}"


def _curves(found: Mapping[str, Any]) -> str:
    return html.grid(
        charts.lines(series, name[0].upper() + name[1:], "optimiser step", LABELS.get(name, "score"))
        for name, series in found["curves"].items()
    )


def _configuration(found: Mapping[str, Any], names: list[str]) -> str:
    rows = [[key, *(str(values[name]) for name in names)] for key, values in found["config_differences"].items()]
    if not rows:
        return html.paragraph("The arms have the same configuration, seeds aside.")
    return html.table(["key", *names], rows)
