"""Divergences from a teacher, held against TRL's own arithmetic on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from trl.experimental.sdpo import loss_utils

from kit.objective.batch import Divergence
from kit.scoring.divergence import divergence
from kit.scoring.head import Projection

ALPHA = {"forward": 0.0, "jensen_shannon": 0.5, "reverse": 1.0}
KINDS = list(ALPHA)


def head(seed: int, width: int, *, count: int = 7, vocabulary: int = 23, spread: float = 1.0) -> Projection:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return spread * torch.randn(*shape, generator=draw, dtype=torch.float64)

    return Projection(
        normal(count, width).requires_grad_(),
        normal(vocabulary, width).requires_grad_(),
        normal(vocabulary).requires_grad_(),
        temperature=1.3,
        softcap=5.0,
        scale=0.9,
    )


def logits(side: Projection) -> Tensor:
    assert side.bias is not None
    assert side.softcap is not None
    raw = side.scale * (side.hidden @ side.weight.T + side.bias)
    return side.softcap * torch.tanh(raw / side.softcap) / side.temperature


def expected(policy: Projection, teacher: Projection, what: Divergence) -> Tensor:
    ours, theirs = logits(policy), logits(teacher).detach()
    if what.top_k is None:
        return loss_utils.compute_full_logit_self_distillation_loss(ours, theirs, distillation_alpha=ALPHA[what.kind])
    return loss_utils.compute_topk_self_distillation_loss(
        ours, theirs, distillation_topk=what.top_k, distillation_alpha=ALPHA[what.kind], distillation_add_tail=True
    )


def gradients(values: Tensor, policy: Projection) -> list[Tensor]:
    weights = torch.linspace(0.5, 2.0, len(values), dtype=values.dtype)
    assert policy.bias is not None
    return list(torch.autograd.grad((values * weights).sum(), [policy.hidden, policy.weight, policy.bias]))


@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_trl(kind: str, top_k: int | None) -> None:
    policy, teacher, what = head(1, 5), head(2, 4), Divergence(kind, top_k)  # type: ignore[arg-type]
    found = divergence(policy, teacher, what, slice_logits=50)  # two positions a slice
    wanted = expected(policy, teacher, what)
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(gradients(found, policy), gradients(wanted, policy), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_like_the_policy_has_divergence_0_and_no_pull(kind: str, top_k: int | None) -> None:
    policy = head(3, 5)
    found = divergence(policy, policy, Divergence(kind, top_k))  # type: ignore[arg-type]
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)
    for gradient in gradients(found, policy):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="same number of vocabulary entries, saw 23 and 24"):
        divergence(head(1, 5), head(2, 5, vocabulary=24), Divergence("forward"))
