"""Held-out scores during training and their consequences: best checkpoint, early end, alarm.

The runs are real, with a tiny model whose scores are scripted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import kit
from kit.config import load_config
from kit.evaluation.heldout import HeldOut
from kit.runner.evaluate import evaluate_run

PROBLEMS = 40
RISING = ('reward.functions=[{"path": "rising.py:score"}]', "generation.max_completion_tokens=3")


@pytest.fixture
def scripted(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `run(shares)`: a run with a rising training reward and the held-out scores `shares`, {step: share}."""
    Path("rising.py").write_text(
        "calls = []\n\ndef score(prompts, completions, **columns):\n    calls.append(1)\n"
        "    return [len(calls) + len(set(str(text))) / 40 for text in completions]\n"
    )

    def run(shares: dict[int, float], *overrides: str) -> Any:
        def score(self: HeldOut, model: Any, progress: Any = None, *, step: int = 0) -> dict[str, Any]:
            right = [place < round(shares[step] * PROBLEMS) for place in range(PROBLEMS)]
            scored.append(step)
            return {
                "problems": PROBLEMS, "step": step, "k": 2, "seconds": 0.0, "samples": [], "truncated_share": 0.0,
                "greedy_accuracy": {"value": sum(right) / PROBLEMS, "low": 0.0, "high": 1.0}, "completion_tokens_mean": 1.0,
                "per_problem": {"id": [str(place) for place in range(PROBLEMS)], "greedy_correct": right},
            }  # fmt: skip

        scored: list[int] = []
        monkeypatch.setattr(HeldOut, "score", score)
        steps = f"optimisation.steps={max(shares)}"
        result = attempt(
            *RISING, steps, "evaluation.every=1", "evaluation.before=true", "evaluation.after=true", *overrides
        )
        assert result.code == 0, result.message
        result.scored = scored
        return result

    return run


def kinds(result: Any, *names: str) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in result.folder.events() if event["kind"] in names]


def best(result: Any) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((result.folder.path / "best.json").read_text())
    return record


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "adapter_model.safetensors")


def test_the_best_checkpoint_is_kept_and_saved_once(scripted: Any) -> None:
    result = scripted(
        {0: 0.2, 1: 0.3, 2: 0.6, 3: 0.5, 4: 0.4, 5: 0.4, 6: 0.3}, "run.keep_checkpoints=1", "run.save_every=1"
    )
    assert best(result) == {"step": 2, "metric": "greedy_accuracy", "value": 0.6, "checkpoint": "checkpoint-2"}
    assert [path.name for path in result.folder.checkpoints] == ["checkpoint-2", "checkpoint-6"]
    assert kinds(result, "best") == [("best", 1), ("best", 2)]
    assert kinds(result, "checkpoint") == [("checkpoint", step) for step in range(1, 7)]  # once per step
    assert (result.folder.status()["state"], result.folder.status()["reason"]) == ("finished", None)
    assert "Best greedy accuracy: 0.600 at step 2" in result.shown


