"""Run stock TRL without a GPU, for comparisons: torch functions replace its two Triton kernels.

TRL 1.15 computes log-probabilities in `ChunkedLogProbFunction`: matrix products in torch, and two Triton kernels that read a
tile of logits (one adds it to running sums, the other replaces it by its gradient). Triton needs a GPU. The torch functions in
this module have the same signatures and as few passes over a tile as torch allows; all other code is TRL's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Kernel:
    """A torch function with the call syntax of a Triton kernel: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.function


def _transform(tile: Tensor, scale: float, softcap: float, inverse_temperature: float, capped: bool) -> Tensor:
    z = tile.float() if scale == 1.0 else tile.float() * scale
    if capped:
        z = softcap * torch.tanh(z / softcap)
    return z if inverse_temperature == 1.0 else z * inverse_temperature


def _forward(
    tile: Tensor,
    _stride: int,
    targets: Tensor,
    best: Tensor,
    sum_exp: Tensor,
    x_sum_exp: Tensor,
    squares: Tensor,
    z_sum: Tensor,
    best_before: Tensor,
    target_logit: Tensor,
    first: int,
    columns: int,
    logit_scale: float,
    softcap: float,
    inv_t: float,
    **flags: Any,
) -> None:
    z = _transform(tile, logit_scale, softcap, inv_t, flags["HAS_SOFTCAP"])
    local = targets - first
    if flags["HAS_MEAN_LOGITS"]:
        z_sum += z.sum(1)
    if flags["HAS_IS_TOP1"]:
        is_before_target = torch.arange(columns) < local[:, None]
        torch.maximum(best_before, z.masked_fill(~is_before_target, -torch.inf).amax(1), out=best_before)
    new = torch.maximum(best, z.amax(1))
    rescale = (best - new).exp()
    e = (z - new[:, None]).exp_()
    sum_exp.mul_(rescale).add_(e.sum(1))
    if flags["HAS_ENTROPY"]:
        x_sum_exp.mul_(rescale).add_(torch.linalg.vecdot(e, z))
    if flags["HAS_LOG_SUM_SQ_PROBS"]:
        squares.mul_(rescale * rescale).add_(torch.linalg.vecdot(e, e))
    best.copy_(new)
    inside = (local >= 0) & (local < columns)
    target_logit[inside] = z[inside, local[inside]]


def _backward(
    tile: Tensor,
    _stride: int,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    first: int,
    columns: int,
    logit_scale: float,
    softcap: float,
    inv_t: float,
    **flags: Any,
) -> None:
    z = _transform(tile, logit_scale, softcap, inv_t, flags["HAS_SOFTCAP"])
    slope = None if not flags["HAS_SOFTCAP"] else 1.0 - (z / (softcap * inv_t)) ** 2
    log_p = z - log_z[:, None]
    p = log_p.exp()
    grad = torch.zeros_like(p)
    if flags["HAS_LOGPROB_GRAD"]:
        grad.addcmul_(p, grad_logprobs[:, None], value=-1.0)
        local = targets - first
        inside = (local >= 0) & (local < columns)
        grad[inside, local[inside]] += grad_logprobs[inside]
    if flags["HAS_ENTROPY_GRAD"]:
        grad.addcmul_(p.mul_(log_p.add_(entropy[:, None])), grad_entropy[:, None], value=-1.0)
    if inv_t * logit_scale != 1.0:
        grad.mul_(inv_t * logit_scale)
    tile.copy_(grad if slope is None else grad.mul_(slope))


@contextmanager
def trl_on_a_cpu() -> Iterator[Any]:
    """Use TRL's own fused head inside the block, with torch functions instead of its two Triton kernels.

    Yields the head's `torch.autograd.Function`, and afterwards restores the kit's replacement of it.
    """
    import trl.kernels.chunked_logprob as kernels
    import trl.trainer.utils as utils

    originals = kernels._forward_kernel, kernels._backward_kernel
    head = utils._ChunkedLogProbFunction
    kernels._forward_kernel, kernels._backward_kernel = _Kernel(_forward), _Kernel(_backward)
    utils._ChunkedLogProbFunction = kernels.ChunkedLogProbFunction
    try:
        yield kernels.ChunkedLogProbFunction
    finally:
        kernels._forward_kernel, kernels._backward_kernel = originals
        utils._ChunkedLogProbFunction = head
