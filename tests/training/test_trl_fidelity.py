"""Loss and LoRA gradient against TRL's trainer on the same rollouts, for all options of TRL's loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import every_pair
from torch import Tensor

from .rollouts import (
    EQUAL,
    POLICIES,
    NewTrainer,
    adapter,
    assert_gradients_close,
    drift,
    kl_term,
    losses_and_gradients,
    rollout,
)

Spec = dict[str, Any]
NARROW = {"eps_low": 0.02, "eps_high": 0.03}  # the mean ratio of a completion is closer to 1
NARROW_TRL = {"epsilon": 0.02, "epsilon_high": 0.03}
WHOLE = {"name": "gspo", **NARROW}

# (TRL's loss_type and importance_sampling_level): (the kit's objective, TRL's other equivalent arguments)
EVERY_LOSS: dict[tuple[str, str], tuple[Spec, Spec]] = {
    ("grpo", "token"): ({"recipe": "grpo"}, {}),
    ("grpo", "sequence"): ({"recipe": "gspo"}, {"epsilon": 3e-4, "epsilon_high": 4e-4}),
    ("bnpo", "token"): ({"recipe": "bnpo"}, {}),
    ("bnpo", "sequence"): ({"recipe": "bnpo", "clip": WHOLE}, NARROW_TRL),
    ("dr_grpo", "token"): ({"recipe": "dr_grpo"}, {}),
    ("dr_grpo", "sequence"): ({"recipe": "dr_grpo", "clip": WHOLE}, NARROW_TRL),
    ("dapo", "token"): ({"recipe": "dapo"}, {"epsilon_high": 0.28}),
    ("dapo", "sequence"): ({"recipe": "dapo", "clip": WHOLE}, NARROW_TRL),
    ("cispo", "token"): ({"recipe": "cispo", "clip": {"eps_high": 1.1}}, {"epsilon_high": 1.1}),
    ("cispo", "sequence"): (
        {"recipe": "cispo", "clip": {"eps_high": 0.8, "level": "sequence"}},
        {"epsilon_high": 0.8},
    ),
    ("sapo", "token"): ({"recipe": "sapo"}, {}),
    ("sapo", "sequence"): (
        {"recipe": "sapo", "clip": {"level": "sequence", "tau_pos": 0.8, "tau_neg": 1.5}},
        {"sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.5},
    ),
    ("vespo", "token"): ({"recipe": "vespo"}, {}),  # TRL refuses it at level sequence
    ("luspo", "token"): ({"clip": {"name": "ppo_clip"}, "reduction": "sequence_sum"}, {}),
    ("luspo", "sequence"): ({"recipe": "luspo"}, {"epsilon": 2e-3, "epsilon_high": 2.5e-3}),
}
CLIPPED = {"cispo": "cispo_clip_ratio"} | {
    name: "clip_ratio/region_mean" for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
}
KLS = ("no_kl", "kl", "corrected_kl")

Rollouts = Callable[[str, int], list[dict[str, Any]]]
Pair = tuple[Any, Any, dict[str, Tensor]]


def test_every_loss_type_and_level_of_trl_is_in_the_matrix() -> None:
    from trl import GRPOConfig

    known = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
    description = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert [name for name in known if f"'{name}'" not in description] == []
    pairs = {(name, level) for name in known for level in ("token", "sequence")}
    assert pairs - {("vespo", "sequence")} == set(EVERY_LOSS)


@pytest.fixture(scope="module")
def shared_rollout(new_trainer: NewTrainer) -> Rollouts:
    """Return micro-batches that a stock trainer generated once, with reference and (off-policy) old log-probabilities."""

    @functools.cache
    def make(policy: str, accumulation: int) -> list[dict[str, Any]]:
        options = {"gradient_accumulation_steps": accumulation, **POLICIES[policy](accumulation)}
        batches = rollout(new_trainer(stock=True, beta=0.04, **options))
        assert ("old_per_token_logps" in batches[0]) == (policy != "on_policy")
        return batches

    return make


def build(new_trainer: NewTrainer, objective: Spec, loss_arguments: Spec, kl: str, level: str) -> Pair:
    """TRL's trainer, the kit's, and the adapter with which both start."""
    if kl != "no_kl":
        corrected = kl == "corrected_kl"
        objective = {**objective, "regularizers": [{**kl_term("", corrected), "level": level}]}
        loss_arguments = {**loss_arguments, "beta": 0.04, "use_bias_correction_kl": corrected}
    stock, hooked = new_trainer(stock=True, **loss_arguments), new_trainer(objective=objective)
    start = adapter(stock)
    assert all(torch.equal(value, start[name]) for name, value in adapter(hooked).items())
    return stock, hooked, start


@pytest.fixture(scope="module")
def pair(new_trainer: NewTrainer) -> Callable[[str, str, str], Pair]:
    """Return a factory of pairs of trainers, cached by loss, level and KL; `assert_equal_trl` sets what depends on the policy."""

    @functools.cache
    def make(loss_type: str, level: str, kl: str) -> Pair:
        objective, loss_arguments = EVERY_LOSS[loss_type, level]
        arguments = {"loss_type": loss_type, "importance_sampling_level": level, **loss_arguments}
        return build(new_trainer, objective, arguments, kl, level)

    return make


def assert_equal_trl(trainers: Pair, batches: list[dict[str, Any]], policy: str, accumulation: int) -> Any:
    """Compare the loss of each micro-batch and the sum of the gradients; return TRL's trainer with its logs."""
    stock, hooked, start = trainers
    results = []
    for trainer in (stock, hooked):
        trainer.args.steps_per_generation = len(batches)
        trainer._metrics["train"].clear()
        with torch.no_grad():
            for name, value in trainer.model.named_parameters():
                if value.requires_grad:
                    value.copy_(start[name])
        if policy != "on_policy":
            drift(trainer)
        results.append(losses_and_gradients(trainer, batches, accumulation))
    (want, want_gradients), (loss, gradients) = results
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=3e-6)  # terms near 1 that cancel to 0.01, in float32
    assert_gradients_close(gradients, want_gradients)
    return stock


