"""The chunked log-probability head against plain float64 arithmetic, and under TRL's fused head."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from kit.scoring import head as tiles
from kit.scoring.head import (
    ChunkedLogProb,
    LogProbDispatcher,
    install_torch_logprob_kernel,
    request_outputs,
)

from .heads import Largest, relative, saved_shapes

pytestmark = pytest.mark.usefixtures("seeded")


def token_logps_and_entropy(hidden, weight, targets, bias=None, *, entropy=True, entropy_gradient=True):
    outputs = ("entropy",) if entropy else ()
    return ChunkedLogProb.apply(hidden, weight, bias, targets, 1.0, 8192, None, 1.0, outputs, entropy_gradient)


def plain(hidden, weight, bias, targets, temperature=1.0, softcap=None, scale=1.0):
    """Log-probabilities and entropies from the complete (N, V) logits."""
    z = hidden @ weight.t()
    z = (z if bias is None else z + bias) * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    logp = z.log_softmax(-1)
    p = logp.exp()
    chosen = logp.gather(1, targets.unsqueeze(1)).squeeze(1)
    return chosen, -(p * logp).sum(-1)


def problem(n, vocab, width, *, bias, trainable, dtype=torch.float32):
    hidden = torch.randn(n, width, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, dtype=dtype).requires_grad_(trainable)
    offset = torch.randn(vocab, dtype=dtype).requires_grad_(trainable) if bias else None
    return hidden, weight, offset, torch.randint(vocab, (n,))


def gradients(outputs, coefficients, leaves):
    loss = sum((c * x).sum() for c, x in zip(coefficients, outputs, strict=True) if c is not None)
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    ("temperature", "softcap", "scale", "bias"),
    [(1.0, None, 1.0, False), (0.7, None, 1.0, True), (1.3, 5.0, 0.5, True), (0.7, 30.0, 2.0, False)],
)
@pytest.mark.parametrize(("n", "vocab", "width"), [(1, 5, 3), (7, 1031, 33)])
def test_values_and_gradients_equal_plain_float64(n, vocab, width, temperature, softcap, scale, bias, trainable):
    hidden, weight, offset, targets = problem(n, vocab, width, bias=bias, trainable=trainable)
    exact = [
        None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in (hidden, weight, offset)
    ]
    actual = ChunkedLogProb.apply(hidden, weight, offset, targets, temperature, 128, softcap, scale)
    want = plain(*exact, targets, temperature, softcap, scale)
    for a, b in zip(actual, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)

    leaves = [x for x in (hidden, weight, offset) if x is not None and x.requires_grad]
    exact_leaves = [x for x in exact if x is not None and x.requires_grad]
    u, v = torch.randn(n), torch.randn(n)
    for pair in ((u, v), (u, None), (None, v)):
        got = gradients(
            ChunkedLogProb.apply(hidden, weight, offset, targets, temperature, 128, softcap, scale)[:2], pair, leaves
        )
        ref = gradients(plain(*exact, targets, temperature, softcap, scale)[:2], pair, exact_leaves)
        assert max(relative(a, b) for a, b in zip(got, ref, strict=True)) <= 1e-5


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradcheck_across_tile_borders(small_tiles, trainable, softcap):
    hidden, weight, bias, targets = problem(4, 11, 3, bias=True, trainable=trainable, dtype=torch.float64)

    def both(hidden, weight, bias):
        return ChunkedLogProb.apply(hidden, weight, bias, targets, 0.7, 1000, softcap, 1.5)[:2]

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("target", [0, 18])
def test_certain_tokens_keep_their_relative_precision_in_float32(small_tiles, trainable, target):
    # Target logit 50, the 18 others 0: logp = -log1p(18 e^-50), 1 - p = 18 e^-50 / (1 + 18 e^-50) = 3.5e-21,
    # far below float32's epsilon, and d logp/d bias_target = 1 - p, d logp/d bias_j = -e^-50.
    vocab = 19
    bias = torch.zeros(vocab)
    bias[target] = 50.0
    weight = torch.eye(vocab).requires_grad_(trainable)
    hidden = torch.zeros(1, vocab).requires_grad_()
    logp, entropy, *_ = ChunkedLogProb.apply(hidden, weight, bias, torch.tensor([target]), 1.0, 5)
    rest = 18 * math.exp(-50)
    assert logp.item() == pytest.approx(-math.log1p(rest), rel=1e-5)
    assert entropy.item() == pytest.approx(rest * 51, rel=1e-5)  # -(1-p) log(1-p) + ... = 18 e^-50 (50 + 1)
    (grad,) = torch.autograd.grad(logp.sum(), hidden, retain_graph=True)
    want = torch.full((1, vocab), -math.exp(-50))
    want[0, target] = rest
    assert relative(grad, want) <= 1e-5
    (grad,) = torch.autograd.grad(entropy.sum(), hidden)
    # dH/dz_j = -p_j (log p_j + H) = 50 e^-50 for the others; they sum to 0 with the target's
    want = torch.full((1, vocab), 50 * math.exp(-50))
    want[0, target] = -50 * rest
    assert relative(grad, want) <= 1e-5


@pytest.mark.parametrize("target", [-100, 23])
def test_targets_outside_the_vocabulary_are_refused(target):
    with pytest.raises(IndexError, match=r"targets must lie in \[0, 23\)"):
        token_logps_and_entropy(torch.randn(1, 4), torch.randn(23, 4), torch.tensor([target]))


def test_a_frozen_head_keeps_one_row_gradient_per_differentiable_output():
    hidden, weight, _, targets = problem(7, 50, 4, bias=False, trainable=False)
    assert saved_shapes(lambda: token_logps_and_entropy(hidden, weight, targets)) == [(7, 4), (7, 4)]
    assert saved_shapes(lambda: token_logps_and_entropy(hidden, weight, targets, entropy=False)) == [(7, 4)]
    constant = {"entropy_gradient": False}
    assert saved_shapes(lambda: token_logps_and_entropy(hidden, weight, targets, **constant)) == [(7, 4)]


def test_a_pass_asks_the_head_for_what_it_needs_and_is_shown_what_it_was_given():
    hidden, weight, _, targets = problem(7, 50, 4, bias=False, trainable=False)
    apply = LogProbDispatcher(None).apply
    arguments = (hidden, weight, None, targets, 0.5, 16)
    assert apply(*arguments)[1].requires_grad
    requires_grad = []
    with request_outputs(entropy_gradient=False, keep=True) as outer:
        logps, entropy, *_ = apply(*arguments)
        assert logps.requires_grad
        assert not entropy.requires_grad
        thread = threading.Thread(target=lambda: requires_grad.append(apply(*arguments)[1].requires_grad))
        thread.start()
        thread.join()
        with request_outputs() as inner:  # a nested request does not change the outer one
            assert apply(*arguments)[1].requires_grad
    assert requires_grad == [True]
    assert inner.projection is None
    assert outer.projection.hidden is hidden
    assert (outer.projection.weight is weight, outer.projection.temperature) == (True, 0.5)
    with pytest.raises(IndexError), request_outputs(entropy_gradient=False):
        apply(hidden, weight, None, targets + 50, 1.0, 16)
    assert apply(*arguments)[1].requires_grad


@pytest.mark.parametrize("trainable", [False, True])
def test_no_tensor_of_the_size_of_the_logits_is_ever_made(trainable):
    n, vocab = 64, 151_936  # 64 x 151936 = 9.7 M logits; a tile has 2.1 M entries at most, the weight 0.6 M
    hidden, weight, _, targets = problem(n, vocab, 4, bias=False, trainable=trainable)
    with Largest() as chunked:
        logps, entropy = token_logps_and_entropy(hidden, weight, targets)
        (logps.sum() + entropy.sum()).backward()
    assert 0 < chunked.elements <= tiles.TILES["cpu"][1] < n * vocab
    with Largest() as unchunked:
        plain(hidden[:2], weight, None, targets[:2])
    assert unchunked.elements >= 2 * vocab  # the counter does count logits


def tiny_qwen3(**changes):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=301,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
        **changes,
    )
    return transformers.Qwen3ForCausalLM(config).float().train()


@pytest.mark.parametrize("frozen_head", [False, True])
def test_trl_fused_head_on_qwen3_equals_plain_logits(utils, frozen_head):
    model = tiny_qwen3()
    model.lm_head.weight.requires_grad_(not frozen_head)
    ids = torch.randint(301, (3, 11))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[0, 8:] = -100
    mask = labels[:, 1:] != -100
    weights = torch.randn(3, 10) * mask
    parameters = [p for p in model.parameters() if p.requires_grad]

    want, want_entropy, *_ = plain(
        model(ids).logits[:, :-1].flatten(0, 1) / 0.7, torch.eye(301), None, ids[:, 1:].flatten()
    )
    want, want_entropy = want.view(3, 10), want_entropy.view(3, 10)
    reference = torch.autograd.grad((weights * (want - 0.1 * want_entropy)).sum(), parameters)

    utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    install_torch_logprob_kernel()
    out = model(ids, labels=labels, fused_lm_head=True)
    got = torch.autograd.grad((weights * (out.log_probs - 0.1 * out.entropy)).sum(), parameters)
    empty = model(ids, labels=torch.full_like(ids, -100), fused_lm_head=True).log_probs
    assert empty.eq(0).all()
    assert empty.requires_grad
    empty.sum().backward()
    assert (out.log_probs - want * mask).abs().max() <= 2e-6
    assert (out.entropy - want_entropy * mask).abs().max() <= 2e-6
    assert max(relative(a, b) for a, b in zip(got, reference, strict=True)) <= 1e-5


@pytest.fixture
def utils(monkeypatch):
    """`trl.trainer.utils` without the changes of other tests; they are restored afterwards."""
    module = pytest.importorskip("trl.trainer.utils")
    current = module._ChunkedLogProbFunction
    monkeypatch.setattr(module, "_ChunkedLogProbFunction", getattr(current, "gpu_kernel", current))
    return module


def test_stock_trl_head_fails_on_a_cpu_and_the_installed_one_works(utils):
    arguments = (torch.randn(2, 4), torch.randn(9, 4), None, torch.tensor([1, 2]), 1.0, 8, None, 1.0, ("entropy",))
    stock = utils._ChunkedLogProbFunction
    with pytest.raises((RuntimeError, AttributeError)):  # no GPU driver, or no Triton
        stock.apply(*arguments)
    install_torch_logprob_kernel()
    assert utils._ChunkedLogProbFunction.gpu_kernel is stock
    assert torch.equal(utils._ChunkedLogProbFunction.apply(*arguments)[0], ChunkedLogProb.apply(*arguments)[0])


def test_outputs_of_other_trainers_are_left_to_the_library():
    head = LogProbDispatcher(SimpleNamespace(apply=lambda *_: "the library's"))
    arguments = problem(7, 50, 4, bias=True, trainable=False)
    assert head.apply(*arguments, 1.0, 16, None, 1.0, ("log_probs", "entropy", "is_top1")) == "the library's"


def products(**changes):
    """Count the matrix products of a forward and backward pass over a single tile."""
    hidden, weight, _, targets = problem(7, 50, 4, bias=False, trainable=changes.pop("trainable", False))
    with Largest() as counted:
        logps, entropy = token_logps_and_entropy(hidden, weight, targets, **changes)
        (logps.sum() + (entropy.sum() if entropy.requires_grad else 0.0)).backward()
    return counted.products


def test_a_frozen_head_takes_two_products_a_tile():
    assert products(entropy_gradient=False) == 2  # logits, and the row gradients
    assert products() == 3  # the logits, and the row gradients of logp and entropy
    assert products(trainable=True) == 4  # the logits twice (again in the backward pass), and two gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trainable", [False, True])
def test_sixteen_bit_inputs_are_summed_in_32(dtype, trainable):
    # Logits of size 20: rounded to bfloat16 they would be off by up to 0.06.
    hidden, weight, bias, targets = problem(16, 3001, 128, bias=True, trainable=trainable)
    inputs = [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in (hidden, weight, bias)]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    actual, want = ChunkedLogProb.apply(*inputs, targets, 0.7, 512), plain(*exact, targets, 0.7)
    for a, b in zip(actual, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)
    u, v = torch.randn(16), torch.randn(16)
    got = gradients(actual[:2], (u, v), [x for x in inputs if x.requires_grad])
    ref = gradients(want[:2], (u, v), [x for x in exact if x.requires_grad])
    for a, b in zip(got, ref, strict=True):
        assert a.dtype == dtype
        assert relative(a, b) <= 2 * torch.finfo(dtype).eps  # of the result, and of the stored row gradient
