"""Compute log-probabilities and entropies of tokens from hidden states without storing the (N, V) logits.

The logits are computed in tiles: blocks of rows times slices of the vocabulary, with running statistics as in online softmax.
The matrix products are torch's, on every device, and sum 16-bit inputs in float32; the tile size depends on the device
(`TILES`). The softmax of a tile is an operator with one implementation for CPUs and one for CUDA. The gradient is computed in
one of two ways:

- Frozen head (LoRA on the backbone): two matrix products for each tile. The forward pass also sums the row gradients
  d logp/d hidden (N, H), so the backward pass only scales rows. The gradient of the entropy, if needed, is a third product.
- Trainable head: one product for each tile in the forward pass. The backward pass recomputes each tile and takes one product
  for the gradient of the hidden states and one for that of the weight.

The running sums exclude the target token, which is added at the end. 1 - p(target) is then a sum of small positive terms
instead of a difference that cancels, and stays exact when p(target) is 1 to machine precision.
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

log = logging.getLogger("kit")
OUTPUTS = frozenset({"log_probs", "entropy"})
"""Outputs of TRL's head that this head computes, those that GRPO uses."""
DEFAULT_CHUNK = 8192


# --- tiles of the (N, V) logits: projection, transform, iteration over rows and vocabulary ----------------------------

TILES = {"cpu": (1024, 1 << 21)}
"""Rows and entries of a tile. Buffers of 8 MiB in float32 fit into the caches of a CPU."""
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
    compute_dtype: torch.dtype  # precision to which hidden states and weights are rounded
    stat_dtype: torch.dtype  # precision of everything after that

    @property
    def product_dtype(self) -> torch.dtype:
        """Precision of the operands of matrix products. Only CUDA sums products of 16-bit operands in 32 bits."""
        sums = self.weight.device.type == "cuda" and self.compute_dtype.itemsize == 2
        return self.compute_dtype if sums else self.stat_dtype

    @property
    def slope(self) -> float:
        """dz / d(projection), without the slope of the softcap."""
        return self.scale / self.temperature

    @property
    def transform(self) -> tuple[float, float | None, float]:
        return self.temperature, self.softcap, self.scale

    def operand(self, values: Tensor) -> Tensor:
        """Round hidden states or weights for a matrix product."""
        return values.to(self.compute_dtype).to(self.product_dtype)

    def columns(self, cols: slice) -> tuple[Tensor, Tensor | None]:
        """The weight (k, H) and the bias (k) of a slice of the vocabulary."""
        bias = None if self.bias is None else self.bias[cols].to(self.compute_dtype).to(self.stat_dtype)
        return self.operand(self.weight[cols]), bias

    def rows_of(self, targets: Tensor) -> Tensor:
        """The weight rows of target tokens: (N) -> (N, H), rounded like `columns`."""
        return self.weight[targets].to(self.compute_dtype).to(self.stat_dtype)


class Tiles:
    """Iterates over the (N, V) logits of hidden states (N, H) in tiles, and holds the buffers of one tile."""

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
        """An uninitialised buffer (n, k), in the same memory for every tile."""
        if name not in self._buffers:
            self._buffers[name] = self.hidden.new_empty(self.rows * self.width, dtype=dtype or self.head.product_dtype)
        shape = (rows.stop - rows.start, cols.stop - cols.start)
        return self._buffers[name][: shape[0] * shape[1]].view(shape)

    def projected(self, rows: slice, cols: slice, weight: Tensor) -> Tensor:
        """The projection h @ w.T (n, k) of a tile, before bias and transform."""
        out = self.buffer("logits", rows, cols, self.head.stat_dtype)
        hidden = self.hidden[rows]
        if hidden.dtype == out.dtype:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in the precision of `total`."""
    a = a.to(b.dtype)
    if b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@dataclass(frozen=True)
class Projection:
    """A language-model head and the hidden states that it projects.

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
        """The same head with hidden states of zero tokens."""
        return replace(self, hidden=self.hidden.new_empty(0, self.hidden.shape[-1]))


# --- the softmax of a tile: two operators, each in torch and in Triton ------------------------------------------------

