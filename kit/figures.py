"""Figures of a run: what was rewarded, what held-out rows say, signs of trouble. matplotlib without pyplot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#2563a8", "#d9691e", "#2e8b57", "#b3322f", "#6b7280"
NAMES = {
    "reward": ("reward",),
    "reward_std": ("reward_std",),
    "length": ("completions/mean_length",),
    "kl": ("kl", "kl/k3", "kl/k1", "kl/k2", "kl/abs"),
    "entropy": ("entropy",),
}
"""What a quantity is called in metrics.jsonl; the first name found counts."""
Series = tuple[list[float], list[float]]
Metrics = Sequence[Mapping[str, Any]]
Evaluations = Mapping[str, Mapping[str, Any]]


def draw(title: str, metrics: Metrics, evaluations: Evaluations, path: str | Path | None) -> Figure:
    """The figure of one run. Raises `RunError` when there is nothing to draw, or `path` cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in (_reward, _heldout, _length, _divergence) if panel(None, metrics, evaluations)]
    if not panels:
        raise RunError(f"{title} has no metrics yet; there is nothing to draw.")
    rows, columns = (len(panels) + 1) // 2, min(len(panels), 2)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color="#1f2937")
    for position, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, position)
        panel(axes, metrics, evaluations)
        axes.set_xlabel("optimiser step")
        axes.grid(True, color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        try:
            figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise RunError(f"The figure cannot be saved to {path}: {error}") from error
    return figure


def series(metrics: Metrics, quantity: str) -> Series:
    """Steps and values of a quantity, lines without it left out."""
    for name in NAMES[quantity]:
        points = [(line.get("step", i), line[name]) for i, line in enumerate(metrics, 1) if line.get(name) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            return list(steps), list(values)
    return [], []


def _reward(axes: Axes | None, metrics: Metrics, _: Evaluations) -> bool:
    steps, mean = series(metrics, "reward")
    if axes is not None:
        spread = dict(zip(*series(metrics, "reward_std"), strict=True))
        low = [value - spread.get(step, 0.0) for step, value in zip(steps, mean, strict=True)]
        high = [value + spread.get(step, 0.0) for step, value in zip(steps, mean, strict=True)]
        if spread:
            axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0, label="± standard deviation")
        axes.plot(steps, mean, color=BLUE, linewidth=1.8, label="mean", marker="o" if len(steps) == 1 else None)
        axes.set_title("Reward on training prompts", fontsize=10)
        axes.set_ylabel("reward")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    return bool(steps)


def step_of(name: str, last: int) -> int | None:
    """The optimiser step of an evaluation by its name: `before`, `step-00050`, `after`; None for any other."""
    number = name.removeprefix("step-")
    return {"before": 0, "after": last}.get(name, int(number) if number.isdigit() else None)


def _heldout(axes: Axes | None, metrics: Metrics, evaluations: Evaluations) -> bool:
    shown = False
    last = max((int(line.get("step") or 0) for line in metrics), default=0)
    steps_of = {name: step_of(name, last) for name in evaluations}
    for number, (name, color) in enumerate({"greedy_accuracy": ORANGE, "pass@1": GREEN}.items()):
        scores = [(steps_of[which], scores.get(name)) for which, scores in evaluations.items()]
        points = [(step, score) for step, score in scores if step is not None and score and score["value"] is not None]
        points.sort(key=lambda point: point[0])
        if not points:
            continue
        shown = True
        if axes is not None:
            steps = [step for step, _ in points]
            values = [100 * s["value"] for _, s in points]
            below = [100 * max(0.0, s["value"] - s.get("low", s["value"])) for _, s in points]
            above = [100 * max(0.0, s.get("high", s["value"]) - s["value"]) for _, s in points]
            axes.errorbar(
                steps, values, yerr=[below, above], color=color, marker="os"[number], capsize=4, linewidth=1.2,
                label=f"{'greedy' if name == 'greedy_accuracy' else 'sampled (pass@1)'}, 95 % interval",
            )  # fmt: skip
    if axes is not None:
        axes.set_title("Accuracy on held-out problems", fontsize=10)
        axes.set_ylabel("correct (%)")
        axes.set_ylim(0, 104)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    return shown


def _length(axes: Axes | None, metrics: Metrics, _: Evaluations) -> bool:
    steps, values = series(metrics, "length")
    if axes is not None:
        axes.plot(steps, values, color=GREY, linewidth=1.8)
        axes.set_title("Completion length", fontsize=10)
        axes.set_ylabel("tokens, mean")
        axes.set_ylim(bottom=0)
    return bool(steps)


def _divergence(axes: Axes | None, metrics: Metrics, _: Evaluations) -> bool:
    """KL and entropy share a panel: each with an axis of its own when both are there."""
    found = {name: series(metrics, name) for name in ("entropy", "kl")}
    found = {name: points for name, points in found.items() if points[0]}
    if axes is not None:
        labels = {"entropy": "entropy (nats per token)", "kl": "KL to reference (nats per token)"}
        current = axes
        for name, (steps, values) in found.items():
            color = GREEN if name == "entropy" else RED
            current.plot(steps, values, color=color, linewidth=1.8)
            both = len(found) > 1
            current.set_ylabel(labels[name], color=color if both else "black")
            if both and name == "entropy":
                current = axes.twinx()
                current.spines["top"].set_visible(False)
        axes.set_title(" and ".join({"entropy": "Entropy", "kl": "KL"}[name] for name in found), fontsize=10)
    return bool(found)
