"""Divergences of the policy's next-token distributions from a teacher's, straight from hidden states.

The reverse KL over the whole vocabulary is `kit.scoring.full_kl`, which scans the vocabulary. Every other divergence takes a
slice of the tokens at a time, with its logits (n, V) in float32, and makes them anew in the backward pass: at most two slices
are held, whatever N.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax
from torch.utils.checkpoint import checkpoint

from kit.objective.batch import Divergence
from kit.scoring.full_kl import full_kl
from kit.scoring.head import Projection

SLICE = 2**24
"""Logits of a slice, at most: 64 MiB in float32."""


def divergence(policy: Projection, teacher: Projection, what: Divergence, slice_logits: int = SLICE) -> Tensor:
    """(N,) nats: the divergence of policy and teacher at each of N positions; at least float32, 0 or more but for rounding.

    policy: what the gradient goes to, hidden (N, H) and weight (V, H). teacher: a constant, of another hidden size perhaps.
    Raises `ValueError` where N or V of the two differ. Formulas: `kit.objective.batch.Divergence`.
    """
    if what == Divergence():
        return full_kl(policy, teacher)
    counts = {
        "positions": (len(policy.hidden), len(teacher.hidden)),
        "vocabulary entries": (len(policy.weight), len(teacher.weight)),
    }
    for name, (ours, theirs) in counts.items():
        if ours != theirs:
            raise ValueError(f"policy and teacher must have the same number of {name}, saw {ours} and {theirs}")
    size = max(1, slice_logits // len(policy.weight))

    def of_slice(hidden: Tensor, weight: Tensor, bias: Tensor | None, their_hidden: Tensor) -> Tensor:
        ours = _log_probabilities(hidden, weight, bias, policy)
        with torch.no_grad():
            theirs = _log_probabilities(their_hidden, teacher.weight, teacher.bias, teacher)
        return _between(ours, theirs, what)

    parts: list[Tensor] = [
        checkpoint(of_slice, ours, policy.weight, policy.bias, theirs, use_reentrant=False)
        for ours, theirs in zip(
            torch.split(policy.hidden, size), torch.split(teacher.hidden.detach(), size), strict=True
        )
    ]
    return torch.cat(parts)


def _log_probabilities(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Projection) -> Tensor:
    """(n, V), in float32 or float64. The product is in the precision of the weight, as in the model."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = linear(hidden.to(weight.dtype), weight, bias)
        logits = (logits if logits.dtype.itemsize > 4 else logits.float()) * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return log_softmax(logits / head.temperature, dim=-1)


def _between(ours: Tensor, theirs: Tensor, what: Divergence) -> Tensor:
    """(n, V) log-probabilities -> (n,) nats."""
    if what.top_k is not None and what.top_k < ours.shape[1]:
        places = ours.detach().topk(what.top_k, dim=1).indices
        ours, theirs = _with_the_rest(ours, places), _with_the_rest(theirs, places)
    if what.kind == "reverse":
        return _kl(ours, theirs)
    if what.kind == "forward":
        return _kl(theirs, ours)
    mixture = torch.logaddexp(ours, theirs) - math.log(2.0)
    return 0.5 * (_kl(ours, mixture) + _kl(theirs, mixture))


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours.exp() * (ours - theirs)).sum(1)


def _with_the_rest(logps: Tensor, places: Tensor) -> Tensor:
    """(n, V) -> (n, k + 1): log-probabilities at `places`, and that of all other tokens together."""
    others = logps.scatter(1, places, -torch.inf)
    return torch.cat([logps.gather(1, places), others.logsumexp(1, keepdim=True)], dim=1)
