"""Six recipes on the embedded model, three seeds each: `python benchmarks/recipes.py [--recipes ...] [--seeds ...] [--out FILE]`.

Each run is a quickstart with `optimisation.iterations: 2` (60 steps on 30 rollouts, so that ratios differ from 1 and clips have
an effect), scored on the same 200 held-out problems every 10 steps. All other settings are equal, also the learning rate, so
the comparison does not show each recipe at its best. The command prints the held-out curve of each recipe (mean pass@1 over
seeds, and the range). For each pair it prints whether the difference is distinguishable from chance: at the first score, after
the last step, and in the mean over the curve, with paired 95 % intervals over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import kit

RECIPES = ["grpo", "dr_grpo", "dapo", "cispo", "gspo", "reinforce_pp"]
SETTINGS = [
    "optimisation.steps=60",
    "optimisation.iterations=2",
    "evaluation.every=10",
    "evaluation.k=4",
    "run.save_completions=false",
]
# 97.5 % quantiles of Student's t by degrees of freedom (standard tables); above 10 the normal quantile is close.
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


def measure(recipe: str, seed: int, root: str, threads: int) -> dict[str, Any]:
    """Train one run; return pass@1 and greedy accuracy by step, and seconds."""
    started = time.perf_counter()
    name = f"{recipe.replace('_', '-')}-{seed}"
    overrides = [*SETTINGS, f"run.root={root}", f"run.id={name}", f"run.threads={threads}"]
    run = kit.train("quickstart", seed=seed, objective=recipe, progress=False, overrides=overrides)
    if run.status["state"] != "finished":
        raise SystemExit(
            f"{name} ended as {run.status['state']}, expected finished. Run the missing runs again with --out."
        )
    steps, curve = run.metrics()[-1]["step"], []
    for when, scores in run.evaluations().items():
        step = {"before": 0, "after": steps}.get(when)
        step = int(when.removeprefix("step-")) if step is None else step
        curve.append({"step": step, "pass@1": scores["pass@1"], "greedy_accuracy": scores["greedy_accuracy"]})
    clipped = [line["clip_fraction/region"] for line in run.metrics() if "clip_fraction/region" in line]
    return {
        "recipe": recipe,
        "seed": seed,
        "curve": curve,
        "clip_fraction": round(statistics.fmean(clipped), 4) if clipped else None,
        "seconds": round(time.perf_counter() - started, 1),
    }


def first(run: dict[str, Any]) -> float:
    """pass@1 at the first score after the start, which shows how fast the policy learns."""
    return float(run["curve"][1]["pass@1"]["value"])


def final(run: dict[str, Any]) -> float:
    """pass@1 after the last step."""
    return float(run["curve"][-1]["pass@1"]["value"])


def mean_of_curve(run: dict[str, Any]) -> float:
    """Mean pass@1 over the scores after the start, which rewards early learning."""
    return statistics.fmean(point["pass@1"]["value"] for point in run["curve"][1:])


def difference(scores: list[float], other: list[float]) -> tuple[float, float]:
    """Mean difference and half of its 95 % interval (paired t: a seed has one order of problems for all recipes)."""
    gaps = [first - second for first, second in zip(scores, other, strict=True)]
    if len(gaps) < 2:
        return gaps[0], math.inf
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return statistics.fmean(gaps), T_975.get(len(gaps) - 1, 1.96) * error


def report(runs: list[dict[str, Any]]) -> str:
    """Format curves and comparisons as Markdown."""
    grouped = {
        name: [run for run in runs if run["recipe"] == name] for name in dict.fromkeys(r["recipe"] for r in runs)
    }
    steps = [point["step"] for point in runs[0]["curve"]]
    lines = [
        f"| recipe | {' | '.join(f'step {step}' for step in steps)} | tokens clipped |",
        "|---" * (len(steps) + 2) + "|",
    ]
    for name, group in grouped.items():
        cells = []
        for index in range(len(steps)):
            values = [run["curve"][index]["pass@1"]["value"] for run in group]
            cells.append(f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        shares = [run["clip_fraction"] for run in group if run["clip_fraction"] is not None]
        cells.append(f"{statistics.fmean(shares):.1%}" if shares else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    early = steps[1]
    lines += ["", f"| pair | pass@1 at step {early} | after the last step | mean over the curve |", "|---|---|---|---|"]
    halves, distinguishable = [], 0
    for recipe, other in itertools.combinations(grouped, 2):
        cells = []
        for measured in (first, final, mean_of_curve):
            gap, half = difference([measured(r) for r in grouped[recipe]], [measured(r) for r in grouped[other]])
            verdict = "not distinguishable" if abs(gap) <= half else ("better" if gap > 0 else "worse")
            halves.append(half)
            distinguishable += abs(gap) > half
            cells.append(f"{gap:+.3f} ± {half:.3f}, {verdict}")
        lines.append(f"| {recipe} - {other} | {' | '.join(cells)} |")
    lines += [
        "",
        f"{distinguishable} of {len(halves)} comparisons are distinguishable; about {0.05 * len(halves):.0f} would be by chance "
        f"alone. The median half-width is {statistics.median(halves):.3f}: this many seeds show no smaller differences.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Train all recipes of a seed before the next seed, so that an interrupted command still compares all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON; runs that the file contains are not repeated")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    if arguments.out and arguments.out.is_file():
        runs = json.loads(arguments.out.read_text())["runs"]
    done = {(run["recipe"], run["seed"]) for run in runs}
    with tempfile.TemporaryDirectory() as root:
        for seed, recipe in itertools.product(arguments.seeds, arguments.recipes):
            if (recipe, seed) in done:
                continue
            runs.append(measure(recipe, seed, root, arguments.threads))
            print(f"{recipe} seed {seed}: pass@1 {final(runs[-1]):.3f} in {runs[-1]['seconds']:.0f} s", flush=True)
            if arguments.out:
                machine = f"{os.cpu_count()} cores, {platform.machine()}, no GPU, {arguments.threads} thread per run"
                record = {"machine": machine, "settings": SETTINGS, "runs": runs}
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(report(runs))


if __name__ == "__main__":
    main()
