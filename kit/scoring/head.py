"""Log-probabilities and entropies of chosen tokens, straight from hidden states, without the (N, V) logits.

One head for every device. Matrix products are torch's, of tiles as large as the device likes (`TILES`); 16-bit inputs are
summed in float32. What is between them, the softmax of a tile, is an operator for each device. Rows are taken in blocks, the
vocabulary in columns, with running statistics as in online softmax. Two ways to the gradient:

- frozen head (LoRA on the backbone): two products a tile. The forward pass folds tiles into the row gradients
  d logp/d hidden (N, H), so that the backward pass only scales rows. d entropy/d hidden (N, H), if asked for, is a third.
- trainable head: one product a tile in the forward pass. The backward pass recomputes each tile, and takes one product
  for the gradient of the hidden states and one for that of the weight, each slice of which is written once.

Every running sum leaves the target out and lets it join at the end: 1 - p(target) is then a sum of small positive
terms instead of a cancelling difference, and stays exact when p(target) is 1 to machine precision.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kit.errors import EnvironmentUnsupported
from kit.models.libraries import TESTED_TRL

log = logging.getLogger("kit")
OUTPUTS = frozenset({"log_probs", "entropy"})
"""Outputs of TRL's head that this head computes: those of GRPO."""
DEFAULT_CHUNK = 8192


# --- tiles of the (N, V) logits: the projection, the transform, and the walk over rows and vocabulary ----------------

TILES = {"cpu": (1024, 1 << 21)}
"""Rows of a tile, and entries: small enough for the caches of a CPU (8 MiB of float32 a buffer)."""
GPU_TILES = (2048, 1 << 24)
"""2,048 rows and 8,192 columns keep a matrix product of a GPU busy; 64 MiB of float32, and 32 MiB in 16 bits."""


@dataclass(frozen=True)
class Head:
    """The projection and the logit transform: z = softcap(scale * (h @ w.T + b)) / temperature."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V)
    temperature: float
    softcap: float | None
    scale: float
    compute_dtype: torch.dtype  # that hidden states and weights are rounded to
    stat_dtype: torch.dtype  # of everything after that

    @property
    def product_dtype(self) -> torch.dtype:
        """Of the operands of matrix products: only CUDA's sum 16-bit numbers into 32 bits."""
        sums = self.weight.device.type == "cuda" and self.compute_dtype.itemsize == 2
        return self.compute_dtype if sums else self.stat_dtype

    @property
    def slope(self) -> float:
        """dz / d(projection), up to the softcap's own slope."""
        return self.scale / self.temperature

    @property
    def transform(self) -> tuple[float, float | None, float]:
        return self.temperature, self.softcap, self.scale

    def operand(self, values: Tensor) -> Tensor:
        """Hidden states or weights as they go into a product."""
        return values.to(self.compute_dtype).to(self.product_dtype)

    def columns(self, cols: slice) -> tuple[Tensor, Tensor | None]:
        """The weight (k, H) and the bias (k) of these entries of the vocabulary."""
        bias = None if self.bias is None else self.bias[cols].to(self.compute_dtype).to(self.stat_dtype)
        return self.operand(self.weight[cols]), bias

    def rows_of(self, targets: Tensor) -> Tensor:
        """(N) -> (N, H), rounded like the columns are."""
        return self.weight[targets].to(self.compute_dtype).to(self.stat_dtype)


