"""Checks of reductions: see `kit.objective.check`."""

from __future__ import annotations

import torch
from torch import Tensor

from kit.objective.checks.inputs import TOKENS, scale_of, token_fields, widened
from kit.objective.checks.tokens import TOKEN_CHECKS
from kit.objective.checks.tools import (
    Check,
    Fault,
    Note,
    Subject,
    alike,
    derivative,
    finite,
    numbers,
    repeated,
    untouched,
)
from kit.objective.reduction import LossScale


def _losses(subject: Subject, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A per-token loss (B, T) that is 0 at padding, and the mask."""
    mask = token_fields(subject.seed)["mask"]
    return numbers(mask.shape, subject.seed + 2).to(dtype).masked_fill(~mask, 0.0), mask


def _runs(subject: Subject) -> str:
    for dtype in (torch.float64, torch.float32):
        per_token, mask = _losses(subject, dtype)
        for scale in (scale_of(mask), LossScale(2.0, float(mask.sum()), TOKENS)):
            out = subject(per_token, mask, scale)
            if out.dim() != 0:
                raise Fault(f"returned shape {tuple(out.shape)}, expected a scalar ().")
    return "a scalar, in float32 and float64"


def _inputs(subject: Subject) -> str:
    for inference in (False, True):
        with torch.inference_mode(inference):
            per_token, mask = _losses(subject)
            scale = scale_of(mask)
            inputs = {"per_token": per_token, "mask": mask, "window_tokens": scale.window_tokens}
            untouched(subject, (per_token, mask, scale), inputs)
    return "not edited, inference tensors neither"


def _same_again(subject: Subject) -> str:
    per_token, mask = _losses(subject)
    return repeated(lambda: [subject(per_token, mask, scale_of(mask))])


def _finite(subject: Subject) -> str:
    for dtype in (torch.float64, torch.float32):
        per_token, mask = _losses(subject, dtype)
        finite(subject(per_token, mask, scale_of(mask)), f"in {dtype}")
    return "also with a completion without live tokens"


def _gradient(subject: Subject) -> str:
    per_token, mask = _losses(subject)
    per_token.requires_grad_()
    out = subject(per_token, mask, scale_of(mask))
    if not out.requires_grad:
        raise Fault(
            "carries no gradient, so nothing would be learned. Compute it from per_token without .detach(), .item() or "
            "torch.no_grad()."
        )
    (slope,) = torch.autograd.grad(out, per_token)
    finite(slope, "in the gradient to per_token")
    lost = int((mask & (slope == 0)).sum())
    if lost == int(mask.sum()):
        raise Fault("the gradient is 0 at every token: the policy would not move.")
    return Note(f"{lost} of {int(mask.sum())} live tokens get no gradient") if lost else "to every live token"


def _finite_differences(subject: Subject) -> str:
    per_token, mask = _losses(subject)

    def value(leaf: Tensor) -> Tensor:
        return subject(leaf.masked_fill(~mask, 0.0), mask, scale_of(mask))

    return derivative(subject, value, (per_token.requires_grad_(),))


def _padding(subject: Subject) -> str:
    per_token, mask = _losses(subject)
    wide = torch.nn.functional.pad(per_token, (0, 5))
    wide_mask = widened({"mask": mask})["mask"]
    alike(
        subject(wide, wide_mask, scale_of(wide_mask)),
        subject(per_token, mask, scale_of(mask)),
        "more padding changes the loss",
    )
    return "more of it changes nothing"


def _accumulation(subject: Subject) -> str:
    """Two micro-batches of equally many full completions against one of all: here every mean agrees with every other."""
    per_token = numbers(torch.Size([4, TOKENS]), subject.seed + 3)
    mask = torch.ones_like(per_token, dtype=torch.bool)
    whole = subject(per_token, mask, scale_of(mask))
    halves = sum(subject(per_token[i : i + 2], mask[i : i + 2], LossScale(2.0, mask.sum(), TOKENS)) for i in (0, 2))
    factor = float(halves / whole)
    if abs(factor - 1.0) > 1e-9:
        return Note(
            f"two micro-batches of two completions add up to {factor:.3g} times the loss of one of four: the gradient "
            f"depends on the accumulation. Divide by scale.accumulation, or by scale.window_tokens."
        )
    return "two micro-batches add up to the loss of one"


REDUCTION_CHECKS: dict[str, Check] = {
    "runs": _runs,
    "inputs": _inputs,
    "same again": _same_again,
    "finite": _finite,
    "gradient": _gradient,
    "finite differences": _finite_differences,
    "masked tokens": TOKEN_CHECKS["masked tokens"],
    "padding": _padding,
    "empty micro-batch": TOKEN_CHECKS["empty micro-batch"],
    "accumulation": _accumulation,
}
