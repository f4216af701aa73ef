"""Dynamic sampling: new groups are handled as TRL's own, and replaced groups do not affect the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kit.config import SelectionConfig
from kit.errors import ConfigError
from kit.objective import Objective
from kit.trainer.dynamic_sampling import FreshPrompts, Group, check_dynamic_sampling

from .rollouts import (
    NewTrainer,
    adapter,
    train,
)

Spec = dict[str, Any]
CLOCKS = ("time", "runtime", "per_second", "seconds/", "memory/")


def selection(**methods: Any) -> dict[str, Any]:
    return {"selection": SelectionConfig.model_validate(methods)}


def flat_for(*targets: int) -> Any:
    """A reward that is constant for prompts with these targets, and differs within all other groups."""

    def placed_or_flat(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float]:
        rewards = _placed(completion_ids)
        return [0.5 if number in targets else reward for number, reward in zip(target, rewards, strict=True)]

    return placed_or_flat


def _placed(completion_ids: list[list[int]]) -> list[float]:
    """Rewards from ids and positions, plus 0.001 per place in the group, so that no two neighbours are equal."""
    sums = [sum(place * token for place, token in enumerate(ids, 1)) % 101 for ids in completion_ids]
    return [value / 101 + 0.001 * (number % 4) for number, value in enumerate(sums)]


def told(trainer: Any) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if not any(word in key for word in CLOCKS)}
        for line in trainer.state.log_history
    ]


# --- without flat groups ----------------------------------------------------------------------------------------------


def two_steps(new_trainer: NewTrainer, extra: Spec) -> tuple[Any, list[dict[str, float]], list[Any]]:
    """Weights, logs and rollouts of a short run without flat groups."""
    sink: list[Any] = []
    extra = {**extra, "rollout_sinks": [sink.append], "reward_funcs": flat_for()}
    trainer = new_trainer(objective="dapo", extra=extra, max_steps=2, gradient_accumulation_steps=2)
    train(trainer)
    return (
        adapter(trainer),
        told(trainer),
        [(each.completion_ids, each.rewards.tolist(), each.advantages.tolist()) for each in sink],
    )


def test_dynamic_sampling_without_flat_groups_changes_nothing(new_trainer: NewTrainer) -> None:
    """Losses, logs, weights and rollouts equal those of a run without `selection` to the bit."""
    weights, lines, rollouts = two_steps(new_trainer, {})
    chosen_weights, chosen_lines, chosen_rollouts = two_steps(new_trainer, selection(dynamic_sampling={}))
    assert rollouts == chosen_rollouts
    for key, value in weights.items():
        assert torch.equal(value, chosen_weights[key]), key
    for line, chosen in zip(lines, chosen_lines, strict=True):
        assert {key: chosen[key] for key in line} == line
        own = {key for key in chosen if key not in line}
        assert {key.partition("/")[0] for key in own} <= {"tokens", "groups", "selection"}


# --- dynamic sampling -------------------------------------------------------------------------------------------------


def test_flat_groups_are_replaced_and_the_sampler_goes_on_undisturbed(new_trainer: NewTrainer) -> None:
    runs = []
    for methods in ({}, {"dynamic_sampling": {"max_rounds": 6}}):
        sink: list[Any] = []
        extra = {**selection(**methods), "rollout_sinks": [sink.append], "reward_funcs": flat_for(8, 15, 0)}
        trainer = new_trainer(objective="dapo", extra=extra, gradient_accumulation_steps=2, max_steps=3)
        train(trainer)
        runs.append((trainer, sink))
    (_, plain), (trainer, chosen) = runs
    flat = {8, 15, 0}
    assert any(row["target"] in flat for each in plain for row in each.rows)
    for before, after in zip(plain, chosen, strict=True):
        assert not any(row["target"] in flat for row in after.rows)
        for place in range(0, 8, 4):  # useful groups keep their positions
            if before.rows[place]["target"] not in flat:
                assert after.rows[place]["prompt"] == before.rows[place]["prompt"]
    lines = [line for line in told(trainer) if "loss" in line]
    assert all(line["groups/useful"] == 2 for line in lines)
    assert all(line["groups/rolled_out"] >= 2 * line["selection/rounds"] - 2 for line in lines)
    assert max(line["selection/rounds"] for line in lines) > 1


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_dynamic_sampling_resumes_to_the_bit(new_trainer: NewTrainer, tmp_path: Path) -> None:
    def one(folder: str) -> tuple[Any, list[Any]]:
        sink: list[Any] = []
        extra = {
            **selection(dynamic_sampling={"max_rounds": 3}),
            "rollout_sinks": [sink.append],
            "reward_funcs": flat_for(8, 15, 0),
        }
        trainer = new_trainer(
            objective="grpo", extra=extra, gradient_accumulation_steps=4, max_steps=7, num_iterations=2,
            save_strategy="steps", save_steps=5, output_dir=str(tmp_path / folder),
        )  # fmt: skip
        return trainer, sink

    straight, sink = one("whole")
    train(straight)
    resumed, seen_after = one("again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert [each.completion_ids for each in seen_after] == [each.completion_ids for each in sink[-len(seen_after) :]]
    assert told(resumed)[-2] == told(straight)[-2]
    for name, weight in adapter(straight).items():
        assert torch.equal(weight, adapter(resumed)[name]), name
    assert resumed.selection.state_dict() == straight.selection.state_dict() != {"passed": 0}


# --- groups, without a model ------------------------------------------------------------------------------------------


def sampler(
    monkeypatch: pytest.MonkeyPatch, trainer: Any, flat: set[int], **limits: Any
) -> tuple[Any, list[list[int]]]:
    """A `DynamicSampling` over prompts 0 to 11 with prescribed groups, and the prompts of each round."""
    rounds: list[list[int]] = []

    def make(rows: list[dict[str, Any]]) -> list[Group]:
        rounds.append([row["prompt"] for row in rows])
        rewards = [[0.0, 0.0] if row["prompt"] in flat else [0.0, 1.0] for row in rows]
        return [
            Group(row, [[1], [2]], [[reward] for reward in group], group, {}, None)
            for row, group in zip(rows, rewards, strict=True)
        ]

    choice = trainer.selection
    monkeypatch.setattr(choice, "config", SelectionConfig.model_validate({"dynamic_sampling": limits}).dynamic_sampling)
    monkeypatch.setattr(choice, "fresh", FreshPrompts([{"prompt": number} for number in range(12)], seed=0))
    monkeypatch.setattr(choice, "_sample", make)
    return choice, rounds


def test_rounds_end_without_flat_groups_at_the_limit_or_with_the_data(
    new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(objective="dapo", extra=selection(dynamic_sampling={}))
    begin = [{"prompt": number} for number in range(4)]
    for flat, limits, expected in (
        ({0, 1}, {"max_rounds": 9}, 2),
        (set(range(12)), {"max_rounds": 3}, 3),
        (set(range(12)), {"max_rounds": 9}, 3),  # twelve prompts, four per round
    ):
        sampling, rounds = sampler(monkeypatch, trainer, flat, **limits)
        groups, made, count = sampling._replace_flat(sampling._sample(begin))
        prompts = [prompt for each in rounds for prompt in each]
        assert count == len(rounds) == expected
        assert len(set(prompts)) == len(prompts) == len(made), "a step has no prompt twice"
        assert any(group.flat for group in groups) == (len(flat) == 12), "flat groups of the last round stay"


PLAIN = {"turns": False, "processes": 1, "images": False}


@pytest.mark.parametrize(
    ("objective", "change", "words"),
    [
        ("grpo", {"processes": 2}, "2 processes.*start one process"),
        ("grpo", {"turns": True}, "run twice"),
        ("grpo", {"images": True}, "pictures"),
        ("gdpo", {}, "components of the reward.*another advantage"),
        ("reinforce_pp", {}, "tokens over the whole batch"),
    ],
)
def test_unsupported_settings_are_refused_with_a_remedy(objective: str, change: dict[str, Any], words: str) -> None:
    check_dynamic_sampling(Objective.from_spec("grpo"), **PLAIN)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        check_dynamic_sampling(Objective.from_spec(objective), **PLAIN | change)  # type: ignore[arg-type]
