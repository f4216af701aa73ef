"""Completions without an advantage are skipped only if that leaves loss and gradient unchanged."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pairwise import every_pair
from peft import LoraConfig

from kit.errors import ObjectiveError
from kit.objective.recipes import recipe_names

from .rollouts import KL, NewTrainer, adapter, train
from .steps import ROWS, assert_same, in_a_step, mixed_rollout, switch, use, watching


@pytest.fixture(scope="module")
def mixed(new_trainer: NewTrainer) -> tuple[Any, list[dict[str, Any]]]:
    """Micro-batches: in the first, half of the completions are in flat groups, in the second all."""
    return mixed_rollout(new_trainer, {"recipe": "dapo", "regularizers": [KL]})


def live(batches: list[dict[str, Any]]) -> int:
    """The number of completions with an advantage at a trained token."""
    trains = [batch["completion_mask"] * batch["tool_mask"] for batch in batches]
    pairs = zip(batches, trains, strict=True)
    return sum(int(((batch["advantages"] != 0) & mask.any(1)).sum()) for batch, mask in pairs)


# --- loss and gradient ------------------------------------------------------------------------------------------------


@every_pair(
    {
        "name": [name for name in recipe_names() if name not in ("ppo", "opd", "sdpo")],
        "accumulation": [1, 3],
        "budget": [None, 80],
    }
)
def test_every_recipe_has_the_same_gradient_without_flat_completions(
    mixed: tuple[Any, list[dict[str, Any]]], name: str, accumulation: int, budget: int | None
) -> None:
    trainer, batches = mixed
    batches = batches[2:] if accumulation == 1 else batches
    use(trainer, name)
    switch(trainer)
    want = in_a_step(trainer, batches, accumulation)
    switch(trainer, skip=True, budget=budget)
    assert trainer.savings_report["skip_flat_groups"] == "on"
    trainer.policy_loss._reached = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.metric_log.means["train"].take()
    scored: list[int] = []
    score = trainer.scorer.score
    trainer.scorer.score = lambda model, rows, *more: (scored.append(len(rows.ids)), score(model, rows, *more))[1]
    try:
        got = in_a_step(trainer, batches, accumulation)
    finally:
        del trainer.scorer.score
    assert_same(got, want)
    assert sum(scored) == live(batches) < ROWS * len(batches)
    assert trainer.metric_log.means["train"].take()["entropy"][1] > 0


def test_a_flat_micro_batch_takes_no_pass_and_leaves_a_gradient_of_zero(
    mixed: tuple[Any, list[dict[str, Any]]],
) -> None:
    trainer, batches = mixed
    use(trainer, "dapo")
    switch(trainer, skip=True)
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.policy_loss._reached = None
    with watching(trainer) as passes:
        in_a_step(trainer, [batches[1]])
        assert passes.rows == [1]  # one pass finds which weights a pass reaches
        assert {id(weight) for weight in trainer.policy_loss._reached} == {id(weight) for weight in weights}
        losses, _ = in_a_step(trainer, [batches[1]])
        assert passes.rows == [1]
    assert losses.item() == 0.0
    assert all(weight.grad is not None and not weight.grad.any() for weight in weights)


# --- objectives for which it would not be exact -----------------------------------------------------------------------


def test_a_term_that_pulls_on_flat_completions_forbids_it(mixed: tuple[Any, list[dict[str, Any]]]) -> None:
    """Flat completions are not skipped; if they were, the gradient would differ."""
    trainer, batches = mixed
    for term in (
        {"regularizers": [KL]},
        {"regularizers": ["entropy_bonus"]},
        {"weights": [{"name": "high_entropy_only", "quantile": 0.3}]},
    ):
        use(trainer, {"recipe": "grpo", **term})
        switch(trainer)
        want = in_a_step(trainer, batches)
        switch(trainer, skip=True)
        reason = trainer.savings_report["skip_flat_groups"]
        assert (
            "has a gradient for completions without an advantage" in reason or "depends on other completions" in reason
        )
        assert_same(in_a_step(trainer, batches), want)
        trainer.policy_loss.skip_flat = True
        with pytest.raises(AssertionError):
            assert_same(in_a_step(trainer, batches), want)


def test_dropout_a_value_head_and_a_switch_forbid_it(new_trainer: NewTrainer, caplog: pytest.LogCaptureFixture) -> None:
    wet = LoraConfig(r=4, lora_alpha=4, lora_dropout=0.3, target_modules=["q_proj"], init_lora_weights=False)
    with caplog.at_level(logging.INFO, logger="kit"):
        dropping = new_trainer(objective="dapo", extra={"peft_config": wet}).savings_report
    assert "dropout" in dropping["skip_flat_groups"]
    assert sum("are not skipped: the model has dropout" in record.message for record in caplog.records) == 1
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="kit"):
        switched = new_trainer(objective="dapo", extra={"skip_flat_groups": False}).savings_report
    assert switched["skip_flat_groups"] == "switched off"
    assert not [record for record in caplog.records if "skip_flat_groups" in record.message]
    assert "value head" in new_trainer(objective="ppo").savings_report["skip_flat_groups"]
    assert new_trainer(objective=None).savings_report == {}


def test_a_router_that_is_balanced_forbids_it(mixed: tuple[Any, list[dict[str, Any]]]) -> None:
    trainer, _ = mixed
    use(trainer, "dapo")
    trainer.aux_loss_enabled = True
    try:
        switch(trainer, skip=True)
    finally:
        trainer.aux_loss_enabled = False
    assert "router" in trainer.savings_report["skip_flat_groups"]


# --- training ---------------------------------------------------------------------------------------------------------


def half_flat(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float]:
    """A reward that differs within the groups of half of the prompts."""
    return [
        sum(place * token for place, token in enumerate(ids, 1)) % 101 / 101 if number > 1 else 1.0
        for ids, number in zip(completion_ids, target, strict=True)
    ]


def flat_at_first(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A constant reward, so that complete optimiser steps are flat."""
    return [0.0] * len(completion_ids)


