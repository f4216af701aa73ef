"""Divergences from a reference or teacher, compared with TRL's arithmetic and with float64 on whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.sdpo import loss_utils

from kit.objective.batch import Divergence
from kit.scoring.divergence import divergence
from kit.scoring.head import Projection

from .heads import Largest, saved_shapes

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
    raw = side.hidden @ side.weight.T
    raw = (raw if side.bias is None else raw + side.bias) * side.scale
    capped = raw if side.softcap is None else side.softcap * torch.tanh(raw / side.softcap)
    return capped / side.temperature


def expected(policy: Projection, teacher: Projection, what: Divergence) -> Tensor:
    p, q = logits(policy), logits(teacher).detach()
    if what.top_k is None:
        return loss_utils.compute_full_logit_self_distillation_loss(p, q, distillation_alpha=ALPHA[what.kind])
    return loss_utils.compute_topk_self_distillation_loss(
        p, q, distillation_topk=what.top_k, distillation_alpha=ALPHA[what.kind], distillation_add_tail=True
    )


def gradients(values: Tensor, policy: Projection) -> list[Tensor]:
    weights = torch.linspace(0.5, 2.0, len(values), dtype=values.dtype)
    assert policy.bias is not None
    return list(torch.autograd.grad((values * weights).sum(), [policy.hidden, policy.weight, policy.bias]))


@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_trl(kind: str, top_k: int | None) -> None:
    policy, teacher, what = head(1, 5), head(2, 4), Divergence(kind, top_k)  # type: ignore[arg-type]
    actual = divergence(policy, teacher, what, slice_logits=50)  # two positions per slice
    reference = expected(policy, teacher, what)
    torch.testing.assert_close(actual, reference)
    for gradient, reference_gradient in zip(gradients(actual, policy), gradients(reference, policy), strict=True):
        torch.testing.assert_close(gradient, reference_gradient)


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="same number of vocabulary entries, saw 23 and 24"):
        divergence(head(1, 5), head(2, 5, vocabulary=24), Divergence("forward"))


# --- KL to the reference, in float32 -----------------------------------------------------------------------------------


def side(count: int, vocabulary: int, width: int, *, trainable: bool = False, **transform: Any) -> Projection:
    return Projection(
        torch.randn(count, width).requires_grad_(),
        torch.randn(vocabulary, width).requires_grad_(trainable),
        torch.randn(vocabulary).requires_grad_(trainable),
        **transform,
    )


def near(policy: Projection, distance: float) -> Projection:
    """A reference with the policy's head, and hidden states at `distance` from the policy's."""
    return replace(policy, hidden=(policy.hidden + distance * torch.randn_like(policy.hidden)).detach())


def leaves(projection: Projection) -> list[Tensor]:
    return [x for x in (projection.hidden, projection.weight, projection.bias) if x is not None and x.requires_grad]


def float64_kl(policy: Projection, reference: Projection) -> tuple[Tensor, list[Tensor]]:
    """The KL (N,) in float64 from complete logits, and the leaves of its graph."""

    def exact(side: Projection) -> Projection:
        names = ("hidden", "weight", "bias")
        tensors = {name: tensor for name in names if (tensor := getattr(side, name)) is not None}
        return replace(
            side, **{name: x.detach().double().requires_grad_(x.requires_grad) for name, x in tensors.items()}
        )

    precise = exact(policy)
    policy_logps, reference_logps = (logits(side).log_softmax(-1) for side in (precise, exact(reference)))
    reference_logps = reference_logps.detach()
    return (policy_logps.exp() * (policy_logps - reference_logps)).sum(-1), leaves(precise)


def check_against_float64(
    policy: Projection, reference: Projection, rtol: float, atol: float, grad_rtol: float
) -> None:
    values = divergence(policy, reference, slice_logits=2 * len(policy.weight))
    expected, exact_leaves = float64_kl(policy, reference)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=rtol, atol=atol)
    weights = torch.randn(len(values))
    computed = torch.autograd.grad((weights * values).sum(), leaves(policy))
    for a, b, leaf in zip(
        computed,
        torch.autograd.grad((weights.double() * expected).sum(), exact_leaves),
        leaves(policy),
        strict=True,
    ):
        assert a.dtype == leaf.dtype
        assert (a.double() - b).abs().max() <= grad_rtol * b.abs().max()


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("transform", [{}, {"temperature": 1.3, "softcap": 5.0, "scale": 0.5}])
def test_kl_and_gradients_equal_float64_on_whole_logits(transform: dict[str, Any], trainable: bool) -> None:
    torch.manual_seed(0)
    policy = side(7, 1031, 33, trainable=trainable, **transform)
    for reference in (side(7, 1031, 12, **transform), near(policy, 0.1)):
        check_against_float64(policy, reference, rtol=1e-5, atol=1e-6, grad_rtol=1e-4)


@pytest.mark.parametrize("distance", [1e-3, 1e-2, 1e-1])
def test_small_divergences_are_not_lost_in_float32(distance: float) -> None:
    torch.manual_seed(0)
    # With the identity as the weight, the logits are equal in both precisions.
    policy = Projection((10 * torch.randn(64, 400)).requires_grad_(), torch.eye(400), None)
    check_against_float64(policy, near(policy, distance), rtol=1e-4, atol=1e-6, grad_rtol=1e-5 / distance)


@pytest.mark.parametrize("trainable", [False, True])
def test_bfloat16_autocast_is_close_and_keeps_float32_statistics(trainable: bool) -> None:
    torch.manual_seed(0)
    policy, reference = side(16, 501, 32, trainable=trainable, scale=0.3), side(16, 501, 32, scale=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_against_float64(policy, reference, rtol=0.02, atol=0.02, grad_rtol=0.05)


def test_a_frozen_head_keeps_one_row_gradient_and_nothing_where_no_gradient_is_needed() -> None:
    policy, reference = side(7, 50, 4), side(7, 50, 5)
    assert saved_shapes(lambda: divergence(policy, reference)) == [(7, 4)]
    assert saved_shapes(lambda: divergence(replace(policy, hidden=policy.hidden.detach()), reference)) == []
    with torch.no_grad():
        assert saved_shapes(lambda: divergence(policy, reference)) == []
        assert not divergence(policy, reference).requires_grad


@pytest.mark.parametrize("trainable", [False, True])
def test_no_tensor_of_the_size_of_the_logits_is_made(trainable: bool) -> None:
    policy = side(64, 30_001, 4, trainable=trainable)
    with Largest() as largest:
        divergence(policy, near(policy, 0.1), slice_logits=4 * 30_001).sum().backward()  # type: ignore[no-untyped-call]
    assert 0 < largest.elements <= 4 * 30_001