# `fold_tile` adds a tile to the running statistics of its rows; `grad_tile` turns it into the gradient of a loss. The functions
# below are the CPU's implementation and the fallback on CUDA, where Triton kernels (`kit.scoring.head_kernels`) run. None of
# them waits for the device.

BEST, OTHERS, SHIFTED, Z_TARGET, SLOPE_TARGET, RISE = range(6)
"""Rows of the running statistics (6, n) of n tokens, with m the maximum of z so far:

m; the sums of e^(z - m) and of e^(z - m) (z - m), without the target; z and the softcap's slope at the target; and the old m
minus the new one at the last tile (0 or less).
"""


def _transform(
    z: Tensor, bias: Tensor | None, temperature: float, softcap: float | None, scale: float
) -> Tensor | None:
    """Turn a projection (n, k) into logits, in place. Returns the slope of the softcap, 1 - tanh^2, or None without one."""
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
    """Add a tile to the statistics of its rows, and compute the operands of the row gradients' products.

    z (n, k) is the projection of the columns from `start` on, and is overwritten. stats (6, n) is updated. e (n, k) becomes
    e^(z - m) times the softcap's slope, 0 at the target. weighted (n, k), or z if it is None and `entropy` is true, becomes
    that times (z - m). targets (n) are token ids of the whole vocabulary. The transform is that of `Head`.
    """
    best, others, shifted, z_target, slope_target, rise = stats.unsqueeze(2).unbind()  # (n, 1)
    slope = _transform(z, bias, temperature, softcap, scale)
    inside, local = _hits(targets, start, z.shape[1])
    z_target.copy_(torch.where(inside, z.gather(1, local), z_target))
    if slope is not None:
        slope_target.copy_(torch.where(inside, slope.gather(1, local), slope_target))
    # The sums move to the larger of the old and the new maximum m': e^(z-m') = e^(z-m) e^(m-m').
    new_best = torch.maximum(best, z.amax(1, keepdim=True))
    torch.sub(best, new_best, out=rise)  # <= 0
    factor = rise.exp()
    best.copy_(new_best)
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
    """Compute d loss / d projection of a tile.

    z (n, k) is the projection, and is overwritten; grad (n, k) is the output. rows (6, n) holds max z, the sum of e^(z - max),
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
    """(n, 1) whether a row's target lies in the tile, and its column there (an arbitrary column if it does not)."""
    local = targets.unsqueeze(1) - start
    return (local >= 0) & (local < width), local.clamp(0, width - 1)


# torch chooses the implementation of an operator by the device of its tensors.
fold_tile = torch.library.custom_op(
    "grpo_kit::fold_tile", fold_in_torch, mutates_args=("z", "stats", "e", "weighted"), device_types="cpu"
)
grad_tile = torch.library.custom_op(
    "grpo_kit::grad_tile", grad_in_torch, mutates_args=("z", "grad"), device_types="cpu"
)

_without_triton: str | None = None


def _with_triton(name: str, otherwise: Callable[..., None], *args: Any) -> None:
    """Run a kernel of `head_kernels`, or `otherwise` if Triton is missing or cannot compile it; that is logged once."""
    global _without_triton
    if _without_triton is None:
        try:
            from kit.scoring import head_kernels

            getattr(head_kernels, name)(*args)
            return
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # raised before the launch, when no output has been written
            _without_triton = f"{type(error).__name__}: {error}".partition("\n")[0]
            log.warning("the head's softmax runs without Triton, more slowly: %s", _without_triton)
    otherwise(*args)


fold_tile.register_kernel("cuda", functools.partial(_with_triton, "fold", fold_in_torch))
grad_tile.register_kernel("cuda", functools.partial(_with_triton, "grad", grad_in_torch))


# --- statistics and gradient of every row -----------------------------------------------------------------------------


