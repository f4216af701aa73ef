"""kit.studies.sweep_ray: the same study, asked by Ray Tune; one sweep on a Ray of one core for real."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kit.runs.store import RunStore
from kit.studies.sweep_config import SweepConfig
from kit.studies.sweep_study import Study

pytestmark = pytest.mark.survival

if find_spec("ray") is None:  # not imported here: it reads kit's settings when it is
    pytest.skip("ray is not installed", allow_module_level=True)
LR = "optimisation.learning_rate"


def silent(_: str) -> None:
    """Says nothing."""


def study(root: Path, **keys: Any) -> Study:
    space = {LR: {"type": "loguniform", "low": 1e-5, "high": 1e-3}}
    return Study(SweepConfig.model_validate({"name": "it", "space": space, "trials": 3} | keys), root)


@pytest.fixture
def searcher(tmp_path: Path) -> Any:
    """Tune's side of a study that prunes whatever is below the median of one trial."""
    from kit.studies.sweep_ray import import_ray, make_searcher

    pruning = study(tmp_path, pruner={"name": "median", "startup_trials": 1}, overrides=["evaluation.every=10"])
    return pruning, make_searcher(import_ray()[1], pruning, silent)


def test_workers_run_in_this_environment_also_under_uv_run() -> None:
    from kit.studies.sweep_ray import import_ray

    import_ray()
    from ray._private.ray_constants import RAY_ENABLE_UV_RUN_RUNTIME_ENV

    assert not RAY_ENABLE_UV_RUN_RUNTIME_ENV, "Ray was imported before kit.studies.sweep_ray could set it up"


def test_tune_is_handed_the_values_of_the_study(searcher: Any, tmp_path: Path) -> None:
    asked, ask = searcher
    proposal = ask.suggest("a")
    assert proposal == {"run": "it-t0000", "values": asked.rows()[0]["params"]}
    ask.on_trial_complete("a", {"state": "complete", "score": 0.7, "step": 20, "reason": ""})
    assert [(row["state"], row["value"]) for row in asked.rows()] == [("complete", 0.7)]
    assert (tmp_path / "sweeps/it/table.json").is_file()


def test_a_trial_that_falls_behind_is_asked_to_stop_by_its_own_file(searcher: Any, tmp_path: Path) -> None:
    asked, ask = searcher
    for trial, score in (("a", 0.7), ("b", 0.2)):
        RunStore(tmp_path).create(ask.suggest(trial)["run"])
        ask.on_trial_result(trial, {"step": 10, "score": score})
        state = "stopped" if trial == "b" else "complete"
        ask.on_trial_complete(trial, {"state": state, "score": score, "step": 10, "reason": ""})
    assert [row["state"] for row in asked.rows()] == ["complete", "pruned"]
    assert [(tmp_path / f"it-t000{number}/control/stop").exists() for number in (0, 1)] == [False, True]


@pytest.mark.parametrize("result", [None, {"step": 10, "score": 0.3}])
def test_a_lost_node_costs_its_trial_and_the_values_are_tried_again(searcher: Any, result: Any) -> None:
    asked, ask = searcher
    first = ask.suggest("a")["values"]
    ask.on_trial_complete("a", result, error=True)
    assert asked.rows()[0]["state"] == "failed"
    assert asked.remaining() == 3
    assert ask.suggest("b")["values"] == first


@pytest.mark.slow
def test_a_sweep_on_a_local_ray(tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "warm_site"))  # so that its workers' runs are warm
    from kit.studies.sweep_ray import carry_out_on_ray

    tree["evaluation"] |= {"after": True, "every": 1}
    tree["run"].pop("id")
    space = {"optimisation.batch_size": [8, 9]}  # 9 is no multiple of the group size 4: a trial that fails at once
    keys = {"name": "it", "config": tree, "space": space, "sampler": {"name": "grid"}, "trials": 5}
    told: list[str] = []
    found = carry_out_on_ray(SweepConfig.model_validate(keys), tmp_path / "runs", "local", told.append)
    rows = {row["params"]["optimisation.batch_size"]: row for row in found["trials"]}
    assert (rows[8]["state"], rows[8]["step"]) == ("complete", 2), told
    assert rows[9]["state"] == "failed"
    assert "cannot be made of groups" in rows[9]["reason"]
    assert found["best"] == rows[8]
    assert found["remaining"] == 0
    assert (tmp_path / "runs" / rows[8]["run"] / "adapter").is_dir()
    assert {path.name for path in (tmp_path / "runs/sweeps/it").iterdir()} >= {"best.yaml", "table.json", "sweep.html"}
