"""Which prompts and completions the methods of `selection:` choose: each against a reference, and put together."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kit.config.sections import GresoConfig, SelectionConfig
from kit.trainer.selection.methods import (
    Greso,
    Group,
    PassRates,
    Pool,
    is_flat,
    key_of,
    largest_advantages,
    max_variance,
)
from kit.trainer.selection.selector import Selector

NAN = math.nan


# --- PODS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_variance_kept_is_the_largest_of_all_subsets(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(2, 9)
    values = [draw.choice((0.0, 1.0)) if seed % 2 else draw.gauss(1e3, 1.0) for _ in range(size)]
    for keep in range(1, size + 1):
        best = max(statistics.pvariance(subset) for subset in itertools.combinations(values, keep))
        kept = max_variance(values, keep)
        assert len(set(kept)) == keep
        assert kept == sorted(kept)
        assert statistics.pvariance([values[index] for index in kept]) == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_of_equal_completions_the_first_are_kept_and_those_without_a_score_last() -> None:
    assert max_variance([1.0] * 6, 3) == [0, 1, 2]
    assert max_variance([1, 0, 1, 0, 1, 0, 1, 1], 4) == [0, 1, 2, 3]
    assert max_variance([NAN, 0.0, NAN, 1.0, 0.5], 2) == [1, 3]
    assert max_variance([NAN, 0.0, NAN, 1.0], 3) == [0, 1, 3]
    with pytest.raises(ValueError, match="3 of 2"):
        max_variance([0.0, 1.0], 3)


# --- CPPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [False, True])
def test_the_largest_advantages_of_every_group_are_kept(tokens: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(12, 5) if tokens else torch.randn(12)
    sizes = values.abs().amax(1) if tokens else values.abs()
    for keep in range(1, 5):
        kept = largest_advantages(values, 4, keep).tolist()
        want = [
            row
            for start in (0, 4, 8)
            for row in sorted(sorted(range(start, start + 4), key=lambda row: -float(sizes[row]))[:keep])
        ]
        assert kept == want
    assert largest_advantages(torch.tensor([0.0, 0.0, 0.0, 0.0]), 4, 2).tolist() == [0, 1]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_pass_rate_of_0_and_1_is_the_share_of_passes_and_the_latest_group_weighs_half() -> None:
    memory = PassRates()
    assert memory.pass_rate("a") is None
    memory.saw("a", [1.0, 1.0])
    assert memory.pass_rate("a") is None  # nothing to compare with yet
    memory.saw("b", [0.0, 1.0, 1.0, 1.0])
    assert memory.pass_rate("a") == 1.0
    assert memory.pass_rate("b") == 0.75
    memory.saw("a", [0.0, 0.0])
    assert memory.pass_rate("a") == 0.5  # (1 + 0) / 2
    memory.saw("c", [NAN, NAN])
    assert memory.pass_rate("c") is None
    memory.saw("d", [-1.0, NAN, 3.0])  # the range is now -1 to 3
    assert memory.pass_rate("d") == 0.5
    assert memory.pass_rate("a") == (0.5 + 1) / 4


def test_flat_groups_in_a_row_are_counted_up_to_the_last_one() -> None:
    memory = PassRates()
    for rewards, count in (([1, 1], 1), ([0, 0], 2), ([0, 1], 0), ([1, NAN], 1)):
        memory.saw("a", rewards)
        assert memory.flat_in_a_row("a") == count
    assert memory.flat_in_a_row("b") == 0
    assert is_flat([NAN, NAN])
    assert not is_flat([NAN, 0.0, 1.0])


def test_a_row_is_told_by_its_content() -> None:
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reference": "2"}
    assert key_of(row) == key_of(dict(reversed(row.items())))
    assert key_of(row) != key_of({**row, "reference": "3"})
    text = b'{"prompt": [{"content": "1 + 1?", "role": "user"}], "reference": "2"}'
    assert key_of(row) == hashlib.blake2b(text, digest_size=8).hexdigest(), "it is the same in every process"


# --- fresh prompts ----------------------------------------------------------------------------------------------------


def test_fresh_prompts_go_through_the_data_in_seeded_orders() -> None:
    rows = [{"prompt": str(number)} for number in range(7)]
    pool = Pool(rows, seed=1)
    drawn = [pool.draw(())["prompt"] for _ in range(14)]  # type: ignore[index]
    assert sorted(drawn[:7]) == sorted(drawn[7:]) == [str(number) for number in range(7)]
    assert drawn[:7] != drawn[7:]
    assert drawn != [Pool(rows, seed=2).draw(())["prompt"] for _ in range(1)] * 14  # type: ignore[index]
    again = Pool(rows, seed=1)
    again.load_state_dict({"passed": 5})
    assert [again.draw(())["prompt"] for _ in range(9)] == drawn[5:]  # type: ignore[index]


def test_what_is_in_the_batch_is_not_drawn_again() -> None:
    rows = [{"prompt": str(number)} for number in range(4)]
    taken = {key_of(row) for row in rows[:3]}
    pool = Pool(rows, seed=0)
    assert [pool.draw(taken) for _ in range(3)] == [rows[3]] * 3
    assert pool.draw({key_of(row) for row in rows}) is None


# --- GRESO ------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_passed_over_with_the_probability_of_the_paper() -> None:
    memory, greso = PassRates(), Greso(GresoConfig(explore=0.5))
    memory.saw("other", [0.0, 1.0])
    for times in range(4):
        assert greso.skip_probability(memory, "a") == 1 - 0.5**times
        memory.saw("a", [1.0, 1.0])
    rng = random.Random(0)
    share = sum(greso.skips(memory, "a", rng) for _ in range(4000)) / 4000
    assert share == pytest.approx(1 - 0.5**4, abs=0.02)
    assert not any(greso.skips(memory, name, rng) for name in ("other", "new") for _ in range(100))


def test_exploration_falls_where_more_groups_are_flat_than_wanted() -> None:
    greso = Greso(GresoConfig(explore=0.5, step=0.1, easy_target=0.25, hard_target=0.25))
    greso.adapt([1.0, 0.9, None], 8)  # 2 easy of 8 reach the target, 1 hard does not
    assert greso.explore == {"easy": 0.4, "hard": 0.6}
    for _ in range(20):
        greso.adapt([1.0, 1.0], 4)
    assert greso.explore == {"easy": 0.05, "hard": 0.95}
    again = Greso(GresoConfig())
    again.load_state_dict(json.loads(json.dumps(greso.state_dict())))
    assert again.explore == greso.explore


# --- put together -----------------------------------------------------------------------------------------------------


class World:
    """Prompts with a pass rate each; a completion is one token, 1 if it passes."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rows = [{"prompt": str(number), "rate": rate} for number, rate in enumerate(rates)]
        self.calls: list[list[str]] = []
        self.draw = random.Random(0)

    def make(self, rows: Sequence[dict[str, Any]]) -> list[Group]:
        """Groups of 4."""
        self.calls.append([row["prompt"] for row in rows])
        return [self.group(row, [float(self.draw.random() < row["rate"]) for _ in range(4)]) for row in rows]

    def group(self, row: dict[str, Any], rewards: list[float]) -> Group:
        ids = [[int(reward)] for reward in rewards]
        words = [str(reward) for reward in rewards]
        return Group(key_of(row), row, [7, 7], ids, words, [[reward] for reward in rewards], rewards, {"word": words})


