"""Compares runs on held-out problems: which arm is better, by how much, and is it significant? Without torch.

`compare_runs` compares existing runs; `kit.studies.arms` trains them from a configuration and changes to it.
`kit.studies.statistics` has the tests. This module also makes the table for the terminal, the page, and the files of a
comparison.

`python -m kit.studies.compare REQUEST` compares in a child process, for the page. The request is {runs: [[ids of an arm], ...]
or [ids], root, metric, evaluation, result}; the result file contains the result of `compare_runs`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kit.errors import ConfigError
from kit.evaluation.results import metric_key
from kit.registry import did_you_mean
from kit.report import charts
from kit.report.page import page, piece
from kit.runs.files import to_json, write_atomic
from kit.runs.store import RUN_ID
from kit.studies.scores import (
    Arms,
    RunScores,
    compare_quantities,
    compare_settings,
    config_differences,
    curves,
    matrix,
    method,
    not_comparable,
    read_run,
    same_seeds,
)
from kit.studies.statistics import detectable, difference, holm

ALPHA = 0.05
BETTER, WORSE, UNCLEAR = "better", "worse", "not distinguishable"
NOT_COMPARABLE = "not comparable"
Named = Mapping[str, Sequence[str]]
FOLDER = "comparisons"
LABELS = {
    "training reward": "reward",
    "completion length": "tokens",
    "entropy": "nats per token",
    "KL": "nats per token",
    "time per step": "seconds",
    "speed": "completion tokens per second",
}
METHOD = (
    "Each difference is paired by held-out problem and, if the arms have the same seeds, by seed. Its interval covers the "
    "variance between seeds and between problems; with one seed only the latter. The verdict is 'better' or 'worse' if p, "
    "corrected for the number of arms (Holm), is below 0.05. All other differences are for information: their intervals are "
    "not corrected for their number."
)


def compare_runs(
    runs: Sequence[str | Sequence[str]] | Named,
    root: str | Path = "runs",
    *,
    metric: str | None = None,
    evaluation: str | None = None,
) -> dict[str, Any]:
    """Compares arms of one or more runs (seeds) with the first arm. Returns plain numbers for JSON.

    Args:
        runs: run ids, where runs that only differ in the seed are one arm; or lists of ids, one per arm; or lists by the
            arm's name.
        metric: the score of the verdict: greedy_accuracy, pass@1, pass@K or greedy_reward. None: evaluation.metric of the
            first run.
        evaluation: the name of the evaluation to compare, e.g. `again`; None: the last of each run.

    Raises:
        RunError: a run that does not exist or has no held-out scores.
        ConfigError: runs that cannot be compared: other problems, another checker, one arm only.
    """
    arms = group(runs, partial(read_run, root=root, evaluation_name=evaluation))
    chosen = choose_metric(arms, metric)
    warnings = compare_settings(arms, chosen)
    problems, scores = matrix(arms, chosen)
    first, *others = arms
    differences = [
        difference(scores[first], scores[other], paired_seeds=same_seeds(arms[first], arms[other])) for other in others
    ]
    comparisons = []
    for arm, gap, p in zip(others, differences, holm([gap.p for gap in differences]), strict=True):
        reason = not_comparable(arms[first], arms[arm])
        verdict = UNCLEAR if p >= ALPHA else BETTER if gap.value > 0 else WORSE
        comparison = {
            "arm": arm,
            "baseline": first,
            "verdict": verdict if reason is None else NOT_COMPARABLE,
            "reason": reason,
            "difference": {"value": gap.value, "low": gap.low, "high": gap.high},
            "p": gap.p,
            "p_holm": p,
            "standard_error": gap.standard_error,
            "degrees_of_freedom": gap.parts.df,
            "variances": asdict(gap.parts),
            "detectable": detectable(gap.parts, ALPHA / len(others)),
            "scope": "method" if gap.of_the_method else "weights",
        }
        comparisons.append(comparison | {"text": sentence(comparison, chosen)})
    configurations = config_differences(arms)
    most = max(len(run.columns["held-out length"]) for runs_of in arms.values() for run in runs_of)
    left, notes = most - len(problems), []
    if left:
        notes.append(f"{left} of {most} held-out problems are left out, because not every run has a {chosen} for them.")
    if not configurations:
        notes.append("The arms have the same configuration, so any difference is random.")
    return {
        "kind": "comparison",
        "metric": chosen,
        "level": 1 - ALPHA,
        "baseline": first,
        "problems": len(problems),
        "arms": [
            {
                "name": name,
                "runs": [run.id for run in runs_of],
                "seeds": [run.seed for run in runs_of],
                "states": [run.state for run in runs_of],
                "steps": [run.step for run in runs_of],
                "value": float(scores[name].mean()),
                "by_run": [float(value) for value in scores[name].mean(axis=1)],
            }
            for name, runs_of in arms.items()
        ],
        "comparisons": comparisons,
        "quantities": compare_quantities(arms, chosen),
        "config_differences": configurations,
        "curves": curves(arms, chosen),
        "warnings": warnings,
        "notes": notes,
    }


def group(runs: Sequence[str | Sequence[str]] | Named, read: Callable[[str], RunScores]) -> dict[str, list[RunScores]]:
    """Arms by name, each with its runs by seed. Raises `ConfigError` unless there are two or more."""
    parts = list(runs.values()) if isinstance(runs, Mapping) else list(runs)
    ids = [[part] if isinstance(part, str) else list(part) for part in parts]
    names = [name for of_arm in ids for name in of_arm]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(doubled)} occurs twice in the comparison. Name each run once.")
    arms = [[read(name) for name in of_arm] for of_arm in ids]
    if all(isinstance(part, str) for part in parts):
        by_configuration: dict[str, list[RunScores]] = {}
        for (run,) in arms:
            by_configuration.setdefault(json.dumps(method(run.config), sort_keys=True), []).append(run)
        if len(by_configuration) > 1:  # otherwise every run is an arm, to compare A with A
            arms = list(by_configuration.values())
    named = dict(zip(runs, arms, strict=True)) if isinstance(runs, Mapping) else _with_names(arms)
    if len(named) < 2 or not all(named.values()):
        raise ConfigError("A comparison needs two arms with runs: grpo-kit compare RUN_A RUN_B.")
    return {name: sorted(runs_of, key=lambda run: (run.seed, run.id)) for name, runs_of in named.items()}


def _with_names(arms: Sequence[Sequence[RunScores]]) -> dict[str, list[RunScores]]:
    """Names arms by their runs without the seed: `base` for base-s0 and base-s1."""
    named: dict[str, list[RunScores]] = {}
    for runs in filter(None, arms):
        stems = {re.sub(r"-(s|seed)?-?\d+$", "", run.id) for run in runs}
        stem = min(stems) if len(stems) == 1 and len(runs) > 1 else runs[0].id
        named[runs[0].id if stem in named else stem] = list(runs)
    return named


def choose_metric(arms: Arms, metric: str | None) -> str:
    """The score of the verdict. Raises `ConfigError` with the common scores if not all runs have it."""
    runs = [run for runs_of in arms.values() for run in runs_of]
    shared = [name for name in runs[0].columns if all(name in run.columns for run in runs)]
    requested = metric or runs[0].config.get("evaluation", {}).get("metric") or "auto"
    score = metric_key(requested, runs[0].settings["k"], checked="greedy_accuracy" in shared)
    options = [name for name in shared if name != "held-out length"]
    if score not in options:
        raise ConfigError(
            f"Not every run has the score '{score}'.{did_you_mean(score, options)} Common scores: {', '.join(options)}. Choose "
            "one with --metric, or evaluate the runs again with the same settings (grpo-kit eval RUN) and add --evaluation again."
        )
    rewards = {json.dumps(run.config.get("reward"), sort_keys=True) for run in runs}
    if score == "greedy_reward" and len(rewards) > 1:
        raise ConfigError(
            "The arms have different rewards, so their greedy rewards are not on the same scale. Compare by a checker: "
            "set evaluation.checker to a preset that decides correctness, or use --metric greedy_accuracy."
        )
    sampled = score != "greedy_accuracy" and score != "greedy_reward"
    for name in ("checker", *(("k", "temperature", "seed") if sampled else ())):
        values = {str(run.settings[name]) for run in runs}
        if len(values) > 1 and not (name == "checker" and score == "greedy_reward"):
            raise ConfigError(
                f"The runs were scored with different evaluation.{name}: {', '.join(sorted(values))}. Evaluate them again "
                f"with the same value (grpo-kit eval RUN -o evaluation.{name}=...), and compare with --evaluation again."
            )
    return score


def sentence(comparison: Mapping[str, Any], metric: str) -> str:
    """The verdict as a sentence."""
    gap, seeds = comparison["difference"], comparison["variances"]["n_seeds"]
    size = f"{seeds:g} seed{'s' * (seeds != 1)} x {comparison['variances']['n_problems']} problems"
    verdict, pair = comparison["verdict"], f"{comparison['arm']} against {comparison['baseline']}"
    score = metric.replace("_", " ").capitalize()
    if verdict == NOT_COMPARABLE:
        difference = f"{score} differs by {gap['value']:+.3f}, which says nothing here."
        return f"{pair}: not comparable: {comparison['reason']}. {difference}"
    budget = f" at this budget ({size})" if verdict == UNCLEAR else ""
    text = f"{pair}: {verdict}{budget}. {score} {gap['value']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}], "
    text += f"p = {comparison['p_holm']:.2g}."
    if verdict == UNCLEAR and comparison["standard_error"]:
        text += (
            f" With this budget, differences of {comparison['detectable']:.3f} or more are found in 80 % of comparisons; more "
            "seeds or more held-out problems find smaller ones."
        )
    elif verdict == UNCLEAR and gap["value"]:
        text += " Every problem differs by the same amount, so the variance is unknown: use more problems."
    elif verdict == UNCLEAR:
        text += " The arms have equal scores on every problem, so the smallest detectable difference is unknown."
    if comparison["scope"] == "weights":
        text += " With one seed, this holds for these weights, not for the method. Train 3 seeds or more to compare methods."
    return text


def compare_and_file(what: Sequence[str], root: Path, name: str | None, **how: Any) -> tuple[dict[str, Any], Path]:
    """Compares runs by id (`a b`, or `a-s0,a-s1 b-s0,b-s1`), writes comparison.json, and returns its folder."""
    if len(what) == 1 and "," not in what[0]:
        raise ConfigError(
            f"Nothing to compare '{what[0]}' with. Name a second run, or for a configuration a change: "
            f"grpo-kit compare {what[0]} --change section.key=value"
        )
    lists = any("," in word for word in what)
    runs = [[part for part in word.split(",") if part] for word in what] if lists else list(what)
    result = compare_runs(runs, root, **how)
    plain = name or "-vs-".join(arm["name"] for arm in result["arms"])[:64].rstrip("-")
    if not RUN_ID.fullmatch(plain):
        raise ConfigError(
            f"--name {plain}: 1 to 64 lower-case letters, digits and dashes, without a dash at either end."
        )
    folder = root / FOLDER / plain
    write_atomic(folder / "comparison.json", to_json(result, indent=2) + "\n")
    return result, folder


def file_page(result: Mapping[str, Any], folder: Path) -> Path:
    """Writes comparison.html."""
    path = folder / "comparison.html"
    write_atomic(path, comparison_page(result))
    return path


def table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table: the score of the verdict, then other quantities; each arm next to its difference."""
    first, *others = [arm["name"] for arm in result["arms"]]
    head = ["quantity", first, *(cell for other in others for cell in (other, "difference"))]
    estimates = {each["arm"]: each["difference"] for each in result["comparisons"]}
    scores = {arm["name"]: arm["value"] for arm in result["arms"]}
    rows = []
    for row in [{"name": result["metric"], "arms": scores, "differences": estimates}, *result["quantities"]]:
        unit = f" ({row['unit']})" if "unit" in row else ""
        cells = [_plain(row["name"]) + unit, _number(row["arms"][first])]
        for other in others:
            cells += [_number(row["arms"][other]), interval(row["differences"][other])]
        rows.append(cells)
    return head, rows


