"""The chunked full-vocabulary divergence against plain float64 arithmetic over the full logits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kit.scoring.full_kl import Projection, full_kl

from .heads import Largest, relative, saved_shapes

pytestmark = pytest.mark.usefixtures("seeded")


def log_probs(side: Projection) -> Tensor:
    """(N, V), from the full logits."""
    z = side.hidden @ side.weight.t()
    z = (z if side.bias is None else z + side.bias) * side.scale
    z = (z if side.softcap is None else side.softcap * torch.tanh(z / side.softcap)) / side.temperature
    return z.log_softmax(-1)


def plain(policy: Projection, reference: Projection) -> Tensor:
    ours, theirs = log_probs(policy), log_probs(reference).detach()
    return (ours.exp() * (ours - theirs)).sum(-1)


def side(n, vocab, width, *, bias=True, trainable=False, dtype=torch.float32, **transform):
    return Projection(
        torch.randn(n, width, dtype=dtype).requires_grad_(),
        torch.randn(vocab, width, dtype=dtype).requires_grad_(trainable),
        torch.randn(vocab, dtype=dtype).requires_grad_(trainable) if bias else None,
        **transform,
    )


def near(policy, distance=0.1, **transform):
    """A reference under the policy's own head, its hidden states `distance` away."""
    return replace(policy, hidden=(policy.hidden + distance * torch.randn_like(policy.hidden)).detach(), **transform)


def exact(projection):
    """The same numbers as float64 leaves."""
    tensors = {name: getattr(projection, name) for name in ("hidden", "weight", "bias")}
    return replace(
        projection,
        **{
            name: value.detach().double().requires_grad_(value.requires_grad)
            for name, value in tensors.items()
            if value is not None
        },
    )


def leaves(projection):
    tensors = (projection.hidden, projection.weight, projection.bias)
    return [x for x in tensors if x is not None and x.requires_grad]


def agree(policy, reference, chunk_size=8192, *, rtol, atol, grad_rtol):
    """Values and, for random weights of the rows, all gradients equal plain float64 arithmetic."""
    ours, want = full_kl(policy, reference, chunk_size), plain(twin := exact(policy), exact(reference))
    torch.testing.assert_close(ours.double(), want, rtol=rtol, atol=atol)
    weights = torch.randn(ours.shape, dtype=ours.dtype)
    got = torch.autograd.grad((weights * ours).sum(), leaves(policy))
    expected = torch.autograd.grad((weights.double() * want).sum(), leaves(twin))
    for a, b, leaf in zip(got, expected, leaves(policy), strict=True):
        assert a.dtype == leaf.dtype
        assert relative(a, b) <= grad_rtol


TRANSFORMS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "softcap": 5.0, "scale": 0.5},
    {"temperature": 0.7, "softcap": 30.0, "scale": 2.0},
]


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("n", "vocab", "width"), [(1, 5, 3), (7, 1031, 33)])
def test_values_and_gradients_equal_plain_float64(n, vocab, width, transform, bias, trainable):
    policy = side(n, vocab, width, bias=bias, trainable=trainable, **transform)
    reference = side(n, vocab, width, bias=bias, **transform)
    agree(policy, reference, 128, rtol=1e-5, atol=1e-6, grad_rtol=1e-5)
    agree(policy, near(policy), 128, rtol=1e-5, atol=1e-6, grad_rtol=1e-4)  # the head is the same object


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 64, 5000])
def test_the_chunk_size_does_not_change_the_result(chunk_size, trainable):
    policy = side(9, 101, 5, trainable=trainable, dtype=torch.float64, softcap=6.0)
    agree(policy, near(policy, 0.5), chunk_size, rtol=1e-10, atol=1e-12, grad_rtol=1e-10)


@pytest.mark.parametrize("trainable", [False, True])
def test_the_two_sides_may_differ_in_every_setting_and_in_hidden_size(small_tiles, trainable):
    policy = side(7, 23, 4, trainable=trainable, dtype=torch.float64, temperature=0.7, softcap=8.0, scale=1.5)
    reference = side(7, 23, 6, bias=False, dtype=torch.float64, temperature=1.2, softcap=None, scale=0.3)
    agree(policy, reference, rtol=1e-10, atol=1e-12, grad_rtol=1e-10)
    agree(reference, policy, rtol=1e-10, atol=1e-12, grad_rtol=1e-10)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradients_equal_finite_differences(small_tiles, trainable, softcap):
    policy = side(4, 11, 3, trainable=trainable, dtype=torch.float64, temperature=0.7, softcap=softcap, scale=1.5)
    reference = near(policy, 0.5)
    fixed = replace(reference, weight=policy.weight.detach().clone(), bias=policy.bias.detach().clone())

    def kl(hidden, weight, bias):
        return full_kl(replace(policy, hidden=hidden, weight=weight, bias=bias), fixed)

    assert torch.autograd.gradcheck(kl, (policy.hidden, policy.weight, policy.bias))


def test_the_reference_is_a_constant_also_where_it_shares_a_trainable_head(small_tiles):
    policy = side(7, 23, 4, trainable=True)
    reference = replace(policy, hidden=torch.randn(7, 4).requires_grad_())  # plain() detaches the reference as well
    agree(policy, reference, rtol=1e-5, atol=1e-6, grad_rtol=1e-5)
    full_kl(policy, reference).sum().backward()
    assert reference.hidden.grad is None
    apart = side(7, 23, 4, trainable=True)
    frozen = Projection(*(x.detach() for x in (policy.hidden, policy.weight, policy.bias)))
    assert not full_kl(frozen, apart).requires_grad