def selector(world: World, size: int = 4, **methods: Any) -> Selector:
    return Selector(SelectionConfig.model_validate(methods), world.rows, size, seed=0)


def test_flat_groups_give_way_to_fresh_ones_until_none_is_left() -> None:
    world = World([0.0] * 4 + [0.5] * 40)
    found = selector(world, dynamic_sampling={"max_rounds": 20}).select(world.rows[:6], 0, world.make)
    assert [group.flat for group in found.groups] == [False] * 6
    assert found.rounds == len(world.calls) > 1
    first, *later = world.calls
    assert first == [row["prompt"] for row in world.rows[:6]]
    everything = [prompt for prompts in world.calls for prompt in prompts]
    assert len(set(everything)) == len(everything), "no prompt twice in a step"
    assert len(later[0]) == sum(group.flat for group in found.made[:6]) >= 4
    assert found.generated == 4 * len(everything)
    kept = {group.row["prompt"] for group in found.groups}
    useful = {group.row["prompt"] for group in found.made if not group.flat}
    assert kept <= useful


def test_dynamic_sampling_stops_at_its_rounds_and_its_budget() -> None:
    for limit, rounds in (({"max_rounds": 3}, 3), ({"max_rounds": 9, "token_budget": 13}, 4)):
        world = World([0.0] * 50)
        found = selector(world, dynamic_sampling=limit).select(world.rows[:1], 0, world.make)
        assert (found.rounds, found.generated) == (rounds, 4 * rounds)
        assert [group.row["prompt"] for group in found.groups] == ["0"], "what stays flat stays"
    world = World([0.0] * 3)
    found = selector(world, dynamic_sampling={}).select(world.rows[:2], 0, world.make)
    assert sum(len(prompts) for prompts in world.calls) == 3, "the data has no more prompts"


