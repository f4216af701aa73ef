"""Compute divergences between the policy's next-token distributions and those of a reference or a teacher from hidden states.

The tokens are processed in slices with logits (n, V) in float32, so memory does not grow with N. With a frozen head (LoRA on
the backbone) the forward pass also computes the gradient of each hidden state, and the backward pass only scales rows. With a
trainable head the backward pass recomputes each slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kit.objective.batch import Divergence
from kit.scoring.head import Head, Projection, add_product, compute_dtype

SLICE = 2**24
"""Most logits of a slice: 64 MiB in float32."""


def divergence(
    policy: Projection, other: Projection, kind: Divergence | None = None, slice_logits: int = SLICE
) -> Tensor:
    """Compute the divergence of two next-token distributions at each of N positions without storing (N, V) logits.

    Args:
        policy: The side that gets gradients, in those of its hidden states, weight and bias that require one.
        other: The reference or teacher, a constant even if its tensors require a gradient or are the policy's own. Its hidden
            size may differ; N and V must be the same.
        kind: The divergence; KL(policy || other) over the whole vocabulary by default.
        slice_logits: Most logits in memory at once.

    Returns:
        (N,) in nats: float32, or float64 for float64 inputs; 0 or more but for rounding. Differentiable once.

    Raises:
        ValueError: N or V of the two sides differ.
    """
    for name, count, expected in (
        ("positions", len(policy.hidden), len(other.hidden)),
        ("vocabulary entries", len(policy.weight), len(other.weight)),
    ):
        if count != expected:
            raise ValueError(f"both sides must have the same number of {name}, saw {count} and {expected}")
    # Gradients are always off inside `forward`, and `needs_input_grad` ignores `no_grad`: without `detach`, row gradients would
    # also be computed under `no_grad`.
    tensors = (policy.hidden, policy.weight, policy.bias)
    if not torch.is_grad_enabled():
        tensors = (
            policy.hidden.detach(),
            policy.weight.detach(),
            None if policy.bias is None else policy.bias.detach(),
        )
    settings = policy.transform, other, kind or Divergence(), max(1, slice_logits // len(policy.weight))
    result: Tensor = _Divergence.apply(*tensors, *settings)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _Side:
    """The head of one distribution and the operands of its matrix product."""

    head: Head
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)

    @classmethod
    def of(cls, projection: Projection, stat: torch.dtype) -> _Side:
        hidden = projection.hidden.detach()
        bias = None if projection.bias is None else projection.bias.detach()
        head = Head(projection.weight.detach(), bias, *projection.transform, compute_dtype(hidden), stat)
        return cls(head, head.operand(hidden), *head.columns(slice(None)))

    def product(self, rows: slice) -> Tensor:
        """hidden @ weight.T (n, V) in the precision of the statistics."""
        hidden, stat = self.hidden[rows], self.head.stat_dtype
        if hidden.dtype == stat:
            return hidden @ self.weight.t()
        return torch.mm(hidden, self.weight.t(), out_dtype=stat)

    def log_probabilities(self, product: Tensor) -> Tensor:
        """Log-probabilities (n, V) from `product`."""
        head = self.head
        logits = (product if self.bias is None else product + self.bias) * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return (logits / head.temperature).log_softmax(-1)


def _slice(policy: _Side, other: _Side, rows: slice, kind: Divergence, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Divergences (n,), and the derivative of their sum weighted by `weights` with respect to the policy's product (n, V)."""
    # Disable the caller's hooks, which are meant for the tensors that its own graph saves.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        product = policy.product(rows).requires_grad_()
        values = _between(policy.log_probabilities(product), other.log_probabilities(other.product(rows)), kind)
        (slope,) = torch.autograd.grad(values, product, torch.ones_like(values) if weights is None else weights)
    return values.detach(), slope


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: tuple[float, float | None, float],
        other: Projection,
        kind: Divergence,
        size: int,
    ) -> Tensor:
        stat = torch.float64 if torch.float64 in (compute_dtype(hidden), compute_dtype(other.hidden)) else torch.float32
        ctx.stored = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        ctx.hidden_dtype = hidden.dtype
        result = hidden.new_empty(len(hidden), dtype=stat)
        row_gradients = hidden.new_zeros(hidden.shape if ctx.stored else 0, dtype=stat)
        with torch.autocast(hidden.device.type, enabled=False):
            policy_side = _Side.of(Projection(hidden, weight, bias, *transform), stat)
            other_side = _Side.of(other, stat)
            for rows in _slices(len(hidden), size):
                if ctx.stored:
                    result[rows], slope = _slice(policy_side, other_side, rows, kind, None)
                    add_product(row_gradients[rows], slope, policy_side.weight)
                else:
                    logps, other_logps = (
                        side.log_probabilities(side.product(rows)) for side in (policy_side, other_side)
                    )
                    result[rows] = _between(logps, other_logps, kind)
        if ctx.stored:
            ctx.save_for_backward(row_gradients)
        elif any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, weight, bias)
            ctx.settings = transform, other, kind, size, stat
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.stored:
            (row_gradients,) = ctx.saved_tensors
            return ((grad.unsqueeze(1) * row_gradients).to(ctx.hidden_dtype), *(None,) * 6)
        hidden, weight, bias = ctx.saved_tensors
        transform, other, kind, size, stat = ctx.settings
        with torch.autocast(hidden.device.type, enabled=False):
            policy_side = _Side.of(Projection(hidden, weight, bias, *transform), stat)
            other_side = _Side.of(other, stat)
            sums: list[Any] = [None if x is None else x.new_zeros(x.shape, dtype=stat) for x in (hidden, weight, bias)]
            for rows in _slices(len(hidden), size):
                _, slope = _slice(policy_side, other_side, rows, kind, grad[rows])
                add_product(sums[0][rows], slope, policy_side.weight)
                add_product(sums[1], slope.t(), policy_side.hidden[rows])
                if sums[2] is not None:
                    sums[2] += slope.sum(0)
        inputs = zip(sums, (hidden, weight, bias), strict=True)
        return (*(None if total is None else total.to(x.dtype) for total, x in inputs), *(None,) * 4)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _between(policy: Tensor, other: Tensor, kind: Divergence) -> Tensor:
    """The divergence of two sets of log-probabilities: (n, V) -> (n,) in nats."""
    if kind.top_k is not None and kind.top_k < policy.shape[1]:
        columns = policy.detach().topk(kind.top_k, dim=1).indices
        policy, other = _lump_others(policy, columns), _lump_others(other, columns)
    if kind.kind == "reverse":
        return _kl(policy, other)
    if kind.kind == "forward":
        return _kl(other, policy)
    mixture = torch.logaddexp(policy, other) - math.log(2.0)
    return 0.5 * (_kl(policy, mixture) + _kl(other, mixture))


def _kl(left: Tensor, right: Tensor) -> Tensor:
    # Both sides' probabilities sum to 1, so the difference adds 0; it cancels the rounding of the two normalisers.
    p = left.exp()
    return (p * (left - right) + (right.exp() - p)).sum(1)


def _lump_others(logps: Tensor, columns: Tensor) -> Tensor:
    """(n, V) -> (n, k + 1): log-probabilities at `columns`, and the log of the sum of all other probabilities."""
    others = logps.scatter(1, columns, -torch.inf)
    return torch.cat([logps.gather(1, columns), others.logsumexp(1, keepdim=True)], dim=1)
