"""Run directories written by hand: a finished run of any length with the contents of a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_runs import common_metrics

from kit.config import load_config
from kit.runs.store import RunDir, RunStore


def score(right: list[bool], step: int, text: str = "answer") -> dict[str, Any]:
    """The result of an evaluation in which these problems were solved."""
    share = sum(right) / len(right)
    return {
        "problems": len(right),
        "step": step,
        "k": 4,
        "temperature": 1.0,
        "checker": "exact",
        "greedy_accuracy": {"value": share, "low": max(0.0, share - 0.1), "high": min(1.0, share + 0.1)},
        "pass@1": {"value": share, "low": max(0.0, share - 0.1), "high": min(1.0, share + 0.1)},
        "greedy_reward": {"value": share, "low": share - 0.1, "high": share + 0.1},
        "completion_tokens_mean": 12.5,
        "truncated_share": 0.02,
        "per_problem": {
            "id": [f"{i:016x}" for i in range(len(right))],
            "greedy_correct": right,
            "sampled_correct": [4 * solved for solved in right],
            "greedy_reward": [float(solved) for solved in right],
        },
        "samples": [{"prompt": "2 + 2 =", "reference": "4", "completion": f"{text} {step}", "reward": share}],
    }


def line(step: int) -> dict[str, Any]:
    """The metrics of a step."""
    wave, common = common_metrics(step)
    own = {"reward": 0.5 + 0.4 * wave, "rewards/accuracy/mean": wave, "entropy": 1 - 0.5 * wave}
    return common | own | {"num_tokens": 100.0 * step}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDir]:
    """Return `make_run(steps=20)`, which writes a finished run; `overrides` change its configuration."""

    def make(steps: int = 20, overrides: tuple[str, ...] = ()) -> RunDir:
        run = RunStore(tmp_path / "runs").create("one")
        config = load_config("quickstart", [f"optimisation.steps={steps}", "run.id=one", *overrides])
        run.write_text("config.yaml", config.to_yaml())
        run.write_json("data.json", {"source": "sums", "rows": {"train": 90, "heldout": 10}, "sha256": "ab" * 32})
        run.write_json(
            "env.json", {"packages": {"torch": "2.13.0"}, "python": "3.11", "seeds": {"run": 0}, "threads": 1}
        )
        run.metrics_file.write_text("".join(json.dumps(line(step)) + "\n" for step in range(1, steps + 1)))
        run.write_json("eval/before.json", score([False] * 18 + [True] * 2, 0))
        run.write_json("eval/after.json", score([True] * 18 + [False] * 2, steps))
        run.append_event("checkpoint", step=steps)
        run.write_status("finished", step=steps, total_steps=steps, exit=0)
        return run

    return make
