"""Right padding gives the numbers and gradients of TRL's layout, and correct ones where left padding is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.errors import ObjectiveError
from kit.scoring.scorer import ExtraOutputs, ModelPass, score_right_padded
from kit.trainer.policy_loss import MicroBatch
from tests.training.rollouts import mixed_prompts, scores

NewTrainer = Callable[..., Any]


def test_log_probabilities_entropies_and_gradients_equal_those_of_trls_layout(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(steps_per_generation=8)  # TRL's own method, whose entropies have a gradient
    inputs = mixed_prompts(trainer)
    results = []
    for packed in (False, True):
        trainer.model.zero_grad()
        if packed:
            run = ModelPass(
                trainer.model, trainer.accelerator.autocast, ExtraOutputs(entropy=True, entropy_gradient=True)
            )
            found_right = score_right_padded(run, MicroBatch(inputs).rows, 2)
            logps, entropy = found_right.logps, found_right.entropy
            assert found_right.aux_loss is None
        else:
            logps, entropy = scores(trainer, inputs, compute_entropy=True)
        assert entropy is not None
        (logps.sum() + 0.1 * entropy.sum()).backward()
        gradients = {n: w.grad.clone() for n, w in trainer.model.named_parameters() if w.grad is not None}
        results.append((logps.detach(), entropy.detach(), gradients))
    (logps, entropy, gradients), (packed_logps, packed_entropy, packed_gradients) = results
    assert logps.abs().max() > 0.1
    torch.testing.assert_close(packed_logps, logps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed_entropy, entropy, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == packed_gradients.keys() != set()
    for name, want in gradients.items():
        assert (packed_gradients[name] - want).norm() <= 1e-4 * want.norm(), name


def leave_the_mask_out(trainer: Any) -> None:
    """Make the backbone ignore the attention mask in training, as Unsloth's does."""
    backbone = trainer.accelerator.unwrap_model(trainer.model).get_base_model().base_model
    forward = backbone.forward

    def without_mask(*args: Any, attention_mask: Any = None, **more: Any) -> Any:
        return forward(*args, attention_mask=None if backbone.training else attention_mask, **more)

    backbone.forward = without_mask


def test_a_backbone_without_a_mask_is_caught_in_trls_layout(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective="grpo", steps_per_generation=8)
    leave_the_mask_out(trainer)
    inputs = mixed_prompts(trainer)
    with pytest.raises(ObjectiveError, match="padding wrongly"):
        trainer.checks.before_scoring(trainer.model.train(), MicroBatch(inputs))


def test_a_backbone_without_a_mask_is_exact_with_right_padding(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective="grpo", steps_per_generation=8)
    inputs = mixed_prompts(trainer)
    trainer.model.train()
    right = scores(trainer, inputs)[0]
    trainer.scorer.padding, trainer.scorer.packing = "right", False  # as for Unsloth's class
    leave_the_mask_out(trainer)
    torch.testing.assert_close(scores(trainer, inputs)[0], right, atol=1e-5, rtol=1e-5)
    trainer.checks.before_scoring(trainer.model, MicroBatch(inputs))
    trainer.train()
    assert trainer.state.global_step == 1
