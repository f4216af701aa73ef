"""Triton kernels of the softmax of a tile: `fold_tile` and `grad_tile` of `kit.scoring.head`, one program for each row.

Each kernel reads a tile once from memory and, for the second pass, from the cache. This module is imported only with a GPU, or
with TRITON_INTERPRET=1, which runs the kernels on a CPU.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
# Triton interprets the annotations of a kernel and accepts only `tl.constexpr`.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _logits(
    z_ptr, bias_ptr, columns, width, temperature, softcap, scale, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Logits of some columns, -inf beyond the last column, and the softcap's slope."""
    inside = columns < width
    z = tl.load(z_ptr + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    slope = tl.full(z.shape, 1.0, z.dtype)
    if HAS_SOFTCAP:
        tanh = 2.0 * tl.sigmoid(2.0 * (z * (scale / softcap))) - 1.0
        slope = 1.0 - tanh * tanh
        z = tanh * (softcap / temperature)
    else:
        z = z * (scale / temperature)
    return tl.where(inside, z, -float("inf")), slope


@triton.jit
def _fold(
    z_ptr, stats_ptr, e_ptr, weighted_ptr, bias_ptr, targets_ptr, rows, width, start, temperature, softcap, scale,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WEIGHTED: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * width
    e_ptr += row * width
    if HAS_WEIGHTED:
        weighted_ptr += row * width
    stats_ptr += row  # (6, rows): kit.scoring.head names its rows
    target = tl.load(targets_ptr + row) - start
    best = tl.load(stats_ptr)
    new, z_target, slope_target = best, tl.load(stats_ptr + 3 * rows), tl.load(stats_ptr + 4 * rows)
    for at in range(0, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        z, slope = _logits(z_ptr, bias_ptr, columns, width, temperature, softcap, scale, HAS_BIAS, HAS_SOFTCAP)
        here = columns == target
        if (target >= at) & (target < at + BLOCK) & (target < width):
            z_target = tl.sum(tl.where(here, z, 0.0), 0)
            slope_target = tl.sum(tl.where(here, slope, 0.0), 0)
        new = tl.maximum(new, tl.max(z, 0))

    rise = best - new
    factor = tl.exp(rise)
    others = tl.load(stats_ptr + rows)
    shifted = (tl.load(stats_ptr + 2 * rows) + others * rise) * factor
    others = others * factor
    for at in range(0, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        z, slope = _logits(z_ptr, bias_ptr, columns, width, temperature, softcap, scale, HAS_BIAS, HAS_SOFTCAP)
        inside = columns < width
        others_inside = inside & (columns != target)
        e = tl.where(others_inside, tl.exp(z - new), 0.0)
        others += tl.sum(e, 0)
        if ENTROPY:
            product = e * tl.where(others_inside, z - new, 0.0)
            shifted += tl.sum(product, 0)
            if HAS_WEIGHTED:
                tl.store(weighted_ptr + columns, product * slope, mask=inside)
            else:
                tl.store(z_ptr + columns, product * slope, mask=inside)
        tl.store(e_ptr + columns, e * slope, mask=inside)

    tl.store(stats_ptr, new)
    tl.store(stats_ptr + rows, others)
    tl.store(stats_ptr + 2 * rows, shifted)
    tl.store(stats_ptr + 3 * rows, z_target)
    tl.store(stats_ptr + 4 * rows, slope_target)
    tl.store(stats_ptr + 5 * rows, rise)


def fold(
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
    """`kit.scoring.head.fold_tile`."""
    rows, width = z.shape
    if rows == 0:
        return
    _fold[(rows,)](
        z, stats, e, e if weighted is None else weighted, z if bias is None else bias, targets, rows, width, start,
        temperature, 1.0 if softcap is None else softcap, scale, bias is not None, softcap is not None,
        weighted is not None, entropy, BLOCK,
    )  # fmt: skip


@triton.jit
def _grad(
    z_ptr, grad_ptr, rows_ptr, bias_ptr, targets_ptr, rows_stride, width, start, temperature, softcap, scale,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * width
    grad_ptr += row * width
    rows_ptr += row  # (6, rows): max z, sum of e^(z - max), E[z - max], 1 - p(target), gradients of logp and entropy
    target = tl.load(targets_ptr + row) - start
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z, slope = _logits(z_ptr, bias_ptr, columns, width, temperature, softcap, scale, HAS_BIAS, HAS_SOFTCAP)
    inside = columns < width
    x = tl.where(inside, z - tl.load(rows_ptr), 0.0)
    p = tl.exp(x) / tl.load(rows_ptr + rows_stride)
    on_logp = tl.load(rows_ptr + 4 * rows_stride)
    grad = tl.where(columns == target, on_logp * tl.load(rows_ptr + 3 * rows_stride), -p * on_logp)
    if ENTROPY:
        grad -= p * (x - tl.load(rows_ptr + 2 * rows_stride)) * tl.load(rows_ptr + 5 * rows_stride)
    tl.store(grad_ptr + columns, grad * slope * (scale / temperature), mask=inside)


def grad(
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
    """`kit.scoring.head.grad_tile`."""
    count, width = z.shape
    if count == 0:
        return
    _grad[(count, triton.cdiv(width, BLOCK))](
        z, grad, rows, z if bias is None else bias, targets, rows.stride(0), width, start, temperature,
        1.0 if softcap is None else softcap, scale, bias is not None, softcap is not None, entropy, BLOCK,
    )  # fmt: skip
