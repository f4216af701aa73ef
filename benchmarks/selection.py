"""Tokens and time to the same held-out score, by method of `selection:`, against plain GRPO on the embedded task.

    python benchmarks/selection.py [--tasks groups_of_8] [--seeds 0 1 2 3 4] [--arms plain cppo ...] [--out FILE] [--page FILE]

Every run trains the quickstart's model on the same few prompts until its greedy accuracy on the held-out problems reaches the
target, or its last step. Counted are the tokens trained on (prompt and completion), those generated, and the CPU seconds of
training. A ratio is plain GRPO's figure by the method's at the same seed, above 1 is better; of ratios the geometric mean is
given with its 95 % interval of Student's t over seeds. One process, one thread. Runs that stand in FILE with the same settings
are not made again, so that it can be stopped and continued; the table goes into the page by itself after every run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GROUP = 8  # completions of a prompt, the quickstart's
STEPS, EVERY, TARGET, PROMPTS, PROBLEMS = 24, 2, 0.75, 24, 100
GOAL = 1.7
SETTINGS = [
    "data.limit=400",  # 200 held out; of the rest few are trained on, so that prompts come back, which memories need
    f"evaluation.prompts={PROBLEMS}",
    "optimisation.batch_size=64",
    "optimisation.learning_rate=3e-4",  # at the quickstart's 5e-4 it takes 5 steps, too few to tell methods apart
    f"optimisation.steps={STEPS}",
    "run.threads=1",
    "run.save_completions=false",
]
ARMS: dict[str, list[str]] = {
    "plain": [],
    "plain, batch of 32": ["optimisation.batch_size=32"],  # as many completions trained on as PODS leaves
    "plain, batch of 16": ["optimisation.batch_size=16"],  # and as CPPO leaves: is it the choice, or the smaller batch?
    "cppo": ["selection.cppo={keep: 2}"],
    "pods": ["selection.pods={keep: 4}"],
    "dynamic_sampling": ["selection.dynamic_sampling={max_rounds: 3}"],
    "greso": ["selection.greso={explore: 0.5}"],
    "dynamic_sampling + cppo": ["selection.dynamic_sampling={max_rounds: 3}", "selection.cppo={keep: 2}"],
}
CONTROLS = {"pods": "plain, batch of 32", "cppo": "plain, batch of 16", "dynamic_sampling + cppo": "plain, batch of 16"}
"""Plain GRPO with as many completions trained on a step."""
TASKS: dict[str, list[str]] = {
    "groups_of_8": [],  # groups of 8, of which few are flat
    "groups_of_4": ["generation.num_generations=4"],  # more prompts a step, and many more flat groups
}
TITLES = {"groups_of_8": "Groups of 8: eight prompts a step", "groups_of_4": "Groups of 4: sixteen prompts a step"}
POOL = {"groups_of_8": PROMPTS, "groups_of_4": 64}
"""Prompts that are trained on."""
ALIKE = ("plain", "dynamic_sampling", "greso")
"""Arms that mean the same in groups of 4."""
MEASURES = {"updated": "update tokens", "generated": "generated tokens", "seconds": "CPU seconds"}
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantiles of Student's t by degrees of freedom."""
BEGIN, END = "<!-- measured: benchmarks/selection.py -->", "<!-- end of measured -->"


def settings(task: str, arm: str) -> list[str]:
    """What decides a run of an arm, beside its seed."""
    return [*SETTINGS, *TASKS[task], *ARMS[arm], f"every={EVERY}", f"target={TARGET}", f"prompts={POOL[task]}"]


