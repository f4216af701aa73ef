"""The curves of a run for report, page and notebook, and downsampling that keeps all peaks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.runs.metrics import Evaluations, Metrics, Point, is_number, placed

Range = tuple[float, float, float]  # (x, low, high)
Numbers = NDArray[np.float64]

MOST_POINTS = 500
"""Maximum number of drawn points of a series."""
SMOOTH_FROM = 150
"""Minimum number of points for a running mean."""
TREND_PARTS = 40
"""The window of the running mean is the number of points divided by this."""


@dataclass(frozen=True)
class Series:
    """A line y over x, NaN at steps without a value.

    `low` and `high` are a band around it (a light area), or with `dots` the intervals of the points (whiskers).
    """

    name: str
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    dots: bool = False
    color: int | None = None
    """Index in the palette; None: the index among the series."""

    def finite(self) -> Series:
        """The series without steps that have no value. Bounds of the band may still be NaN."""
        known = np.isfinite(self.x) & np.isfinite(self.y)
        bounds = [None if bound is None else bound[known] for bound in (self.low, self.high)]
        return replace(self, x=self.x[known], y=self.y[known], low=bounds[0], high=bounds[1])

    def band(self) -> Band:
        """(x, low, high) at steps with both bounds."""
        if self.low is None or self.high is None:
            return self.x[:0], self.x[:0], self.x[:0]
        known = np.isfinite(self.low) & np.isfinite(self.high)
        return self.x[known], self.low[known], self.high[known]

    @classmethod
    def of_points(
        cls, name: str, points: Sequence[Point], intervals: Sequence[Range] = (), *, dots: bool = True
    ) -> Series:
        """A series of points with optional intervals."""
        x, y = np.array(points, float).reshape(-1, 2).T
        ends = {step: (low, high) for step, low, high in intervals}
        low, high = np.array([ends.get(step, (math.nan, math.nan)) for step in x.tolist()]).reshape(-1, 2).T
        return cls(name, x, y, low, high, dots=dots) if ends else cls(name, x, y, dots=dots)


Band = tuple[Numbers, Numbers, Numbers]


LEARNING, MACHINE = "learning", "machine"
"""The topic of a chart: the training, or the machine."""


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    label: str
    """Of the y axis."""
    series: list[Series]
    low: float | None = None
    high: float | None = None
    """Minimal range of the y axis."""
    smooth: bool = True
    """Whether long series have a running mean."""
    topic: str = LEARNING


SIMPLE: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
    ("Right answers in training", "completions (%)", {"right": ("answers/right",)}),
    ("Cut at the length limit", "completions (%)", {"cut": ("completions/clipped_ratio",)}),
    ("KL to the reference policy", "nats per token", {"KL": ("kl", "kl/k3", "kl/k1", "kl/k2", "kl/abs")}),
    ("Entropy", "nats per token", {"entropy": ("entropy",)}),
    (
        "Clipped by the objective",
        "tokens (%)",
        {"below": ("clip_fraction/low",), "above": ("clip_fraction/high",), "all": ("clip_fraction/region",)},
    ),
    (
        "Trainer against engine",
        "ratio of their probabilities",
        {"ratio, 1 %": ("sampler/ratio/p01",), "ratio, 99 %": ("sampler/ratio/p99",)},
    ),
    (
        "Groups with equal rewards",
        "groups of equal reward (%)",
        {"groups": ("groups/zero_spread", "frac_reward_zero_std")},
    ),
    ("Gradient norm", "before clipping", {"norm": ("grad_norm",)}),
    ("Learning rate", "learning rate", {"learning rate": ("learning_rate",)}),
)
"""Title, y label, and lines with the names of a quantity in metrics.jsonl. The first name with values is used."""

TERMS = (
    ("Regularizers", "mean, without coefficient", r"objective/(?!clip$)(.+)"),
    ("Coefficients that change", "coef", r"coef/(.+)"),
)
"""Title, y label, and pattern of the metrics of terms of the objective."""
PHASES = ("generation", "rewards", "scoring", "update", "saving", "other")
"""Phases of a step, `seconds/<phase>` in metrics.jsonl."""
MACHINES: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
    ("Time per step", "seconds, by phase", {phase: (f"seconds/{phase}",) for phase in PHASES}),
    ("Memory", "GiB", {"process": ("memory/process",), "GPU peak": ("memory/gpu",)}),
    ("Speed, end to end", "completion tokens per second", {"tokens": ("tokens/per_second",)}),
)
"""The same for the machine."""


def panels(columns: Mapping[str, Numbers], evaluations: Evaluations) -> list[Panel]:
    """The charts with values, the most important first. columns: see `columns_of`."""
    x = columns["step"] if columns else np.zeros(0)

    def series(name: str, *keys: str, factor: float = 1.0, band: Sequence[Numbers] = ()) -> list[Series]:
        """A series of the first key with values, or none."""
        drawn = next((key for key in keys if key in columns and np.isfinite(columns[key]).any()), None)
        low, high = band or (None, None)
        return [] if drawn is None else [Series(name, x, columns[drawn] * factor, low, high)]

    def bounds(*keys: str) -> list[Numbers]:
        return [columns[key] for key in keys] if columns.keys() >= set(keys) else []

    spread = (
        [columns["reward"] + sign * std for std in bounds("reward_std") for sign in (-1, 1)]
        if "reward" in columns
        else []
    )
    reach = bounds("completions/min_length", "completions/max_length")
    components = {match[1]: key for key in columns if (match := re.fullmatch(r"rewards/(.+)/mean", key))}
    named = [line for name, key in components.items() for line in series(name, key)]
    reward, length = series("mean", "reward", band=spread), series("mean", "completions/mean_length", band=reach)
    drawn = [
        Panel("Reward on training prompts", "mean, ± standard deviation" if spread else "mean", reward),
        Panel("Components of the reward", "mean, unweighted", named),
        *_heldout(evaluations),
        Panel("Completion length", "tokens: mean, shortest to longest" if reach else "tokens, mean", length, low=0.0),
    ]
    for title, label, names in SIMPLE:
        factor = 100.0 if label.endswith("(%)") else 1.0
        lines = [line for name, keys in names.items() for line in series(name, *keys, factor=factor)]
        noisy = title != "Learning rate"  # a running mean would hide its warm-up
        drawn.append(Panel(title, label, lines, low=None if title == "Entropy" else 0.0, smooth=noisy))
    for title, label, pattern in TERMS:
        terms = {match[1]: key for key in columns if (match := re.fullmatch(pattern, key))}
        drawn.append(Panel(title, label, [line for name, key in terms.items() for line in series(name, key)]))
    for title, label, names in MACHINES:
        lines = [line for name, keys in names.items() for line in series(name, *keys)]
        if title == "Time per step" and not lines:  # stock TRL only logs the total
            lines, label = series("step", "step_time"), "seconds"
        drawn.append(Panel(title, label, lines, low=0.0, topic=MACHINE))
    return [panel for panel in drawn if panel.series]


def _heldout(evaluations: Evaluations) -> list[Panel]:
    scores = placed(evaluations)
    keys = list(dict.fromkeys(key for _, score in scores for key in score))
    right = [key for key in keys if key == "greedy_accuracy" or key.startswith("pass@")]
    solved, reward = _scores(scores, right, 100.0), _scores(scores, ["greedy_reward"], 1.0)
    return [
        Panel("Held-out problems solved", "correct (%), 95 % interval", solved, 0.0, 100.0, smooth=False),
        Panel("Held-out reward, greedy", "mean, 95 % interval", reward, smooth=False),
    ]


def _scores(scores: list[tuple[int, Mapping[str, Any]]], keys: list[str], factor: float) -> list[Series]:
    drawn = []
    for key in keys:
        points, intervals = list[Point](), list[Range]()
        for step, score in scores:
            estimate = score.get(key)
            if not isinstance(estimate, Mapping) or not is_number(estimate.get("value")):
                continue
            value = factor * estimate["value"]
            points.append((step, value))
            if is_number(estimate.get("low")) and is_number(estimate.get("high")):
                intervals.append((step, min(factor * estimate["low"], value), max(factor * estimate["high"], value)))
        if points:
            drawn.append(Series.of_points(key.replace("_", " "), points, intervals))
    return drawn


def columns_of(metrics: Metrics) -> dict[str, Numbers]:
    """Metric lines as columns by step, NaN for steps without a value. The last of several lines of a step is used."""
    steps: dict[float, dict[str, float]] = {}
    for place, line in enumerate(metrics, 1):
        step = float(line["step"]) if is_number(line.get("step")) else float(place)
        steps.setdefault(step, {}).update((key, value) for key, value in line.items() if is_number(value))
    rows = [steps[step] | {"step": step} for step in sorted(steps)]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: np.array([row.get(key, math.nan) for row in rows], float) for key in keys}


def downsample(y: Numbers, most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Indices of at most `most` points, in order: both ends, and the minimum and maximum of each of equal segments.

    The extremes of the complete range are kept. Raises `ValueError` if `most` is below 4.
    """
    if most < 4:
        raise ValueError(f"most must be at least 4 (both ends, a minimum and a maximum), got {most}")
    if len(y) <= most:
        return np.arange(len(y))
    stretches = (most - 2) // 2
    edges = 1 + np.arange(stretches + 1) * (len(y) - 2) // stretches
    chosen = [0, len(y) - 1]
    for start, end in itertools.pairwise(edges.tolist()):
        chosen += [start + int(y[start:end].argmin()), start + int(y[start:end].argmax())]
    return np.unique(chosen)


def trend(y: Numbers) -> Numbers | None:
    """The mean of the values around each value of a long series, of fewer at the ends; None for a short one."""
    if len(y) < SMOOTH_FROM:
        return None
    window = np.ones(2 * (len(y) // TREND_PARTS // 2) + 1)
    mean: Numbers = np.convolve(y, window, "same") / np.convolve(np.ones(len(y)), window, "same")
    return mean