def test_a_new_best_is_saved_though_no_checkpoint_was_due_and_its_score_is_there_first(scripted: Any) -> None:
    result = scripted({0: 0.2, 1: 0.3, 2: 0.2, 3: 0.2})
    assert [path.name for path in result.folder.checkpoints] == ["checkpoint-1", "checkpoint-3"]
    order = kinds(result, "evaluation", "checkpoint", "best")
    assert order[:3] == [("evaluation", 1), ("checkpoint", 1), ("best", 1)]
    state = json.loads((result.folder.path / "checkpoint-3" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).name == "checkpoint-1"


def test_patience_ends_the_run_as_finished_with_the_reason(scripted: Any) -> None:
    shares = {0: 0.2, 1: 0.5, 2: 0.48, 3: 0.5, 4: 0.9, 5: 0.9}
    result = scripted(shares, "evaluation.patience=2")
    status = result.folder.status()
    assert (status["state"], status["exit"], status["step"]) == ("finished", 0, 3)
    assert status["reason"] == (
        "held-out greedy accuracy has not been better than the 0.500 of step 1 for 2 evaluations (evaluation.patience)"
    )
    (event,) = [event for event in result.folder.events() if event["kind"] == "early_stop"]
    assert {key: event[key] for key in ("step", "metric", "value", "best_step", "cause")} == {
        "step": 3, "metric": "greedy_accuracy", "value": 0.5, "best_step": 1, "cause": "patience",
    }  # fmt: skip
    assert result.scored == [0, 1, 2, 3]  # the final weights are not scored a second time
    assert json.loads((result.folder.eval / "after.json").read_text())["step"] == 3
    assert [path.name for path in result.folder.checkpoints] == ["checkpoint-1", "checkpoint-3"]
    assert "Training ends early at step 3" in result.shown


@pytest.fixture
def hacked() -> dict[int, float]:
    """Held-out scores that are best at step 5 of 20 and then fall, while the training reward rises."""
    return {0: 0.3, 5: 0.9, 10: 0.4, 15: 0.3, 20: 0.3}


def test_the_alarm_warns_once(scripted: Any, hacked: dict[int, float]) -> None:
    result = scripted(hacked, "evaluation.alarm=warn", "evaluation.every=5")
    alerts = [
        event for event in result.folder.events() if event["kind"] == "alert" and event["name"] == "reward_hacking"
    ]
    assert [(event["step"], event["severity"]) for event in alerts] == [(15, "warning")]
    assert (result.folder.status()["state"], result.folder.status()["step"]) == ("finished", max(hacked))
    assert "held-out greedy accuracy fell from 0.900 (step 5) to 0.300 (step 15)" in result.shown


def test_the_alarm_stops_the_run(scripted: Any, hacked: dict[int, float]) -> None:
    result = scripted(hacked, "evaluation.alarm=stop", "evaluation.every=5")
    status = result.folder.status()
    assert (status["state"], status["step"]) == ("finished", 15)
    assert status["reason"].startswith("reward hacking: held-out greedy accuracy fell from 0.900 (step 5) to 0.300")
    assert kinds(result, "early_stop") == [("early_stop", 15)]
    last = weights(result.folder.path / "checkpoint-15")
    assert all((last[name] == value).all() for name, value in weights(result.folder.adapter).items())


def test_alerts_on_the_metric_lines_are_filed_once(attempt: Any) -> None:
    """The constant reward gives no group a spread, so `zero_spread` is raised at step 10, once."""
    Path("flat.py").write_text("def score(prompts, completions, **columns):\n    return [1.0 for _ in completions]\n")
    flat = ['reward.functions=[{"path": "flat.py:score"}]', "optimisation.steps=13", "data.limit=80"]
    result = attempt(*flat, "reward.preset=null")
    assert result.code == 0, result.message
    alerts = [event for event in result.folder.events() if event["kind"] == "alert"]
    assert [(event["step"], event["severity"]) for event in alerts if event["name"] == "zero_spread"] == [
        (10, "warning")
    ]
    assert "Alert at step 10: In 100% of the groups of the last 10 steps" in result.shown


def test_a_finished_run_is_scored_again_with_more_samples_and_from_its_best_checkpoint(
    attempt: Any, tmp_path: Path
) -> None:
    result = attempt("evaluation.every=1", "evaluation.after=true")
    assert result.code == 0, result.message
    run, request = kit.Run("it", tmp_path / "runs"), {"run_dir": str(result.folder.path), "name": "more"}
    again = evaluate_run(request, True)
    after = run.evaluations()["after"]
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in after.items() if k != "seconds"}
    first = evaluate_run(request | {"checkpoint": "1", "name": "first"}, True)
    step = run.evaluations()["step-00001"]
    assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in step.items() if k != "seconds"}
    more = evaluate_run(request | {"checkpoint": "best", "overrides": ["evaluation.k=3"], "name": "best-3"}, True)
    assert more["step"] == best(result)["step"]
    assert "pass@3" in more
    assert list(run.evaluations())[-3:] == ["best-3", "first", "more"]
    # A run that Unsloth trained on a GPU is read on a machine without one.
    written = load_config(result.folder.config, ["model.backend=unsloth"])
    result.folder.config.write_text(written.to_yaml())
    elsewhere = evaluate_run(request | {"name": "elsewhere"}, True)
    assert elsewhere["greedy_accuracy"] == again["greedy_accuracy"]
