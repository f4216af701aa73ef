"""Held-out scores of the quickstart over seeds: `python benchmarks/quickstart_seeds.py [--seeds 0 1 2] [--out FILE]`.

The command runs `grpo-kit quickstart` once per seed. It prints the tables of README and docs/getting-started.md (scores before
and after with 95 % intervals) and the wall-clock seconds. The exit code is 1 unless each seed at least doubles its greedy
accuracy, or gains 25 points, and the intervals do not overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import kit
from kit.evaluation.statistics import Estimate
from kit.trainer.metric_log import PHASES


def measure(seed: int, root: str) -> dict[str, Any]:
    """Run one quickstart; return scores before and after, total seconds, and mean seconds per step by phase."""
    started = time.perf_counter()
    run = kit.train("quickstart", seed=seed, progress=False, overrides=[f"run.root={root}", f"run.id=seed-{seed}"])
    seconds = time.perf_counter() - started
    scores, metrics = run.evaluations(), run.metrics()
    keys = ("greedy_accuracy", "pass@1", "pass@4")
    phases = {name: f"seconds/{name}" for name in PHASES} | {"step": "step_time"}
    return {
        "seed": seed,
        "before": {key: scores["before"][key] for key in keys},
        "after": {key: scores["after"][key] for key in keys},
        "seconds": round(seconds, 1),
        "seconds_of_a_step": {name: round(fmean(line[key] for line in metrics), 3) for name, key in phases.items()},
    }


def has_improved(row: dict[str, Any]) -> bool:
    """Whether the greedy accuracy doubled or gained 25 points, and the intervals do not overlap."""
    before, after = row["before"]["greedy_accuracy"], row["after"]["greedy_accuracy"]
    is_higher = after["value"] >= min(2 * before["value"], before["value"] + 0.25)
    return bool(is_higher and not Estimate(**before).overlaps(Estimate(**after)))


def cell(estimate: dict[str, float]) -> str:
    """Format a score and its interval: `0.155 [0.111, 0.212]`."""
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def scores(run: dict[str, Any]) -> str:
    """Table of the README: the scores of one run."""
    keys = [("greedy accuracy", "greedy_accuracy"), ("pass@1", "pass@1"), ("pass@4", "pass@4")]
    rows = [f"| {name} | {cell(run['before'][key])} | {cell(run['after'][key])} |" for name, key in keys]
    return "\n".join(["| | before | after |", "|---|---|---|", *rows])


def step(run: dict[str, Any]) -> str:
    """Table of docs/getting-started.md: seconds per step by phase."""
    seconds = run["seconds_of_a_step"]
    cells = [f"{seconds[name]:.2f}" for name in ("generation", "rewards", "update")]
    rest = seconds["step"] - sum(seconds[name] for name in ("generation", "rewards", "update"))
    head = "| one step of 24 | 16 problems, 8 answers each | their rewards | update of 0.12 million weights | the rest | all |"
    return f"{head}\n|---|---|---|---|---|---|\n| seconds | {' | '.join(cells)} | {rest:.2f} | {seconds['step']:.2f} |"


def table(runs: list[dict[str, Any]]) -> str:
    """Table of docs/getting-started.md: the scores of each seed."""
    head = "| seed | greedy accuracy before | after | pass@1 before | after |"
    rows = []
    for run in runs:
        cells = [cell(run[when][key]) for key in ("greedy_accuracy", "pass@1") for when in ("before", "after")]
        rows.append(f"| {run['seed']} | {' | '.join(cells)} |")
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def main() -> int:
    """Run the seeds, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        rows = [measure(seed, root) for seed in arguments.seeds]
    print(scores(rows[0]), step(rows[0]), table(rows), sep="\n\n", end="\n\n")
    for row in rows:
        print(f"seed {row['seed']}: {row['seconds']:.0f} s, {row['seconds_of_a_step']['step']:.2f} s per step")
    if arguments.out:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, no GPU"
        arguments.out.write_text(json.dumps({"machine": machine, "runs": rows}, indent=2) + "\n")
    return 0 if all(has_improved(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
