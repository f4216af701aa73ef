"""Reads runs for a comparison: held-out scores by problem, costs of training, and other differences of the arms.

It reads only files: scores, length, entropy, KL, time, memory, configuration, and reasons that weaken a verdict.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kit.config.loading import leaves, read_yaml
from kit.errors import ConfigError, RunError
from kit.evaluation.heldout import GENERATION
from kit.evaluation.results import course, scores_by_problem, value_of
from kit.report.panels import downsample
from kit.runs.files import read_json, read_result
from kit.runs.metrics import Point, is_number, points
from kit.runs.store import RunDir, RunStore
from kit.studies.statistics import Floats, difference, scalar_difference

SETTINGS = ("checker", "temperature", "seed")
"""Settings that must be equal for comparable scores; for sampled completions also `k`."""
NOT_THE_METHOD = (
    "run.id", "run.root", "run.seed", "run.threads", "run.report_to", "run.save_completions", "run.save_every",
    "run.keep_checkpoints",
)  # fmt: skip
MOST_POINTS = 200
SAMPLING = ("top_p", "top_k", "min_p")
"""Keys of `generation` without effect on greedy completions."""


@dataclass(frozen=True)
class Quantity:
    """A quantity of training, one number per run."""

    name: str
    unit: str
    keys: tuple[str, ...]
    """Its names in metrics.jsonl; the first one with values is used."""


QUANTITIES = (
    Quantity("training reward", "mean of the last half", ("reward",)),
    Quantity("completion length", "tokens, mean of the last half", ("completions/mean_length",)),
    Quantity("entropy", "nats per token, mean of the last half", ("entropy",)),
    Quantity("KL", "nats per token, mean of the last half", ("kl", "kl/k3", "kl/k1", "kl/k2", "kl/abs")),
    Quantity("clip fraction", "share of tokens, mean of the last half", ("clip_fraction/region",)),
    Quantity("gradient norm", "before clipping, mean of the last half", ("grad_norm",)),
    Quantity("time per step", "seconds, mean without the first step", ("step_time",)),
    Quantity("speed", "completion tokens per second, mean without the first step", ("tokens/per_second",)),
)
TOTAL_TIME, MEMORY, GPU_MEMORY = "training time", "peak memory", "peak GPU memory"


@dataclass(frozen=True)
class RunScores:
    """A run's last held-out evaluation and its training metrics."""

    id: str
    seed: int
    state: str
    config: dict[str, Any]
    step: int
    settings: dict[str, Any]
    columns: dict[str, dict[str, float]]
    """Values of problems by quantity: {"greedy_accuracy": {problem: 1.0, ...}}. Problems are numbered content hashes."""
    series: dict[str, list[Point]] = field(default_factory=dict)
    """(step, value) by the name of a quantity."""
    heldout: dict[str, list[Point]] = field(default_factory=dict)
    """(step, value) by the name of a held-out score."""
    totals: dict[str, float] = field(default_factory=dict)
    data_hash: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    """Generation settings of the evaluation; from the run's configuration if the evaluation has none."""

    def tail(self, name: str) -> list[Point]:
        """The points of a quantity that count: the last half of training; for times all steps but the first."""
        series = self.series.get(name, [])
        return series[1:] or series if name in ("time per step", "speed") else series[len(series) // 2 :]

    def scalar(self, name: str) -> float | None:
        """The number of the run; None if it has none."""
        if name in self.totals:
            return self.totals[name]
        tail = self.tail(name)
        return statistics.fmean(value for _, value in tail) if tail else None


Arms = Mapping[str, Sequence[RunScores]]
"""Runs by the name of their arm; the first arm is the baseline."""


def read_run(run_id: str, root: str | Path = "runs", evaluation_name: str | None = None) -> RunScores:
    """A run with its last evaluation, or the one of that name (e.g. `again`). Raises `RunError` if there is none."""
    run = RunStore(root).open(run_id)
    config, evaluation, metrics = read_yaml(run.config), last_evaluation(run, evaluation_name), run.metrics()
    series = {quantity.name: points(metrics, *quantity.keys) for quantity in QUANTITIES}
    generation = evaluation.get("generation")
    if not isinstance(generation, dict):
        generation = config.get("generation", {})
    totals = {TOTAL_TIME: sum(value for _, value in series["time per step"])} if series["time per step"] else {}
    peaks, results = [event for event in run.events() if event.get("kind") == "memory"], course(run)
    for name, key in ((MEMORY, "peak_rss_bytes"), (GPU_MEMORY, "peak_gpu_bytes")):
        if values := [event[key] / 2**20 for event in peaks if is_number(event.get(key))]:
            totals[name] = max(values)
    heldout = {
        name: [(float(result["step"]), value) for result in results if (value := value_of(result, name)) is not None]
        for name in dict.fromkeys(key for result in results for key in result if isinstance(result[key], Mapping))
    }
    return RunScores(
        id=run.id,
        seed=int(config.get("run", {}).get("seed", 0)),
        state=str(run.status()["state"]),
        config=config,
        step=int(evaluation.get("step") or 0),
        settings={name: evaluation.get(name) for name in (*SETTINGS, "k")},
        columns=_columns(evaluation),
        series={name: line for name, line in series.items() if line},
        heldout=heldout,
        totals=totals,
        data_hash=read_json(run.data).get("sha256"),
        generation={key: generation[key] for key in GENERATION if key in generation},
    )


def matrix(arms: Arms, metric: str) -> tuple[list[str], dict[str, Floats]]:
    """Problems that all runs share, and by arm the scores (runs, problems). Raises `ConfigError` for fewer than 2."""
    runs = [run for runs_of in arms.values() for run in runs_of]
    shared = set.intersection(*(set(run.columns.get(metric, {})) for run in runs))
    problems = [key for key in runs[0].columns.get(metric, {}) if key in shared]
    if len(problems) < 2:
        raise ConfigError(
            f"The runs share {len(problems)} held-out problems with a {metric}; but a comparison needs at least 2. Train "
            "and evaluate all arms with the same data section, and the same evaluation.prompts."
        )
    return problems, {
        name: np.array([[run.columns[metric][key] for key in problems] for run in runs_of])
        for name, runs_of in arms.items()
    }


def same_seeds(baseline: Sequence[RunScores], arm: Sequence[RunScores]) -> bool:
    """Whether both arms have the same seeds, each once, so that runs can be paired by seed."""
    seeds = [run.seed for run in baseline]
    return seeds == [run.seed for run in arm] and len(set(seeds)) == len(seeds)


def last_evaluation(run: RunDir, name: str | None = None) -> dict[str, Any]:
    """The evaluation of the run's result that has columns by problem, or the one called `name`.

    The result is `after`; without it the evaluation of the latest step, those made by hand included. Raises `RunError`.
    """
    evaluations: dict[str, dict[str, Any]] = {}
    for path in sorted(run.eval.glob(f"{name or '*'}.json")):
        result = read_result(path)
        if isinstance(result.get("per_problem"), dict) and (name or path.stem != "before"):
            evaluations[path.stem] = result
    if not evaluations:
        raise RunError(
            f"Run '{run.id}' has no held-out score to compare: expected eval/{name or 'after'}.json with one entry per problem. "
            "A run with evaluation.after: true writes it at its end. To score the trained weights now: "
            f"grpo-kit eval {run.id}"
        )
    last = max(evaluations, key=lambda stem: (int(evaluations[stem].get("step") or 0), stem))
    return evaluations[name or ("after" if evaluations.get("after") else last)]


def _columns(evaluation: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    names = ("greedy_accuracy", "pass@1", f"pass@{int(evaluation.get('k') or 1)}", "greedy_reward", "held-out length")
    columns = {name: scores_by_problem(evaluation, name) for name in names}
    return {name: scores for name, scores in columns.items() if scores}


def compare_settings(arms: Arms, metric: str) -> list[str]:
    """Warnings that weaken the verdict: other seeds or steps, unfinished runs, other completion lengths in evaluations."""
    runs = [run for runs_of in arms.values() for run in runs_of]
    seeds = [sorted(run.seed for run in runs_of) for runs_of in arms.values()]
    notes = generation_differences(arms, metric)
    if any(other != seeds[0] for other in seeds):
        notes.append("The arms have different seeds, so the comparison is paired by problem but not by seed.")
    steps = sorted({run.step for run in runs})
    if len(steps) > 1:
        notes.append(f"The scores are of different steps ({', '.join(map(str, steps))}).")
    if unfinished := [f"{run.id} ({run.state})" for run in runs if run.state != "finished"]:
        notes.append(f"Not every run finished: {', '.join(unfinished)}.")
    return notes


def generation_differences(arms: Arms, metric: str) -> list[str]:
    """Warnings about evaluations with different generation settings, if the arms' configurations differ in them.

    Raises `ConfigError` if the configurations do not: then evaluations were repeated with other settings.
    """
    runs = [run for runs_of in arms.values() for run in runs_of]
    warnings = []
    for key in dict.fromkeys(key for run in runs for key in run.generation):
        values = {str(run.generation.get(key)) for run in runs}
        if len(values) < 2 or (metric.startswith("greedy") and key in SAMPLING):
            continue
        if any(run.generation.get(key) != run.config.get("generation", {}).get(key) for run in runs):
            raise ConfigError(
                f"The runs were scored with different generation.{key}: {', '.join(sorted(values))}. Evaluate them again with "
                f"the same (grpo-kit eval RUN -o generation.{key}=...), and compare with --evaluation again."
            )
        warnings.append(
            f"The arms' own generation.{key} differs ({', '.join(sorted(values))}), and held-out completions use it: "
            f"the difference includes its effect. To evaluate all runs alike: grpo-kit eval RUN -o generation.{key}=... "
            "for every run, then compare with --evaluation again."
        )
    return warnings


def not_comparable(baseline: Sequence[RunScores], arm: Sequence[RunScores]) -> str | None:
    """Why a verdict on these runs is impossible; None if it is possible."""
    if len({run.data_hash for run in (*baseline, *arm)}) < 2:
        return None
    return (
        "the runs were trained on different data, so that one run may have trained on held-out problems of another. "
        "Train all arms with the same data section"
    )


def compare_quantities(arms: Arms, metric: str) -> list[dict[str, Any]]:
    """All common quantities, with the difference of each arm to the first and its 95 % interval if known.

    These intervals are not corrected for their number; the verdict depends only on the metric.
    """
    runs = [run for runs_of in arms.values() for run in runs_of]
    shared = [name for name in runs[0].columns if all(name in run.columns for run in runs)]
    rows = [_scored(arms, name) for name in shared if name != metric]
    names = [(quantity.name, quantity.unit) for quantity in QUANTITIES]
    names += [(TOTAL_TIME, "seconds, sum of steps"), (MEMORY, "MiB, process"), (GPU_MEMORY, "MiB, torch")]
    rows += [_scalar(arms, name, unit) for name, unit in names]
    return [row for row in rows if row is not None]


def _scored(arms: Arms, name: str) -> dict[str, Any] | None:
    try:
        _, scores = matrix(arms, name)
    except ConfigError:  # too few common problems
        return None
    first, *others = scores
    paired = {other: same_seeds(arms[first], arms[other]) for other in others}
    differences = {other: difference(scores[first], scores[other], paired_seeds=paired[other]) for other in others}
    return {
        "name": name,
        "unit": "tokens, greedy" if name == "held-out length" else "held-out score",
        "arms": {arm: float(values.mean()) for arm, values in scores.items()},
        "differences": {arm: {"value": d.value, "low": d.low, "high": d.high} for arm, d in differences.items()},
    }


def _scalar(arms: Arms, name: str, unit: str) -> dict[str, Any] | None:
    values = {arm: [run.scalar(name) for run in runs] for arm, runs in arms.items()}
    known = {arm: [value for value in of_arm if value is not None] for arm, of_arm in values.items()}
    if any(len(known[arm]) < len(values[arm]) for arm in values):
        return None
    first, *others = arms
    means, differences = {arm: statistics.fmean(of_arm) for arm, of_arm in known.items()}, {}
    for other in others:  # with an interval over seeds if both arms have two
        interval: tuple[float, float | None, float | None] = (means[other] - means[first], None, None)
        if min(len(known[first]), len(known[other])) > 1:
            interval = scalar_difference(known[first], known[other], paired=same_seeds(arms[first], arms[other]))
        differences[other] = dict(zip(("value", "low", "high"), interval, strict=True))
    return {"name": name, "unit": unit, "arms": means, "differences": differences}


def curves(arms: Arms, metric: str) -> dict[str, dict[str, list[Point]]]:
    """The mean over seeds by quantity and arm, at each common step of its runs, at most 200 points."""
    heldout = f"held-out {metric.replace('_', ' ')}"
    drawn: dict[str, dict[str, list[Point]]] = {}
    for name in (heldout, *(quantity.name for quantity in QUANTITIES)):
        for arm, runs in arms.items():
            lines = [run.heldout.get(metric, []) if name == heldout else run.series.get(name, []) for run in runs]
            by_step = [dict(line) for line in lines]
            steps = sorted(set.intersection(*map(set, by_step)))
            if means := [(step, statistics.fmean(line[step] for line in by_step)) for step in steps]:
                places = downsample(np.array([value for _, value in means]), MOST_POINTS)
                drawn.setdefault(name, {})[arm] = [means[place] for place in places]
    return drawn


def method(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as flat keys, without those that do not change training: id, seed, folders, trackers."""
    return {key: value for key, value in leaves(config) if key not in NOT_THE_METHOD}


def config_differences(arms: Arms) -> dict[str, dict[str, Any]]:
    """Keys in which the arms' configurations differ, with the value of each arm; null if an arm does not have the key."""
    flat = {arm: method(runs[0].config) for arm, runs in arms.items()}
    keys = dict.fromkeys(key for tree in flat.values() for key in tree)
    return {
        key: {arm: tree.get(key) for arm, tree in flat.items()}
        for key in keys
        if any(tree.get(key) != next(iter(flat.values())).get(key) for tree in flat.values())
    }
