from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import every_pair
from torch import Tensor
from trl.trainer.utils import nanstd

from kit.errors import ConfigError, ObjectiveError
from kit.objective import Objective, RewardBatch
from kit.objective.advantage import advantages as registry

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


def test_a_custom_estimator_is_held_to_its_contract() -> None:
    with pytest.raises(ObjectiveError, match=r"'<lambda>' returned shape \(1,\), expected \(2,\) or \(2, T\)"):
        compute(lambda batch: batch.rewards[:1], RewardBatch(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])))  # type: ignore[arg-type]


@pytest.mark.parametrize("need", ["components", "lengths"])
def test_a_missing_need_is_named(need: str) -> None:
    def weighted(batch: RewardBatch) -> Tensor:
        return batch.rewards

    weighted.needs = {need}  # type: ignore[attr-defined]
    objective = Objective(advantage=weighted)
    assert objective.needs == {need}
    with pytest.raises(ObjectiveError, match=f"weighted needs {need}, but .* remove the advantage"):
        objective.compute_advantages(RewardBatch(torch.tensor([1.0]), torch.tensor([0])))


def test_every_estimator_has_a_formula_and_a_source() -> None:
    for name in registry:
        assert registry[name].formula, name
        assert registry[name].source, name
        assert Objective(advantage=name).advantage.describe().startswith(name)


def of(name: str | dict[str, Any], rewards: list[float], **fields: Any) -> list[float]:
    """The advantages of one group."""
    values = torch.tensor(rewards, dtype=torch.float64)
    batch = RewardBatch(values, torch.zeros(len(rewards), dtype=torch.int64), **fields)
    out: list[float] = Objective(advantage=name).compute_advantages(batch).tolist()
    return out


def test_opo_golden_numbers() -> None:
    # baseline (2·1 + 3·0 + 5·3) / (2 + 3 + 5) = 1.7; the completion without a score is 100 tokens long, to no effect
    lengths = torch.tensor([2, 3, 5, 100])
    assert of("opo", [1.0, 0.0, 3.0, math.nan], lengths=lengths) == pytest.approx([-0.7, -1.7, 1.3, 0])


def test_opo_of_completions_without_tokens_has_no_advantage() -> None:
    assert of("opo", [1.0, 2.0], lengths=torch.zeros(2, dtype=torch.int64)) == [0, 0]


def test_gdpo_golden_numbers() -> None:
    # first component: mean 1/2, variance (1/4 + 1/4) / 1; second: mean 1/4, variance (1/16 + 1/16) / 1
    first, second = 0.5 / (math.sqrt(1 / 2) + 1e-4), 0.25 / (math.sqrt(1 / 8) + 1e-4)
    # sums ±s, whose mean is 0 and whose variance is 2s²
    components = torch.tensor([[1.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
    s = first - 3 * second
    expected = s / (math.sqrt(2) * abs(s) + 1e-4)
    weights = torch.tensor([1.0, 3.0])
    advantages = of("gdpo", [1.0, 1.5], components=components, component_weights=weights)
    assert advantages == pytest.approx([expected, -expected])
    s = first - second
    expected = s / (math.sqrt(2) * abs(s) + 1e-4)
    assert of("gdpo", [1.0, 0.5], components=components) == pytest.approx([expected, -expected], abs=1e-9)


def trl_normalize_then_sum(components: Tensor, weights: Tensor, generations: int) -> Tensor:
    """The formula of `_generate_and_score_completions` for `normalize_then_sum`, with TRL's own `nanstd`."""
    grouped = components.view(-1, generations, components.shape[1])
    mean = torch.nanmean(grouped, dim=1, keepdim=True)
    std = nanstd(grouped, dim=1, keepdim=True) if generations > 1 else torch.zeros_like(mean)
    scores = ((grouped - mean) / (std + 1e-4)).view(-1, components.shape[1])
    rewards = (scores * weights).nansum(dim=1)
    rewards[torch.isnan(components).all(dim=1)] = torch.nan
    spread = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
    return torch.nan_to_num((rewards - torch.nanmean(rewards)) / (spread + 1e-4), nan=0.0)


@every_pair(
    {
        "generations": [1, 4],
        "gaps": [(), (0,), (8, 9, 10), (8, 9, 10, 11)],
        "unscorable": [(), (1,), (4, 5, 6), (4, 5, 6, 7), tuple(range(11)), tuple(range(12))],
        "dtype": [torch.float32, torch.float64],
    }
)
def test_gdpo_equals_trl(
    generations: int, gaps: tuple[int, ...], unscorable: tuple[int, ...], dtype: torch.dtype
) -> None:
    components = torch.randn(12, 3, generator=torch.Generator().manual_seed(2), dtype=dtype)
    components[list(gaps), 1] = torch.nan
    components[list(unscorable)] = torch.nan
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=dtype)
    rewards = (components * weights).nansum(1).masked_fill(components.isnan().all(1), torch.nan)
    batch = RewardBatch(rewards, torch.arange(12) // generations, components, weights)
    expected = trl_normalize_then_sum(components, weights, generations)
    torch.testing.assert_close(compute("gdpo", batch), expected, rtol=1e-5, atol=1e-6)


# --- with a teacher ---------------------------------------------------------------------------------------------------


def taught(*, teacher: list[list[float]]) -> RewardBatch:
    """A good and a bad completion of one prompt, of two tokens and one; all probabilities of the policy are 1/2."""
    policy = torch.full((2, 2), math.log(0.5), dtype=torch.float64)
    return RewardBatch(
        torch.tensor([1.0, 0.0], dtype=torch.float64),
        torch.tensor([0, 0]),
        mask=torch.tensor([[True, True], [True, False]]),
        old_logps=policy,
        teacher_logps=torch.log(torch.tensor(teacher, dtype=torch.float64)),
    )


Z = 0.5 / (math.sqrt(0.5) + 1e-4)  # of rewards 1 and 0: mean 1/2, unbiased variance 1/2


@pytest.mark.parametrize(("mix", "base"), [(0.0, "group_zscore"), (0.25, "group_zscore"), (0.25, "group_mean")])
def test_sdpo_golden_numbers(mix: float, base: str) -> None:
    batch = taught(teacher=[[1.0, 0.25], [0.5, 0.9]])
    out = compute_with({"name": "sdpo", "mix": mix, "base": base}, batch)
    group = Z if base == "group_zscore" else 0.5
    two = math.log(2)
    expected = [[mix * group + (1 - mix) * two, mix * group - (1 - mix) * two], [-mix * group, -mix * group]]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))


def test_without_a_teacher_the_group_alone_decides() -> None:
    batch = taught(teacher=[[math.nan, math.nan], [0.5, 0.5]])
    advantages = compute_with({"name": "sdpo", "mix": 0.25}, batch)
    torch.testing.assert_close(advantages[0], torch.full((2,), 0.25 * Z, dtype=torch.float64))


def test_a_share_outside_of_0_and_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="must satisfy 0 <= mix <= 1"):
        Objective(advantage={"name": "sdpo", "mix": 1.5})


def test_none_is_0_for_every_reward() -> None:
    assert compute("none", drawn(0)).tolist() == [0.0] * 12


def compute_with(spec: dict[str, Any], batch: RewardBatch) -> Tensor:
    return Objective(advantage=spec).compute_advantages(batch)
