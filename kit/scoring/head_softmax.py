"""The softmax of a tile of logits, between the matrix products of `kit.scoring.head`: two operators, each in two forms.

`fold_tile` takes a tile into the running statistics of its rows, `grad_tile` makes it the gradient of a loss. A CPU runs
the forms below, in torch's operators; CUDA runs Triton kernels (`kit.scoring.head_kernels`), and these forms where Triton
cannot. None of them waits for the device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("kit")

BEST, OTHERS, SHIFTED, Z_TARGET, SLOPE_TARGET, RISE = range(6)
"""Rows of the running statistics (6, n) of n tokens.

With m = max z so far: m; sums of e^(z - m) and e^(z - m) (z - m) without the target; z of the target and the softcap's slope
there; and by how much m rose with the last tile (0 or less).
"""


def transform_(
    z: Tensor, bias: Tensor | None, temperature: float, softcap: float | None, scale: float, *, slopes: bool
) -> Tensor | None:
    """Makes logits of a projection (n, k), in place; the softcap's slope 1 - tanh^2, where there is one and it is wanted."""
    if bias is not None:
        z.add_(bias)
    if softcap is None:
        if scale != temperature:
            z.mul_(scale / temperature)
        return None
    z.mul_(scale / softcap).tanh_()
    slope = torch.mul(z, z).neg_().add_(1.0) if slopes else None
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
    slope = transform_(z, bias, temperature, softcap, scale, slopes=True)
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
    slope = transform_(z, bias, temperature, softcap, scale, slopes=True)
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