@every_pair({"loss_type, level": list(EVERY_LOSS), "kl": KLS, "policy": list(POLICIES), "accumulation": [1, 3]})
def test_loss_and_lora_gradient_equal_trl_on_the_same_rollout(
    shared_rollout: Rollouts,
    pair: Callable[[str, str, str], Pair],
    loss_type: str,
    level: str,
    kl: str,
    policy: str,
    accumulation: int,
) -> None:
    batches = shared_rollout(policy, accumulation)
    stock = assert_equal_trl(pair(loss_type, level, kl), batches, policy, accumulation)
    if policy != "on_policy" and loss_type in CLIPPED:  # the batch does have clipped tokens
        assert sum(stock._metrics["train"][CLIPPED[loss_type]]) > 0


@pytest.mark.parametrize("name", list(EQUAL))
def test_a_recipe_with_its_own_values_equals_trl(new_trainer: NewTrainer, shared_rollout: Rollouts, name: str) -> None:
    objective, loss_arguments = EQUAL[name]
    trainers = build(new_trainer, objective, loss_arguments, "no_kl", "token")
    assert_equal_trl(trainers, shared_rollout("two_windows", 3), "two_windows", 3)


def test_the_comparison_can_tell_losses_apart(pair: Callable[[str, str, str], Pair], shared_rollout: Rollouts) -> None:
    (stock, _, start), (_, hooked, _) = pair("grpo", "token", "no_kl"), pair("dapo", "token", "no_kl")
    with pytest.raises(AssertionError):
        assert_equal_trl((stock, hooked, start), shared_rollout("two_windows", 3), "two_windows", 3)
