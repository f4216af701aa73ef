"""What a teacher is worth: rollouts until GRPO's final held-out score is reached, on two embedded tasks.

    python benchmarks/teachers.py [--seeds 0 1 2 3 4] [--root DIR] [--minutes M] [--out FILE]

`sums` is the quickstart: the embedded model is right once in five times, and GRPO has something to learn from in every group.
`rare` has sums of three and four terms, and a model that this script builds (`Reader`): it is careful four times in a
hundred answers, so that most groups have no success. It has learned to read a hint: shown the right answer it works the sum out.
That is what self-teaching asks of a model, and what the embedded one was never shown.

All arms take the same batches, learning rate, problems and seeds; GRPO makes 1,536 and 3,840 rollouts, every other arm a third.
Each is held against GRPO at its end with the statistics of `grpo-kit compare`. Memory is the peak of a run's resident set.
A run that stands below --root is not made again, so that the script can be stopped (or stop after --minutes) and go on.
It took 50 minutes on two cores that had much else to do, the model apart, whose building takes 3 minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from embedded_models import Recipe, build, exercise

ROOT = Path(__file__).parents[1]
BATCH = 64
STEPS = {"sums": 24, "rare": 60}
"""Optimiser steps of GRPO: on `sums` until it has stopped rising, on `rare` until it has learned. Other arms make a third."""
POINTS = {"sums": 2, "rare": 4}
"""Steps between held-out scores of these."""
HINT = "{}\nA right answer is {}."
METRIC = "greedy_accuracy"
ENOUGH = 0.98
"""Share of GRPO's final score at which it counts as reached."""


# --- the tasks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader(Recipe):
    """What the model of `rare` is made of: without a hint hardly ever careful, with one mostly, and else it copies the answer."""

    terms: tuple[int, int] = (3, 4)
    careful_share: float = 0.04
    careless_right: float = 0.0
    shown_share: float = 0.5
    heeded_share: float = 0.8

    def example(self, tokenizer: Any, rng: Random, careful_share: float) -> tuple[list[int], list[int]]:
        """Token ids of an exercise (L,), half of them with a hint, and labels (L,) with -100 on the prompt."""
        shown = rng.random() < self.shown_share
        share, right = (max(careful_share, self.heeded_share), 1.0) if shown else (careful_share, self.careless_right)
        question, answer = exercise(replace(self, careless_right=right), rng, share)
        if shown:
            question = HINT.format(question, answer.partition("<answer>")[2].partition("<")[0])
        prompt: list[int] = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        reply = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        return prompt + reply, [-100] * len(prompt) + reply


SELF = f"teacher={{model: self, prompt: {json.dumps(HINT.format('{prompt}', '{reference}'))}}}"
OTHER = "teacher={model: another}"
TASKS: dict[str, list[str]] = {
    "sums": [],
    "rare": ["model.name=READER", "data.task_params={min_terms: 3, max_terms: 4, min_digits: 1, max_digits: 1}"],
}
ARMS: dict[str, list[str]] = {
    "grpo": ["objective={recipe: grpo}"],
    "opd, another model": ["objective={recipe: opd}", OTHER],
    "sdpo, itself with the answer": ["objective={recipe: sdpo}", SELF],
}
COMPARED = {
    "sums": ("grpo", "opd, another model"),
    "rare": ("grpo", "opd, another model", "sdpo, itself with the answer"),
}
IMPORTED = (
    "trl",
    "peft",
    "reasoning_gym",
    "kit.train",
    "kit.runner.build",
    "kit.trainer.trainer",
    "kit.evaluation.heldout",
)
COMMON = ["run.threads=1", "run.save_completions=false", f"optimisation.batch_size={BATCH}", "evaluation.k=1"]


# --- the runs ----------------------------------------------------------------------------------------------------------


class TimeIsUp(Exception):
    """No further run is begun."""


@dataclass
class Bench:
    """Runs below `root`, until `deadline` (seconds of `time.monotonic`)."""

    root: Path
    deadline: float

    def train(self, name: str, seed: int, changes: list[str]) -> str:
        """Makes the run in a process of its own unless it stands. Raises `TimeIsUp`, and `SystemExit` where it fails."""
        import kit
        from kit.config import load_config

        if (self.root / name / "status.json").is_file() and kit.Run(name, self.root).status["state"] == "finished":
            return name
        shutil.rmtree(self.root / name, ignore_errors=True)
        if time.monotonic() > self.deadline:
            raise TimeIsUp
        started = time.monotonic()
        for module in IMPORTED:  # in this process, so that every child has them
            importlib.import_module(module)
        child = os.fork()
        if child == 0:
            try:
                fixed = [f"run.root={self.root}", f"run.id={name}", f"run.seed={seed}"]
                made = importlib.import_module("kit.train").run(
                    load_config("quickstart", [*COMMON, *changes, *fixed]), quiet=True
                )
                os._exit(made.status()["state"] != "finished")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{name} failed: {changes}")
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        return name

    def model(self, task: str) -> list[str]:
        """The changes of a task, with the model built where it needs one."""
        folder = self.root / "reader"
        if task == "rare" and not (folder / "config.json").is_file():
            build(Reader(), folder)
        return [change.replace("READER", str(folder)) for change in TASKS[task]]

    def teacher(self, task: str) -> Path:
        """The merged weights of a task's other model, which GRPO has trained from the same start.

        On `sums` with a seed of its own, for 36 steps; on `rare`, where that takes longer, the run of GRPO with seed 0.
        """
        import kit

        if task == "rare":
            name = self.arm("rare", "grpo", 0)
        else:
            name = self.train("sums-teacher", 100, [*ARMS["grpo"], "optimisation.steps=36", "evaluation.every=0"])
        folder = self.root / name / "export" / "merged-16bit"
        if not (folder / "config.json").is_file():
            kit.Run(name, self.root).export("merged-16bit")
        return folder

    def arm(self, task: str, arm: str, seed: int) -> str:
        """The id of a run of an arm."""
        changes = ["evaluation.before=false", *self.model(task), *ARMS[arm]]
        share = 1 if arm == "grpo" else 3
        changes += [f"optimisation.steps={STEPS[task] // share}", f"evaluation.every={3 * POINTS[task] // share}"]
        if OTHER in changes:
            changes[changes.index(OTHER)] = f"teacher={{model: {self.teacher(task)}}}"
        name = f"{task} {arm} {seed}".replace(",", "").replace("_", "-").replace(" ", "-")
        return self.train(name, seed, changes)


