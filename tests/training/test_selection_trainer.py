"""`selection:` in the trainer: chosen completions go the way of TRL's own, and what is not chosen leaves no trace in the loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.config import SelectionConfig
from kit.errors import EngineError
from kit.trainer.selection.methods import key_of, max_variance

from .rollouts import (
    NewTrainer,
    adapter,
    assert_gradients_close,
    generated,
    log_of,
    losses_and_gradients,
    train,
)

Spec = dict[str, Any]
CLOCKS = ("time", "runtime", "per_second", "seconds/", "memory/")


def selection(**methods: Any) -> dict[str, Any]:
    return {"selection": SelectionConfig.model_validate(methods)}


def flat_for(*targets: int) -> Any:
    """Rewards that differ within every group, but one and the same for prompts with these targets."""

    def placed_or_flat(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float]:
        rewards = _placed(completion_ids)
        return [0.5 if wanted in targets else reward for wanted, reward in zip(target, rewards, strict=True)]

    return placed_or_flat


def _placed(completion_ids: list[list[int]]) -> list[float]:
    """By ids and places, and a little by number, so that no two neighbours have the same."""
    sums = [sum(place * token for place, token in enumerate(ids, 1)) % 101 for ids in completion_ids]
    return [value / 101 + 0.001 * (number % 4) for number, value in enumerate(sums)]


def told(trainer: Any) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if not any(word in key for word in CLOCKS)}
        for line in trainer.state.log_history
    ]


# --- nothing chosen ---------------------------------------------------------------------------------------------------

INERT: dict[str, Spec] = {
    "counting alone": {},
    "dynamic_sampling": {"dynamic_sampling": {}},
    "greso": {"greso": {}},
    "pods": {"pods": {"keep": 4}},
    "cppo": {"cppo": {"keep": 4}},
}


def two_steps(new_trainer: NewTrainer, extra: Spec) -> tuple[Any, list[dict[str, float]], list[Any]]:
    """Weights, logs and rollouts of a short run in which no group is flat."""
    sink: list[Any] = []
    extra = {**extra, "rollout_sinks": [sink.append], "reward_funcs": flat_for()}
    trainer = new_trainer(objective="dapo", extra=extra, max_steps=2, gradient_accumulation_steps=2)
    train(trainer)
    return (
        adapter(trainer),
        told(trainer),
        [(each.completion_ids, each.rewards.tolist(), each.advantages.tolist()) for each in sink],
    )


@pytest.fixture(scope="module")
def without_selection(new_trainer: NewTrainer) -> Any:
    return two_steps(new_trainer, {})


@pytest.mark.parametrize("name", INERT)
def test_a_method_with_nothing_to_choose_changes_nothing(
    name: str, without_selection: Any, new_trainer: NewTrainer
) -> None:
    """Losses, logs, weights and rollouts are those of a run without `selection`, to the bit."""
    weights, lines, rollouts = without_selection
    chosen_weights, chosen_lines, chosen_rollouts = two_steps(new_trainer, selection(**INERT[name]))
    assert rollouts == chosen_rollouts
    for key, value in weights.items():
        assert torch.equal(value, chosen_weights[key]), key
    for line, chosen in zip(lines, chosen_lines, strict=True):
        assert {key: chosen[key] for key in line} == line
        own = {key for key in chosen if key not in line}
        assert {key.partition("/")[0] for key in own} <= {"tokens", "groups", "selection"}


def test_what_a_step_spent_is_counted(new_trainer: NewTrainer) -> None:
    sink: list[Any] = []
    extra = {**selection(), "rollout_sinks": [sink.append], "reward_funcs": flat_for(8, 15, 9)}
    trainer = new_trainer(objective="grpo", extra=extra, gradient_accumulation_steps=8)
    train(trainer)
    (seen,), line = sink, log_of(trainer)
    completion = [len(ids) for ids in seen.completion_ids]
    prompt = [len(ids) for ids in seen.prompt_ids]
    useful = [row["target"] not in (8, 15, 9) for row in seen.rows]
    assert sum(useful) == 20
    assert line["tokens/generated"] == sum(completion)
    assert line["tokens/updated"] == sum(completion) + sum(prompt)
    assert line["tokens/with_advantage"] == sum(
        c + p for c, p, advantage in zip(completion, prompt, seen.advantages.tolist(), strict=True) if advantage
    )
    assert (line["groups/rolled_out"], line["groups/useful"]) == (8, 5)
    assert line["tokens/per_useful_group"] == sum(completion) / 5


# --- PODS and CPPO: the gradient is that of a batch made by hand ------------------------------------------------------

RECIPES = ("grpo", "bnpo", "dapo", "dr_grpo")


def by_hand(output: dict[str, Any], rows: list[int], advantages: list[float]) -> dict[str, Any]:
    """A batch of some rows, without the help of the code under test."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    batch = {name: torch.stack([output[name][row] for row in rows]) for name in names}
    batch["advantages"] = torch.tensor(advantages)
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    return batch


