"""kit.studies.arms: arms of one configuration are interleaved, resumed, and get the same prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from study_runs import draw, make_run
from typer.testing import CliRunner

from kit import launch as launching
from kit.api import Run
from kit.cli import app as cli
from kit.config import RunConfig, load_config
from kit.errors import ConfigError, ObjectiveError, RunError
from kit.runs.store import RunStore
from kit.runs.worker import DONE, STOPPED, USER_ERROR, Outcome
from kit.studies.arms import carry_out, make_plan, parse_change

CLIP = "objective.clip.eps_high=0.4"
FAST = "fast:optimisation.learning_rate=1e-3"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the runs in the order of their start; each is written at once, with a better score for a higher clip."""
    started: list[str] = []

    def launch(config: RunConfig, *, quiet: bool = False) -> Outcome:
        started.append(str(config.run.id))
        share = 0.8 if "eps-high" in str(config.run.id) else 0.5
        make_run(Path(config.run.root), str(config.run.id), draw(np.random.default_rng(config.run.seed), 60, share),
                 config.run.seed, overrides=[f"optimisation.learning_rate={config.optimisation.learning_rate}"])  # fmt: skip
        return Outcome(DONE)

    monkeypatch.setattr(launching, "launch", launch)
    return started


def plan(root: Path, *changes: str, **options: Any) -> Any:
    return make_plan("quickstart", changes or (CLIP,), root=root, **({"name": "it", "seeds": 2} | options))


def silent(_: str) -> None:
    """Discard a message."""


def test_arms_are_interleaved_and_their_order_rotates(tmp_path: Path, launched: list[str]) -> None:
    carry_out(plan(tmp_path, CLIP, FAST, seeds=3), silent)
    arms = ["baseline", "eps-high-0-4", "fast"]
    rotated = [arms[number:] + arms[:number] for number in range(3)]
    assert launched == [f"it-{arm}-s{seed}" for seed in range(3) for arm in rotated[seed]]


def test_arms_differ_in_their_change_and_in_nothing_else(tmp_path: Path) -> None:
    runs = {(arm, seed): config for arm, seed, config in plan(tmp_path, "a:optimisation.learning_rate=1e-3").in_order()}
    for seed in range(2):
        base, other = (runs[arm, seed].model_dump() for arm in ("baseline", "a"))
        assert base["run"].pop("id") != other["run"].pop("id")
        assert (base["optimisation"].pop("learning_rate"), other["optimisation"].pop("learning_rate")) == (5e-4, 1e-3)
        assert base == other, "the same data, prompts, engine and evaluation seeds"
        assert base["run"]["seed"] == seed


def test_a_finished_comparison_runs_nothing_again_and_more_seeds_add_to_it(tmp_path: Path, launched: list[str]) -> None:
    first = carry_out(plan(tmp_path), silent)
    launched.clear()
    assert carry_out(plan(tmp_path), silent) == first
    assert launched == []
    more = carry_out(plan(tmp_path, seeds=3), silent)
    assert launched == ["it-baseline-s2", "it-eps-high-0-4-s2"]
    assert more["arms"][1]["seeds"] == [0, 1, 2]
    assert json.loads((tmp_path / "comparisons/it/comparison.json").read_text())["arms"] == more["arms"]


