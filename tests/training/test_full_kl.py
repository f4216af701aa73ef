"""The chunked full-vocabulary divergence against plain float64 arithmetic over the full logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kit.scoring import head as tiles
from kit.scoring.full_kl import Projection, full_kl


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 3 rows x 5 columns, so that small problems cross tile borders in both directions."""
    monkeypatch.setitem(tiles.TILES, "cpu", (3, 15))


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


def relative(a, b):
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()


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
@pytest.mark.parametrize(("n", "vocab", "width"), [(1, 5, 3), (7, 5, 33), (1, 1031, 33), (7, 1031, 3)])
def test_values_and_gradients_equal_plain_float64(n, vocab, width, transform, bias, trainable):
    policy = side(n, vocab, width, bias=bias, trainable=trainable, **transform)
    reference = side(n, vocab, width, bias=bias, **transform)
    agree(policy, reference, 128, rtol=1e-5, atol=1e-6, grad_rtol=1e-5)
    agree(policy, near(policy), 128, rtol=1e-5, atol=1e-6, grad_rtol=1e-4)  # the head is the same object


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_float64_inputs_stay_float64_and_exact_across_tile_borders(small_tiles, transform, trainable):
    policy = side(8, 23, 4, trainable=trainable, dtype=torch.float64, **transform)
    for reference in (side(8, 23, 4, dtype=torch.float64), near(policy), near(policy, 1e-4)):
        assert full_kl(policy, reference).dtype == torch.float64
        agree(policy, reference, rtol=1e-10, atol=1e-12, grad_rtol=1e-10)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 64, 100, 101, 5000])
def test_the_chunk_size_does_not_change_the_result(chunk_size, trainable):
    policy = side(9, 101, 5, trainable=trainable, dtype=torch.float64, softcap=6.0)
    agree(policy, near(policy, 0.5), chunk_size, rtol=1e-10, atol=1e-12, grad_rtol=1e-10)


@pytest.mark.parametrize("trainable", [False, True])
def test_the_two_sides_may_differ_in_every_setting_and_in_hidden_size(small_tiles, trainable):
    policy = side(7, 23, 4, trainable=trainable, dtype=torch.float64, temperature=0.7, softcap=8.0, scale=1.5)
    reference = side(7, 23, 6, bias=False, dtype=torch.float64, temperature=1.2, softcap=None, scale=0.3)
    agree(policy, reference, rtol=1e-10, atol=1e-12, grad_rtol=1e-10)
    agree(reference, policy, rtol=1e-10, atol=1e-12, grad_rtol=1e-10)


@pytest.mark.parametrize("shared", ["weight", "bias"])
def test_sharing_only_one_of_weight_and_bias_keeps_the_other_apart(small_tiles, shared):
    policy, other = side(7, 23, 4, dtype=torch.float64), side(7, 23, 4, dtype=torch.float64)
    reference = replace(other, **{shared: getattr(policy, shared)})
    agree(policy, reference, rtol=1e-10, atol=1e-12, grad_rtol=1e-10)
    agree(policy, replace(reference, bias=None), rtol=1e-10, atol=1e-12, grad_rtol=1e-10)


