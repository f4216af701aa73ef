"""kit.runner.prepare: output and errors of `grpo-kit validate`, without a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config
from kit.errors import (
    EnvironmentUnsupported,
    ObjectiveError,
    RewardError,
)
from kit.runner.prepare import check_environment, prepare, validate


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def notes_of(tree: Any, *overrides: str) -> str:
    return "\n".join(validate(load_config(tree, overrides)))


def test_notes_tell_model_data_reward_objective_and_steps(tree: Any, tmp_path: Path) -> None:
    notes = notes_of(tree, "objective.recipe=grpo")
    line = next(line for line in notes.splitlines() if line.startswith(f"model: {tree['model']['name']}, "))
    assert "M weights, transformers + PEFT" in line
    assert " 0.00M" not in line
    assert "data: 32 training and 8 held-out rows" in notes
    assert "reward: reasoning-gym, accuracy x 1, format x 0.2" in notes
    assert "objective: grpo" in notes.splitlines()
    # 2 steps x 2 prompts of 32 rows
    assert "steps: 2 x 2 prompts x 4 completions, 0.12 passes over the training rows" in notes
    assert not list(tmp_path.iterdir())  # nothing was written


def test_a_name_that_is_taken_is_a_note_because_everything_else_is_checked(tree: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    notes = notes_of(tree, "run.id=mine", f"run.root={tmp_path}/runs")
    assert "run: There is already a run 'mine'" in notes
    assert "reward: reasoning-gym" in notes


def test_rows_that_are_left_out_are_counted(tree: Any) -> None:
    rows = [json.dumps({"question": f"{i} + 1" + " + 1" * (40 * (i == 3)), "answer": "2"}) for i in range(12)]
    Path("rows.jsonl").write_text("\n".join([*rows, "not json"]) + "\n")
    tree["data"] = {"source": "rows.jsonl", "heldout": 2, "skip_bad_rows": True, "max_prompt_tokens": 100}
    tree["reward"] = {"preset": "gsm8k-reasoning"}
    notes = notes_of(tree)
    assert ", 1 bad rows left out, 1 rows with prompts of more than 100 tokens left out" in notes


def test_the_embedded_model_is_checked_like_any_other(tree: Any) -> None:
    assert "model: embedded, 0.66M weights" in notes_of(tree, "model.name=embedded")


# --- a reward that cannot fit the data --------------------------------------------------------------------------------


def rows_of(tree: Any, **columns: str) -> None:
    rows = [json.dumps({"question": f"{i}?", **columns}) for i in range(8)]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    tree["data"] = {"source": "rows.jsonl", "heldout": 2}


def test_a_preset_that_cannot_score_the_rows_is_refused_with_the_reason(tree: Any) -> None:
    rows_of(tree, answer="1")
    with pytest.raises(RewardError, match=r"'accuracy' of preset 'reasoning-gym' cannot score the rows of rows\.jsonl"):
        notes_of(tree)
    with pytest.raises(RewardError, match="cannot score"):  # a run refuses it, too
        prepare(load_config(tree))
    assert "6 training" in notes_of(tree, "reward.preset=gsm8k-hash")


def test_a_function_is_tried_on_whole_groups_with_what_the_trainer_gives(tree: Any) -> None:
    Path("fine.py").write_text(
        "def score(prompts, completions, completion_ids, reference, trainer_state, log_metric, **columns):\n"
        "    assert len(prompts) % 4 == 0 and prompts[0] == prompts[3] and trainer_state.max_steps == 2\n"
        "    log_metric('a', 1.0)\n"
        "    return [float(c[-1]['content'] == r) for c, r in zip(completions, reference)]\n"
    )
    assert "reward: " in notes_of(tree, 'reward.functions=[{"path": "fine.py:score"}]')


# --- limits of this machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimisation.optimizer=adamw_8bit", "pip install 'grpo-kit"),
        ("run.report_to=[wandb, tensorboard]", "wandb, tensorboard is not installed.*pip install wandb tensorboard"),
        ("model.dtype=float16", r"Set model\.dtype: float32"),
        ("generation.engine=vllm", r"Set generation\.engine: hf"),
    ],
)
def test_what_the_machine_lacks_is_said_first(
    tree: Any, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kit.runner.prepare.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for check_it in (notes_of, lambda tree, override: prepare(load_config(tree, [override]))):
        with pytest.raises(EnvironmentUnsupported, match=message):
            check_it(tree | {"data": {"source": "nowhere.jsonl"}}, override)


def test_several_gpus_are_refused_by_the_process_that_trains_unless_a_launcher_shares_them_out(
    tree: Any, attempt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL would refuse them only after loading the weights. Kubernetes sets WORLD_SIZE=1 in jobs without a launcher."""
    for name in ("LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_environment(load_config(tree))  # of the page, whose training process sees only the first GPU
    for variables, named in (({}, "0"), ({"WORLD_SIZE": "1"}, "0"), ({"CUDA_VISIBLE_DEVICES": "1,3"}, "1")):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            outcome = attempt()
        assert outcome.code == 2
        assert f"sees 2 GPUs, but a run trains on one. Set CUDA_VISIBLE_DEVICES={named};" in outcome.message
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_environment(load_config(tree), trains=True)


# --- on-policy --------------------------------------------------------------------------------------------------------


def test_a_clip_that_cannot_act_is_noted(tree: Any) -> None:
    assert "They have one with optimisation.iterations: 2" in notes_of(tree)
    assert "on-policy" not in notes_of(tree, "optimisation.iterations=2")
    assert "on-policy" not in notes_of(tree, "objective.recipe=rloo")


def test_reinforce_over_several_iterations_is_refused(tree: Any) -> None:
    with pytest.raises(ObjectiveError, match=r"'reinforce' has no ratio.*Set optimisation\.iterations: 1"):
        notes_of(tree, "objective.recipe=rloo", "optimisation.iterations=2")


@pytest.mark.parametrize(
    ("clip", "reduction", "meant"),
    [
        ("gspo", "token_mean", "sequence_mean or sequence_sum"),
        ("gmpo", "fixed_length", "sequence_mean"),
    ],
)
def test_a_reduction_that_undoes_a_clip_is_noted(tree: Any, clip: str, reduction: str, meant: str) -> None:
    overrides = [f"objective.clip={clip}", f"objective.reduction={reduction}"]
    assert f"{clip} clips whole completions and is made for reduction {meant}" in notes_of(tree, *overrides)
    assert "whole completions" not in notes_of(tree, overrides[0], f"objective.reduction={meant.split()[0]}")


# --- needs of an objective --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k3", "full"])
def test_a_kl_without_a_reference_is_refused(tree: Any, estimator: str) -> None:
    with pytest.raises(ObjectiveError, match=r"has no reference policy \(model.reference: none\)"):
        notes_of(tree, f"objective.regularizers=[{{name: kl, estimator: {estimator}}}]", "model.reference=none")