def run(task: str, arm: str, seed: int, root: str) -> dict[str, Any]:
    """One run to the target: a point of its curve at the start and every few steps."""
    import torch
    from transformers import TrainerCallback, set_seed

    from kit.config import load_config
    from kit.evaluation.heldout import HeldOut, evaluating, scoring_context
    from kit.models.backend import use_threads
    from kit.models.loading import load_model
    from kit.runner.console import silence_steps
    from kit.trainer.arguments import grpo_config
    from kit.trainer.trainer import HookedGRPOTrainer

    config = load_config("quickstart", [*SETTINGS, *TASKS[task], *ARMS[arm], f"run.seed={seed}", f"run.root={root}"])
    use_threads(1)
    parts = checked_parts(task, config)
    set_seed(seed)
    loaded = load_model(parts.files, config.model)
    rewards = parts.preset.trl(seed=seed)
    args = grpo_config(config, loaded.backend, Path(root), rewards.reward_weights)
    args.save_strategy = "no"
    trainer = HookedGRPOTrainer(
        loaded.model,
        rewards,
        args,
        train_dataset=parts.data.train.select(range(POOL[task])),
        processing_class=loaded.processing_class(pictures=False),
        peft_config=loaded.peft_config,
        objective=parts.objective,
        selection=config.selection,
    )
    silence_steps(trainer)
    heldout = HeldOut(
        parts.data.heldout.to_list(),
        parts.preset,
        parts.files.tokenizer,
        config.evaluation,
        config.generation,
        parts.checker,
    )
    spent = {"updated": 0.0, "with_advantage": 0.0, "generated": 0.0, "useful": 0.0, "seconds": 0.0}
    curve: list[dict[str, float]] = []

    def score(step: int) -> float:
        with evaluating(trainer.model, 0):
            greedy = heldout._complete(trainer.model, heldout.prompts, False, None, 0, len(heldout.prompts))
        samples = heldout._as_samples(heldout.rows, greedy)
        right = parts.checker.is_correct(samples, scoring_context())
        curve.append({"step": step, "score": sum(right) / len(right), **spent})
        return curve[-1]["score"]

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Adds up what a step spent; scores every few steps, off the clock."""

        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = self.began or time.process_time()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if not logs or "tokens/generated" not in logs:
                return
            spent["seconds"] += time.process_time() - self.began
            for name, key in (("updated", "tokens/updated"), ("with_advantage", "tokens/with_advantage"),
                              ("generated", "tokens/generated"), ("useful", "groups/useful")):  # fmt: skip
                spent[name] += float(logs[key])
            if state.global_step % EVERY == 0 and score(state.global_step) >= TARGET:
                control.should_training_stop = True
            self.began = time.process_time()

    score(0)
    trainer.add_callback(Watch())
    torch.manual_seed(seed)
    trainer.train()
    made = {"task": task, "arm": arm, "seed": seed, "settings": settings(task, arm), "heldout": len(heldout.rows)}
    return {**made, "curve": curve}


@functools.cache
def _prepared(task: str) -> Any:
    from kit.config import load_config
    from kit.runner.prepare import prepare

    return prepare(load_config("quickstart", [*SETTINGS, *TASKS[task]]))


def checked_parts(task: str, config: Any) -> Any:
    """Data, reward, objective and model files: the same for all runs of a task, so that they are made once."""
    from kit.trainer.selection.rules import check_selection

    parts = _prepared(task)
    check_selection(config, parts.objective)
    return dataclasses.replace(parts, config=config)


def to_target(curve: list[dict[str, float]], measure: str) -> float | None:
    """The measure where the score first reaches the target, linear between two points; None if it never does."""
    for before, after in itertools.pairwise(curve):
        if after["score"] >= TARGET:
            share = (TARGET - before["score"]) / (after["score"] - before["score"])
            return before[measure] + share * (after[measure] - before[measure])
    return None


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and its 95 % t interval; without width NaN of fewer than two."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), math.nan, math.nan
    half = T_975[min(9, len(logs) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _groups(task: str, arm: str) -> int:
    """Prompts in a batch of an arm."""
    given = [*SETTINGS, *ARMS[arm]]
    rows = int([each for each in given if each.startswith("optimisation.batch_size=")][-1].partition("=")[2])
    return rows // (GROUP if task == "groups_of_8" else GROUP // 2)


def ratio_to(
    found: dict[tuple[str, int], Any], other: str, arm: str, measure: str
) -> tuple[float, float, float] | None:
    """Of another arm's measure to an arm's, over the seeds at which both reached the target."""
    ratios = []
    for name, seed in found:
        if name == arm and (other, seed) in found:
            theirs, own = to_target(found[other, seed], measure), to_target(found[arm, seed], measure)
            ratios += [theirs / own] if theirs is not None and own is not None else []
    return interval(ratios) if ratios else None


def summary(task: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row an arm: how many seeds reached the target, medians, and ratios to plain GRPO over seeds that both reached."""
    found = {(row["arm"], row["seed"]): row["curve"] for row in runs}
    rows = []
    for arm in ARMS:
        seeds = sorted(seed for name, seed in found if name == arm)
        if not seeds:
            continue
        row: dict[str, Any] = {"arm": arm, "seeds": len(seeds)}
        points = [(first, last) for seed in seeds for first, last in itertools.pairwise(found[arm, seed])]
        groups = sum(_groups(task, arm) * (last["step"] - first["step"]) for first, last in points)
        row["useful share"] = sum(last["useful"] - first["useful"] for first, last in points) / groups
        row["reached"] = sum(to_target(found[arm, seed], "step") is not None for seed in seeds)
        for measure in ("step", *MEASURES):
            values = [value for seed in seeds if (value := to_target(found[arm, seed], measure)) is not None]
            row[measure] = statistics.median(values) if values else None
        for measure in MEASURES:
            row[f"{measure} ratio"] = None if arm == "plain" else ratio_to(found, "plain", arm, measure)
        if arm in CONTROLS:
            row["updated ratio to control"] = ratio_to(found, CONTROLS[arm], arm, "updated")
            row["generated ratio to control"] = ratio_to(found, CONTROLS[arm], arm, "generated")
        spent = [point for seed in seeds if (point := found[arm, seed][-1])["useful"]]
        row["generated per useful group"] = (
            statistics.median(p["generated"] / p["useful"] for p in spent) if spent else None
        )
        rows.append(row)
    return rows


