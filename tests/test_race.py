"""kit.studies.race: the error rate that docs/sweep.md states, and a race that is interrupted decides as one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from study_runs import evaluation
from transformers import TrainerControl, TrainerState
from typer.testing import CliRunner

from kit.api import launch as api
from kit.cli import app as cli
from kit.config import RunConfig, load_config
from kit.evaluation.heldout import own_seed
from kit.evaluation.results import course
from kit.runner.evaluation import EvaluationCallback, EvaluationPolicy
from kit.runner.lifecycle import StopSignal
from kit.runs.store import RunDir, RunStore
from kit.runs.worker import DONE, STOPPED, TURN, USER_ERROR, Outcome
from kit.studies.race import Evidence, dropped
from kit.studies.sweep import carry_out, look
from kit.studies.sweep_config import SweepConfig, check, trial_config

LR = "optimisation.learning_rate"
RATES = [1e-5, 1e-4, 1e-3]
OVERRIDES = ["optimisation.steps=12", "evaluation.every=3"]


def sweep(**keys: Any) -> SweepConfig:
    content = {"name": "it", "space": {LR: RATES}, "sampler": {"name": "grid"}, "race": True, "overrides": OVERRIDES}
    made = SweepConfig.model_validate(content | keys)
    check(made)
    return made


def silent(_: str) -> None:
    """Says nothing."""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was trained, as (run, up to which step): the higher the learning rate the better, from the first step on."""
    made: list[tuple[str, int]] = []

    def train(config: RunConfig, until: int | None) -> Outcome:
        run, steps, every = RunDir(Path(config.run.root) / str(config.run.id)), config.optimisation.steps, 3
        end = until or steps
        made.append((run.id, end))
        share = 0.2 + 0.3 * (np.log10(config.optimisation.learning_rate) + 5)
        reached = max((result["step"] for result in course(run)), default=0)
        for step in range(reached + every, end + 1, every):
            rng = np.random.default_rng(own_seed(run.id, step))
            correct = [[int(rng.binomial(4, share)), 0] for _ in range(60)]
            result = evaluation(correct, step=step) | {"pass@1": {"value": sum(n for n, _ in correct) / 240}}
            run.write_json("eval/after.json" if step == steps else f"eval/step-{step:05d}.json", result)
        run.write_status("finished" if end == steps else "stopped", reason=None if end == steps else f"{TURN}{end}")
        return Outcome(DONE if end == steps else STOPPED)

    def launch(config: RunConfig, *, quiet: bool = False, until: int | None = None) -> tuple[None, Outcome]:
        RunStore(config.run.root).create(str(config.run.id), config=config.to_yaml())
        return None, train(config, until)

    def relaunch(run_id: str, root: str, *, quiet: bool = False, until: int | None = None) -> tuple[None, Outcome]:
        return None, train(load_config(Path(root) / run_id / "config.yaml"), until)

    monkeypatch.setattr(api, "launch", launch)
    monkeypatch.setattr(api, "relaunch", relaunch)
    return made


def test_worse_arms_are_dropped_with_their_reason_and_the_best_trains_to_the_end(
    tmp_path: Path, turns: list[tuple[str, int]]
) -> None:
    found = carry_out(sweep(), tmp_path, silent)
    by_rate = {row["params"][LR]: row for row in found["trials"]}
    assert [by_rate[rate]["state"] for rate in RATES] == ["pruned", "pruned", "complete"]
    best = by_rate[1e-3]
    assert found["best"]["run"] == best["run"]
    assert (best["step"], by_rate[1e-5]["step"]) == (12, 3)
    assert by_rate[1e-5]["reason"].startswith(f"dropped at step 3: worse than {best['run']}, evidence")
    assert turns[-1] == (best["run"], 12)
    assert turns[:3] == [(row["run"], 3) for row in found["trials"]], "in turns"
    assert len(turns) == len(set(turns))
    assert found["race"]["steps"] == sum(row["step"] for row in found["trials"]) < found["race"]["steps_of_all"] == 36
    page = (tmp_path / "sweeps/it/sweep.html").read_text()
    assert "dropped at step 3" in page
    assert "Evidence against being the best" in page
    assert look(sweep(), tmp_path)["race"] == found["race"]