@pytest.mark.parametrize("trainable", [False, True])
def test_equal_distributions_have_no_divergence_and_no_gradient(trainable):
    policy = side(16, 3001, 64, trainable=trainable, scale=0.8)  # logits up to about 25
    kl = full_kl(policy, replace(policy), 512)
    assert kl.eq(0).all()
    assert all(x.abs().max() <= 1e-6 for x in torch.autograd.grad(kl.sum(), leaves(policy)))
    # The same distribution, all its logits 17 higher: equal but for the rounding of the logits
    lifted = replace(policy, bias=policy.bias.detach() + 17.0)
    kl = full_kl(policy, lifted, 512)
    assert kl.abs().max() <= 1e-6
    assert all(x.abs().max() <= 1e-4 for x in torch.autograd.grad(kl.sum(), leaves(policy)))


@pytest.mark.parametrize("distance", [1e-3, 1e-2, 1e-1])
def test_small_divergences_are_not_lost_in_float32(distance):
    # The identity as the weight: the logits are the same numbers in both precisions
    z = 10 * torch.randn(64, 400)
    policy = Projection(z.requires_grad_(), torch.eye(400), None)
    agree(policy, near(policy, distance), 64, rtol=1e-5, atol=2e-7, grad_rtol=1e-3 * 1e-3 / distance)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("top", [0, 18])
def test_a_token_certain_on_both_sides_keeps_its_relative_precision_in_float32(small_tiles, top, trainable):
    # Logit 50 against 49 for the top token, 0 for the 18 others: p and q of another token are e^-50 and e^-49
    # nearly, far below float32's epsilon, and KL = 18 e^-50 (-1) - 18 e^-50 + 18 e^-49 = 18 e^-50 (e - 2).
    weight = torch.eye(19).requires_grad_(trainable)
    hidden, other = torch.zeros(2, 1, 19)
    hidden[0, top], other[0, top] = 50.0, 49.0
    hidden.requires_grad_()
    kl = full_kl(Projection(hidden, weight, None), Projection(other, weight, None))
    assert kl.item() == pytest.approx(18 * math.exp(-50) * (math.e - 2), rel=1e-5)
    # d - E_p[d] = -1 for the others, so that dKL/dz_j = -e^-50, and the top token has the negative of their sum
    want = torch.full((1, 19), -math.exp(-50))
    want[0, top] = 18 * math.exp(-50)
    assert relative(torch.autograd.grad(kl.sum(), hidden)[0], want) <= 1e-5


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("size", [100.0, 1e4])
def test_certain_but_contradicting_distributions_give_large_finite_values_and_gradients(small_tiles, size, trainable):
    weight = torch.linspace(-1, 1, 11).unsqueeze(1).requires_grad_(trainable)
    policy = Projection(torch.tensor([[size], [-size], [size], [0.0]]).requires_grad_(), weight, None)
    reference = Projection(torch.tensor([[-size], [size], [size], [size]]), weight, None)
    kl = full_kl(policy, reference, 4)
    # certain against certain elsewhere: 2 size; the same: 0; uniform against certain: E[d] = 0, size - log 11
    torch.testing.assert_close(kl, torch.tensor([2 * size, 2 * size, 0.0, size - math.log(11)]))
    grads = torch.autograd.grad(kl.sum(), leaves(policy))
    assert all(x.isfinite().all() for x in grads)
    # dKL/dh = Cov_p(d, w) = -size * Var(w) for the uniform row, nothing for the certain ones
    assert relative(grads[0], torch.tensor([[0.0], [0.0], [0.0], [-size * 0.4]])) <= 1e-5
    agree(policy, reference, 4, rtol=1e-5, atol=1e-6, grad_rtol=1e-5)


@pytest.mark.parametrize("trainable", [False, True])
def test_bfloat16_inputs_get_bfloat16_gradients_and_float32_values(trainable):
    policy = side(16, 501, 32, trainable=trainable, scale=0.3)
    half = Projection(
        *(x.detach().bfloat16().requires_grad_(x.requires_grad) for x in (policy.hidden, policy.weight, policy.bias)),
        scale=0.3,
    )
    reference = replace(near(half, 0.5), hidden=near(half, 0.5).hidden.bfloat16())
    assert full_kl(half, reference).dtype == torch.float32
    agree(half, reference, rtol=0.05, atol=0.05, grad_rtol=0.05)
    assert full_kl(half, replace(half)).eq(0).all()


def test_a_frozen_head_keeps_one_row_gradient_and_nothing_where_no_gradient_is_needed():
    policy, reference = side(7, 50, 4), side(7, 50, 5, trainable=True)
    assert saved_shapes(lambda: full_kl(policy, reference)) == [(7, 4)]
    frozen = replace(policy, hidden=policy.hidden.detach())
    assert saved_shapes(lambda: full_kl(frozen, reference)) == []


@pytest.mark.parametrize("trainable", [False, True])
def test_no_tensor_of_the_size_of_the_logits_is_ever_made(trainable):
    n, vocab = 64, 30_001  # 1.9 M logits; a tile has 64 x 1024 = 0.07 M entries, the weight 0.12 M
    policy = side(n, vocab, 4, trainable=trainable, softcap=30.0)
    with Largest() as ours:
        full_kl(policy, near(policy), 1024).sum().backward()
    assert 0 < ours.elements <= 4 * vocab < n * vocab / 10
    with Largest() as theirs:
        plain(policy, near(policy))
    assert theirs.elements >= n * vocab  # the counter does see logits
