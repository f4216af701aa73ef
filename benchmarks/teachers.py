"""What a teacher is worth: rollouts until GRPO's final held-out score is reached, on two embedded tasks.

    python benchmarks/teachers.py [--seeds 0 1 2 3 4] [--root DIR] [--minutes M] [--out FILE]
    python benchmarks/teachers.py settings [--tasks rare]      the settings tried, on one seed that is not reported

`sums` is the quickstart: the embedded model is right once in five times, and GRPO has something to learn from in every group.
`rare` has sums of three and four terms, and a model that this script builds (`Reader`): it is careful four times in a
hundred answers, so that most groups have no success. It has learned to read a hint: shown the right answer it works the sum out.
That is what self-teaching asks of a model, and what the embedded one was never shown.

All arms take the same batches, learning rate, problems and seeds; GRPO makes 1,536 and 3,840 rollouts, every other arm a third.
Each is held against GRPO at its end with the statistics of `grpo-kit compare`. Memory is the peak of a run's resident set.
The settings of `grpo_sdpo` and `teacher_reweight` were chosen from `SETTINGS` by seed 5, which is not among those reported.
A run that stands below --root is not made again, so that the script can be stopped (or stop after --minutes) and go on.
It took 50 minutes on two cores that had much else to do, the model apart, whose building takes 3 minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import time
import traceback
from collections.abc import Iterable, Mapping
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


SHOWN = json.dumps(HINT.format("{prompt}", "{reference}"))
SELF = f"teacher={{model: self, prompt: {SHOWN}}}"
OTHER = "teacher={model: ANOTHER}"
TASKS: dict[str, list[str]] = {
    "sums": [],
    "rare": ["model.name=READER", "data.task_params={min_terms: 3, max_terms: 4, min_digits: 1, max_digits: 1}"],
}
BOTH = "objective={recipe: grpo_sdpo, advantage: {mix: 'linear(0, 1, STEPS)'}}"
WEIGHED = "objective={recipe: grpo, advantage: {name: teacher_reweight, strength: 0.5, eps: 0.2}}"
DISTILLED = "objective={recipe: sdpo, regularizers: [{name: distill, divergence: %s}]}"
SETTINGS: dict[str, list[str]] = {
    "sdpo, reverse KL": [DISTILLED % "reverse", SELF],
    "sdpo, forward KL": [DISTILLED % "forward", SELF],
    "sdpo with GRPO": ["objective={recipe: sdpo, advantage: group_zscore}", SELF],
    "sdpo with GRPO, 10 to 0": [
        "objective={recipe: sdpo, advantage: group_zscore, regularizers: [{name: distill, divergence: jensen_shannon, "
        "coef: 'linear(10, 0, STEPS)'}]}",
        SELF,
    ],
    "grpo_sdpo, mix 0.5": ["objective={recipe: grpo_sdpo, advantage: {mix: 0.5}}", SELF],
    "grpo_sdpo, mix 0 to 1": [BOTH, SELF],
    "grpo_sdpo, mix 0 to 1 in half": [BOTH.replace("STEPS", "HALF"), SELF],
    "teacher_reweight, strength 0.5, eps 0.2": [WEIGHED, SELF],
    "teacher_reweight, strength 1, eps 0.9": [WEIGHED.replace("0.5, eps: 0.2", "1.0, eps: 0.9"), SELF],
}
"""What was tried on seed `TRIED`. STEPS and HALF stand for the steps of the run, all and half of them."""
TRIED = 5
ARMS: dict[str, list[str]] = {
    "grpo": ["objective={recipe: grpo}"],
    "opd, another model": ["objective={recipe: opd}", OTHER],
    "grpo_sdpo, another model": [BOTH, OTHER],
    "teacher_reweight, another model": [WEIGHED, OTHER],
    "sdpo, itself with the answer": ["objective={recipe: sdpo}", SELF],
    "grpo_sdpo, itself with the answer": [BOTH, SELF],
    "teacher_reweight, itself with the answer": [WEIGHED, SELF],
}
COMPARED = {
    "sums": [arm for arm in ARMS if "itself" not in arm],
    "rare": ["grpo", "opd, another model", *(arm for arm in ARMS if "itself" in arm)],
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
        """The id of a run of an arm, or of one of the settings."""
        share = 1 if arm == "grpo" else 3
        steps = STEPS[task] // share
        changes = [
            change.replace("STEPS", str(steps)).replace("HALF", str(steps // 2)) for change in {**ARMS, **SETTINGS}[arm]
        ]
        if any("ANOTHER" in change for change in changes):
            changes = [change.replace("ANOTHER", str(self.teacher(task))) for change in changes]
        changes = ["evaluation.before=false", *self.model(task), *changes]
        changes += [f"optimisation.steps={steps}", f"evaluation.every={3 * POINTS[task] // share}"]
        name = re.sub(r"[^a-z0-9]+", "-", f"{task} {arm} {seed}".lower())
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
        lines.append(f"| {escaped(row['arm'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tried(bench: Bench, task: str, settings: Iterable[str]) -> dict[str, Any]:
    """Held-out score by rollouts of each setting, on seed `TRIED`."""
    from kit.studies.scores import read_run

    found = {}
    for setting in settings:
        scores = read_run(bench.arm(task, setting, TRIED), bench.root).heldout[METRIC]
        found[setting] = {f"{BATCH * step:.0f}": score for step, score in scores}
        print(f"{task}, {setting}: {found[setting]}", flush=True)
    return found


def settings_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Scores of the settings of one task by rollouts, the best at the end first."""
    shown = list(next(iter(found.values())))
    lines = [
        f"| after rollouts | {' | '.join(f'{int(count):,}' for count in shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for setting, scores in sorted(found.items(), key=lambda one: -one[1][shown[-1]]):
        lines.append(f"| {escaped(setting)} | {' | '.join(f'{scores[count]:.3f}' for count in shown)} |")
    return "\n".join(lines)


def escaped(name: str) -> str:
    return name.replace("_", "\\_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("arms", "settings"), default="arms")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="of those that a task has, beside grpo"
    )
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--root", type=Path, default=Path("runs/teachers"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/teachers.json")
    options = parser.parse_args()
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    bench = Bench(root, time.monotonic() + 60 * options.minutes)
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    kept = {task: rows for task, rows in record.get("tasks", {}).items() if task not in options.tasks}
    lost = {row["arm"] for task in options.tasks for row in record.get("tasks", {}).get(task, ())} - {
        "grpo",
        *options.arms,
    }
    if options.what == "arms" and (lost or (kept and record["seeds"] != options.seeds)):
        parser.error(f"{options.out} has other arms or seeds, which this would drop; give --out another file.")
    try:
        if options.what == "settings":
            for task in options.tasks:
                found = record.setdefault("settings", {"seed": TRIED}).setdefault(task, {})
                found |= tried(bench, task, options.settings)
        else:
            found = measured(bench, options.tasks, options.arms, options.seeds)
            record |= found | {"tasks": kept | found["tasks"]}
    except TimeIsUp:
        print("The time is up; the same call goes on from here.")
        raise SystemExit(3) from None
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measured(bench: Bench, tasks: Iterable[str], arms: Iterable[str], seeds: list[int]) -> dict[str, Any]:
    """The record of the arms against GRPO, whose tables are printed."""
    runs: dict[str, dict[str, list[str]]] = {
        task: {arm: [] for arm in COMPARED[task] if arm in {"grpo", *arms}} for task in tasks
    }
    for seed in seeds:
        for task, by_arm in runs.items():
            for arm, made in by_arm.items():
                made.append(bench.arm(task, arm, seed))
    rows = {task: summary(task, by_arm, bench.root) for task, by_arm in runs.items()}
    print("\n\n".join(table(found) for found in rows.values()))
    return {
        "seeds": seeds,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()},
        "reader": {key: value for key, value in asdict(Reader()).items()},
        "tasks": rows,
    }


if __name__ == "__main__":
    main()
