"""rewards.adaptors.trl: parts of a batch scored before the rest is there, and dropped where they are of another."""

from __future__ import annotations

from typing import Any

import pytest

from rewards import load
from rewards.adaptors import TrlRewards

ROWS: dict[str, Any] = {
    "prompts": ["1+1?"] * 2 + ["2+2?"] * 2 + ["2+2?"] * 2,  # equal neighbours are one group
    "completions": ["#### 2", "#### 3", "#### 4", "four", "#### 4", ""],
    "completion_ids": [[1], [2], [3], [4], [5], [6]],
    "answer": ["2", "2", "4", "4", "4", "4"],
}


def rows(first: int, last: int, **changes: Any) -> dict[str, Any]:
    return {name: column[first:last] for name, column in (ROWS | changes).items()}


def made(*parts: dict[str, Any], whole: dict[str, Any] = ROWS) -> TrlRewards:
    rewards = load("gsm8k-hash").trl()
    for part in parts:
        rewards.begin(**part)
    for function in rewards:
        function(**whole)
    return rewards


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that a preset is given."""
    from rewards.preset import Preset

    sizes: list[int] = []
    real = Preset.scores

    def counted(self: Preset, samples: Any, ctx: Any) -> Any:
        sizes.append(len(samples))
        return real(self, samples, ctx)

    monkeypatch.setattr(Preset, "scores", counted)
    return sizes


def test_parts_make_the_same_evaluation(scored: list[int]) -> None:
    plain = made().last_evaluation
    assert scored == [6]
    ahead = made(rows(0, 2), rows(2, 4), rows(4, 6)).last_evaluation
    assert scored == [6, 2, 2, 2]  # nothing twice
    assert plain is not None
    assert ahead is not None
    assert (ahead.values, ahead.statuses, ahead.infos) == (plain.values, plain.statuses, plain.infos)
    assert (ahead.totals, ahead.weights) == (plain.totals, plain.weights)
    assert ahead.groups == plain.groups == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "parts",
    [
        [rows(0, 2)],
        [rows(0, 2), rows(2, 6, completions=["#### 2", "#### 3", "#### 4", "changed", "#### 4", ""])],
        [rows(0, 2), rows(2, 6, answer=["2", "2", "5", "5", "5", "5"])],
        [rows(0, 2), rows(2, 6, completion_ids=[[1], [2], [3], [4], [5], [7]])],
        [rows(2, 6), rows(0, 2)],
    ],
    ids=["a part is missing", "another text", "another reference", "other ids", "another order"],
)
def test_parts_of_another_batch_are_dropped(parts: list[dict[str, Any]]) -> None:
    plain, dropped = made().last_evaluation, made(*parts).last_evaluation
    assert plain is not None
    assert dropped is not None
    assert dropped.values == plain.values


def test_of_another_step_too(scored: list[int]) -> None:
    from types import SimpleNamespace

    made(rows(0, 6) | {"trainer_state": SimpleNamespace(global_step=3, max_steps=9)})
    assert scored == [6, 6]