def zscores(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", ["pods", "cppo"])
def test_the_gradient_is_that_of_a_batch_of_the_kept_completions(
    method: str, recipe: str, new_trainer: NewTrainer
) -> None:
    objective = {"recipe": recipe, "advantage": "group_zscore"}
    options: Spec = {"objective": objective, "unchecked": True, "per_device_train_batch_size": 12}
    sink: list[Any] = []
    plain = new_trainer(**options, extra={"rollout_sinks": [sink.append]})
    torch.manual_seed(3)
    whole = generated(plain)
    rewards = sink[0].rewards[:, 0].tolist()
    rows, advantages = [], []
    for start in range(0, 12, 4):
        group = rewards[start : start + 4]
        if method == "pods":
            kept = max_variance(group, 2)
            advantages += zscores([group[place] for place in kept])
        else:
            every = zscores(group)
            kept = sorted(sorted(range(4), key=lambda place: -abs(every[place]))[:2])
            advantages += [every[place] for place in kept]
        rows += [start + place for place in kept]
    want = losses_and_gradients(plain, [by_hand(whole, rows, advantages)], 1)

    choosing = new_trainer(**options, extra=selection(**{method: {"keep": 2}}))
    torch.manual_seed(3)
    output = generated(choosing)
    assert len(output["completion_ids"]) == 6
    losses, gradients = losses_and_gradients(choosing, [output], 1)
    torch.testing.assert_close(losses, want[0], rtol=1e-5, atol=1e-7)
    assert_gradients_close(gradients, want[1])


@pytest.mark.parametrize("method", ["pods", "cppo"])
def test_kept_completions_are_split_into_micro_batches(method: str, new_trainer: NewTrainer) -> None:
    trainer = new_trainer(
        objective="dapo", extra=selection(**{method: {"keep": 2}}), gradient_accumulation_steps=4, max_steps=2
    )
    sizes: list[int] = []
    original = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: sizes.append(len(inputs["advantages"])) or original(model, inputs)
    train(trainer)
    assert sizes == [2] * 8
    line = log_of(trainer)
    assert line["tokens/per_useful_group"] == line["tokens/generated"] / line["groups/useful"]
    assert line["groups/rolled_out"] == 4


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
        for place in range(0, 8, 4):  # a group that was useful is where it was
            if before.rows[place]["target"] not in flat:
                assert after.rows[place]["prompt"] == before.rows[place]["prompt"]
    lines = [line for line in told(trainer) if "loss" in line]
    assert all(line["groups/useful"] == 2 for line in lines)
    assert all(line["groups/rolled_out"] >= 2 * line["selection/rounds"] - 2 for line in lines)
    assert max(line["selection/rounds"] for line in lines) > 1


def test_tokens_of_discarded_groups_are_counted_as_seen(new_trainer: NewTrainer) -> None:
    extra = {**selection(dynamic_sampling={"max_rounds": 3}), "reward_funcs": flat_for(8, 15, 1, 0, 9, -10, 5)}
    trainer = new_trainer(objective="dapo", extra=extra, gradient_accumulation_steps=2)
    calls: list[int] = []
    original = trainer._generate_single_turn

    def count(prompt_ids: Any, *rest: Any) -> Any:
        made = original(prompt_ids, *rest)
        if trainer._state.replayed is None:
            calls.append(sum(map(len, prompt_ids)) + sum(map(len, made[0])))
        return made

    trainer._generate_single_turn = count
    train(trainer)
    assert len(calls) == 3
    assert trainer.state.num_input_tokens_seen == sum(calls) == log_of(trainer)["num_tokens"]


def test_what_reward_functions_log_follows_the_completions(new_trainer: NewTrainer) -> None:
    def noted(completions: list[str], target: list[int], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("text", [f"{text}!" for text in completions])
        log_metric("calls", 1.0)
        return [0.5 if wanted in (8, 15, 0) else len(text) + 0.01 * n for n, (text, wanted) in
                enumerate(zip(completions, target, strict=True))]  # fmt: skip

    sink: list[Any] = []
    extra = {**selection(dynamic_sampling={"max_rounds": 6}), "rollout_sinks": [sink.append], "reward_funcs": noted}
    trainer = new_trainer(objective="dapo", extra=extra, gradient_accumulation_steps=4, max_steps=2)
    train(trainer)
    for each in sink:
        assert list(each.extra["text"]) == [f"{text}!" for text in each.completions]
    assert log_of(trainer)["calls"] == 1.0
    assert [list(each.completion_ids) for each in sink]


# --- checkpoints ------------------------------------------------------------------------------------------------------

EVERYTHING: Spec = {"dynamic_sampling": {"max_rounds": 3}, "greso": {"explore": 0.3}, "pods": {"keep": 3}}


@pytest.mark.parametrize("iterations", [pytest.param(1, marks=pytest.mark.survival), 2])
def test_a_run_that_chooses_is_resumed_to_the_bit(iterations: int, new_trainer: NewTrainer, tmp_path: Path) -> None:
    def one(folder: str) -> tuple[Any, list[Any]]:
        sink: list[Any] = []
        extra = {**selection(**EVERYTHING), "rollout_sinks": [sink.append], "reward_funcs": flat_for(8, 15, 0)}
        trainer = new_trainer(
            objective="grpo", extra=extra, gradient_accumulation_steps=4, max_steps=7, num_iterations=iterations,
            save_strategy="steps", save_steps=5, output_dir=str(tmp_path / folder),
        )  # fmt: skip
        return trainer, sink

    whole, seen = one("whole")
    train(whole)
    resumed, seen_after = one("again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert [each.completion_ids for each in seen_after] == [each.completion_ids for each in seen[-len(seen_after) :]]
    assert told(resumed)[-2] == told(whole)[-2]
    for name, weight in adapter(whole).items():
        assert torch.equal(weight, adapter(resumed)[name]), name
    assert resumed.selection.selector.state_dict() == whole.selection.selector.state_dict()
    known = resumed.selection.selector.memory.known
    assert {key_of(row) for row in whole.train_dataset} >= set(known) != set()


def test_a_failed_engine_leaves_the_memory_of_the_step_before(
    new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is written when an engine fails, also in a second round: it must not know of the first one."""
    extra = {**selection(dynamic_sampling={}, greso={}), "reward_funcs": flat_for(8, 15, 1, 0, 9, -10, 5)}
    trainer = new_trainer(objective="dapo", extra=extra, unchecked=True, gradient_accumulation_steps=2)
    rows = [dict(row) for row in trainer.train_dataset.select(range(2))]
    trainer.model.train()
    first_round = trainer.selection.sample_groups(rows)
    assert all(group.flat for group in first_round)
    rounds: list[int] = []

    def fails_in_the_second_round(wanted: Any) -> Any:
        rounds.append(len(wanted))
        if len(rounds) == 2:
            raise EngineError("gone")
        return first_round

    monkeypatch.setattr(trainer.selection, "sample_groups", fails_in_the_second_round)
    monkeypatch.setattr(trainer, "use_vllm", True)
    before = trainer.selection.selector.state_dict()
    with pytest.raises(EngineError):
        trainer.selection._selected(rows)
    assert rounds == [2, 2]
    assert trainer.selection.selector.state_dict() == before
