"""Trains the arms of a comparison: a configuration, changes to it, and seeds. Each run has an ordinary run directory.

All arms of a seed run before the next seed, in rotated order, so that a change in the machine's speed affects all arms
equally. Arms share data.seed (rows and their split), and run.seed within a seed (adapters, order of prompts, sampling).
Finished runs are kept: the same command trains the missing ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import launch as launching
from kit.config import RunConfig, load_config
from kit.errors import ConfigError, KitError, RunError
from kit.evaluation.checker import check_metric
from kit.runs.files import to_json, write_atomic
from kit.runs.store import ALIVE, RUN_ID, RunDir
from kit.runs.worker import STOPPED, USER_ERROR
from kit.studies.compare import FOLDER, at_a_glance, compare_runs, file_page
from kit.studies.scores import last_evaluation, method

BASELINE = "baseline"
Tell = Callable[[str], None]
MEASURE = ("prompts", "k", "temperature", "seed", "checker", "batch_size")


@dataclass(frozen=True)
class Plan:
    """Arms by name with their configurations (without run.id and run.seed), and the seeds."""

    name: str
    root: Path
    arms: dict[str, RunConfig]
    seeds: tuple[int, ...]

    @property
    def folder(self) -> Path:
        """The folder of the comparison, next to its runs."""
        return self.root / FOLDER / self.name

    def run_id(self, arm: str, seed: int) -> str:
        """`NAME-ARM-sSEED`."""
        return f"{self.name}-{arm}-s{seed}"

    def in_order(self) -> Iterator[tuple[str, int, RunConfig]]:
        """(arm, seed, configuration) of every run: all arms of a seed, starting with another arm for each seed."""
        names = list(self.arms)
        for number, seed in enumerate(self.seeds):
            for place in range(len(names)):
                arm = names[(place + number) % len(names)]
                tree = self.arms[arm].model_dump(mode="json")
                tree["run"] |= {"id": self.run_id(arm, seed), "seed": seed, "root": str(self.root)}
                yield arm, seed, load_config(tree)


def make_plan(
    config: str | Path,
    changes: Sequence[str],
    *,
    seeds: str | int = 3,
    steps: int | None = None,
    overrides: Sequence[str] = (),
    root: str | Path | None = None,
    name: str | None = None,
    metric: str | None = None,
) -> Plan:
    """Reads and checks all configurations before a run starts. Raises `ConfigError`.

    Args:
        config: a YAML file or a preset's name; with `overrides` it is the baseline.
        changes: one per arm: `[NAME:]KEY=VALUE[,KEY=VALUE...]`.
        seeds: a number of seeds, starting with run.seed, or the seeds: `3,7,11`.
        steps: optimiser steps of every arm.
        root: folder of the runs; None is the configuration's.
        metric: the score of the verdict, checked for every arm.
        name: of the comparison; None is made of the configuration's name and a hash of what is compared.
    """
    common = [*overrides, *([f"optimisation.steps={steps}"] if steps else []), *([f"run.root={root}"] if root else [])]
    baseline = load_config(config, common)
    if not changes:
        raise ConfigError("A comparison needs a second arm: add --change section.key=value, once per arm.")
    if not baseline.evaluation.after:
        raise ConfigError("A comparison needs the held-out score after training: set evaluation.after to true.")
    arms = {BASELINE: baseline}
    for change in changes:
        arm, keys = parse_change(change, set(arms))
        arms[arm] = load_config(config, [*common, *keys])
        check_objective(arms[arm], keys)
        if method(arms[arm].model_dump(mode="json")) == method(baseline.model_dump(mode="json")):
            raise ConfigError(f"--change {change} has no effect: the baseline has this value already.")
    for of_arm in arms.values():
        check_metric(metric or of_arm.evaluation.metric, of_arm, "--metric" if metric else "evaluation.metric")
    if name is None:  # independent of the seeds, so that a repeated command continues the comparison
        content = json.dumps({arm: method(each.model_dump(mode="json")) for arm, each in arms.items()}, sort_keys=True)
        stem = re.sub(r"[^a-z0-9]+", "-", Path(config).stem.lower()).strip("-")[:16].strip("-") or "compare"
        name = f"{stem}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"
    plan = Plan(name, Path(baseline.run.root), arms, parse_seeds(seeds, baseline.run.seed))
    longest = max((plan.run_id(arm, seed) for arm in arms for seed in plan.seeds), key=len)
    if not RUN_ID.fullmatch(longest):
        raise ConfigError(
            f"'{longest}' cannot be a run id: 1 to 64 lower-case letters, digits and dashes. Use shorter names: --name NAME, "
            "--change ARM:section.key=value."
        )
    return plan


def check_objective(config: RunConfig, keys: Sequence[str]) -> None:
    """Builds the objective if `keys` change it, to check the hyper-parameters of hooks. Raises `KitError`."""
    if any(key.partition(".")[0].strip() == "objective" for key in keys):
        from kit.runner.prepare import build_objective  # imports torch

        build_objective(config)


def parse_change(change: str, taken: set[str]) -> tuple[str, list[str]]:
    """`fast:a.b=1,c.d=[2, 3]` to ("fast", ["a.b=1", "c.d=[2, 3]"]); an arm without a name is named by its values."""
    match = re.match(r"([a-z0-9][a-z0-9-]*):(?=\s*[\w.]+\s*=)", change)
    name, text = (match[1], change[match.end() :]) if match else (None, change)
    keys = [part.strip() for part in re.split(r",(?=\s*\w+(?:\.\w+)+\s*=)", text)]  # commas before another key
    for key in (part.partition("=")[0].strip() for part in keys):
        section, _, rest = key.partition(".")
        if section == "run" and rest in ("id", "root", "seed"):
            raise ConfigError(f"--change {key}: is set by the comparison. Use --seeds, --root or --name.")
        if section == "evaluation" and rest in MEASURE:
            raise ConfigError(
                f"--change {key} would score the arms in different ways. Set it for all of them: -o {key}=..."
            )
    short = "-".join(part.partition("=")[0].rpartition(".")[2] + "-" + part.partition("=")[2] for part in keys)
    plain = name or re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")[:24].strip("-") or "arm"
    if plain in taken and name:
        raise ConfigError(f"Two arms are called '{name}'; give each a different name.")
    number, free = 2, plain
    while free in taken:
        free, number = f"{plain}-{number}", number + 1
    return free, keys


def parse_seeds(seeds: str | int, first: int) -> tuple[int, ...]:
    """`3` to (first, first + 1, first + 2); `3,7` to (3, 7). Raises `ConfigError`."""
    words = str(seeds).split(",")
    try:
        numbers = tuple(int(word) for word in words if word.strip())
    except ValueError:
        numbers = ()
    if len(words) == 1 and numbers and numbers[0] > 0:
        return tuple(range(first, first + numbers[0]))
    if len(numbers) < 2 or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds {seeds}: expected a number of seeds such as 3, or different seeds such as 0,1,2.")
    return numbers


def carry_out(plan: Plan, tell: Tell = print, *, quiet: bool = False, **how: Any) -> dict[str, Any]:
    """Trains the missing runs, compares all, and writes comparison.json. `how`: keywords of `compare_runs`.

    A failed run is reported and left out. Raises `KeyboardInterrupt` if a run was stopped by Ctrl-C, and `KitError` if fewer
    than two arms have a finished run.
    """
    _claim(plan)
    runs, failed = list(plan.in_order()), []
    for number, (arm, seed, config) in enumerate(runs, start=1):
        state = _finished(plan, arm, seed)
        tell(f"[{number}/{len(runs)}] {arm}, seed {seed}: {'finished already' if state else plan.run_id(arm, seed)}")
        if state:
            continue
        if error := run_once(config, quiet=quiet, abandoned=plan.folder / "abandoned"):
            failed.append(f"{arm}, seed {seed}: {error}")
            tell(f"  failed: {error}")
        if number == len(plan.arms) and not failed:
            compare_runs(_done(plan), plan.root, metric=how.get("metric"))  # raises if the arms cannot be compared
    result = compare_runs(_done(plan), plan.root, **how)
    result["warnings"] += [f"A run failed and was left out. {reason}" for reason in failed]
    write_atomic(plan.folder / "comparison.json", to_json(result, indent=2) + "\n")
    return result


def run_once(config: RunConfig, *, quiet: bool, abandoned: Path) -> KitError | None:
    """Trains, or resumes an earlier attempt; returns the error if it failed. Raises `KeyboardInterrupt`.

    An attempt that cannot be resumed is moved to `abandoned`, and the run starts again.
    """
    run, outcome = RunDir(Path(config.run.root) / str(config.run.id)), None
    if run.path.exists():
        state = run.status()["state"]
        if state in ALIVE:
            return RunError(f"{run.id} is running in another process; wait for it, or stop it: grpo-kit stop {run.id}")
        if state != "failed":
            with suppress(KitError):  # it cannot be resumed
                outcome = launching.relaunch(run.id, str(config.run.root), quiet=quiet)
            if outcome is not None and outcome.code == USER_ERROR and run.status()["state"] != "failed":
                outcome = None  # the resume was refused
        if outcome is None:
            abandoned.mkdir(parents=True, exist_ok=True)
            places = (abandoned / f"{run.id}-{number}" for number in itertools.count(1))
            run.path.rename(next(place for place in places if not place.exists()))
    outcome = outcome or launching.launch(config, quiet=quiet)
    status = run.status()  # after Ctrl-C the comparison ends; `grpo-kit stop` ends only this run
    requested = (run.control / "stop").exists() or status.get("stop")
    if outcome.code == STOPPED and not (requested or str(status.get("reason")).startswith("control/stop")):
        raise KeyboardInterrupt
    return RunError("it was stopped by hand") if outcome.code == STOPPED else outcome.error


def _finished(plan: Plan, arm: str, seed: int) -> bool:
    run = RunDir(plan.root / plan.run_id(arm, seed))
    try:
        return run.status()["state"] == "finished" and bool(last_evaluation(run))
    except RunError:
        return False


def _done(plan: Plan) -> dict[str, list[str]]:
    """Finished runs by arm, for the seeds that all arms have; without arms that have none."""
    seeds = {arm: [seed for seed in plan.seeds if _finished(plan, arm, seed)] for arm in plan.arms}
    arms = {arm: of_arm for arm, of_arm in seeds.items() if of_arm}
    if len(arms) < 2 or BASELINE not in arms:
        raise RunError(
            f"Comparison '{plan.name}' needs two arms with finished runs. Finished runs by arm: "
            f"{', '.join(f'{arm} {len(of_arm)}' for arm, of_arm in seeds.items())}. The errors are above and in the "
            "runs' log.txt. Correct them and repeat the command."
        )
    shared = [seed for seed in plan.seeds if all(seed in of_arm for of_arm in arms.values())]
    return {arm: [plan.run_id(arm, seed) for seed in shared or of_arm] for arm, of_arm in arms.items()}


def _claim(plan: Plan) -> None:
    """Writes the plan. Raises `ConfigError` if a comparison of this name has another configuration for an arm."""
    path = plan.folder / "plan.json"
    arms = {arm: config.model_dump(mode="json") for arm, config in plan.arms.items()}
    earlier = json.loads(path.read_text(encoding="utf-8"))["arms"] if path.is_file() else {}
    for arm, tree in arms.items():
        if arm in earlier and method(earlier[arm]) != method(tree):
            raise ConfigError(
                f"A comparison '{plan.name}' exists in which arm '{arm}' has another configuration. Choose "
                f"another --name, or remove {plan.folder} and its runs."
            )
    arms = earlier | arms
    write_atomic(path, to_json({"name": plan.name, "arms": arms, "seeds": plan.seeds}, indent=2) + "\n")


@dataclass(frozen=True)
class Comparison:
    """A comparison of arms on the same held-out problems and seeds. A notebook displays verdicts, scores and curves."""

    result: Mapping[str, Any]
    """The content of comparison.json."""
    page: Path
    """The comparison as one HTML file."""

    @property
    def verdicts(self) -> list[str]:
        """A sentence about each arm and the first one."""
        return [str(each["text"]) for each in self.result["comparisons"]]

    def __repr__(self) -> str:
        return "\n".join(["<Comparison", *(f"  {text}" for text in self.verdicts), f"  in {self.page.parent}>"])

    def _repr_html_(self) -> str:
        from kit.report.run_report import around

        names = [arm["name"] for arm in self.result["arms"]]
        return around(" vs ".join(names), [at_a_glance(self.result)])


def compare(
    config: str | Path,
    changes: Sequence[str],
    *,
    seeds: str | int = 3,
    steps: int | None = None,
    overrides: Sequence[str] = (),
    root: str | Path | None = None,
    name: str | None = None,
    metric: str | None = None,
    tell: Callable[[str], None] = print,
) -> Comparison:
    """Trains `config` and changed copies with the same seeds, and decides which is better, or that they are not distinguishable.

    Finished runs are kept: a repeated call trains the missing ones.

    Args:
        config: a YAML file or a preset's name; with `overrides` it is the baseline.
        changes: one per arm: `[NAME:]section.key=value[,section.key=value...]`.
        seeds: their number, or the seeds (`"0,1,7"`).
        steps: optimiser steps of every arm.
        root: folder of the runs; None is the configuration's.
        name: of the comparison; None is made of the configuration's name and a hash of what is compared.
        metric: the score of the verdict, e.g. `pass@1`; None: evaluation.metric.
        tell: called with a message about each run.

    Raises:
        KitError: an error that the user can correct, or fewer than two arms have a finished run.
        KeyboardInterrupt: stopped; the run in progress has saved a checkpoint.
    """
    plan = make_plan(
        config, changes, seeds=seeds, steps=steps, overrides=overrides, root=root, name=name, metric=metric
    )
    result = carry_out(plan, tell, quiet=True, metric=metric)
    return Comparison(result, file_page(result, plan.folder))