def test_an_interrupted_run_goes_on_in_its_directory(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    RunStore(tmp_path).create("it-baseline-s0").write_status("interrupted")
    resumed: list[str] = []

    def relaunch(run_id: str, root: str, *, quiet: bool = False) -> Outcome:
        resumed.append(run_id)
        (tmp_path / run_id).rename(tmp_path / "gone")
        make_run(tmp_path, run_id, draw(np.random.default_rng(0), 60, 0.5))
        return Outcome(DONE)

    monkeypatch.setattr(launching, "relaunch", relaunch)
    carry_out(plan(tmp_path, seeds=1), silent)
    assert resumed == ["it-baseline-s0"]
    assert launched == ["it-eps-high-0-4-s0"]


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_a_run_that_may_not_go_on_is_put_aside_and_started_again(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RunError("the packages have changed")

    monkeypatch.setattr(launching, "relaunch", refuse)
    RunStore(tmp_path).create("it-baseline-s0").write_status(state)
    carry_out(plan(tmp_path, seeds=1), silent)
    assert launched == ["it-baseline-s0", "it-eps-high-0-4-s0"]
    assert (tmp_path / "comparisons/it/abandoned/it-baseline-s0-1/status.json").is_file()


def failing(monkeypatch: pytest.MonkeyPatch, bad: Callable[[str], Outcome | None]) -> None:
    fine = launching.launch

    def launch(config: RunConfig, *, quiet: bool = False) -> Any:
        outcome = bad(str(config.run.id))
        return outcome if outcome else fine(config, quiet=quiet)

    monkeypatch.setattr(launching, "launch", launch)


def test_a_failed_run_is_told_and_its_seed_left_out(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(USER_ERROR, ObjectiveError("the loss is not a number"))
    failing(monkeypatch, lambda run: outcome if run == "it-eps-high-0-4-s1" else None)
    report = carry_out(plan(tmp_path, seeds=3), silent)
    assert [arm["seeds"] for arm in report["arms"]] == [[0, 2], [0, 2]]
    assert any("seed 1: the loss is not a number" in warning for warning in report["warnings"])


def test_ctrl_c_ends_the_comparison_and_not_only_the_run(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda run: Outcome(STOPPED) if run.endswith("s1") else None)
    with pytest.raises(KeyboardInterrupt):
        carry_out(plan(tmp_path), silent)
    assert len(launched) == 2


def test_a_run_stopped_by_hand_is_left_out_and_ends_nothing(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(run: str) -> Outcome | None:
        if run != "it-baseline-s1":
            return None
        RunStore(tmp_path).create(run).write_status("stopped", reason="control/stop")
        return Outcome(STOPPED)

    failing(monkeypatch, stop)
    report = carry_out(plan(tmp_path, seeds=3), silent)
    assert report["arms"][0]["seeds"] == [0, 2]
    assert any("stopped by hand" in warning for warning in report["warnings"])


def test_a_name_is_not_used_for_another_comparison(tmp_path: Path, launched: list[str]) -> None:
    carry_out(plan(tmp_path, seeds=1), silent)
    with pytest.raises(ConfigError, match="arm 'baseline' has another configuration"):
        carry_out(plan(tmp_path, seeds=1, steps=7), silent)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (CLIP, ("eps-high-0-4", [CLIP])),
        (FAST, ("fast", ["optimisation.learning_rate=1e-3"])),
        ("b:objective.recipe=gspo, model.lora.rank=4", ("b", ["objective.recipe=gspo", "model.lora.rank=4"])),
        ("model.lora.targets=[q_proj, v_proj]", ("targets-q-proj-v-proj", ["model.lora.targets=[q_proj, v_proj]"])),
        ("objective.clip=my.py:tanh", ("clip-my-py-tanh", ["objective.clip=my.py:tanh"])),
    ],
)
def test_changes_are_read(change: str, expected: tuple[str, list[str]]) -> None:
    assert parse_change(change, {"baseline"}) == expected


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ((), {}, "needs a second arm"),
        (("objective.clip.eps_hgih=0.3",), {}, "eps_high"),
        (("run.seed=3",), {}, "--seeds"),
        (("evaluation.k=8",), {}, "score the arms in different ways"),
        (("optimisation.learning_rate=5e-4",), {}, "has no effect"),
        ((CLIP,), {"seeds": "x"}, "expected a number of seeds"),
        ((CLIP,), {"overrides": ["evaluation.after=false"]}, "evaluation.after"),
        ((CLIP,), {"metric": "pass@3"}, "--metric: there is no held-out score 'pass@3'"),
        (
            (CLIP,),
            {"metric": "pass@4", "overrides": ["reward={functions: [{path: my.py:f}]}"]},
            "nothing decides what is right",
        ),
        (("x:" + CLIP, "x:optimisation.steps=3"), {}, "Two arms are called 'x'"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    tmp_path: Path, changes: tuple[str, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan("quickstart", changes, root=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.survival
def test_the_verb_trains_and_compares_for_real(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: Any
) -> None:
    import kit.train

    def launch(config: RunConfig, *, quiet: bool = False) -> Outcome:
        kit.train.run(load_config(config), quiet=True)
        return Outcome(DONE)

    monkeypatch.setattr(launching, "launch", launch)
    tree["evaluation"] |= {"after": True, "prompts": 6}
    tree["run"].pop("id")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tree))
    arguments = ["compare", "tiny.yaml", "--change", "lr:optimisation.learning_rate=1e-5", "--seeds", "2", "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(result.stdout)
    assert [arm["runs"][0].rpartition("-")[2] for arm in report["arms"]] == ["s0", "s0"]
    assert report["problems"] == 6
    assert report["config_differences"].keys() == {"optimisation.learning_rate"}
    assert {"peak memory", "time per step", "entropy", "completion length"} <= {
        row["name"] for row in report["quantities"]
    }
    prompts = [  # the same prompts in the same order, for both arms of a seed
        [row["prompt"] for row in Run(arm["runs"][0], tmp_path / "runs").completions(step=1)] for arm in report["arms"]
    ]
    assert prompts[0] == prompts[1]