class _Scan:
    """Computes statistics of all rows, block by block, and the row gradients if they are stored."""

    def __init__(self, tiles: Tiles, targets: Tensor, wants_entropy: bool, logp: bool, entropy: bool) -> None:
        self.tiles, self.targets = tiles, targets
        n, stat = tiles.n, tiles.head.stat_dtype
        empty = functools.partial(tiles.hidden.new_empty, (n,), dtype=stat)
        self.logps, self.best, self.sum_exp, self.mean_shifted = empty(), empty(), empty(), empty()
        self.entropies = empty() if wants_entropy else None
        # bfloat16 has float32's range. In float16, small gradients would become 0 before the loss scale multiplies them.
        stored = torch.bfloat16 if tiles.hidden.dtype == torch.bfloat16 else stat
        shape = (n, tiles.hidden.shape[1])
        self.logp_rows = tiles.hidden.new_empty(shape, dtype=stored) if logp else None
        self.entropy_rows = tiles.hidden.new_empty(shape, dtype=stored) if entropy else None

    def block(self, rows: slice) -> None:
        """Compute statistics and row gradients of a block of rows."""
        tiles, head = self.tiles, self.tiles.head
        targets = self.targets[rows]
        stats = tiles.hidden.new_zeros((6, len(targets)), dtype=head.stat_dtype)
        stats[BEST] = torch.finfo(head.stat_dtype).min  # finite, so that 0 * rescale is 0
        stats[SLOPE_TARGET] = 1.0
        sums = [self._sums(gradients, rows) for gradients in (self.logp_rows, self.entropy_rows)]
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

    def _sums(self, gradients: Tensor | None, rows: slice) -> Tensor | None:
        """Zeros (n, H) in which a row gradient is summed: its own memory, or a buffer if it is stored in 16 bits."""
        if gradients is None:
            return None
        part, stat = gradients[rows], self.tiles.head.stat_dtype
        return part.zero_() if part.dtype == stat else part.new_zeros(part.shape, dtype=stat)

    def _finish(self, rows: slice, stats: Tensor, sums: list[Tensor | None]) -> None:
        """Add the target to the sums `stats` (6, n, 1), and write the outputs of the block."""
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
            _store(entropy_rows.mul_(-scale), self.entropy_rows[rows])
        # dlogp/dz_target = 1 - p_target = others / sum, dlogp/dz_j = -p_j
        _store(logp_rows.neg_().addcmul_(others * slope, w_target).mul_(scale), self.logp_rows[rows])


def _store(gradients: Tensor, stored: Tensor) -> None:
    if gradients.dtype != stored.dtype:  # equal types: they were summed in place
        stored.copy_(gradients)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Precision of the projection: autocast's if it is on (it does not change float64), else that of the hidden states."""
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return hidden.dtype
    return torch.get_autocast_dtype(device)


