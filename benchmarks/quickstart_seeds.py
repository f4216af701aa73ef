"""Held-out scores of the quickstart over seeds: `python benchmarks/quickstart_seeds.py [--seeds 0 1 2] [--out FILE]`.

Runs `grpo-kit quickstart` once a seed, one after the other, and prints a table: greedy accuracy and pass@1 before and after
with 95 % intervals, and wall-clock seconds. Exits with 1 unless every seed at least doubles its greedy accuracy, or gains
25 points, with intervals that do not overlap.
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
from typing import Any

import kit
from kit.evaluation.statistics import Estimate


def measure(seed: int, root: str) -> dict[str, Any]:
    """One quickstart: scores before and after, seconds, and the rate of optimiser steps."""
    started = time.perf_counter()
    run = kit.train("quickstart", seed=seed, progress=False, overrides=[f"run.root={root}", f"run.id=seed-{seed}"])
    seconds = time.perf_counter() - started
    scores, metrics = run.evaluations(), run.metrics()
    keys = ("greedy_accuracy", "pass@1", "pass@4")
    return {
        "seed": seed,
        "before": {key: scores["before"][key] for key in keys},
        "after": {key: scores["after"][key] for key in keys},
        "seconds": round(seconds, 1),
        "seconds_per_step": round((metrics[-1]["time"] - metrics[0]["time"]) / (len(metrics) - 1), 3),
    }


def better(row: dict[str, Any]) -> bool:
    """Doubled or 25 points more, and the intervals do not overlap."""
    before, after = row["before"]["greedy_accuracy"], row["after"]["greedy_accuracy"]
    grown = after["value"] >= min(2 * before["value"], before["value"] + 0.25)
    return bool(grown and not Estimate(**before).overlaps(Estimate(**after)))


def cell(estimate: dict[str, float]) -> str:
    """`0.155 [0.111, 0.212]`."""
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def main() -> int:
    """Runs the seeds, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        rows = [measure(seed, root) for seed in arguments.seeds]
    print("| seed | greedy before | greedy after | pass@1 before | pass@1 after | seconds | s/step |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [cell(row[when][key]) for key in ("greedy_accuracy", "pass@1") for when in ("before", "after")]
        print(f"| {row['seed']} | {' | '.join(cells)} | {row['seconds']:.0f} | {row['seconds_per_step']:.2f} |")
    if arguments.out:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, no GPU"
        arguments.out.write_text(json.dumps({"machine": machine, "runs": rows}, indent=2) + "\n")
    return 0 if all(better(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