def comparison_page(result: Mapping[str, Any]) -> str:
    """A self-contained HTML page of a result of `compare_runs`."""
    names = [arm["name"] for arm in result["arms"]]
    rows = [[key, *(str(values[name]) for name in names)] for key, values in result["config_differences"].items()]
    sections = {
        **_sections(result),
        "Configuration": piece("comparison.html", "configuration", names, rows),
        "How to read this": piece("comparison.html", "how_to_read", METHOD, result["notes"]),
    }
    subtitle = f"{_plain(result['metric'])} on {result['problems']} held-out problems"
    return page(" vs ".join(names), sections.items(), subtitle=subtitle)


def at_a_glance(result: Mapping[str, Any]) -> Markup:
    """Verdicts, other differences and curves, for an existing page."""
    return Markup("\n").join(_sections(result).values())


def _sections(result: Mapping[str, Any]) -> dict[str, Markup]:
    metric = _plain(result["metric"])
    gaps = [
        (each["arm"], *(each["difference"][key] for key in ("value", "low", "high"))) for each in result["comparisons"]
    ]
    scores = [
        [
            arm["name"],
            f"{arm['value']:.3f}",
            str(len(arm["runs"])),
            ", ".join(map("{} {:.3f}".format, arm["runs"], arm["by_run"])),
        ]
        for arm in result["arms"]
    ]
    head, (_, *quantities) = table(result)
    curves = [
        charts.lines(series, name[0].upper() + name[1:], "optimiser step", LABELS.get(name, "score"))
        for name, series in result["curves"].items()
    ]
    gap_chart = charts.intervals(gaps, f"Difference in {metric} to the baseline", reference=0.0)
    return {
        "Verdict": piece("comparison.html", "verdicts", result, gap_chart),
        "Scores": piece("parts.html", "table", ["arm", metric, "seeds", "by run"], scores, (1, 2)),
        "What else differs": piece("parts.html", "table", head, quantities, range(1, len(head))),
        "Curves": piece("parts.html", "grid", curves),
    }


def interval(estimate: Mapping[str, float | None]) -> str:
    """`+0.12 [-0.01, +0.25]`, or only the difference if its interval is unknown."""
    value, low, high = (
        None if estimate[key] is None else _number(estimate[key], "+") for key in ("value", "low", "high")
    )
    return f"{value or '-'}" if low is None or high is None else f"{value} [{low}, {high}]"


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    sign = sign if value else ""
    return f"{value:{sign}.0f}" if abs(value) >= 1000 else f"{value:{sign}.3g}"


def _plain(name: str) -> str:
    return str(name).replace("_", " ")


def job(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Compares runs. Raises `KitError` if they cannot be compared."""
    return compare_runs(
        request["runs"], request["root"], metric=request.get("metric"), evaluation=request.get("evaluation")
    )


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(job))