class ChunkedLogProb(torch.autograd.Function):
    """Log-probability of each target and entropy of softmax(z) for each row of hidden states.

    z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature.

    Replaces TRL's Triton function on any device. The arguments of `apply` are those of TRL's function and, at the end,
    `entropy_gradient`.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V) or None.
        targets: (N), token ids in [0, V).
        temperature: Divides the logits, last.
        chunk_size: Largest width of a tile, in vocabulary entries.
        final_logit_softcapping: The cap in cap * tanh(z / cap), or None.
        logit_scale: Multiplies the projection, first.
        outputs: Names of TRL's outputs. The entropy is computed if `entropy` is one of them.
        entropy_gradient: Whether the entropy is differentiable. With a frozen head this costs one more matrix product for each
            tile and one more (N, H) buffer.

    Returns:
        logps and entropy (or None), each (N) in nats: float32, or float64 for float64 inputs. Differentiable once, with
        respect to hidden, weight and bias.

    Raises:
        IndexError: a target lies outside the vocabulary.
    """

    @classmethod
    def apply(cls, hidden: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
        # Without `detach`, row gradients would also be stored under `no_grad` (see `kit.scoring.divergence`).
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
        # On a GPU this check would wait for the device. CUDA's own index check ends the process there.
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
    """Compute the gradients of hidden, weight and bias from one tile of d loss/d projection at a time, in `stat_dtype`."""
    hidden, weight, bias, targets, logps, best, sum_exp, mean_shifted = ctx.saved_tensors
    head, needed = Head(weight, bias, *ctx.head_args), ctx.needs_input_grad[:3]
    stat = head.stat_dtype
    miss = -torch.expm1(logps)  # 1 - p_target
    grads = [torch.zeros_like(best) if grad is None else grad.to(stat) for grad in (grad_logps, grad_entropy)]
    row_stats = torch.stack([best, sum_exp, mean_shifted, miss, *grads])

    with torch.autocast(hidden.device.type, enabled=False):
        tiles = Tiles(head, hidden, ctx.chunk_size)

        grad_hidden = hidden.new_zeros(hidden.shape, dtype=stat) if needed[0] else None
        grad_weight = torch.empty_like(weight) if needed[1] else None
        grad_bias = torch.empty_like(bias) if needed[2] and bias is not None else None
        # Columns are the outer loop, so that each slice of the weight's gradient is written once.
        for cols in tiles.column_slices():
            weight_slice, bias_slice = head.columns(cols)
            weight_sum = weight_slice.new_zeros(weight_slice.shape, dtype=stat)
            bias_sum = weight_slice.new_zeros(len(weight_slice), dtype=stat)
            for rows in tiles.row_slices():
                z, grad = tiles.projected(rows, cols, weight_slice), tiles.buffer("e", rows, cols)
                entropy = grad_entropy is not None
                grad_tile(z, grad, row_stats[:, rows], bias_slice, targets[rows], cols.start, *head.transform, entropy)
                if grad_hidden is not None:
                    add_product(grad_hidden[rows], grad, weight_slice)
                if grad_weight is not None:
                    add_product(weight_sum, grad.t(), tiles.hidden[rows])
                if grad_bias is not None:
                    bias_sum.add_(grad.sum(0, dtype=stat))
            if grad_weight is not None:
                grad_weight[cols] = weight_sum
            if grad_bias is not None:
                grad_bias[cols] = bias_sum
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


# --- installation under TRL's fused head ------------------------------------------------------------------------------
#
# TRL 1.15 calls its Triton function on any device. Without a GPU, GRPO stops with `RuntimeError: 0 active drivers` (without
# Triton: `'NoneType' object has no attribute 'apply'`). On a GPU it takes three products for each tile of a frozen head where
# two are enough. Remove this section when TRL's head does both.

_NAME = "_ChunkedLogProbFunction"


@dataclass
class HeadRequest:
    """Settings of the head beyond TRL's arguments for one forward pass, and its inputs if they are kept."""

    entropy_gradient: bool = True
    keep: bool = False
    projection: Projection | None = None  # the head and the hidden states (N, H), if `keep` is true


# A context variable, because the model's forward method cannot pass these settings on to the head.
_request: ContextVar[HeadRequest | None] = ContextVar("head_request", default=None)


@contextmanager
def request_outputs(entropy_gradient: bool = True, *, keep: bool = False) -> Iterator[HeadRequest]:
    """Context that sets what the head of a forward pass inside computes.

    entropy_gradient: Whether entropies carry a gradient. TRL requests entropies at every step, usually to log them; with a frozen
    head their gradient costs one more matrix product for each tile. keep: Keep the hidden states in the yielded request.
    """
    request = HeadRequest(entropy_gradient, keep)
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


class LogProbDispatcher:
    """Has the `apply` that TRL calls, and calls `ChunkedLogProb` with the settings of `request_outputs`.

    gpu_kernel: The function that it replaces, TRL's or Unsloth's. It computes the outputs that only TRL's other trainers use.
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
            request.projection = Projection(hidden, weight, bias, temperature, final_logit_softcapping, logit_scale)
        args = (weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
        if OUTPUTS.issuperset(outputs):
            return (*ChunkedLogProb.apply(hidden, *args, request.entropy_gradient), None, None, None)
        result: tuple[Tensor | None, ...] = self.gpu_kernel.apply(hidden, *args, *rest)
        return result


def install_torch_logprob_kernel() -> None:
    """Install the dispatcher under TRL's fused head for the rest of the process. Calling it again changes nothing.

    Call it after `import unsloth`, if that is used, so that the dispatcher wraps Unsloth's CUDA kernel.
    `kit.models.libraries.check_trl` refuses other versions of TRL.
    """
    from trl.trainer import utils

    current = getattr(utils, _NAME)
    if not isinstance(current, LogProbDispatcher):
        setattr(utils, _NAME, LogProbDispatcher(current))
