"""One run as a comparison sees it: held-out scores problem by problem, and what training took. Reads files only."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kit.config.loading import read_yaml
from kit.errors import ConfigError, RunError
from kit.evaluation.heldout import GENERATION
from kit.evaluation.problems import problem_scores
from kit.evaluation.selection import course, value_of
from kit.runs.curves import Point, is_number, points, result_of
from kit.runs.store import RunDir, RunStore
from kit.studies.paired import Floats

SETTINGS = ("checker", "temperature", "seed")
"""What must be the same for scores to mean the same; `k`, too, where completions were sampled."""


@dataclass(frozen=True)
class Quantity:
    """Something that training took or did, one number a run."""

    name: str
    unit: str
    keys: tuple[str, ...]
    """What it is called in metrics.jsonl; the first that is found counts."""


QUANTITIES = (
    Quantity("training reward", "mean of the last half", ("reward",)),
    Quantity("completion length", "tokens, mean of the last half", ("completions/mean_length",)),
    Quantity("entropy", "nats per token, mean of the last half", ("entropy",)),
    Quantity("KL", "nats per token, mean of the last half", ("kl", "kl/k3", "kl/k1", "kl/k2", "kl/abs")),
    Quantity("time a step", "seconds, mean without the first step", ("step_time",)),
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
    """Value a problem by quantity: {"greedy_accuracy": {problem: 1.0, ...}}. Problems are content hashes, numbered."""
    series: dict[str, list[Point]] = field(default_factory=dict)
    """(step, value) by the name of a quantity."""
    heldout: dict[str, list[Point]] = field(default_factory=dict)
    """(step, value) by the name of a held-out score."""
    totals: dict[str, float] = field(default_factory=dict)
    data_hash: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    """How the evaluation's completions were generated; of the run's configuration where the evaluation does not say."""

    def tail(self, name: str) -> list[Point]:
        """What a quantity is judged by: the last half of training; for times every step but the first."""
        series = self.series.get(name, [])
        return series[1:] or series if name == "time a step" else series[len(series) // 2 :]

    def scalar(self, name: str) -> float | None:
        """One number for the run; None where it has none."""
        if name in self.totals:
            return self.totals[name]
        tail = self.tail(name)
        return statistics.fmean(value for _, value in tail) if tail else None


Arms = Mapping[str, Sequence[RunScores]]
"""Runs by the name of their arm; the first arm is the baseline."""


def read_run(run_id: str, root: str | Path = "runs", evaluation_name: str | None = None) -> RunScores:
    """A run with its last evaluation, or the one of that name (`again`). Raises `RunError` when there is none."""
    run = RunStore(root).open(run_id)
    config, evaluation, metrics = read_yaml(run.config), last_evaluation(run, evaluation_name), run.metrics()
    series = {quantity.name: points(metrics, *quantity.keys) for quantity in QUANTITIES}
    return RunScores(
        id=run.id,
        seed=int(config.get("run", {}).get("seed", 0)),
        state=str(run.status()["state"]),
        config=config,
        step=int(evaluation.get("step") or 0),
        settings={name: evaluation.get(name) for name in (*SETTINGS, "k")},
        columns=_columns(evaluation),
        series={name: line for name, line in series.items() if line},
        heldout=_heldout(run),
        totals=_totals(run, series["time a step"]),
        data_hash=_data_hash(run),
        generation=_generation(evaluation, config),
    )


def matrix(arms: Arms, metric: str) -> tuple[list[str], dict[str, Floats]]:
    """Problems that all runs share, and by arm the scores (runs, problems). Raises `ConfigError` for fewer than 2."""
    runs = [run for runs_of in arms.values() for run in runs_of]
    shared = set.intersection(*(set(run.columns.get(metric, {})) for run in runs))
    problems = [key for key in runs[0].columns.get(metric, {}) if key in shared]
    if len(problems) < 2:
        raise ConfigError(
            f"The runs share {len(problems)} held-out problems with a {metric}; a comparison needs the same ones. Train "
            "and evaluate all arms with the same data section, and the same evaluation.prompts."
        )
    return problems, {
        name: np.array([[run.columns[metric][key] for key in problems] for run in runs_of])
        for name, runs_of in arms.items()
    }


def same_seeds(baseline: Sequence[RunScores], arm: Sequence[RunScores]) -> bool:
    """Whether both arms have the same seeds, each once: then run s of one belongs to run s of the other."""
    seeds = [run.seed for run in baseline]
    return seeds == [run.seed for run in arm] and len(set(seeds)) == len(seeds)


def last_evaluation(run: RunDir, name: str | None = None) -> dict[str, Any]:
    """The evaluation of the run's result that has columns by problem, or the one called `name`.

    The result is `after`; without it the evaluation of the latest step, those made by hand included. Raises `RunError`.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(run.eval.glob(f"{name or '*'}.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}. Remove it and evaluate again.") from error
        if isinstance(result.get("per_problem"), dict) and (name or path.stem != "before"):
            found[path.stem] = result
    if not found:
        raise RunError(
            f"Run '{run.id}' has no held-out score to compare: expected eval/{name or 'after'}.json with one entry a problem. "
            "It is written at the end of a run with evaluation.after: true; or score the trained weights now: "
            f"grpo-kit eval {run.id}"
        )
    last = max(found, key=lambda stem: (int(found[stem].get("step") or 0), stem))
    return found[name or result_of({"after": found.get("after", {})}) or last]


def _columns(evaluation: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    table, k = evaluation["per_problem"], int(evaluation.get("k") or 1)
    keys = _numbered(table["id"])
    scores = ("greedy_accuracy", "pass@1", f"pass@{k}", f"maj@{k}", "greedy_reward")
    columns: dict[str, Sequence[float | None]] = {key: problem_scores(evaluation, key) or [] for key in scores}
    columns["held-out length"] = table.get("greedy_tokens") or []
    return {
        name: {
            key: float(value)
            for key, value in zip(keys, values, strict=True)
            if value is not None and math.isfinite(value)
        }
        for name, values in columns.items()
        if len(values) == len(keys) and any(value is not None for value in values)
    }


def _heldout(run: RunDir) -> dict[str, list[Point]]:
    results = course(run)
    return {
        name: [(float(result["step"]), value) for result in results if (value := value_of(result, name)) is not None]
        for name in dict.fromkeys(key for result in results for key in result if isinstance(result[key], Mapping))
    }


def _numbered(ids: Sequence[str]) -> list[str]:
    """Equal problems told apart by their place among their equals: `a`, `b`, `a#2`."""
    seen: Counter[str] = Counter()
    keys = []
    for name in ids:
        seen[name] += 1
        keys.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return keys


def _totals(run: RunDir, step_times: Sequence[Point]) -> dict[str, float]:
    totals = {TOTAL_TIME: sum(value for _, value in step_times)} if step_times else {}
    peaks = [event for event in run.events() if event.get("kind") == "memory"]
    for name, key in ((MEMORY, "peak_rss_bytes"), (GPU_MEMORY, "peak_gpu_bytes")):
        values = [event[key] / 2**20 for event in peaks if is_number(event.get(key))]
        if values:
            totals[name] = max(values)
    return totals


def _generation(evaluation: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    said = evaluation.get("generation")
    settings = said if isinstance(said, dict) else config.get("generation", {})
    return {key: settings[key] for key in GENERATION if key in settings}


def _data_hash(run: RunDir) -> str | None:
    try:
        return str(json.loads(run.data.read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError):
        return None
