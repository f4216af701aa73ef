"""Run directories as training leaves them, written without training, for tests of readers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kit.config import load_config
from kit.runs.store import RunDir, RunStore


def common_metrics(step: int) -> tuple[float, dict[str, Any]]:
    """Return a number in [0, 1) that looks random, and metrics of a step that depend on it."""
    wave = (step * 7919 % 101) / 101
    return wave, {
        "step": step,
        "time": 1000.0 + step,
        "reward_std": 0.2,
        "rewards/format/mean": 1.0,
        "completions/mean_length": 20 + wave,
        "completions/min_length": 3,
        "completions/max_length": 40,
        "completions/clipped_ratio": 0.1 * wave,
        "kl": 0.01 * wave,
        "clip_fraction/low": 0.0,
        "clip_fraction/high": 0.01 * wave,
        "clip_fraction/region": 0.01 * wave,
        "groups/zero_spread": 0.2,
        "grad_norm": 1 + wave,
        "learning_rate": 1e-5,
        "step_time": 2 + wave,
    }


def make_run(
    root: Path,
    run_id: str,
    correct: Sequence[Sequence[int]],
    seed: int = 0,
    *,
    overrides: Sequence[str] = (),
    **of: Any,
) -> RunDir:
    """Write a finished run. `correct`: per problem, [correct samples of k = 4, 1 if the greedy completion is correct]."""
    names = [f"run.id={run_id}", f"run.seed={seed}", f"run.root={root}", *overrides]
    config = load_config(of.get("config", "quickstart"), names)
    run = RunStore(root).create(run_id)
    run.write_text("config.yaml", config.to_yaml())
    run.write_json("data.json", {"sha256": of.get("data", "d")})
    run.write_json("eval/after.json", evaluation(correct, **of))
    shift = of.get("shift", 0.0)
    for step in range(1, 21):
        wave = 0.1 * np.sin(step + seed)
        run.append_metrics(
            {"step": step, "reward": 0.5 + wave, "entropy": 0.2 + shift + wave, "completions/mean_length": 20.0,
             "step_time": 9.0 if step == 1 else 1.0 + shift}
        )  # fmt: skip
    run.append_event("memory", step=20, peak_rss_bytes=(500 + seed) * 2**20)
    run.write_status(of.get("state", "finished"), step=20, total_steps=20, reason=of.get("reason"))
    return run


def evaluation(correct: Sequence[Sequence[int]], **of: Any) -> dict[str, Any]:
    """Return the contents of an evaluation file that a comparison reads."""
    drawn, greedy = [list(column) for column in zip(*correct, strict=True)]
    return {
        "step": of.get("step", 20),
        "k": 4,
        "temperature": 1.0,
        "seed": 0,
        "checker": of.get("checker", "reasoning-gym/accuracy"),
        "greedy_accuracy": {"value": sum(greedy) / len(greedy)},
        "per_problem": {
            "id": of.get("ids") or [f"{number:016x}" for number in range(len(drawn))],
            "greedy_correct": [bool(value) for value in greedy],
            "sampled_correct": drawn,
            "greedy_reward": [1.2 * value for value in greedy],
            "greedy_tokens": [20 + value for value in greedy],
            "sampled_tokens_mean": [20.0] * len(drawn),
        },
    }


def draw(rng: np.random.Generator, problems: int, share: float) -> list[list[int]]:
    """Draw problems that are solved with probability `share`: [correct of 4 samples, greedy correct] each."""
    return [[int(rng.binomial(4, share)), int(rng.random() < share)] for _ in range(problems)]
