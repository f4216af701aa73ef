"""KL(policy || reference) over the whole vocabulary, straight from hidden states, without the (N, V) logits.

With z the policy's logits, z' the reference's and d = z - z', the divergence is E_p[d] - lse(z) + lse(z') and its
gradient dKL/dz_j = p_j (d_j - E_p[d]). Both sides are scanned together, tile by tile, with running statistics as in
online softmax. As in `kit.scoring.head` there are two ways to the gradient:

- frozen head (LoRA on the backbone): the forward folds the tiles into sum_j p_j d_j w_j and sum_j p_j w_j, (N, H)
  each, keeps their combination dKL/d hidden (N, H), and the backward only scales rows.
- trainable head: the backward recomputes each tile once, and each slice of the weight's gradient is written once.

d is taken relative to its value at the policy's most likely token. A certain token then adds exactly nothing to
E_p[d] or to the gradient, however far off the reference is, and what is left to sum is small wherever the two
distributions are close: no difference of large numbers decides the result. The same holds for the normalisers:
log(sum' / sum) comes from a running sum of the differences of their terms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kit.scoring.head import (
    DEFAULT_CHUNK,
    Head,
    Projection,
    Tiles,
    add_product,
    compute_dtype,
    gradients_by_tile,
)
from kit.scoring.head_softmax import transform_


def full_kl(policy: Projection, reference: Projection, chunk_size: int = DEFAULT_CHUNK) -> Tensor:
    """Exact KL(policy || reference) of each next-token distribution, without (N, V) logits.

    Args:
        policy: what the gradient goes to: its hidden states, weight and bias, whichever require one.
        reference: a constant, even where its tensors require a gradient or are the policy's own. Its hidden size may
            be another one; N and V must be the same.
        chunk_size: upper limit of a tile's width in vocabulary entries.

    Returns:
        (N), in nats: float32, or float64 for float64 inputs. Equal logits give exactly 0; rounding may leave other
        small values a little below it. Differentiable once; N = 0 gives an empty tensor that is still differentiable.
        Logits must be finite: a token with a logit of -inf makes its row NaN.

    Raises:
        ValueError: N or V of the two sides differ.
    """
    for name, count, other in (
        ("positions", policy.hidden.shape[0], reference.hidden.shape[0]),
        ("vocabulary entries", policy.weight.shape[0], reference.weight.shape[0]),
    ):
        if count != other:
            raise ValueError(f"policy and reference must have the same number of {name}, saw {count} and {other}")

    ours, theirs = [(side.hidden, side.weight, side.bias) for side in (policy, reference)]
    # Inside `forward` the grad mode is always off and `needs_input_grad` ignores it: without this, row gradients
    # would be computed under `no_grad` too.
    ours = ours if torch.is_grad_enabled() else _constants(*ours)
    result: Tensor = _FullKL.apply(  # type: ignore[no-untyped-call]
        *ours, *_constants(*theirs), policy.transform, reference.transform, chunk_size
    )
    return result


def _constants(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return hidden.detach(), weight.detach(), None if bias is None else bias.detach()


def _same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.is_set_to(b)


class _Pair:
    """The tiles of both sides, which have the same borders."""

    def __init__(
        self, policy: Head, hidden: Tensor, reference: Head, reference_hidden: Tensor, chunk_size: int, slopes: bool
    ) -> None:
        stat = policy.stat_dtype
        self.policy = Tiles(policy, hidden, chunk_size, scratch=stat)
        self.reference = Tiles(reference, reference_hidden, chunk_size, scratch=stat)
        self.slopes = slopes
        self.shared = (
            policy.compute_dtype == reference.compute_dtype
            and _same_memory(policy.weight, reference.weight)
            and _same_memory(policy.bias, reference.bias)
        )

    def columns(self, cols: slice) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Weight and bias slices of the policy and of the reference; a head that both share is cast once."""
        ours = self.policy.head.columns(cols)
        return ours, ours if self.shared else self.reference.head.columns(cols)

    def logits(
        self, rows: slice, cols: slice, ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """z and z' (n, k) of a tile, and the slope of the policy's softcap where there is one and it is asked for."""
        z = self.policy.projected(rows, cols, ours[0])
        slope = transform_(z, ours[1], *self.policy.head.transform, slopes=self.slopes)
        other = self.reference.projected(rows, cols, theirs[0])
        transform_(other, theirs[1], *self.reference.head.transform, slopes=False)
        return z, other, slope


class _Scan:
    """Running statistics of every row, and the row gradients when they are to be stored."""

    def __init__(self, pair: _Pair, store: bool) -> None:
        self.pair = pair
        hidden, stat = pair.policy.hidden, pair.policy.head.stat_dtype

        def column(value: float = 0.0) -> Tensor:
            return hidden.new_full((hidden.shape[0], 1), value, dtype=stat)

        lowest = torch.finfo(stat).min  # finite, so that 0 * rescale is 0
        self.best = column(lowest)  # max z
        self.at_best = column()  # z' where z is largest
        self.reference_best = column(lowest)  # max z'
        self.total = column()  # sum of e^(z - best)
        self.reference_total = column()  # sum of e^(z' - reference_best)
        self.excess = column()  # reference_total - total, summed term by term
        self.gaps = column()  # sum of e^(z - best) * gap, with gap = (z - best) - (z' - at_best)
        self.prob_rows = hidden.new_zeros(hidden.shape, dtype=stat) if store else None  # sum of e^(z - best) * w
        self.gap_rows = hidden.new_zeros(hidden.shape, dtype=stat) if store else None  # sum of e^(z - best) * gap * w

    def run(self) -> None:
        for cols in self.pair.policy.column_slices():
            ours, theirs = self.pair.columns(cols)
            for rows in self.pair.policy.row_slices():
                self._fold(rows, cols, ours, theirs)

    def _fold(
        self,
        rows: slice,
        cols: slice,
        ours: tuple[Tensor, Tensor | None],
        theirs: tuple[Tensor, Tensor | None],
    ) -> None:
        x, y, slope = self.pair.logits(rows, cols, ours, theirs)
        e, f = self.pair.policy.buffer("e", rows, cols), self.pair.reference.buffer("e", rows, cols)
        self._raise_best(rows, x, y)

        x.sub_(self.best[rows])
        y.sub_(self.at_best[rows])
        torch.exp(x, out=e)
        torch.sub(y, self.reference_best[rows] - self.at_best[rows], out=f).exp_()
        x.sub_(y).mul_(e)  # e^(z - best) * gap
        self.total[rows] += e.sum(1, keepdim=True)
        self.gaps[rows] += x.sum(1, keepdim=True)
        self.reference_total[rows] += f.sum(1, keepdim=True)
        self.excess[rows] += f.sub_(e).sum(1, keepdim=True)
        if self.prob_rows is not None and self.gap_rows is not None:
            add_product(self.prob_rows[rows], e if slope is None else e.mul_(slope), ours[0])
            add_product(self.gap_rows[rows], x if slope is None else x.mul_(slope), ours[0])

    def _raise_best(self, rows: slice, x: Tensor, y: Tensor) -> None:
        """Move the sums to the larger of the old and the new maximum, and the gaps to the token that has it."""
        old, old_at, old_reference = self.best[rows], self.at_best[rows], self.reference_best[rows]
        tile_best, index = x.max(1, keepdim=True)
        new = torch.maximum(old, tile_best)
        new_at = torch.where(tile_best > old, y.gather(1, index), old_at)
        new_reference = torch.maximum(old_reference, y.amax(1, keepdim=True))
        factor, reference_factor = (old - new).exp(), (old_reference - new_reference).exp()
        shift = (old - new) - (old_at - new_at)  # of every gap; 0 where the maximum stays
        self.excess[rows].mul_(reference_factor).addcmul_(self.total[rows], reference_factor - factor)
        # sum of e (gap + shift) = sum of e gap + shift * sum of e
        self.gaps[rows].addcmul_(self.total[rows], shift).mul_(factor)
        self.total[rows].mul_(factor)
        self.reference_total[rows].mul_(reference_factor)
        if self.prob_rows is not None and self.gap_rows is not None:
            self.gap_rows[rows].addcmul_(self.prob_rows[rows], shift).mul_(factor)
            self.prob_rows[rows].mul_(factor)
        self.best[rows], self.at_best[rows], self.reference_best[rows] = new, new_at, new_reference

    def finish(self) -> Tensor:
        """KL (N); leaves dKL/d hidden in `gap_rows`."""
        self.mean_gap = self.gaps / self.total  # E_p[gap]
        ratio = self.excess / self.total
        # log1p(ratio) is the precise one where the two sums are close, the difference of the logarithms elsewhere
        log_ratio = torch.where(
            ratio.abs() < 0.5, torch.log1p(ratio), torch.log(self.reference_total) - torch.log(self.total)
        )
        if self.prob_rows is not None and self.gap_rows is not None:
            self.gap_rows.addcmul_(self.prob_rows, self.mean_gap, value=-1.0)
            self.gap_rows.mul_(self.pair.policy.head.slope / self.total)
        return (self.mean_gap + (self.reference_best - self.at_best) + log_ratio).squeeze(1)


class _FullKL(torch.autograd.Function):
    """`full_kl` of (hidden, weight, bias) of the policy, the same of the reference, and the two transforms."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reference_hidden: Tensor,
        reference_weight: Tensor,
        reference_bias: Tensor | None,
        transform: tuple[float, float | None, float],
        reference_transform: tuple[float, float | None, float],
        chunk_size: int,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        dtypes = compute_dtype(hidden), compute_dtype(reference_hidden)
        stat = torch.float64 if torch.float64 in dtypes else torch.float32
        ctx.head_args = (*transform, dtypes[0], stat), (*reference_transform, dtypes[1], stat)

        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        store = needs_hidden and not (needs_weight or needs_bias)
        with torch.autocast(hidden.device.type, enabled=False):
            policy = Head(weight, bias, *ctx.head_args[0])
            reference = Head(reference_weight, reference_bias, *ctx.head_args[1])
            with_slope = store and policy.softcap is not None
            scan = _Scan(_Pair(policy, hidden, reference, reference_hidden, chunk_size, with_slope), store)
            scan.run()
            result = scan.finish()

        ctx.hidden_dtype, ctx.stored, ctx.chunk_size = hidden.dtype, store, chunk_size
        if store:
            ctx.save_for_backward(scan.gap_rows)
        elif needs_weight or needs_bias:
            inputs = (hidden, weight, bias, reference_hidden, reference_weight, reference_bias)
            ctx.save_for_backward(*inputs, scan.best, scan.at_best, scan.total, scan.mean_gap)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 9
        if not ctx.stored:
            return (*_recompute_gradients(ctx, grad), *(None,) * 6)
        (rows,) = ctx.saved_tensors
        return ((grad.unsqueeze(1) * rows).to(ctx.hidden_dtype), *(None,) * 8)


def _recompute_gradients(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, one tile of d loss/d projection at a time."""
    hidden, weight, bias, reference_hidden, reference_weight, reference_bias = ctx.saved_tensors[:6]
    best, at_best, total, mean_gap = ctx.saved_tensors[6:]
    policy = Head(weight, bias, *ctx.head_args[0])
    reference = Head(reference_weight, reference_bias, *ctx.head_args[1])
    on_row = grad_kl.to(policy.stat_dtype).unsqueeze(1) * (policy.slope / total)

    with torch.autocast(hidden.device.type, enabled=False):
        pair = _Pair(policy, hidden, reference, reference_hidden, ctx.chunk_size, policy.softcap is not None)

        def grad_of(rows: slice, cols: slice, weight: Tensor, bias: Tensor | None) -> Tensor:
            theirs = (weight, bias) if pair.shared else reference.columns(cols)
            x, y, slope = pair.logits(rows, cols, (weight, bias), theirs)
            grad = torch.exp(x.sub_(best[rows]), out=pair.policy.buffer("e", rows, cols)).mul_(
                on_row[rows]
            )  # p, scaled
            grad.mul_(x.sub_(y.sub_(at_best[rows])).sub_(mean_gap[rows]))
            return grad if slope is None else grad.mul_(slope)

        return gradients_by_tile(pair.policy, grad_of, hidden, ctx.needs_input_grad[:3])