def verdict(row: dict[str, Any]) -> str:
    """In words, from the interval of update tokens and of generated tokens."""
    found = row["updated ratio"]
    if row["arm"].startswith("plain"):
        return "reference" if row["arm"] == "plain" else "control"
    if found is None:
        return "never reached"
    value, low, high = found
    if math.isnan(low):
        return "one seed says nothing"
    if low > 1:
        return f"helps{', reaches the goal' if value >= GOAL else ''}"
    return "does not help" if high < 1 else "no difference shown"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| method | reached | steps | update tokens | ratio | generated tokens | ratio | CPU s | ratio | "
        "generated per useful group | useful groups | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]

    def number(value: float | None, digits: int = 0) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    def ratio(found: tuple[float, float, float] | None) -> str:
        return "" if found is None else f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"

    for row in rows:
        cells = [row["arm"], f"{row['reached']}/{row['seeds']}", number(row["step"], 1)]
        for measure in MEASURES:
            cells += [number(row[measure]), ratio(row[f"{measure} ratio"])]
        cells += [number(row["generated per useful group"]), f"{row['useful share']:.0%}", verdict(row)]
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        if row.get("updated ratio to control") is not None:
            lines += ["", f"`{row['arm']}` against {CONTROLS[row['arm']]}: update tokens "
                      f"{ratio(row['updated ratio to control'])}, generated tokens "
                      f"{ratio(row['generated ratio to control'])}."]  # fmt: skip
    return lines


def write(runs: list[dict[str, Any]], out: Path, page: Path | None) -> list[str]:
    """The JSON, and the table in the page between its markers."""
    rows = {task: summary(task, [row for row in runs if row["task"] == task]) for task in TASKS}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, no GPU"
    content = {"machine": machine, "target": TARGET, "every": EVERY, "steps": STEPS, "summary": rows, "runs": runs}
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)
    lines = [line for task in TASKS if rows[task] for line in (f"**{TITLES[task]}**", "", *table(rows[task]), "")]
    if page is not None and page.is_file():
        text = page.read_text(encoding="utf-8")
        if BEGIN in text and END in text:
            head, _, rest = text.partition(BEGIN)
            body = "\n".join([BEGIN, "", *lines, END])
            page.write_text(head + body + rest.partition(END)[2], encoding="utf-8")
    return lines


def main() -> int:
    """Makes the runs that are missing, seed by seed; writes the JSON and the table after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "selection.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "selection.md")
    arguments = parser.parse_args()
    kept = json.loads(arguments.out.read_text(encoding="utf-8"))["runs"] if arguments.out.is_file() else []
    kept = [row for row in kept if row["arm"] in ARMS and row["task"] in TASKS]
    runs = [row for row in kept if row["settings"] == settings(row["task"], row["arm"])]
    done = {(row["task"], row["arm"], row["seed"]) for row in runs}
    for task, seed, arm in itertools.product(arguments.tasks, arguments.seeds, arguments.arms):
        if (task, arm, seed) in done or (task == "groups_of_4" and arm not in ALIKE):
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as root:
            runs.append(run(task, arm, seed, root))
        scores = " ".join(f"{point['score']:.2f}" for point in runs[-1]["curve"])
        print(f"{task}, seed {seed}, {arm}: {scores} ({time.perf_counter() - started:.0f} s)", flush=True)
        write(runs, arguments.out, arguments.page)
    print("\n".join(write(runs, arguments.out, arguments.page)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
