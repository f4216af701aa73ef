"""Right padding gives the numbers and gradients of TRL's layout, and correct ones where left padding is wrong; layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.errors import ObjectiveError
from kit.scoring.scorer import ExtraOutputs, ModelPass, PlacedLabels, scatter_to_tokens, score_right_padded
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


def test_rows_are_laid_over_live_tokens_in_order_with_gradient() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    laid = scatter_to_tokens(rows, mask)
    assert laid.tolist() == [[1, 2, 0], [0, 0, 0], [0, 3, 4]]
    (laid * torch.arange(9.0).view(3, 3)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [0, 1, 7, 8]
    wide = torch.stack([rows.detach(), -rows.detach()], dim=1)
    laid = scatter_to_tokens(wide, mask)
    assert laid.shape == (3, 3, 2)
    assert laid[..., 1].tolist() == [[-1, -2, 0], [0, 0, 0], [0, -3, -4]]
    assert torch.equal(laid[mask.bool()], wide)


def test_placed_labels_replace_the_heads_mask() -> None:
    labels = torch.tensor([[-100, 4, -100, 7, 2]])
    placed = PlacedLabels(labels, torch.tensor([1, 3, 4])).to(torch.device("cpu"))
    hidden = torch.arange(10.0).view(1, 5, 2).requires_grad_()
    positions, mask = placed != -100, labels != -100
    assert torch.equal(hidden[positions], hidden[mask])
    assert torch.equal(placed[positions], labels[mask])
    values = torch.tensor([0.5, 1.5, 2.5], requires_grad=True)
    spread = values.new_zeros(positions.shape).masked_scatter(positions, values)
    assert torch.equal(spread, values.new_zeros(mask.shape).masked_scatter(mask, values))
    (hidden[positions].sum() + (spread * 2).sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad[0, :, 0].tolist() == [0, 1, 0, 1, 1]
    assert values.grad is not None
    assert values.grad.tolist() == [2, 2, 2]
    assert int(positions.sum()) == 3  # other attributes are the tensor's
    assert torch.equal(torch.where(mask, hidden[..., 0], 0.0), torch.where(positions.values, hidden[..., 0], 0.0))
