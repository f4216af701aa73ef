"""kit.studies.sweep: what is searched is checked first, a killed sweep goes on, and a failing trial ends nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from study_runs import draw, make_run
from typer.testing import CliRunner

from kit import launch as launching
from kit.cli import app as cli
from kit.config import RunConfig, load_config
from kit.errors import ConfigError, RewardError, RunError
from kit.runs.store import RunDir, RunStore
from kit.runs.worker import DONE, STOPPED, USER_ERROR, Outcome
from kit.studies.sweep import SweepConfig, carry_out, check, load_sweep, look, make_trial, table, trial_config

LR, CLIP = "optimisation.learning_rate", "objective.clip.eps_high"
SPACE: dict[str, Any] = {LR: {"type": "loguniform", "low": 1e-5, "high": 1e-3}, CLIP: [0.2, 0.3, 0.4]}
Launch = Callable[..., Outcome]


def sweep(**keys: Any) -> SweepConfig:
    made = SweepConfig.model_validate({"name": "it", "space": SPACE, "trials": 3} | keys)
    check(made)
    return made


def write(path: Path, **keys: Any) -> Path:
    path.write_text(yaml.safe_dump({"space": SPACE, "trials": 3} | keys))
    return path


def silent(_: str) -> None:
    """Says nothing."""


def share(config: RunConfig) -> float:
    """How good a trial is: the higher the learning rate the better."""
    return float(np.clip(0.2 + 0.3 * (np.log10(config.optimisation.learning_rate) + 5), 0, 1))


def launch_into(started: list[RunConfig]) -> Launch:
    """In the place of `kit.launch`: notes the configuration, and leaves a finished run at once."""

    def launch(config: RunConfig, *, quiet: bool = False) -> Outcome:
        started.append(config)
        rng = np.random.default_rng(0)
        make_run(Path(config.run.root), str(config.run.id), draw(rng, 50, share(config)), config=config)
        return Outcome(DONE)

    return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations of the trials that were started."""
    started: list[RunConfig] = []
    monkeypatch.setattr(launching, "launch", launch_into(started))
    return started


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[RunConfig]]:
    """One sweep of ten trials: its root, what it returned, and the trials' configurations."""
    root, started = tmp_path_factory.mktemp("finished"), list[RunConfig]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "launch", launch_into(started))
        return root, carry_out(sweep(trials=10), root, silent), started


def instead(monkeypatch: pytest.MonkeyPatch, bad: Callable[[RunConfig], Outcome | None]) -> None:
    """Trials for which `bad` has an outcome end so; the others go on as before."""
    fine = launching.launch

    def launch(config: RunConfig, *, quiet: bool = False) -> Any:
        outcome = bad(config)
        return outcome if outcome else fine(config, quiet=quiet)

    monkeypatch.setattr(launching, "launch", launch)


def test_every_trial_is_a_run_with_its_values_and_the_best_is_left_as_yaml(
    finished: tuple[Path, dict[str, Any], list[RunConfig]],
) -> None:
    root, found, launched = finished
    assert [row["run"] for row in found["trials"]] == [f"it-t{number:04d}" for number in range(10)]
    for row, config in zip(found["trials"], launched, strict=True):
        assert row["state"] == "complete"
        assert config.optimisation.learning_rate == row["params"][LR]
        assert config.objective.clip["eps_high"] == row["params"][CLIP]
        assert 1e-5 <= row["params"][LR] <= 1e-3
    highest = max(found["trials"], key=lambda row: row["value"])
    assert found["best"] == highest
    best = load_config(root / "sweeps/it/best.yaml")
    assert best.optimisation.learning_rate == highest["params"][LR]
    assert best.run.id is None, "so that it can be trained again"
    assert json.loads((root / "sweeps/it/table.json").read_text())["trials"] == found["trials"]


def test_a_finished_sweep_does_nothing_more_and_a_longer_one_goes_on(tmp_path: Path, launched: list[RunConfig]) -> None:
    first = carry_out(sweep(), tmp_path, silent)
    assert carry_out(sweep(), tmp_path, silent)["trials"] == first["trials"]
    longer = carry_out(sweep(trials=5), tmp_path, silent)["trials"]
    assert longer[:3] == first["trials"]
    assert len(launched) == 5
    assert len({row["params"][LR] for row in longer}) == 5, "what goes on does not draw the first values again"