class Casts(TorchDispatchMode):
    """How many slices of five weight rows are cast."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape == (5, 4)
        return func(*args, **(kwargs or {}))


def test_a_shared_head_in_another_precision_is_cast_once_per_slice(small_tiles):
    policy = side(3, 25, 4, bias=False)  # five slices, each rounded to 16 bits, and multiplied in 32
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with Casts() as apart:
            full_kl(policy, replace(near(policy), weight=policy.weight.clone()))
        with Casts() as together:
            full_kl(policy, near(policy))
    assert (apart.count, together.count) == (20, 10)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradients_equal_finite_differences(small_tiles, trainable, softcap):
    policy = side(4, 11, 3, trainable=trainable, dtype=torch.float64, temperature=0.7, softcap=softcap, scale=1.5)
    reference = near(policy, 0.5)
    fixed = replace(reference, weight=policy.weight.detach().clone(), bias=policy.bias.detach().clone())

    def kl(hidden, weight, bias):
        return full_kl(replace(policy, hidden=hidden, weight=weight, bias=bias), fixed)

    assert torch.autograd.gradcheck(kl, (policy.hidden, policy.weight, policy.bias))


@pytest.mark.parametrize("only", ["hidden", "weight", "bias"])
def test_each_input_may_be_the_only_one_that_needs_a_gradient(small_tiles, only):
    policy = side(7, 23, 4, trainable=True)
    tensors = {
        name: getattr(policy, name).detach().requires_grad_(name == only) for name in ("hidden", "weight", "bias")
    }
    agree(Projection(**tensors), side(7, 23, 4), rtol=1e-5, atol=1e-6, grad_rtol=1e-5)


def test_frozen_and_trainable_heads_give_the_same_hidden_gradient():
    trainable = side(40, 3001, 16, trainable=True, temperature=0.7)
    frozen = replace(trainable, weight=trainable.weight.detach(), bias=trainable.bias.detach())
    reference, weights = side(40, 3001, 16), torch.randn(40)
    a, b = full_kl(trainable, reference, 256), full_kl(frozen, reference, 256)
    assert torch.equal(a, b)
    (a,), (b,) = (torch.autograd.grad((weights * x).sum(), trainable.hidden) for x in (a, b))
    assert relative(a, b) <= 1e-6


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
@pytest.mark.parametrize("top", [0, 9, 18])
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


def test_a_saturated_policy_gets_no_gradient_from_rounding():
    # p is one-hot to machine precision and q certain of another token: the gap of thousands must not leave a trace
    weight = torch.randn(301, 8)
    policy = Projection((1e3 * torch.randn(16, 8)).requires_grad_(), weight, None)
    reference = Projection(1e3 * torch.randn(16, 8), weight, None)
    kl, twin = full_kl(policy, reference, 32), exact(policy)
    want = plain(twin, exact(reference))
    assert want.max() > 1e3
    torch.testing.assert_close(kl.double(), want, rtol=1e-5, atol=1e-6)
    got, expected = torch.autograd.grad(kl.sum(), policy.hidden)[0], torch.autograd.grad(want.sum(), twin.hidden)[0]
    assert expected.abs().max() < 1e-15  # of two vanishing gradients the size counts, not the digits
    assert got.abs().max() < 1e-15


@pytest.mark.parametrize("trainable", [False, True])
def test_no_positions_give_an_empty_differentiable_tensor(trainable):
    policy = side(0, 23, 4, trainable=trainable)
    kl = full_kl(policy, side(0, 23, 4))
    assert kl.shape == (0,)
    kl.sum().backward()
    assert policy.hidden.grad.shape == (0, 4)
    if trainable:
        assert policy.weight.grad.eq(0).all()
        assert policy.bias.grad.eq(0).all()


@pytest.mark.parametrize("trainable", [False, True])
def test_bfloat16_autocast_is_close_and_keeps_float32_statistics(trainable):
    policy, reference = side(16, 501, 32, trainable=trainable, scale=0.3), side(16, 501, 32, scale=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kl = full_kl(policy, reference, 100)
    assert kl.dtype == torch.float32
    want = plain(policy, reference)
    torch.testing.assert_close(kl, want, rtol=0.02, atol=0.02)
    got, expected = (torch.autograd.grad(x.sum(), leaves(policy)) for x in (kl, want))
    for a, b, leaf in zip(got, expected, leaves(policy), strict=True):
        assert a.dtype == leaf.dtype
        assert relative(a, b) <= 0.05


def test_autocast_leaves_float64_alone():
    policy = side(7, 23, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(policy, near(policy), rtol=1e-10, atol=1e-12, grad_rtol=1e-10)


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


@pytest.mark.parametrize("trainable", [False, True])
def test_the_sides_may_differ_in_precision_also_under_one_head(small_tiles, trainable):
    policy = side(7, 23, 4, trainable=trainable)
    half, double = (replace(policy, hidden=near(policy, 0.5).hidden.to(x)) for x in (torch.bfloat16, torch.float64))
    assert full_kl(policy, half).dtype == full_kl(half, policy).dtype == torch.float32
    agree(policy, half, rtol=0.05, atol=0.05, grad_rtol=0.05)
    assert full_kl(policy, double).dtype == full_kl(double, policy).dtype == torch.float64
    agree(policy, double, rtol=1e-5, atol=1e-6, grad_rtol=1e-5)


def test_a_spread_policy_against_a_certain_reference_keeps_its_normalisers_apart():
    # sum e^(z - best) is about 2e5 and the reference's is 1: their difference alone has lost the smaller one's digits
    vocab = 400_001
    weight = torch.randn(vocab, 1)
    weight[7] = 10.0
    policy, reference = (
        Projection(torch.tensor([[0.05]]), weight, None),
        Projection(torch.tensor([[9.0]]), weight, None),
    )
    want = plain(exact(policy), exact(reference))
    torch.testing.assert_close(full_kl(policy, reference).double(), want, rtol=1e-6, atol=0)


def test_sampled_estimators_average_to_the_divergence():
    count = 200_000
    policy = side(3, 301, 8, dtype=torch.float64, scale=0.5)
    reference = near(policy, 0.3)
    kl = full_kl(policy, reference).detach()
    ours, theirs = log_probs(policy).detach(), log_probs(reference)
    tokens = torch.multinomial(ours.exp(), count, replacement=True)
    ratio = (theirs - ours).gather(1, tokens)  # log q/p
    for estimate in (-ratio, ratio.exp() - 1 - ratio):
        error = estimate.std(1) / math.sqrt(count)
        assert ((estimate.mean(1) - kl).abs() <= 4 * error).all()
        assert (error < 0.02 * kl).all()  # tight enough to mean something


def saved_shapes(function):
    """Shapes of what the graph of `function()` keeps for its backward."""
    shapes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        function()
    return shapes


def test_a_frozen_head_keeps_one_row_gradient_and_nothing_where_no_gradient_is_needed():
    policy, reference = side(7, 50, 4), side(7, 50, 5, trainable=True)
    assert saved_shapes(lambda: full_kl(policy, reference)) == [(7, 4)]
    frozen = replace(policy, hidden=policy.hidden.detach())
    assert saved_shapes(lambda: full_kl(frozen, reference)) == []


class Largest(TorchDispatchMode):
    """Element count of the largest tensor that any operation returns, and how many products are accumulated."""

    elements = 0
    products = 0  # accumulating matrix products, i.e. row or weight gradients

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        self.products += func is torch.ops.aten.addmm_.default
        return result


@pytest.mark.parametrize("trainable", [False, True])
def test_row_gradients_are_neither_computed_nor_kept_under_no_grad(trainable):
    policy, reference = side(7, 50, 4, trainable=trainable), side(7, 50, 4)
    with Largest() as counted:
        full_kl(policy, reference)
    assert counted.products == (0 if trainable else 2)
    with Largest() as counted, torch.no_grad():
        assert saved_shapes(lambda: full_kl(policy, reference)) == []
        assert not full_kl(policy, reference).requires_grad
    assert counted.products == 0


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
