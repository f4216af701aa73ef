"""kit.validation: what `grpo-kit validate` says, and what it refuses, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config
from kit.errors import ConfigError, DataError, KitError, ModelError, ObjectiveError
from kit.validation import check


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def notes_of(tree: Any, *overrides: str) -> str:
    return "\n".join(check(load_config(tree, overrides)))


def test_notes_tell_model_data_reward_objective_and_steps(tree: Any, tmp_path: Path) -> None:
    notes = notes_of(tree, "objective.recipe=grpo")
    assert f"model: {tree['model']['name']}, 0M weights, transformers + PEFT" in notes
    assert "data: 32 training and 8 held-out rows" in notes
    assert "reward: Preset('reasoning-gym'" in notes
    assert "objective: grpo, needs " in notes
    # 2 steps x 2 prompts of 32 rows
    assert "steps: 2 x 2 prompts x 4 completions, 0.12 passes over the training rows" in notes
    assert not list(tmp_path.iterdir())  # nothing was written


def test_a_reference_is_named_when_it_is_needed(tree: Any) -> None:
    assert "ref_logps" in notes_of(tree, "objective.regularizers=[{name: kl, coef: 0.1}]")


def test_the_embedded_model_is_not_built_to_validate(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.training.embedded.build", lambda *_: pytest.fail("built"))
    monkeypatch.setenv("GRPO_KIT_CACHE", "/nonexistent")
    assert "steps: 2" in notes_of(tree, "model.name=embedded")


def test_bad_rows_left_out_are_counted(tree: Any) -> None:
    rows = [json.dumps({"question": f"{i}?", "answer": "1"}) for i in range(8)]
    Path("rows.jsonl").write_text("\n".join([*rows, "not json"]) + "\n")
    tree["data"] = {"source": "rows.jsonl", "heldout": 2}
    tree["reward"] = {"preset": "gsm8k-hash"}
    with pytest.raises(DataError, match="row 9"):
        notes_of(tree)
    assert "6 training and 2 held-out rows, 1 bad rows left out" in notes_of(tree, "data.skip_bad_rows=true")


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("data.source=nowhere.jsonl", DataError),
        ("model.name=./nowhere", ModelError),
        ("data.max_prompt_tokens=2", DataError),
        ("generation.max_completion_tokens=9999", ConfigError),
        ("objective.clip=ppo_clop", ConfigError),
        ('reward.functions=[{"path": "mine.py:score"}]', Exception),
    ],
)
def test_what_would_keep_the_run_from_starting_is_refused(tree: Any, override: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as failure:
        notes_of(tree, override)
    assert isinstance(failure.value, KitError) or type(failure.value).__module__.startswith("rewards")


def test_a_regularizer_without_its_reference_is_refused(tree: Any) -> None:
    with pytest.raises(ObjectiveError, match=r"Set model\.reference: base"):
        notes_of(tree, "objective.regularizers=[{name: kl, coef: 0.1}]", "model.reference=none")


def test_no_held_out_rows_are_fine_when_nothing_is_evaluated(tree: Any) -> None:
    assert "40 training and 0 held-out" in notes_of(tree, "data.heldout=0")
    with pytest.raises(ConfigError, match=r"Set data\.heldout above 0"):
        notes_of(tree, "data.heldout=0", "evaluation.every=1")