def test_a_failed_trial_is_noted_and_ends_nothing(
    tmp_path: Path, launched: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Outcome(USER_ERROR, RewardError("the reward has failed"))
    instead(monkeypatch, lambda config: error if config.run.id == "it-t0001" else None)
    found = carry_out(sweep(), tmp_path, silent)["trials"]
    assert [row["state"] for row in found] == ["complete", "failed", "complete"]
    assert found[1]["reason"] == "the reward has failed"


def test_ctrl_c_ends_the_sweep_and_its_trial_is_tried_again(
    tmp_path: Path, launched: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []

    def stop_once(config: RunConfig) -> Outcome | None:
        if config.run.id != "it-t0001" or stopped:
            return None
        stopped.append(str(config.run.id))
        make_run(tmp_path, "it-t0001", draw(np.random.default_rng(0), 20, 0.5), state="stopped", reason="SIGINT")
        return Outcome(STOPPED)

    instead(monkeypatch, stop_once)
    with pytest.raises(KeyboardInterrupt):
        carry_out(sweep(), tmp_path, silent)
    found = carry_out(sweep(), tmp_path, silent)["trials"]
    assert [row["state"] for row in found] == ["complete", "failed", "complete", "complete"]
    assert found[2]["params"] == found[1]["params"]


KILLED = """
import os, signal, sys
from pathlib import Path
from kit import launch as launching
from kit.runs.store import RunStore
from kit.studies.sweep import carry_out, load_sweep

def launch(config, *, quiet=False):
    RunStore(config.run.root).create(config.run.id).write_status("running")
    os.kill(os.getpid(), signal.SIGKILL)

launching.launch = launch
carry_out(load_sweep(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.survival
def test_a_killed_sweep_goes_on_with_the_values_of_the_dead_trial(tmp_path: Path, launched: list[RunConfig]) -> None:
    path, script = write(tmp_path / "it.yaml"), tmp_path / "killed.py"
    script.write_text(KILLED)
    killed = subprocess.run([sys.executable, str(script), str(path), str(tmp_path)], check=False)
    assert killed.returncode == -9
    before = look(load_sweep(path), tmp_path)["trials"]
    assert [row["state"] for row in before] == ["running"]
    told: list[str] = []
    found = carry_out(load_sweep(path), tmp_path, told.append)["trials"]
    assert told[0] == "it-t0000 had died; its values are tried again"
    assert [row["state"] for row in found] == ["failed", "complete", "complete", "complete"]
    assert found[1]["params"] == before[0]["params"]


def test_values_that_are_interrupted_every_time_are_given_up(
    tmp_path: Path, launched: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(config: RunConfig, *, quiet: bool = False) -> None:
        launched.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "launch", interrupt)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            carry_out(sweep(trials=1), tmp_path, silent)
    with pytest.raises(RunError, match="No trial"):
        carry_out(sweep(trials=1), tmp_path, silent)
    assert len({config.optimisation.learning_rate for config in launched}) == 1
    assert len(launched) == 3


def test_a_trial_that_falls_behind_is_asked_to_stop_and_noted_as_pruned(
    tmp_path: Path, launched: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(config: RunConfig) -> Outcome | None:
        """A run that trains until it is asked to stop, after a poor score at step 10."""
        if config.run.id != "it-t0002":
            RunStore(tmp_path).create(str(config.run.id))
            for step, of in ((10, 0.6), (20, 0.8)):
                result = {"step": step, "k": 4, "greedy_accuracy": {"value": of, "low": of, "high": of}}
                RunDir(tmp_path / str(config.run.id)).write_json(f"eval/step-{step:05d}.json", result)
            return Outcome(DONE)
        run = RunStore(tmp_path).create("it-t0002")
        run.write_json("eval/step-00010.json", {"step": 10, "k": 4, "greedy_accuracy": {"value": 0.1}})
        deadline = time.monotonic() + 20
        while not (run.control / "stop").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        run.write_status("stopped", reason="control/stop")
        return Outcome(STOPPED)

    instead(monkeypatch, slowly)
    monkeypatch.setattr("kit.studies.sweep.POLL_SECONDS", 0.05)
    pruner = {"name": "median", "startup_trials": 1}
    # The first two end as soon as they begin; their scores in between are read all the same.
    found = carry_out(sweep(pruner=pruner, overrides=["evaluation.every=10"]), tmp_path, silent)["trials"]
    assert [(row["state"], row["value"]) for row in found] == [("complete", 0.8), ("complete", 0.8), ("pruned", 0.1)]
    assert (tmp_path / "it-t0002/control/stop").is_file()


def test_scores_are_reported_once_each_and_before_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Event()

    class Trial:
        seen: ClassVar[list[tuple[int, float]]] = []

        def report(self, value: float, step: int) -> None:
            self.seen.append((step, value))
            if step == 20:
                ready.set()

        def should_prune(self) -> bool:
            return False

    def launch(config: RunConfig, *, quiet: bool = False) -> Outcome:
        run = RunStore(tmp_path).create("t")
        for name, step, of in (("before", 0, 0.1), ("step-00010", 10, 0.3), ("after", 20, 0.5)):
            run.write_json(f"eval/{name}.json", {"step": step, "k": 2, "greedy_accuracy": {"value": of}})
        ready.wait(5)
        return Outcome(DONE)

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr("kit.studies.sweep.POLL_SECONDS", 0.02)
    result = make_trial(trial_config(sweep(), {}, "t", tmp_path), "auto", Trial())
    assert Trial.seen == [(10, 0.3), (20, 0.5)]
    assert result == ("complete", 0.5, 20)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"space": {"optimisation.learning_rat": SPACE[LR]}}, "Did you mean 'learning_rate'"),
        ({"space": {LR: {"type": "loguniform", "low": 1e-3, "high": 1e-5}}}, "`low <= high` must hold"),
        ({"space": {LR: {"type": "loguniform", "low": 0.0, "high": 1e-5}}}, "`low > 0` must hold"),
        ({"space": {LR: [-1.0, 0.0]}}, "no value of it can be used"),
        ({"space": {"objective.clip.eps_hgih": [0.2, 0.3]}}, "eps_high"),
        ({"space": {"run.seed": [0, 1]}}, "different yardsticks"),
        ({"space": {"reward.params": [{}]}}, "evaluation.checker"),
        ({"metric": "greedy_acuracy"}, "Did you mean 'greedy_accuracy'"),
        ({"pruner": {"name": "median"}, "overrides": ["evaluation.every=0"]}, "Set evaluation.every"),
        ({"overrides": ["evaluation.after=false"]}, "evaluation.after"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    result = CliRunner().invoke(cli.app, ["sweep", str(write(tmp_path / "it.yaml", **keys)), "--root", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert not (tmp_path / "sweeps").exists()


def test_the_documented_sweep_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/sweep.md").read_text(encoding="utf-8")
    path = tmp_path / "sweep.yaml"
    path.write_text(text.partition("```yaml\n")[2].partition("```")[0])
    made = load_sweep(path)
    assert {of_key.type for of_key in made.space.values()} == {"loguniform", "uniform", "int", "categorical"}


def test_another_search_under_the_same_name_is_refused(tmp_path: Path, launched: list[RunConfig]) -> None:
    carry_out(sweep(), tmp_path, silent)
    with pytest.raises(ConfigError, match="already with another space"):
        carry_out(sweep(space={LR: SPACE[LR]}), tmp_path, silent)
    with pytest.raises(ConfigError, match="already with another config, base"):
        carry_out(
            SweepConfig.model_validate({**sweep().model_dump(), "config": {"run": {"seed": 3}}}), tmp_path, silent
        )


def test_rewards_may_be_searched_where_a_checker_says_what_is_right() -> None:
    space = {"reward.preset": ["gsm8k", "gsm8k-hash"]}
    sweep(space=space, overrides=["evaluation.checker=gsm8k"])
    with pytest.raises(ConfigError, match="greedy_reward"):
        sweep(space=space, overrides=["evaluation.checker=gsm8k"], metric="greedy_reward")


def test_the_verb_shows_the_table_best_first(tmp_path: Path, launched: list[RunConfig]) -> None:
    path = write(tmp_path / "it.yaml")
    arguments = ["sweep", str(path), "--root", str(tmp_path)]
    before = CliRunner().invoke(cli.app, [*arguments, "--show"])
    assert before.exit_code == 2
    assert "no sweep 'it'" in before.output
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    shown = CliRunner().invoke(cli.app, [*arguments, "--show"])
    found = json.loads(CliRunner().invoke(cli.app, [*arguments, "--show", "--json"]).output)
    lines = [line.split()[0] for line in shown.output.splitlines() if line.startswith(" it-t")]
    assert lines == [row[0] for row in table(found)[1]]
    assert lines[0] == found["best"]["run"]
    assert "best.yaml" in shown.output
    assert len(launched) == 3
    database = (tmp_path / "sweeps/it/study.db").read_bytes()
    CliRunner().invoke(cli.app, [*arguments, "--show"])
    assert (tmp_path / "sweeps/it/study.db").read_bytes() == database, "looking writes nothing"


def test_a_trial_for_real(tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: Any) -> None:
    import kit.train

    def launch(config: RunConfig, *, quiet: bool = False) -> Outcome:
        try:
            kit.train.run(load_config(config), quiet=True)
        except KeyboardInterrupt:
            return Outcome(STOPPED)
        return Outcome(DONE)

    monkeypatch.setattr(launching, "launch", launch)
    tree["evaluation"] |= {"after": True, "every": 1}
    tree["run"].pop("id")
    made = sweep(config=tree, space={LR: [1e-3, 1e-5]}, trials=2, sampler={"name": "random"})
    found = carry_out(made, tmp_path / "runs", silent)
    assert [row["state"] for row in found["trials"]] == ["complete", "complete"]
    assert [row["step"] for row in found["trials"]] == [2, 2]
    assert load_config(tmp_path / "runs/sweeps/it/best.yaml").optimisation.learning_rate in (1e-3, 1e-5)
    assert os.path.getsize(tmp_path / "runs/sweeps/it/study.db") > 0
