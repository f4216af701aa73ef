"""kit.evaluation.results: the best checkpoint so far and the number of evaluations since, by hand and from files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from kit.config import EvaluationConfig
from kit.errors import RunError
from kit.evaluation.results import (
    Mark,
    course,
    scores_by_problem,
    standing,
    value_of,
    weights_of,
)
from kit.runner.evaluation import Evaluator, wrong_answer
from kit.runner.lifecycle import StopSignal
from kit.runner.recording import write_parquet
from kit.runs.store import RunDir, RunStore

KEY = "greedy_accuracy"


def results(*values: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * place, KEY: {"value": value}} for place, value in enumerate(values)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunStore(tmp_path).create("it")


def evaluator(run: RunDir, score: Any = None, **settings: Any) -> Evaluator:
    return Evaluator(run, EvaluationConfig(**settings), KEY, score, StopSignal(run), lambda text: None)


def checkpoint(run: RunDir, step: int, *, is_complete: bool = True) -> None:
    folder = run.path / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}" if is_complete else "{")


@pytest.mark.parametrize(
    ("values", "best", "trained", "waited"),
    [
        ((), None, None, 0),
        ((0.5,), Mark(0, 0.5), None, 0),
        ((0.5, 0.4, 0.6, 0.6), Mark(20, 0.6), Mark(20, 0.6), 1),  # the first of equal ones
        ((0.9, 0.4, 0.5, 0.3), Mark(0, 0.9), Mark(20, 0.5), 3),  # no checkpoint, but its score counts
        ((0.1, None, 0.2), Mark(20, 0.2), Mark(20, 0.2), 0),  # an evaluation without the score is skipped
    ],
)
def test_the_standing_is_this(
    values: tuple[float | None, ...], best: Mark | None, trained: Mark | None, waited: int
) -> None:
    now = standing(results(*values), KEY)
    assert (now.best, now.best_trained, now.waited) == (best, trained, waited)


def test_scores_by_problem_are_those_whose_mean_is_the_score() -> None:
    columns = {
        "id": ["a", "b", "a"], "greedy_correct": [True, False, True], "sampled_correct": [0, 1, 4],
        "greedy_reward": [1.5, None, 0.5],
    }  # fmt: skip
    result = {"k": 4, "per_problem": columns}
    assert list(scores_by_problem(result, "greedy_accuracy").values()) == [
        1.0,
        0.0,
        1.0,
    ]  # two rows of one problem count
    assert list(scores_by_problem(result, "pass@1").values()) == [0.0, 0.25, 1.0]
    assert list(scores_by_problem(result, "pass@4").values()) == [0.0, 1.0, 1.0]
    assert list(scores_by_problem(result, "greedy_reward").values()) == [1.5, 0.5]
    assert scores_by_problem({}, "greedy_accuracy") == {}
    assert value_of({"pass@1": {"value": None}}, "pass@1") is value_of({}, "pass@1") is None


def test_the_course_is_the_runs_own_evaluations_by_step(run: RunDir) -> None:
    for name, step in (("step-00020", 20), ("after", 30), ("before", 0), ("again", 30), ("step-00010", 10)):
        run.write_json(f"eval/{name}.json", {"step": step, "name": name})
    assert [(result["name"], result["step"]) for result in course(run)] == [
        ("before", 0), ("step-00010", 10), ("step-00020", 20), ("after", 30),
    ]  # fmt: skip
    assert [result["step"] for result in course(run, until=10)] == [0, 10]


def test_weights_are_found_by_name_or_step(run: RunDir) -> None:
    for step in (10, 20):
        checkpoint(run, step)
    checkpoint(run, 30, is_complete=False)
    run.write_json("best.json", {"step": 10, "checkpoint": "checkpoint-10"})
    (run.path / "adapter").mkdir()
    (run.adapter / "adapter_config.json").write_text("{}")
    run.write_status("finished", step=33)
    assert weights_of(run, None) == (33, run.adapter)
    assert weights_of(run, "best") == (10, run.path / "checkpoint-10")
    assert weights_of(run, "last") == (20, run.path / "checkpoint-20")
    assert weights_of(run, 20) == weights_of(run, "20") == (20, run.path / "checkpoint-20")


@pytest.mark.parametrize("which", [None, "best", "last", "30", "nonsense"])
def test_weights_that_are_not_there_are_refused_with_what_there_is(run: RunDir, which: str | None) -> None:
    checkpoint(run, 30, is_complete=False)
    with pytest.raises(RunError, match=r"no trained weights|no best checkpoint|no complete checkpoint|no checkpoint '"):
        weights_of(run, which)
    checkpoint(run, 40)
    if which != "last":
        with pytest.raises(RunError, match="Its checkpoints: 40"):
            weights_of(run, which)


def test_a_resumed_run_makes_the_evaluation_that_a_stop_had_cut_short(run: RunDir) -> None:
    made: list[int] = []

    def score(model: Any, name: str, step: int) -> dict[str, Any]:
        made.append(step)
        result = {"step": step, "seconds": 1.0, "greedy_accuracy": {"value": 0.5}}
        run.write_json(f"eval/{name}.json", result)
        return result

    callback = evaluator(run, score, every=3)
    for step in (3, 3, 4):
        callback.on_train_begin(None, TrainerState(global_step=step, max_steps=40), TrainerControl())
    assert made == [3]


def test_a_plateau_names_what_is_wrong_most_often_and_shows_an_answer(run: RunDir) -> None:
    statuses, reasons = ["wrong", "ok", "wrong", "wrong", "format"], ["no city", None, "no age", "no city", "no JSON"]
    columns = {
        "step": [7] * 5, "completion": ["a", "b", "c", "d", "e"], "reference": ["r"] * 5,
        "reward/accuracy/status": statuses, "reward/accuracy/reason": reasons,
    }  # fmt: skip
    assert wrong_answer(run) == ""
    write_parquet(run.path / "completions" / "step-00007.parquet", columns)
    callback = evaluator(run)
    for step in range(1, 30):
        state = SimpleNamespace(global_step=step)
        callback.on_log(None, state, None, {"reward": step / 30, "answers/right": 0.0})
    (alert,) = [event for event in run.events() if event["kind"] == "alert"]
    assert alert["name"] == "plateau"
    assert alert["message"].endswith("Most frequent reason (2 of 5 in step 7): no city. Example: 'd', expected 'r'.")
