"""Loss and gradient of every recipe, in packs and in TRL's layout, from the rollout on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairwise import rest_in_matrix

from kit.objective.recipes import recipe_names
from kit.trainer.trainer import HookedGRPOTrainer

from .rollouts import NewTrainer, assert_gradients_close, drift, losses_and_gradients, rollout

FURTHER: dict[str, Any] = {
    "kl": {"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.04}]},
    "full_kl": {"recipe": "dapo", "regularizers": [{"name": "kl", "coef": 0.1, "estimator": "full"}]},
    "entropy": {"recipe": "dapo", "regularizers": [{"name": "entropy_bonus", "coef": 0.01}]},
}
ON_POLICY = {"rloo"}  # without a ratio: refused off-policy


@pytest.mark.parametrize("name", rest_in_matrix(3, [*recipe_names(), *FURTHER]))
def test_every_recipe_has_the_loss_and_gradient_of_the_plain_path(new_trainer: NewTrainer, name: str) -> None:
    """With one micro-batch a step and with three, off-policy, so that ratios and old log-probabilities matter."""
    extra = {"skip_flat_groups": False}  # all of the work, to compare
    trainer = new_trainer(
        objective=FURTHER.get(name, name),
        unchecked=True,
        gradient_accumulation_steps=3,
        num_iterations=1 if name in ON_POLICY else 2,
        extra=extra,
    )
    batches = rollout(trainer)
    drift(trainer)
    if trainer.critic is not None:
        torch.nn.init.normal_(trainer.critic.head.linear.weight)
    for chosen in (batches, batches[:1]):
        found = []
        for on in (True, False):
            trainer.scorer.packing = on
            losses, gradients = losses_and_gradients(trainer, chosen, len(chosen))
            if trainer.critic is not None:
                gradients |= {f"value {n}": w.grad.clone() for n, w in trainer.critic.head.named_parameters()}
                trainer.critic.head.zero_grad()
            found.append((losses, gradients))
        torch.testing.assert_close(found[0][0], found[1][0], atol=2e-6, rtol=1e-5)
        assert_gradients_close(found[0][1], found[1][1])
    trainer.scorer.packing = True
    assert trainer.packing_report["packing"] == "packed"


@pytest.mark.parametrize("name", ["ppo", "full_kl"])
def test_what_the_rollout_scores_is_what_the_plain_path_gives(
    new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Old and reference log-probabilities, hidden states and values, each at its token."""
    monkeypatch.setattr(HookedGRPOTrainer, "shares_prompts", False)  # rows in one order
    made = []
    for packing in (True, False):
        trainer = new_trainer(
            objective=FURTHER.get(name, name),
            unchecked=True,
            num_iterations=2,
            gradient_accumulation_steps=2,
            extra={"packing": packing},
        )
        if trainer.critic is not None:
            torch.manual_seed(0)
            torch.nn.init.normal_(trainer.critic.head.linear.weight)
        made.append(rollout(trainer)[0])
    fields = {"old_per_token_logps", "ref_per_token_logps", "ref_hidden", "old_values", "value_targets"} & made[
        0
    ].keys()
    assert len(fields) >= 2
    assert torch.equal(made[0]["completion_ids"], made[1]["completion_ids"])
    for field in fields:
        torch.testing.assert_close(made[0][field], made[1][field], atol=2e-5, rtol=1e-5)
