"""A field that is added to the table of batch fields reaches hooks through the whole trainer, and `objective check`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kit.objective import Objective, TokenBatch, regularizers
from kit.objective.batch import TOKEN_FIELDS, Field
from kit.objective.check import check_hook

from .rollouts import NewTrainer, train


def late_tokens(batch: TokenBatch) -> Tensor:
    """A penalty by the position of a token, a field that only an extended batch has."""
    position: Tensor = batch.position  # type: ignore[attr-defined]
    late_tokens.seen.append(position)  # type: ignore[attr-defined]
    return batch.logps * position


@pytest.mark.parametrize("source", ["position", lambda batch: batch.completion_mask.cumsum(1).float()])
def test_a_hook_sees_a_field_that_was_added(new_trainer: NewTrainer, monkeypatch: Any, source: Any) -> None:
    field = Field("(B, T)", lambda draw: draw.normal().abs(), "there is no position. Fill it in", source=source)
    monkeypatch.setitem(TOKEN_FIELDS, "position", field)
    late_tokens.needs, late_tokens.seen = {"position"}, []  # type: ignore[attr-defined]
    findings = check_hook(regularizers.build(late_tokens))
    assert [finding.name for finding in findings if not finding.passed] == []
    trainer = new_trainer(objective=Objective(regularizers=[late_tokens]), unchecked=True)
    if isinstance(source, str):
        _add_to_rollouts(trainer, source)
    late_tokens.seen.clear()  # type: ignore[attr-defined]
    train(trainer)
    positions = late_tokens.seen  # type: ignore[attr-defined]
    assert positions
    assert all(
        torch.equal(values.long().amax(1), (values > 0).sum(1)) for values in positions
    )  # 1, 2, 3 ... and 0 at padding


def _add_to_rollouts(trainer: Any, name: str) -> None:
    original = trainer._generate_and_score_completions

    def generate(inputs: Any) -> Any:
        output = original(inputs)
        output[name] = output["completion_mask"].cumsum(1).float()
        return output

    trainer._generate_and_score_completions = generate