class Tiles:
    """Walk over the (N, V) logits of the (N, H) hidden states, and the buffers of one tile."""

    def __init__(self, head: Head, hidden: Tensor, chunk_size: int) -> None:
        rows, elements = TILES.get(hidden.device.type, GPU_TILES)
        self.head, self.hidden = head, head.operand(hidden)
        self.n, self.vocab = hidden.shape[0], head.weight.shape[0]
        self.rows = max(1, min(self.n, rows))
        self.width = max(1, min(self.vocab, chunk_size, elements // self.rows))
        self._buffers: dict[str, Tensor] = {}

    def column_slices(self) -> Iterator[slice]:
        return (slice(start, min(start + self.width, self.vocab)) for start in range(0, self.vocab, self.width))

    def row_slices(self) -> Iterator[slice]:
        return (slice(start, min(start + self.rows, self.n)) for start in range(0, self.n, self.rows))

    def buffer(self, name: str, rows: slice, cols: slice, dtype: torch.dtype | None = None) -> Tensor:
        """(n, k) without values, the same memory for every tile."""
        if name not in self._buffers:
            self._buffers[name] = self.hidden.new_empty(self.rows * self.width, dtype=dtype or self.head.product_dtype)
        shape = (rows.stop - rows.start, cols.stop - cols.start)
        return self._buffers[name][: shape[0] * shape[1]].view(shape)

    def projected(self, rows: slice, cols: slice, weight: Tensor) -> Tensor:
        """h @ w.T (n, k) of this tile, before the bias and the transform."""
        out = self.buffer("logits", rows, cols, self.head.stat_dtype)
        hidden = self.hidden[rows]
        if hidden.dtype == out.dtype:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in the precision of `total`."""
    a, b = a.to(b.dtype), b
    if b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@dataclass(frozen=True)
class Projection:
    """A language-model head and the hidden states that go through it.

    z = softcap(scale * (hidden @ weight.T + bias)) / temperature, with softcap(a) = softcap * tanh(a / softcap).
    """

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V)
    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    @property
    def transform(self) -> tuple[float, float | None, float]:
        return self.temperature, self.softcap, self.scale

    def bare(self) -> Projection:
        """The head alone, with hidden states of no token."""
        return replace(self, hidden=self.hidden.new_empty(0, self.hidden.shape[-1]))


# --- the softmax of a tile: two operators, each in two forms ----------------------------------------------------------

# `fold_tile` takes a tile into the running statistics of its rows, `grad_tile` makes it the gradient of a loss. A CPU runs
# the forms below, in torch's operators; CUDA runs Triton kernels (`kit.scoring.head_kernels`), and these forms where Triton
# cannot. None of them waits for the device.

BEST, OTHERS, SHIFTED, Z_TARGET, SLOPE_TARGET, RISE = range(6)
"""Rows of the running statistics (6, n) of n tokens.

With m = max z so far: m; sums of e^(z - m) and e^(z - m) (z - m) without the target; z of the target and the softcap's slope
there; and by how much m rose with the last tile (0 or less).
"""


def _transform(
    z: Tensor, bias: Tensor | None, temperature: float, softcap: float | None, scale: float
) -> Tensor | None:
    """Makes logits of a projection (n, k), in place; returns the softcap's slope 1 - tanh^2, where there is one."""
    if bias is not None:
        z.add_(bias)
    if softcap is None:
        if scale != temperature:
            z.mul_(scale / temperature)
        return None
    z.mul_(scale / softcap).tanh_()
    slope = torch.mul(z, z).neg_().add_(1.0)
    z.mul_(softcap / temperature)
    return slope


def fold_in_torch(
    z: Tensor,
    stats: Tensor,
    e: Tensor,
    weighted: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    start: int,
    temperature: float,
    softcap: float | None,
    scale: float,
    entropy: bool,
) -> None:
    """Folds a tile into the statistics of its rows, and leaves what the products of the row gradients need.

    z (n, k): the projection of the columns from `start` on, in the statistics' type; overwritten. e (n, k), of any type:
    becomes e^(z - m) times the softcap's slope. weighted (n, k), if given, and else z where `entropy` is asked for: that
    times z - m. Both are 0 at the target. targets (n): of the whole vocabulary.
    """
    best, others, shifted, z_target, slope_target, rise = stats.unsqueeze(2).unbind()  # (n, 1)
    slope = _transform(z, bias, temperature, softcap, scale)
    inside, local = _hits(targets, start, z.shape[1])
    z_target.copy_(torch.where(inside, z.gather(1, local), z_target))
    if slope is not None:
        slope_target.copy_(torch.where(inside, slope.gather(1, local), slope_target))
    # The sums move to the larger of the old and the new maximum m': e^(z-m') = e^(z-m) e^(m-m').
    new = torch.maximum(best, z.amax(1, keepdim=True))
    torch.sub(best, new, out=rise)  # <= 0
    factor = rise.exp()
    best.copy_(new)
    shifted.addcmul_(others, rise).mul_(factor)  # sum of e (x + rise) = sum of e x + rise * sum of e
    others.mul_(factor)

    x = z.sub_(best)
    same = e.dtype == z.dtype
    exact = torch.exp(x, out=e) if same else x.exp()
    exact.scatter_(1, local, exact.gather(1, local).masked_fill_(inside, 0.0))
    others += exact.sum(1, keepdim=True)
    if entropy:
        x.mul_(exact)
        shifted += x.sum(1, keepdim=True)
        if slope is not None:
            x.mul_(slope)
    if slope is not None:
        exact.mul_(slope)
    if not same:
        e.copy_(exact)
    if weighted is not None:
        weighted.copy_(x)


def grad_in_torch(
    z: Tensor,
    grad: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    start: int,
    temperature: float,
    softcap: float | None,
    scale: float,
    entropy: bool,
) -> None:
    """d loss / d projection of a tile.

    z (n, k): the projection; overwritten. grad (n, k), of any type: the result. rows (6, n): max z, sum of e^(z - max),
    E[z - max], 1 - p(target), and the gradients of log-probability and entropy.
    """
    best, sum_exp, mean_shifted, miss, on_logp, on_entropy = rows.unsqueeze(2).unbind()  # (n, 1)
    slope = _transform(z, bias, temperature, softcap, scale)
    inside, local = _hits(targets, start, z.shape[1])
    x = z.sub_(best)
    same = grad.dtype == z.dtype
    exact = torch.exp(x, out=grad) if same else x.exp()
    exact.mul_(-(scale / temperature) / sum_exp)  # -p, scaled
    # d loss/dz_j = on_logp (1[j = target] - p_j) - on_entropy p_j (x_j - E[x])
    at_target = (scale / temperature) * (on_logp * miss)
    if entropy:
        x.sub_(mean_shifted).mul_(on_entropy)
        at_target = at_target + exact.gather(1, local) * x.gather(1, local)
        exact.mul_(x.add_(on_logp))
    else:
        exact.mul_(on_logp)
    exact.scatter_(1, local, torch.where(inside, at_target, exact.gather(1, local)))
    if slope is not None:
        exact.mul_(slope)
    if not same:
        grad.copy_(exact)


def _hits(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """(n, 1) whether a row's target lies in these columns, and its index inside them; any index where it does not."""
    local = targets.unsqueeze(1) - start
    return (local >= 0) & (local < width), local.clamp(0, width - 1)


# An operator chooses its form by the device, and counts as one where operators are counted.
fold_tile = torch.library.custom_op(
    "grpo_kit::fold_tile", fold_in_torch, mutates_args=("z", "stats", "e", "weighted"), device_types="cpu"
)
grad_tile = torch.library.custom_op(
    "grpo_kit::grad_tile", grad_in_torch, mutates_args=("z", "grad"), device_types="cpu"
)

_without_triton: str | None = None


def _with_triton(name: str, otherwise: Callable[..., None], *args: Any) -> None:
    """One of the kernels of `head_kernels`, or torch's form where Triton is not there or cannot build it; logged once."""
    global _without_triton
    if _without_triton is None:
        try:
            from kit.scoring import head_kernels

            getattr(head_kernels, name)(*args)
            return
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # before its launch: nothing has been written yet
            _without_triton = f"{type(error).__name__}: {error}".partition("\n")[0]
            log.warning("the head's softmax runs without Triton, more slowly: %s", _without_triton)
    otherwise(*args)


fold_tile.register_kernel("cuda", functools.partial(_with_triton, "fold", fold_in_torch))
grad_tile.register_kernel("cuda", functools.partial(_with_triton, "grad", grad_in_torch))


# --- statistics of every row, and its gradient -------------------------------------------------------------------------


class _Scan:
    """Statistics of every row, block by block, and the row gradients when they are to be stored."""

    def __init__(self, tiles: Tiles, targets: Tensor, wants_entropy: bool, logp: bool, entropy: bool) -> None:
        self.tiles, self.targets = tiles, targets
        n, stat = tiles.n, tiles.head.stat_dtype
        empty = functools.partial(tiles.hidden.new_empty, (n,), dtype=stat)
        self.logps, self.best, self.sum_exp, self.mean_shifted = empty(), empty(), empty(), empty()
        self.entropies = empty() if wants_entropy else None
        # bfloat16 has float32's range; in float16 what is small would be lost before the loss's scale reaches it.
        kept = torch.bfloat16 if tiles.hidden.dtype == torch.bfloat16 else stat
        shape = (n, tiles.hidden.shape[1])
        self.logp_rows = tiles.hidden.new_empty(shape, dtype=kept) if logp else None
        self.entropy_rows = tiles.hidden.new_empty(shape, dtype=kept) if entropy else None

    def block(self, rows: slice) -> None:
        """Statistics and row gradients of these rows."""
        tiles, head = self.tiles, self.tiles.head
        targets = self.targets[rows]
        stats = tiles.hidden.new_zeros((6, len(targets)), dtype=head.stat_dtype)
        stats[BEST] = torch.finfo(head.stat_dtype).min  # finite, so that 0 * rescale is 0
        stats[SLOPE_TARGET] = 1.0
        sums = [self._sums(kept, rows) for kept in (self.logp_rows, self.entropy_rows)]
        wide = sums[1] is not None and head.product_dtype != head.stat_dtype
        for cols in tiles.column_slices():
            weight, bias = head.columns(cols)
            z, e = tiles.projected(rows, cols, weight), tiles.buffer("e", rows, cols)
            weighted = tiles.buffer("weighted", rows, cols) if wide else None
            fold_tile(z, stats, e, weighted, bias, targets, cols.start, *head.transform, self.entropies is not None)
            if sums[0] is not None:
                rise = stats[RISE].unsqueeze(1)
                if sums[1] is not None:
                    sums[1].addcmul_(sums[0], rise).mul_(rise.exp())
                    add_product(sums[1], z if weighted is None else weighted, weight)
                sums[0].mul_(rise.exp())
                add_product(sums[0], e, weight)
        self._finish(rows, stats.unsqueeze(2), sums)

    def _sums(self, kept: Tensor | None, rows: slice) -> Tensor | None:
        """(n, H) zeros to sum a row gradient in: where it is kept, or beside it."""
        if kept is None:
            return None
        stat = self.tiles.head.stat_dtype
        return kept[rows].zero_() if kept.dtype == stat else kept.new_zeros(kept[rows].shape, dtype=stat)

    def _finish(self, rows: slice, stats: Tensor, sums: list[Tensor | None]) -> None:
        """Lets the target join the sums (6, n, 1), and writes this block's outputs."""
        others = stats[OTHERS]
        x_target = stats[Z_TARGET] - stats[BEST]  # <= 0
        e_target = x_target.exp()
        sum_exp = others + e_target
        log_sum = torch.where(x_target >= 0, torch.log1p(others), torch.log(sum_exp))
        mean_shifted = (stats[SHIFTED] + e_target * x_target) / sum_exp  # E[z - best]
        self.best[rows], self.sum_exp[rows] = stats[BEST].squeeze(1), sum_exp.squeeze(1)
        self.mean_shifted[rows], self.logps[rows] = mean_shifted.squeeze(1), (x_target - log_sum).squeeze(1)
        if self.entropies is not None:
            self.entropies[rows] = (log_sum - mean_shifted).squeeze(1)

        logp_rows, entropy_rows = sums
        if logp_rows is None or self.logp_rows is None:
            return
        head = self.tiles.head
        scale, slope = head.slope / sum_exp, stats[SLOPE_TARGET]
        w_target = head.rows_of(self.targets[rows])  # (n, H)
        if entropy_rows is not None and self.entropy_rows is not None:
            # dH/dz_j = -p_j (log p_j + H) = -p_j (x_j - E[x]), as x = z - best is log p plus a constant
            entropy_rows.addcmul_(logp_rows, mean_shifted, value=-1.0)
            entropy_rows.addcmul_((x_target - mean_shifted) * e_target * slope, w_target)
            _keep(entropy_rows.mul_(-scale), self.entropy_rows[rows])
        # dlogp/dz_target = 1 - p_target = others / sum, dlogp/dz_j = -p_j
        _keep(logp_rows.neg_().addcmul_(others * slope, w_target).mul_(scale), self.logp_rows[rows])


def _keep(summed: Tensor, kept: Tensor) -> None:
    if summed.dtype != kept.dtype:  # else it was summed in place
        kept.copy_(summed)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """The projection's: autocast's where it is on, which leaves float64 alone, else that of the hidden states."""
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return hidden.dtype
    return torch.get_autocast_dtype(device)


class ChunkedLogProb(torch.autograd.Function):
    """Log-probability of each target and entropy of softmax(z) for each row of hidden states.

    z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature.

    Takes the place of TRL's Triton function on any device, with the same call:
    `apply(hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)`, and
    one argument more.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V) or None.
        targets: (N), token ids in [0, V).
        temperature: divides the logits, last.
        chunk_size: upper limit of a tile's width in vocabulary entries.
        final_logit_softcapping: cap * tanh(z / cap), or None.
        logit_scale: multiplies the projection, first.
        outputs: whether to compute the entropy: with `entropy` among them, as TRL names its outputs.
        entropy_gradient: whether the entropy is differentiable. With a frozen head that costs one more matrix product per
            tile and one more (N, H) buffer, and the forward cannot see whether a loss will use it.

    Returns:
        logps and entropy (or None), each (N) in nats: float32, or float64 for float64 inputs. Differentiable once, with
        respect to hidden, weight and bias.

    Raises:
        IndexError: a target lies outside the vocabulary.
    """

    @classmethod
    def apply(cls, hidden: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
        # Inside `forward` the grad mode is always off and `needs_input_grad` ignores it: without this, row gradients
        # would be stored under `no_grad` too.
        source = hidden if torch.is_grad_enabled() else hidden.detach()
        result: tuple[Tensor, Tensor | None] = super().apply(source, *args)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy",),
        entropy_gradient: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        vocab = weight.shape[0]
        # On another device to ask would be to wait; there its own check of indices ends the process.
        if (
            targets.device.type == "cpu"
            and targets.numel()
            and not 0 <= int(targets.min()) <= int(targets.max()) < vocab
        ):
            raise IndexError(f"targets must lie in [0, {vocab}), saw {targets.min()} to {targets.max()}")
        compute = compute_dtype(hidden)
        stat = torch.float64 if compute == torch.float64 else torch.float32
        ctx.head_args = (temperature, final_logit_softcapping, logit_scale, compute, stat)

        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        store = needs_hidden and not (needs_weight or needs_bias)
        keep_entropy = "entropy" in outputs and entropy_gradient
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = Tiles(Head(weight, bias, *ctx.head_args), hidden, chunk_size)
            scan = _Scan(tiles, targets, "entropy" in outputs, store, store and keep_entropy)
            for rows in tiles.row_slices():
                scan.block(rows)

        ctx.hidden_dtype, ctx.stored, ctx.chunk_size = hidden.dtype, store, chunk_size
        if store:
            ctx.save_for_backward(scan.logp_rows, scan.entropy_rows)
        elif needs_weight or needs_bias:
            ctx.save_for_backward(hidden, weight, bias, targets, scan.logps, scan.best, scan.sum_exp, scan.mean_shifted)
        if scan.entropies is not None and not keep_entropy:
            ctx.mark_non_differentiable(scan.entropies)
        return scan.logps, scan.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        if grad_logps is None and grad_entropy is None:
            return (None,) * 10
        if not ctx.stored:
            return (*_recompute_gradients(ctx, grad_logps, grad_entropy), *(None,) * 7)
        grad_hidden = None
        for grad, rows in zip((grad_logps, grad_entropy), ctx.saved_tensors, strict=True):
            if grad is not None:
                part = grad.unsqueeze(1) * rows  # (N, 1) * (N, H)
                grad_hidden = part if grad_hidden is None else grad_hidden.add_(part)
        assert grad_hidden is not None
        return (grad_hidden.to(ctx.hidden_dtype), *(None,) * 9)


def _recompute_gradients(
    ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, one tile of d loss/d projection at a time, summed in `stat_dtype`."""
    hidden, weight, bias, targets, logps, best, sum_exp, mean_shifted = ctx.saved_tensors
    head, needed = Head(weight, bias, *ctx.head_args), ctx.needs_input_grad[:3]
    stat = head.stat_dtype
    nothing = torch.zeros_like(best)
    miss = -torch.expm1(logps)  # 1 - p_target
    incoming = [nothing if grad is None else grad.to(stat) for grad in (grad_logps, grad_entropy)]
    of_rows = torch.stack([best, sum_exp, mean_shifted, miss, *incoming])

    with torch.autocast(hidden.device.type, enabled=False):
        tiles = Tiles(head, hidden, ctx.chunk_size)

        grad_hidden = hidden.new_zeros(hidden.shape, dtype=stat) if needed[0] else None
        grad_weight = torch.empty_like(weight) if needed[1] else None
        grad_bias = torch.empty_like(bias) if needed[2] and bias is not None else None
        for cols in tiles.column_slices():  # outside, so that each slice of the weight's gradient is written once
            own_weight, own_bias = head.columns(cols)
            weight_sum = own_weight.new_zeros(own_weight.shape, dtype=stat)
            bias_sum = own_weight.new_zeros(len(own_weight), dtype=stat)
            for rows in tiles.row_slices():
                z, grad = tiles.projected(rows, cols, own_weight), tiles.buffer("e", rows, cols)
                entropy = grad_entropy is not None
                grad_tile(z, grad, of_rows[:, rows], own_bias, targets[rows], cols.start, *head.transform, entropy)
                if grad_hidden is not None:
                    add_product(grad_hidden[rows], grad, own_weight)
                if grad_weight is not None:
                    add_product(weight_sum, grad.t(), tiles.hidden[rows])
                if grad_bias is not None:
                    bias_sum.add_(grad.sum(0, dtype=stat))
            if grad_weight is not None:
                grad_weight[cols] = weight_sum
            if grad_bias is not None:
                grad_bias[cols] = bias_sum
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


# --- under TRL's fused head -------------------------------------------------------------------------------------------
#
# TRL 1.15 calls its Triton function for tensors on any device: GRPO on a machine without a GPU stops with `RuntimeError: 0
# active drivers` (or, where Triton is not installed, `'NoneType' object has no attribute 'apply'`), and on a GPU a frozen
# head takes three products a tile where two are needed. This can go when TRL's head does both.

_NAME = "_ChunkedLogProbFunction"


@dataclass
class HeadRequest:
    """What a scoring pass asks of the head beyond TRL's arguments, and what it is shown."""

    entropy_gradient: bool = True
    keep: bool = False
    seen: Projection | None = None  # the head and the hidden states (N, H) that it was given, if they are kept


# The head is reached through the model's own forward pass, which has no argument for it.
_request: ContextVar[HeadRequest | None] = ContextVar("head_request", default=None)


@contextmanager
def asking_head(entropy_gradient: bool = True, *, keep: bool = False) -> Iterator[HeadRequest]:
    """Inside, the head that a forward pass ends in is asked for this.

    entropy_gradient: whether entropies carry a gradient. TRL asks for entropies on every step, mostly to log them; with a
    frozen head their gradient costs a matrix product more a tile. keep: the hidden states that go into it.
    """
    request = HeadRequest(entropy_gradient, keep)
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


class LogProbDispatcher:
    """Has the `apply` that TRL calls: `ChunkedLogProb`, told what `asking_head` asks for.

    gpu_kernel: the function that was there, TRL's or Unsloth's; it computes the outputs that only other trainers of TRL ask for.
    """

    def __init__(self, gpu_kernel: Any) -> None:
        self.gpu_kernel = gpu_kernel

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs", "entropy"),
        *rest: Any,
    ) -> tuple[Tensor | None, ...]:
        request = _request.get() or HeadRequest()
        if request.keep:
            request.seen = Projection(hidden, weight, bias, temperature, final_logit_softcapping, logit_scale)
        args = (weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
        if OUTPUTS.issuperset(outputs):
            return (*ChunkedLogProb.apply(hidden, *args, request.entropy_gradient), None, None, None)
        result: tuple[Tensor | None, ...] = self.gpu_kernel.apply(hidden, *args, *rest)
        return result


def install_torch_logprob_kernel() -> None:
    """Install the dispatcher under TRL's fused head for the rest of the process; calling it again changes nothing.

    Call it after `import unsloth`, if that is used: Unsloth's own CUDA kernel is then the one that is dispatched to.

    Raises:
        EnvironmentUnsupported: this TRL has no such head.
    """
    import trl
    from trl.trainer import utils

    for name in (_NAME, "add_fused_lm_head"):
        if hasattr(utils, name):
            continue
        raise EnvironmentUnsupported(
            f"trl {trl.__version__} has no trainer.utils.{name}; grpo-kit was tested with trl {TESTED_TRL}.*. "
            "Install trl>=1.15,<1.16."
        )
    current = getattr(utils, _NAME)
    if not isinstance(current, LogProbDispatcher):
        setattr(utils, _NAME, LogProbDispatcher(current))