def test_prompts_that_were_flat_are_passed_over_for_fresh_ones() -> None:
    world = World([1.0] * 4 + [0.5] * 40)
    chooser = selector(world, greso={"explore": 0.01, "step": 0})
    chooser.select(world.rows[:8], 0, world.make)
    found = chooser.select(world.rows[:4], 1, world.make)
    assert found.skipped >= 4
    assert all(row["rate"] == 0.5 for row in (group.row for group in found.groups))


def test_exploration_is_adapted_once_prompts_come_back() -> None:
    world = World([0.5] * 20)
    chooser = selector(world, greso={"explore": 0.5, "step": 0.1, "easy_target": 0.9, "hard_target": 0.9})
    assert chooser.greso is not None
    chooser.select(world.rows[:5], 0, world.make)
    chooser.select(world.rows[5:10], 1, world.make)
    assert chooser.greso.explore == {"easy": 0.5, "hard": 0.5}
    chooser.select(world.rows[:5], 2, world.make)
    assert chooser.greso.explore == {"easy": 0.6, "hard": 0.6}


def test_pods_keeps_the_spread_of_a_group_with_all_that_belongs_to_its_completions() -> None:
    world = World([])
    chooser = selector(world, size=6, pods={"keep": 2})
    row = {"prompt": "x", "rate": 0.5}
    kept = chooser._down_sampled(world.group(row, [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    assert (kept.totals, kept.completion_ids, kept.extra["word"]) == ([1.0, 0.0], [[1], [0]], ["1.0", "0.0"])


EVERYTHING: dict[str, Any] = {"dynamic_sampling": {"max_rounds": 3}, "greso": {}, "pods": {"keep": 3}}


def test_choosing_draws_nothing_from_the_random_numbers_of_the_run() -> None:
    world = World([0.0, 0.2, 0.5, 0.9, 1.0] * 10)
    chooser = selector(world, **EVERYTHING)
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    for step in range(3):
        chooser.select(world.rows[5 * step : 5 * step + 5], step, world.make)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before


def test_the_choices_go_on_from_a_checkpoint_as_they_would_have() -> None:
    def steps(chooser: Selector, world: World, first: int, last: int) -> list[Any]:
        told = []
        for step in range(first, last):
            world.draw = random.Random(step)  # the policy's own draws are the trainer's affair
            found = chooser.select(world.rows[2 * step : 2 * step + 5], step, world.make)
            told.append([(group.row["prompt"], group.totals) for group in found.groups])
        return told

    rates = [0.0, 0.2, 0.5, 0.9, 1.0] * 10
    whole = steps(selector(World(rates), **EVERYTHING), World(rates), 0, 20)
    world = World(rates)
    chooser = selector(world, **EVERYTHING)
    assert repr(steps(chooser, world, 0, 11)) == repr(whole[:11])
    saved = json.loads(json.dumps(chooser.state_dict(), indent=1))
    again = selector(World(rates), **EVERYTHING)
    again.load_state_dict(saved)
    assert repr(steps(again, World(rates), 11, 20)) == repr(whole[11:])
    forgetful = selector(World(rates), **EVERYTHING)
    assert repr(steps(forgetful, World(rates), 11, 20)) != repr(whole[11:])
