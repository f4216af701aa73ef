"""kit.planning.signal: every verdict, and the evidence that it requires."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kit.config import RunConfig, load_config
from kit.evaluation.statistics import Estimate, wilson
from kit.planning.signal import Signal, judge

NEVER, MIDDLING, ALWAYS = wilson(0, 64), wilson(32, 64), wilson(64, 64)
NONE = Estimate(math.nan, 0.0, 1.0)
GOOD = Signal(
    prompts=64, spread=wilson(50, 64), truncated=NEVER, malformed=NEVER, failures=NEVER, pass_at_1=MIDDLING,
    constant=False, reward=Estimate(0.5, 0.4, 0.6), reward_seconds=0.1, rollout_seconds=1.9, config=load_config({}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict", "change"),
    [
        ({}, "will learn", ""),
        ({"failures": ALWAYS, "failure": "'f' on completion 1: error"}, "reward fails", "Correct the reward ('f'"),
        ({"truncated": ALWAYS, "spread": NEVER}, "truncated", "-o generation.max_completion_tokens=512"),
        ({"truncated": ALWAYS}, "will learn", "-o generation.max_completion_tokens=512"),  # rewards differ nevertheless
        ({"truncated": ALWAYS, "spread": NEVER, "pass_at_1": NEVER, "ended_right": NEVER}, "too hard", "easier"),
        (
            {"truncated": ALWAYS, "spread": NEVER, "malformed": ALWAYS, "ended_malformed": wilson(10, 10)},
            "wrong format",
            "data.system_prompt",
        ),
        ({"malformed": ALWAYS, "spread": NEVER}, "wrong format", "data.system_prompt"),
        ({"spread": NEVER, "pass_at_1": ALWAYS}, "too easy", "harder"),
        ({"spread": NEVER, "pass_at_1": NEVER}, "too hard", "easier"),
        ({"spread": NEVER, "constant": True}, "no signal", "Choose a reward"),
        ({"spread": NEVER, "constant": True, "pass_at_1": None}, "no signal", "Choose a reward"),
        ({"spread": NEVER}, "no signal", "-o generation.num_generations=16"),
        (
            {"spread": NEVER, "config": load_config({}, ["generation.num_generations=16"])},
            "no signal",
            "Add prob",
        ),
        ({"spread": NEVER, "constant": True, "reward": NONE}, "no signal", "Choose a reward"),
        ({"reward_seconds": 30.0, "rollout_seconds": 10.0}, "slow reward", "faster"),
        ({"reward_seconds": 0.5, "rollout_seconds": 0.1}, "will learn", ""),  # half a second does no harm
        ({"malformed": ALWAYS}, "will learn", ""),  # rewards differ, so the format can be learned
    ],
)
def test_verdicts(changes: dict[str, object], verdict: str, change: str) -> None:
    result = judge(replace(GOOD, **changes))  # type: ignore[arg-type]
    assert result.verdict == verdict
    assert change in result.change
    assert bool(result.change) is bool(change)
    assert "nan" not in result.because


@pytest.mark.parametrize("right", [None, MIDDLING])
@pytest.mark.parametrize(("value", "because"), [(0.5, "every completion got 0.5: the reward is constant"),
                                                (-1.0, "every completion got the lowest value, -1; 100%")])  # fmt: skip
def test_one_reward_for_all_completions_is_about_the_reward_not_the_length(
    value: float, because: str, right: Estimate | None
) -> None:
    signal = replace(GOOD, truncated=ALWAYS, spread=NEVER, constant=True, pass_at_1=right, lowest=-1.0)
    result = judge(replace(signal, reward=Estimate(value, value, value)))
    assert result.verdict == "no signal"
    assert result.because.startswith(because)
    assert result.change.startswith("Compare the samples" if value < 0 else "Choose a reward")
    assert ("max_completion_tokens" in result.change) is (value < 0)
    few = judge(replace(signal, spread=wilson(0, 4), prompts=4))  # [0, 0.49]
    assert few.verdict == "sample more"
    assert "the interval of spread_share contains 25%" in few.because


def test_rewards_that_differ_although_nothing_is_right_are_pointed_out() -> None:
    assert "no sampled answer is right" in judge(replace(GOOD, pass_at_1=NEVER)).because


def changed(config: RunConfig, change: str) -> RunConfig:
    """`config` with the overrides of a suggested change; raises if the result is invalid."""
    return load_config(config, change.removeprefix("-o ").split(" -o "))


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (["optimisation.batch_size=64"], "-o generation.num_generations=16"),
        (["optimisation.batch_size=72"], "-o generation.num_generations=16 -o optimisation.batch_size=80"),
        (["optimisation.batch_size=8"], "-o generation.num_generations=16 -o optimisation.batch_size=16"),
        (["optimisation.batch_size=72", "optimisation.micro_batch_size=12"],
         "-o generation.num_generations=16 -o optimisation.batch_size=96"),
    ],
)  # fmt: skip
def test_larger_groups_are_a_valid_configuration(overrides: list[str], change: str) -> None:
    config = load_config({}, overrides)
    result = judge(replace(GOOD, spread=NEVER, config=config))
    assert result.change == change
    assert changed(config, result.change).generation.num_generations == 16


@pytest.mark.parametrize(
    ("room", "change"), [(None, "=512"), (900, "=512"), (300, "=300"), (256, "Lower data.max_prom")]
)
def test_longer_completions_end_at_the_context(room: int | None, change: str) -> None:
    result = judge(replace(GOOD, truncated=ALWAYS, spread=NEVER, room=room))
    assert result.verdict == "truncated"
    assert change in result.change


@pytest.mark.parametrize(
    ("prompts", "rows", "verdict", "words"),
    [
        (16, 40, "sample more", "--prompts 40"),
        (16, 16, "borderline", "all 16 training rows"),
        (4096, 9000, "borderline", "4096 prompts"),
    ],
)
def test_asking_for_more_ends(prompts: int, rows: int, verdict: str, words: str) -> None:
    share = wilson(5, 16) if prompts == 16 else wilson(1024, 4096)
    result = judge(replace(GOOD, prompts=prompts, rows=rows, spread=share))
    assert result.verdict == verdict
    assert words in result.because + result.change
    assert f"[{share.low:.0%}, {share.high:.0%}]" in result.because
    assert "--prompts" not in result.change or verdict == "sample more"


@pytest.mark.parametrize("name", ["failures", "truncated"])
def test_a_share_beyond_its_threshold_with_an_interval_across_it_asks_for_more(name: str) -> None:
    result = judge(replace(GOOD, spread=NEVER, **{name: wilson(4, 8)}))  # type: ignore[arg-type]  # [0.22, 0.78]
    assert result.verdict == ("reward fails" if name == "failures" else "sample more")
