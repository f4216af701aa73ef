"""Does `compare` cry wolf? 20 comparisons of A with A, and of A with something better, by real runs of the embedded model.

`python benchmarks/compare_aa.py [--runs FOLDER] [--out FILE]`: short runs of the quickstart at half its learning rate, three
seeds an arm; ten A/A comparisons of seeds of their own, and ten of the same runs paired anew. Exits with 1 unless at least 18
of the 20 say "not distinguishable" and every planted improvement (twice the learning rate) is found. With `--runs` runs are
kept, and those that are there are not made again.
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
"""Runs of A: enough for half of the tries with seeds of their own; the other half pairs the same runs anew."""
SHORT = [
    "optimisation.steps=6",
    "optimisation.batch_size=32",
    "evaluation.before=false",
    "evaluation.every=0",
    "evaluation.prompts=50",
    "run.save_every=0",
    "run.threads=1",
]
BASE = ["optimisation.learning_rate=2.5e-4"]  # half of the quickstart's, and so far from the ceiling
FAST = ["optimisation.learning_rate=5e-4"]


def train(root: Path, run_id: str, seed: int, changes: list[str]) -> float:
    """One run in a process of its own (forked: torch is imported once), unless it is there; its seconds."""
    if finished(root, run_id):
        return seconds_of(root, run_id)
    import_all()
    shutil.rmtree(root / run_id, ignore_errors=True)  # what a benchmark that was cut off has left
    overrides = [*SHORT, *changes, f"run.id={run_id}", f"run.seed={seed}", f"run.root={root}"]
    config = load_config("quickstart", overrides)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            import kit.train

            kit.train.main({"config": config.model_dump(mode="json")}, True)
            code = 0
        os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"{run_id} failed; see {root / run_id / 'log.txt'}")
    return seconds_of(root, run_id)


def finished(root: Path, run_id: str) -> bool:
    """Whether the run is there already."""
    return RunDir(root / run_id).status()["state"] == "finished"


def seconds_of(root: Path, run_id: str) -> float:
    """From its directory to its last word."""
    status = RunDir(root / run_id).status()
    return float(status["ended"] - status["started"])


def as_pairs(root: Path, arms: dict[str, list[str]]) -> float:
    """p of an A/A comparison had its runs been paired by seed: three pairs instead of three and three."""
    scores = matrix({arm: [read_run(run, root) for run in runs] for arm, runs in arms.items()}, "greedy_accuracy")[1]
    return difference(*scores.values(), paired_seeds=True).p


def short(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a comparison."""
    one = found["comparisons"][0]
    numbers = {"p": one["p"], **one["difference"], "detectable": one["detectable"]}
    return {
        "verdict": one["verdict"],
        **{name: round(value, 5) for name, value in numbers.items()},
        "by_run": [[round(value, 3) for value in arm["by_run"]] for arm in found["arms"]],
    }


@cache
def import_all() -> None:
    """What a run imports is imported here, before the forks."""
    from kit.runner.prepare import prepare

    prepare(load_config("quickstart", SHORT))


def trios() -> Iterator[tuple[list[int], list[int]]]:
    """Seeds of both arms of every A/A comparison: each seed once in order, then each once more in a drawn order."""
    shuffled = random.Random(0).sample(range(POOL), POOL)
    for seeds in (list(range(POOL)), shuffled):
        for start in range(0, POOL, 2 * SEEDS):
            yield sorted(seeds[start : start + SEEDS]), sorted(seeds[start + SEEDS : start + 2 * SEEDS])


def measure(root: Path) -> dict[str, Any]:
    """Trains what is missing and compares."""
    seconds = []
    for seed in range(POOL):
        seconds.append(train(root, f"base-s{seed}", seed, BASE))
        if seed < PLANTED * SEEDS:
            seconds.append(train(root, f"fast-s{seed}", seed, FAST))
        print(f"{seed + 1}/{POOL}  {sum(seconds):.0f} s", flush=True)
    same, planted = [], []
    for trio, other in trios():
        arms = {"a": [f"base-s{seed}" for seed in trio], "again": [f"base-s{seed}" for seed in other]}
        same.append(short(compare_runs(arms, root)) | {"p_as_pairs": round(as_pairs(root, arms), 5)})
    for number in range(PLANTED):
        trio = range(SEEDS * number, SEEDS * (number + 1))
        arms = {"base": [f"base-s{seed}" for seed in trio], "fast": [f"fast-s{seed}" for seed in trio]}
        planted.append(short(compare_runs(arms, root)))
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
    """Prints the verdicts, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.runs or Path(folder))
    unclear = result["a_a"].get("not distinguishable", 0)
    found = result["planted_improvement"]["found"]
    print(f"A against A: not distinguishable in {unclear} of {TRIES}")
    print(f"planted improvement: found in {found} of {PLANTED}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if unclear >= 18 and found == PLANTED else 1


if __name__ == "__main__":
    sys.exit(main())