# --- what they say -----------------------------------------------------------------------------------------------------


def summary(task: str, runs: Mapping[str, list[str]], root: Path) -> list[dict[str, Any]]:
    """A row for each arm: held-out score by rollouts, against GRPO at its end; and what the runs took.

    runs: ids by arm, `grpo` first, with the same seeds.
    """
    from kit.studies.compare import compare_runs
    from kit.studies.scores import matrix, read_run
    from kit.studies.statistics import difference

    judged = compare_runs(runs, root, metric=METRIC)
    verdicts = {one["arm"]: one for one in judged["comparisons"]}
    took = {row["name"]: row["arms"] for row in judged["quantities"]}
    end = [read_run(one, root) for one in runs["grpo"]]
    goal = fmean(judged["arms"][0]["by_run"])
    rows = []
    for arm, ids in runs.items():
        names = [path.stem for path in (root / ids[0] / "eval").glob("*.json")]
        points = []
        for name in names:
            at = [read_run(one, root, name) for one in ids]
            _, scores = matrix({"grpo": end, "arm": at}, METRIC)
            found = difference(scores["grpo"], scores["arm"], paired_seeds=True)
            points.append(
                {
                    "rollouts": at[0].step * BATCH,
                    "score": float(scores["arm"].mean()),
                    "by_seed": [round(float(score), 4) for score in scores["arm"].mean(axis=1)],
                    "difference": {"value": found.value, "low": found.low, "high": found.high},
                    "tokens": fmean(fmean(one.columns["held-out length"].values()) for one in at),
                }
            )
        points = list({point["rollouts"]: point for point in sorted(points, key=lambda one: one["rollouts"])}.values())
        row = {
            "task": task,
            "arm": arm,
            "curve": points,
            "reached": next((one["rollouts"] for one in points if one["score"] >= ENOUGH * goal), None),
            "memory_mib": took["peak memory"][arm],
            "memory_ratio": took["peak memory"][arm] / took["peak memory"]["grpo"],
        }
        if arm in verdicts:
            row |= {key: verdicts[arm][key] for key in ("verdict", "difference", "p_holm")}
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of one task, as docs/teachers.md shows them."""
    shown = sorted({point["rollouts"] for row in rows for point in row["curve"]})
    lines = [
        f"| after rollouts | {' | '.join(f'{count:,}' for count in shown)} | against GRPO's last | verdict | reached | memory |",
        "|---" * (len(shown) + 5) + "|",
    ]
    for row in rows:
        scores = {point["rollouts"]: point["score"] for point in row["curve"]}
        cells = [f"{scores[count]:.3f}" if count in scores else "" for count in shown]
        if "verdict" in row:
            apart = row["difference"]
            cells += [f"{apart['value']:+.3f} [{apart['low']:+.3f}, {apart['high']:+.3f}]", row["verdict"]]
        else:
            cells += ["", ""]
        cells += ["no" if row["reached"] is None else f"{row['reached']:,}", f"{row['memory_ratio']:.2f}"]
        lines.append(f"| {row['arm'].replace('_', chr(92) + '_')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="of those that a task has")
    parser.add_argument("--root", type=Path, default=Path("runs/teachers"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/teachers.json")
    options = parser.parse_args()
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    bench = Bench(root, time.monotonic() + 60 * options.minutes)
    runs: dict[str, dict[str, list[str]]] = {
        task: {arm: [] for arm in COMPARED[task] if arm in options.arms} for task in options.tasks
    }
    try:
        for seed in options.seeds:
            for task in options.tasks:
                for arm, made in runs[task].items():
                    made.append(bench.arm(task, arm, seed))
    except TimeIsUp:
        print("The time is up; the same call goes on from here.")
        raise SystemExit(3) from None
    rows = {task: summary(task, runs[task], root) for task in options.tasks}
    record = {
        "seeds": options.seeds,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()},
        "reader": {key: value for key, value in asdict(Reader()).items()},
        "tasks": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(table(found) for found in rows.values()))


if __name__ == "__main__":
    main()