def test_an_interrupted_race_goes_on_and_decides_the_same(
    tmp_path: Path, turns: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = carry_out(sweep(), tmp_path / "whole", silent)
    all_turns, trained = list(turns), api.relaunch
    turns.clear()

    def interrupted(run_id: str, *rest: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "relaunch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out(sweep(), tmp_path / "parts", silent)
    monkeypatch.setattr(api, "relaunch", trained)
    again = carry_out(sweep(), tmp_path / "parts", silent)
    assert turns == all_turns
    drop = ("seconds",)
    assert [{k: v for k, v in row.items() if k not in drop} for row in again["trials"]] == [
        {k: v for k, v in row.items() if k not in drop} for row in whole["trials"]
    ]
    assert again["race"] == whole["race"]
    turns.clear()
    assert carry_out(sweep(), tmp_path / "parts", silent)["trials"] == again["trials"]
    assert turns == [], "a finished race trains nothing"


def test_an_arm_that_fails_leaves_the_race(
    tmp_path: Path, turns: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.errors import RewardError

    fine = api.launch

    def launch(config: RunConfig, **how: Any) -> Any:
        bad = config.optimisation.learning_rate == 1e-3
        return (None, Outcome(USER_ERROR, RewardError("broken"))) if bad else fine(config, **how)

    monkeypatch.setattr(api, "launch", launch)
    found = carry_out(sweep(), tmp_path, silent)
    assert {row["params"][LR]: row["state"] for row in found["trials"]} == {
        1e-5: "pruned",
        1e-4: "complete",
        1e-3: "failed",
    }


def error_rate(*, fresh: bool, races: int = 300, arms: int = 4, problems: int = 40, looks: int = 10) -> float:
    """How often the first arm is dropped although all arms are alike. Problems are of unequal difficulty."""
    rng, wrong = np.random.default_rng(0), 0
    chance = rng.random(problems)
    for _ in range(races):
        evidence, once = Evidence(arms), rng.random((arms, problems))
        for _ in range(looks):
            draws = rng.random((arms, problems)) if fresh else once
            evidence.see(list(range(arms)), (draws < chance).astype(float))
            if 0 in dropped(evidence, list(range(arms)), 0.05):
                wrong += 1
                break
    return wrong / races


def test_the_best_arm_is_dropped_as_often_as_is_said_at_most() -> None:
    assert error_rate(fresh=True) <= 0.05


def test_completions_that_are_not_sampled_anew_would_break_the_error_rate() -> None:
    assert error_rate(fresh=False) > 0.15
    config = trial_config(sweep(), {}, "t", Path("runs"))
    assert config.evaluation.seed is None, "each look and each arm has a seed of its own"
    assert len({own_seed(name, step) for name in ("a", "b") for step in (3, 6)}) == 4


def test_evidence_is_the_capital_of_a_bet() -> None:
    evidence = Evidence(2)
    evidence.see([0, 1], np.array([[0.0, 1.0, 0.0], [1.0, 0.5, 0.0]]))
    bets = np.array([0.1, 0.25, 0.5, 0.9])
    assert evidence.total(0) == pytest.approx(np.mean((1 + bets) * (1 - bets / 2)))
    assert evidence.total(1) == pytest.approx(np.mean((1 - bets) * (1 + bets / 2)))


def test_one_arm_always_stays() -> None:
    evidence = Evidence(2)
    evidence.log_capital[:] = 10.0
    assert len(dropped(evidence, [0, 1], 0.05)) == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sampler": {"name": "tpe"}}, "sampler: {name: random}"),
        ({"pruner": {"name": "median"}}, "leave pruner out"),
        ({"overrides": ["optimisation.steps=12", "evaluation.every=0"]}, "evaluation.every is 0"),
        ({"metric": "greedy_accuracy"}, "choose pass@1"),
        ({"space": {"optimisation.steps": [4, 8]}}, "at equal steps"),
        ({"overrides": [*OVERRIDES, "evaluation.patience=2"]}, "evaluation.patience=null"),
        ({"race_error": 1.0}, "less than 1"),
    ],
)
def test_what_a_race_cannot_test_is_refused(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    content = {"space": {LR: RATES}, "sampler": {"name": "grid"}, "race": True, "overrides": OVERRIDES} | keys
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(content))
    result = CliRunner().invoke(cli.app, ["sweep", str(tmp_path / "it.yaml"), "--root", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.survival
def test_a_turn_ends_with_its_evaluation_and_the_run_goes_on_as_if_uninterrupted(
    tree: dict[str, Any], tmp_path: Path, attempt: Any
) -> None:
    import kit.train

    tree["evaluation"] |= {"after": True, "every": 1, "seed": None}
    tree["optimisation"]["steps"] = 3
    tree["run"] |= {"root": str(tmp_path)}

    def run(name: str, **how: Any) -> RunDir:
        return kit.train.run(load_config(tree | {"run": tree["run"] | {"id": name}}), quiet=True, **how)

    def numbers(found: RunDir) -> list[Any]:
        keys = ("step", "loss", "reward", "entropy", "grad_norm")
        return [{key: line[key] for key in keys if key in line} for line in found.metrics()]

    whole, parts = run("whole"), run("parts", until=1)
    assert (parts.status()["state"], parts.status()["reason"]) == ("stopped", f"{TURN}1")
    assert [result["step"] for result in course(parts)][-1] == 1
    assert parts.last_checkpoint is not None
    (parts.eval / "step-00001.json").unlink()  # as where the turn was stopped during its evaluation
    run("parts", resume=True, until=1)
    assert (parts.status()["state"], parts.status()["reason"]) == ("stopped", f"{TURN}1")
    assert ([result["step"] for result in course(parts)][-1], parts.last_checkpoint.name) == (1, "checkpoint-1")
    run("parts", resume=True, until=2)
    assert [result["step"] for result in course(parts)][-1] == 2
    run("parts", resume=True)
    assert parts.status()["state"] == "finished"
    assert numbers(parts) == numbers(whole)
    seeds = [json.loads((parts.eval / name).read_text())["seed"] for name in ("step-00001.json", "step-00002.json")]
    assert seeds == [own_seed("parts", 1), own_seed("parts", 2)]


def test_a_turn_that_is_beyond_its_step_ends_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes, whose turn cannot end before its first step."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load_config("quickstart", ["evaluation.every=0"])
    run = RunStore(tmp_path).create("it", config=config.to_yaml(), step=0, total_steps=9)
    policy, stop = EvaluationPolicy(run, config.evaluation, "pass@1", silent), StopSignal(run)
    callback, control = EvaluationCallback(policy, pytest.fail, stop), TrainerControl()
    for until in (None, 4, 3):
        stop.until = until
        callback.on_train_begin(None, TrainerState(global_step=3, max_steps=9), control)
        assert (stop.reason, control.should_training_stop) == (None, False)
    callback.on_step_end(None, TrainerState(global_step=4, max_steps=9), control)
    assert (stop.reason, control.should_training_stop, control.should_save) == (f"{TURN}4", True, True)


def test_the_documented_tables_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import race

    found = json.loads((root / "benchmarks/results/race.json").read_text(encoding="utf-8"))
    page = (root / "docs/sweep.md").read_text(encoding="utf-8")
    assert all(table in page for table in race.tables(found))
    fair = [row for row in found["simulated"] if "wrong on purpose" not in row["case"] and "slowly" not in row["case"]]
    assert all(row["best_dropped"] <= 0.05 for row in fair)