LEARNING: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "max_steps": 5,
    "weight_decay": 0.1,
    "num_iterations": 2,
}
ALL_OFF = {"skip_flat_groups": False}
ALL_ON = {"token_budget": 60}


@pytest.mark.parametrize("function", [half_flat, flat_at_first])
def test_five_steps_with_everything_on_are_those_with_everything_off(new_trainer: NewTrainer, function: Any) -> None:
    results = []
    for extra in (ALL_OFF, ALL_ON):
        trainer = new_trainer(objective="dapo", extra={"reward_funcs": function, **extra}, **LEARNING)
        train(trainer)
        logs = [line for line in trainer.state.log_history if "loss" in line]
        results.append((adapter(trainer), [line["loss"] for line in logs], [line["grad_norm"] for line in logs]))
    assert trainer.savings_report == dict.fromkeys(("token_budget", "skip_flat_groups"), "on")
    (weights, losses, norms), (others, their_losses, their_norms) = results
    assert len(losses) == 5
    assert their_losses == pytest.approx(losses, abs=1e-6)
    assert their_norms == pytest.approx(norms, rel=1e-4, abs=1e-6)
    for name, value in weights.items():
        assert (others[name] - value).abs().max() <= 2e-6, name  # Adam divides rounding errors by rounding errors
    assert bool(sum(norms)) == (function is half_flat)


def test_the_first_steps_still_see_a_defect_when_most_is_skipped(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(
        objective="grpo", extra={"reward_funcs": half_flat}, num_generations=2, per_device_train_batch_size=8
    )
    send = trainer.policy_loss._backward

    def halved(outputs: Any, grads: Any, *rest: Any) -> Any:
        return send(outputs, {name: 0.5 * grad for name, grad in grads.items()}, *rest)

    trainer.policy_loss._backward = halved
    with pytest.raises(ObjectiveError, match="is not that of the objective"):
        train(trainer)
