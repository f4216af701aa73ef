"""False alarms of `compare`: 20 comparisons of equal arms and 4 of different arms, with real runs of the embedded model.

`python benchmarks/compare_aa.py [--runs FOLDER] [--out FILE]` trains short quickstarts at half the learning rate, three seeds
per arm. Ten comparisons of equal arms use each run once; ten more pair the same runs in a random order. The exit code is 1
unless at least 18 of the 20 say "not distinguishable" and `compare` detects all planted improvements (twice the learning
rate). `--runs` stores the runs in FOLDER and uses finished runs that it already contains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kit.config import load_config
from kit.runs.store import RunDir
from kit.studies.compare import compare_runs
from kit.studies.scores import matrix, read_run
from kit.studies.statistics import difference

TRIES, SEEDS, PLANTED = 20, 3, 4
POOL = TRIES * SEEDS
"""Runs of the base arm: half of the tries use each of them once, the other half pairs them again."""
SHORT = [
    "optimisation.steps=6",
    "optimisation.batch_size=32",
    "evaluation.before=false",
    "evaluation.every=0",
    "evaluation.prompts=50",
    "run.save_every=0",
    "run.threads=1",
]
BASE = ["optimisation.learning_rate=2.5e-4"]  # half of the quickstart's, so that scores stay below their maximum
FAST = ["optimisation.learning_rate=5e-4"]


def train(root: Path, run_id: str, seed: int, changes: list[str]) -> float:
    """Train one run in a forked process unless it has finished already; return its seconds."""
    if finished(root, run_id):
        return seconds_of(root, run_id)
    import_all()
    shutil.rmtree(root / run_id, ignore_errors=True)  # an unfinished run of an interrupted benchmark
    overrides = [*SHORT, *changes, f"run.id={run_id}", f"run.seed={seed}", f"run.root={root}"]
    config = load_config("quickstart", overrides)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException), open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            import kit.train

            kit.train.main({"config": config.model_dump(mode="json")}, True)
            code = 0
        os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"{run_id} failed; see {root / run_id / 'log.txt'}")
    return seconds_of(root, run_id)


def finished(root: Path, run_id: str) -> bool:
    """Whether the directory has this run and its state is "finished"."""
    return RunDir(root / run_id).status()["state"] == "finished"


def seconds_of(root: Path, run_id: str) -> float:
    """Seconds from the start to the end of a run."""
    status = RunDir(root / run_id).status()
    return float(status["ended"] - status["started"])


def as_pairs(root: Path, arms: dict[str, list[str]]) -> float:
    """Return the p-value of a comparison that pairs the runs of two arms by seed."""
    scores = matrix({arm: [read_run(run, root) for run in runs] for arm, runs in arms.items()}, "greedy_accuracy")[1]
    return difference(*scores.values(), paired_seeds=True).p


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The verdict, the numbers and the scores by run of a comparison of two arms."""
    comparison = result["comparisons"][0]
    numbers = {"p": comparison["p"], **comparison["difference"], "detectable": comparison["detectable"]}
    return {
        "verdict": comparison["verdict"],
        **{name: round(value, 5) for name, value in numbers.items()},
        "by_run": [[round(value, 3) for value in arm["by_run"]] for arm in result["arms"]],
    }


@cache
def import_all() -> None:
    """Import the modules of a run before the forks, so that torch is imported once."""
    from kit.runner.prepare import prepare

    prepare(load_config("quickstart", SHORT))


def seed_pairs() -> Iterator[tuple[list[int], list[int]]]:
    """Yield the seeds of both arms of every A/A comparison: all seeds in order, then all again in a random order."""
    shuffled = random.Random(0).sample(range(POOL), POOL)
    for seeds in (list(range(POOL)), shuffled):
        for start in range(0, POOL, 2 * SEEDS):
            yield sorted(seeds[start : start + SEEDS]), sorted(seeds[start + SEEDS : start + 2 * SEEDS])


def measure(root: Path) -> dict[str, Any]:
    """Train the missing runs and compare them."""
    seconds = []
    for seed in range(POOL):
        seconds.append(train(root, f"base-s{seed}", seed, BASE))
        if seed < PLANTED * SEEDS:
            seconds.append(train(root, f"fast-s{seed}", seed, FAST))
        print(f"{seed + 1}/{POOL}  {sum(seconds):.0f} s", flush=True)
    same, planted = [], []
    for seeds, other_seeds in seed_pairs():
        arms = {"a": [f"base-s{seed}" for seed in seeds], "again": [f"base-s{seed}" for seed in other_seeds]}
        same.append(summary(compare_runs(arms, root)) | {"p_as_pairs": round(as_pairs(root, arms), 5)})
    for number in range(PLANTED):
        seeds = range(SEEDS * number, SEEDS * (number + 1))
        arms = {"base": [f"base-s{seed}" for seed in seeds], "fast": [f"fast-s{seed}" for seed in seeds]}
        planted.append(summary(compare_runs(arms, root)))
    return {
        "machine": f"{os.cpu_count()} cores, no GPU",
        "settings": SHORT,
        "seeds_an_arm": SEEDS,
        "runs": len(seconds),
        "training_seconds": round(sum(seconds)),
        "a_a": dict(Counter(row["verdict"] for row in same)),
        "a_a_as_pairs_below_5_percent": sum(row["p_as_pairs"] < 0.05 for row in same),
        "planted_improvement": {"arms": [BASE, FAST], "found": sum(row["verdict"] == "better" for row in planted)},
        "a_a_tries": same,
        "planted_tries": planted,
    }


def main() -> int:
    """Print the verdicts and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.runs or Path(folder))
    unclear = result["a_a"].get("not distinguishable", 0)
    detected = result["planted_improvement"]["found"]
    print(f"A against A: not distinguishable in {unclear} of {TRIES}")
    print(f"planted improvement: detected in {detected} of {PLANTED}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if unclear >= 18 and detected == PLANTED else 1


if __name__ == "__main__":
    sys.exit(main())
