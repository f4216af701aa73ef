"""kit.studies.sweep: trials are measured alike, judged by the weights they leave, and looking changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from study_runs import draw, evaluation, make_run
from typer.testing import CliRunner

from kit.api import launch as api
from kit.cli import app as cli
from kit.config import RunConfig
from kit.errors import ConfigError
from kit.runs.store import RunDir, RunStore
from kit.runs.worker import DONE, Outcome
from kit.studies.sweep import carry_out, run_trial
from kit.studies.sweep_config import SweepConfig, check, load_sweep, trial_config

LR = "optimisation.learning_rate"
SPACE: dict[str, Any] = {LR: [1e-5, 1e-4, 1e-3]}


def sweep(**keys: Any) -> SweepConfig:
    return SweepConfig.model_validate({"name": "it", "space": SPACE, "sampler": {"name": "grid"}} | keys)


def silent(_: str) -> None:
    """Says nothing."""


def launching(monkeypatch: pytest.MonkeyPatch, make: Callable[[RunConfig], Any]) -> None:
    def launch(config: RunConfig, *, quiet: bool = False) -> tuple[None, Outcome]:
        make(config)
        return None, Outcome(DONE)

    monkeypatch.setattr(api, "launch", launch)


def finished(config: RunConfig, **of: Any) -> RunDir:
    return make_run(Path(config.run.root), str(config.run.id), draw(np.random.default_rng(0), 20, 0.5), **of)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"metric": "greedy_acuracy"}, "Did you mean 'greedy_accuracy'"),
        ({"metric": "pass@3"}, "With evaluation.k: 4"),
        (
            {"metric": "pass@1", "config": {"reward": {"functions": [{"path": "my.py:f"}]}}},
            "nothing says what is right",
        ),
        ({"space": {"run.seed": [0, 1]}}, "lucky seed"),
        ({"space": {"run": [{"seed": 1}]}}, "the sweep sets it"),
        ({"space": {"data.seed": [0, 1]}}, "hold out other problems"),
        ({"space": {"data.limit": [100, 1000]}}, "hold out other problems"),
        ({"space": {"data": [{"heldout": 3}]}}, "hold out other problems"),
        ({"space": {"evaluation.every": [1, 2]}}, "different yardsticks"),
        ({"space": {"reward.preset": ["gsm8k", "gsm8k-hash"]}}, "set evaluation.checker|Set evaluation.checker"),
        ({"space": {"reward.params": [{}]}}, "evaluation.checker"),
        (
            {"space": {"reward.params": [{}]}, "overrides": ["evaluation.checker=gsm8k"], "metric": "greedy_reward"},
            "not on one scale",
        ),
    ],
)
def test_what_changes_the_yardstick_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(sweep(**keys))


def test_rewards_may_be_searched_where_something_else_says_what_is_right() -> None:
    check(sweep(space={"reward.preset": ["gsm8k", "gsm8k-hash"]}, overrides=["evaluation.checker=gsm8k"]))
    check(sweep(space={"reward.max_failure_share": [0.1, 0.2]}))
    with pytest.raises(ConfigError, match=r"evaluation\.checker"):
        check(sweep(space={"reward.preset": ["gsm8k", "gsm8k-hash"]}))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"checker": "gsm8k/accuracy"}, "said by gsm8k/accuracy, there by reasoning-gym/accuracy"),
        ({"ids": [f"x{number}" for number in range(20)]}, "the 20 held-out problems are not its 20"),
    ],
)
def test_a_trial_measured_by_another_yardstick_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], words: str
) -> None:
    launching(monkeypatch, lambda config: finished(config, **(other if config.run.id == "it-t0001" else {})))
    found = carry_out(sweep(), tmp_path, silent)["trials"]
    assert [row["state"] for row in found] == ["complete", "failed", "complete"]
    assert "cannot be compared with that of it-t0000" in found[1]["reason"]
    assert words in found[1]["reason"]


def test_a_trial_that_was_rolled_back_counts_by_the_weights_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def roll_back(config: RunConfig) -> None:
        run = RunStore(tmp_path).create(str(config.run.id))
        run.write_json("eval/before.json", evaluation([[0, 0]] * 5, step=0))
        for name, step, right in (
            ("step-00010", 10, 4),
            ("step-00020", 20, 1),
            ("step-00030", 30, 1),
            ("after", 10, 4),
        ):
            run.write_json(f"eval/{name}.json", evaluation([[4, 1]] * right + [[0, 0]] * (5 - right), step=step))

    launching(monkeypatch, roll_back)
    result = run_trial(trial_config(sweep(), {}, "t", tmp_path), "auto", lambda *_: False)
    assert (result.state, result.step, result.value) == ("complete", 10, 0.8)


def test_a_wrong_key_of_a_range_is_met_with_those_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(yaml.safe_dump({"space": {LR: {"type": "loguniform", "low": 1e-5, "hgh": 1e-3}}}))
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    assert f"space.{LR}.hgh: there is no such key. Did you mean 'high'? space.{LR} has: type, low, high." in str(
        caught.value
    )
    assert f"space.{LR}.high: Field required" in str(caught.value)


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_looking_writes_nothing_and_works_with_an_edited_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launching(monkeypatch, finished)
    path, arguments = tmp_path / "it.yaml", ["sweep", str(tmp_path / "it.yaml"), "--root", str(tmp_path / "runs")]
    path.write_text(yaml.safe_dump({"space": SPACE, "sampler": {"name": "grid"}}))
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    before = contents(tmp_path / "runs")
    plain = CliRunner().invoke(cli.app, [*arguments, "--show"])
    assert "differs" not in plain.output
    path.write_text(yaml.safe_dump({"space": {"model.lora.rank": [4, 8]}, "overrides": ["optimisation.steps=7"]}))
    shown = CliRunner().invoke(cli.app, [*arguments, "--show"])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert all(f"it-t000{number}" in shown.output for number in range(3))
    assert "differs by now from the sweep shown: overrides, sampler, space, base" in shown.output
    assert contents(tmp_path / "runs") == before
