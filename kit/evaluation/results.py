"""Evaluations on disk: scores by problem, the best evaluation so far, and the number of evaluations since.

Everything is computed from files, so that a resumed run decides like an uninterrupted one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import RunError
from kit.evaluation.statistics import pass_at_k
from kit.runs.files import read_result

if TYPE_CHECKING:
    from kit.runs.store import RunDir

RECORDED = {"greedy_accuracy": "greedy_correct", "greedy_reward": "greedy_reward", "held-out length": "greedy_tokens"}


def problem_scores(result: Mapping[str, Any], key: str) -> list[float | None] | None:
    """Return the score `key` of every problem (None if its reward failed), or None if the result has no such column.

    `key` is greedy_accuracy, greedy_reward, held-out length, or pass@N with N up to the K samples of a problem.
    """
    table, k = result.get("per_problem") or {}, int(result.get("k") or 0)
    if key.startswith("pass@"):
        drawn, n = table.get("sampled_correct"), int(key.removeprefix("pass@"))
        return None if drawn is None or n > k else [pass_at_k(k, count, n) for count in drawn]
    values = table.get(RECORDED.get(key, ""))
    return None if values is None else [None if value is None else float(value) for value in values]


Result = Mapping[str, Any]
BEST_FILE = "best.json"


def metric_key(metric: str, k: int, *, checked: bool) -> str:
    """Return the key of an evaluation's result for `evaluation.metric`; `checked` says that there is a checker."""
    if metric == "auto":
        return "greedy_accuracy" if checked else "greedy_reward"
    return f"pass@{k}" if metric == "pass@k" else metric


def value_of(result: Result, key: str) -> float | None:
    """Return the score, or None if this evaluation has none."""
    estimate = result.get(key)
    value = estimate.get("value") if isinstance(estimate, Mapping) else None
    return float(value) if value is not None and math.isfinite(value) else None


def interval(estimate: Any) -> str:
    """Format an estimate as `0.915 [0.868, 0.946]`, or as a dash without a value."""
    if not isinstance(estimate, Mapping) or estimate.get("value") is None:
        return "–"
    bounds = [estimate.get("low"), estimate.get("high")]
    if None in bounds:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]"


def scores_by_problem(result: Result, key: str) -> dict[str, float]:
    """Return the score of each problem by its id, without problems whose reward failed.

    Equal problems are numbered: `a`, `b`, `a#2`.
    """
    ids, values = (result.get("per_problem") or {}).get("id", []), problem_scores(result, key) or []
    repeats, scores = Counter[str](), {}
    for problem, value in zip(ids, values, strict=False):
        repeats[problem] += 1
        if value is not None:
            scores[problem if repeats[problem] == 1 else f"{problem}#{repeats[problem]}"] = value
    return scores


def course(run: RunDir, until: int | None = None) -> list[Result]:
    """Return the evaluations that the run made itself, one per step, in the order of their steps.

    `until` excludes later steps. Evaluations that a user made afterwards are excluded. Raises `RunError` if a file cannot be
    read.
    """
    by_step: dict[int, Result] = {}
    for name, result in run.evaluations().items():
        if name in ("before", "after") or name.removeprefix("step-").isdigit():
            by_step.setdefault(int(result["step"]), result)
    return [by_step[step] for step in sorted(by_step) if until is None or step <= until]


@dataclass(frozen=True)
class Mark:
    """A score and the optimiser step at which it was reached."""

    step: int
    value: float


@dataclass(frozen=True)
class Standing:
    """The best and last scores of a run so far.

    `best` is the highest score, the earliest of equal ones. `best_trained` excludes the evaluation before training, which
    has no checkpoint. `waited` counts the evaluations since `best`.
    """

    best: Mark | None = None
    best_trained: Mark | None = None
    waited: int = 0
    last: Mark | None = None


def standing(results: Sequence[Result], key: str) -> Standing:
    """Return the standing after `results`, in the order of their steps; evaluations without this score are skipped."""
    best = trained = last = None
    waited = 0
    for result in results:
        value = value_of(result, key)
        if value is None:
            continue
        last = Mark(int(result["step"]), value)
        best, waited = (last, 0) if best is None or value > best.value else (best, waited + 1)
        if last.step > 0:
            trained = last if trained is None or value > trained.value else trained
    return Standing(best, trained, waited, last)


def checkpoint_now(run: RunDir, which: str | int | None) -> str | int | None:
    """Return `which`, or `last` instead of None for a live run, which has no result yet."""
    from kit.runs.store import ALIVE

    return "last" if which is None and run.status()["state"] in ALIVE else which


def weights_of(run: RunDir, which: str | int | None) -> tuple[int, Path]:
    """Return step and folder of a run's weights: its result (None), `best`, `last` or a step. Raises `RunError`."""
    from kit.runs.store import is_complete

    by_step = {int(path.name.partition("-")[2]): path for path in run.checkpoints if is_complete(path)}
    there = f"Its checkpoints: {', '.join(map(str, by_step)) or 'none yet'}."
    if which is None:
        if not any((run.adapter / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise RunError(
                f"Run '{run.id}' has no trained weights in {run.adapter}; they are written at its end. {there} "
                "Choose one with --checkpoint (best, last or a step)."
            )
        return int(run.status().get("step") or 0), run.adapter
    if which == "last":
        if not by_step:
            raise RunError(
                f"Run '{run.id}' has no complete checkpoint yet; the first comes after run.save_every steps."
            )
        return max(by_step), by_step[max(by_step)]
    step = read_best(run).get("step") if which == "best" else int(which) if str(which).isdigit() else None
    if which == "best" and step is None:
        raise RunError(
            f"Run '{run.id}' has no best checkpoint: it was not evaluated in between. Set evaluation.every "
            f"before training. {there}"
        )
    if step not in by_step:
        raise RunError(f"Run '{run.id}' has no checkpoint '{which}'. {there} Choose best, last or one of these.")
    return step, by_step[step]


def read_best(run: RunDir) -> dict[str, Any]:
    """Read best.json: step, metric, value, checkpoint. Empty if the file does not exist."""
    path = run.path / BEST_FILE
    return read_result(path) if path.is_file() else {}
