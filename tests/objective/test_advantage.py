from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kit.errors import ObjectiveError
from kit.objective import Objective, RewardBatch

NAMES = ["group_zscore", "group_mean", "batch_zscore", "leave_one_out"]


def advantages(name: str, rewards: list[float], group: list[int]) -> list[float]:
    batch = RewardBatch(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group))
    out: list[float] = Objective(advantage=name).compute_advantages(batch).tolist()
    return out


def drawn(seed: int, groups: int = 3, size: int = 4) -> RewardBatch:
    rewards = torch.randn(groups * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return RewardBatch(rewards, torch.arange(groups).repeat_interleave(size))


def compute(name: str, batch: RewardBatch) -> Tensor:
    return Objective(advantage=name).compute_advantages(batch)


@pytest.mark.parametrize("seed", range(3))
def test_leave_one_out_is_the_centred_reward_stretched(seed: int) -> None:
    batch = drawn(seed, size=4)
    torch.testing.assert_close(compute("leave_one_out", batch), compute("group_mean", batch) * 4 / 3)


def test_golden_numbers() -> None:
    rewards, group = [1.0, 0.0, 0.0, 3.0, 5.0], [0, 0, 0, 1, 1]
    # group 0: mean 1/3, unbiased variance (4/9 + 1/9 + 1/9) / 2 = 1/3. group 1: mean 4, variance (1 + 1) / 1 = 2
    a, b = math.sqrt(1 / 3) + 1e-4, math.sqrt(2) + 1e-4
    assert advantages("group_zscore", rewards, group) == pytest.approx([2/3/a, -1/3/a, -1/3/a, -1/b, 1/b])  # fmt: skip
    assert advantages("group_mean", rewards, group) == pytest.approx([2/3, -1/3, -1/3, -1, 1])  # fmt: skip
    # others of the first: mean 0; of the second: 1/2; of the last: 3
    assert advantages("leave_one_out", rewards, group) == pytest.approx([1, -0.5, -0.5, -2, 2])
    # all five: mean 1.8, squares .64 + 3.24 + 3.24 + 1.44 + 10.24 = 18.8, variance 18.8 / 4 = 4.7
    c = math.sqrt(4.7) + 1e-4
    assert advantages("batch_zscore", rewards, group) == pytest.approx([2/3/c, -1/3/c, -1/3/c, -1/c, 1/c])  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_groups_may_be_interleaved_and_have_any_id(name: str) -> None:
    rewards, group = [1.0, 0.0, 0.0, 3.0, 5.0], [0, 0, 0, 1, 1]
    order = [3, 0, 4, 2, 1]
    expected = advantages(name, rewards, group)
    ids = [70, -5]
    shuffled = advantages(name, [rewards[i] for i in order], [ids[group[i]] for i in order])
    assert shuffled == pytest.approx([expected[i] for i in order])


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_has_no_advantage(name: str) -> None:
    assert advantages(name, [5.0, 1.0, 2.0], [0, 1, 1])[0] == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_single_reward_in_the_whole_batch_has_no_advantage(name: str) -> None:
    assert advantages(name, [5.0], [0]) == [0]


@pytest.mark.parametrize("name", ["group_zscore", "group_mean", "leave_one_out"])
def test_an_unscorable_completion_gets_zero_and_does_not_count(name: str) -> None:
    with_nan = advantages(name, [1.0, math.nan, 4.0, 2.0], [0, 0, 0, 0])
    without = advantages(name, [1.0, 4.0, 2.0], [0, 0, 0])
    assert with_nan == pytest.approx([without[0], 0, without[1], without[2]])


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_any_score_has_no_advantage(name: str) -> None:
    assert advantages(name, [math.nan] * 3, [0, 0, 1]) == [0, 0, 0]


@settings(max_examples=50, deadline=None)
@given(
    rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=6), shift=st.floats(-5, 5), name=st.sampled_from(NAMES)
)
def test_adding_a_constant_changes_nothing_and_a_group_sums_to_zero(
    rewards: list[float], shift: float, name: str
) -> None:
    group = [0] * len(rewards)
    plain, moved = advantages(name, rewards, group), advantages(name, [r + shift for r in rewards], group)
    assert plain == pytest.approx(moved, abs=1e-8)
    assert sum(plain) == pytest.approx(0, abs=1e-8)


def test_a_custom_estimator_may_be_token_level() -> None:
    def token_level(batch: RewardBatch) -> Tensor:
        return batch.rewards[:, None].expand(-1, 5).nan_to_num(3.0)

    batch = RewardBatch(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))
    out = Objective(advantage=token_level).compute_advantages(batch)
    assert out.tolist() == [[1.0] * 5, [0.0] * 5]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: batch.rewards[:1], r"advantage '<lambda>' returned shape \(1,\), expected \(2,\) or \(2, T\)"),
        (lambda batch: batch.rewards / 0, r"advantage '<lambda>' returned NaN or infinity"),
        (lambda batch: batch.rewards.sub_(1.0), r"advantage '<lambda>' edited rewards in place"),
        (lambda batch: 3.0, r"advantage '<lambda>' returned float, expected a tensor"),
    ],
)
def test_a_custom_estimator_is_held_to_its_contract(function: object, message: str) -> None:
    with pytest.raises(ObjectiveError, match=message):
        Objective(advantage=function).compute_advantages(RewardBatch(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])))  # type: ignore[arg-type]


@pytest.mark.parametrize("need", ["components", "lengths"])
def test_a_missing_need_is_named(need: str) -> None:
    def weighted(batch: RewardBatch) -> Tensor:
        return batch.rewards

    weighted.needs = {need}  # type: ignore[attr-defined]
    objective = Objective(advantage=weighted)
    assert objective.needs == {need}
    with pytest.raises(ObjectiveError, match=f"weighted needs {need}, but .* remove the advantage"):
        objective.compute_advantages(RewardBatch(torch.tensor([1.0]), torch.tensor([0])))
