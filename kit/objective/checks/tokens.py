"""Checks of clips, weights and regularizers: see `kit.objective.check`."""

from __future__ import annotations

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.checks.inputs import (
    TOKENS,
    Fields,
    extreme_fields,
    token_batch,
    token_fields,
    widened,
    with_rubbish,
)
from kit.objective.checks.tools import (
    Check,
    Fault,
    Note,
    Subject,
    alike,
    counted,
    declared,
    derivative,
    equal,
    finite,
    numbers,
    repeated,
    slopes_of,
    untouched,
    zero_and_attached,
)
from kit.objective.hook import TOKEN_REMEDIES
from kit.objective.reduction import LossScale


def _variants(subject: Subject) -> list[Fields]:
    return [
        token_fields(subject.seed, dtype, off_policy=off_policy, per_token=per_token)
        for dtype in (torch.float64, torch.float32)
        for off_policy in (True, False)
        for per_token in (False, True)
    ]


def _runs(subject: Subject) -> str:
    for fields in _variants(subject):
        out, expected = subject(token_batch(fields)[0]), fields["mask"].shape
        if subject.kind == "regularizer" and out.dim() == 0:
            continue
        if out.shape != expected:
            hint = " Use .expand(-1, T) on a value per completion." if out.dim() == 2 and out.shape[-1] == 1 else ""
            seen = "(B, 1)" if fields["advantages"].shape[1] == 1 else "(B, T)"
            raise Fault(
                f"returned shape {tuple(out.shape)}, expected (B, T) = {tuple(expected)}, with advantages {seen}.{hint}"
            )
    return "float32 and float64, on and off policy, advantages (B, 1) and (B, T)"


def _needs(subject: Subject) -> str:
    fields = token_fields(subject.seed)
    return declared(subject, TOKEN_REMEDIES, lambda keep: subject(token_batch(fields, keep)[0]))


def _inputs(subject: Subject) -> str:
    fields = token_fields(subject.seed)
    for inference in (False, True):
        with torch.inference_mode(inference):
            batch, _ = token_batch(fields)
            batch.ratio, batch.sequence_ratio  # noqa: B018  (computed now; other hooks read them, too)
            untouched(subject, (batch,), vars(batch))
    return "not edited, inference tensors neither"


def _same_again(subject: Subject) -> str:
    return repeated(lambda: [subject(token_batch(fields)[0]) for fields in _variants(subject)])


def _finite(subject: Subject) -> str:
    for fields in _variants(subject):
        finite(counted(subject(batch := token_batch(fields)[0]), batch.mask), f"at live tokens, {_kind_of(fields)}")
    return "at every live token"


def _kind_of(fields: Fields) -> str:
    policy = "on" if torch.equal(fields["logps"][fields["mask"]], fields["old_logps"][fields["mask"]]) else "off"
    return f"{policy} policy, {str(fields['logps'].dtype).removeprefix('torch.')}"


def _gradient(subject: Subject) -> str | None:
    if subject.kind == "weight":
        return None
    reached: set[str] = set()
    for fields in _variants(subject):
        batch, leaves = token_batch(fields)
        out = counted(subject(batch), batch.mask)
        if not out.requires_grad and subject.muted:
            return Note("carries none; its coef is 0, so it is only logged")
        if not out.requires_grad:
            source = "batch.logps" if subject.kind == "clip" else "batch.logps, entropy, full_kl or weight_norm"
            raise Fault(
                f"carries no gradient, so nothing would be learned. Compute it from {source} without .detach(), "
                f".item() or torch.no_grad()."
            )
        found = torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
        for name, slope in zip(leaves, found, strict=True):
            if slope is not None:
                finite(slope, f"in the gradient to {name}, {_kind_of(fields)}")
                reached |= {name} if slope.any() else set()
    if subject.kind == "clip" and "logps" not in reached:
        raise Fault("the gradient to logps is 0 at every token of every batch: the policy would not move.")
    if not reached:
        return Note(f"attached, but 0 at every token of these small batches ({TOKENS} tokens, rewards 0 to 2)")
    return f"to {', '.join(sorted(reached))}"


def _finite_differences(subject: Subject) -> str | None:
    if subject.kind == "weight":
        return None
    fields = token_fields(subject.seed, per_token=True)
    weight = numbers(fields["mask"].shape, subject.seed + 1)

    def value(*leaves: Tensor) -> Tensor:
        batch = TokenBatch(**fields | dict(zip(leaf_names, leaves, strict=True)))
        batch.ratio, batch.sequence_ratio  # noqa: B018  (what these do is not the hook's doing)
        out = subject(batch)
        return out if out.dim() == 0 else (torch.where(batch.mask, out, 0.0) * weight).sum()

    leaf_names, leaves = zip(*token_batch(fields)[1].items(), strict=True)
    return derivative(subject, value, leaves)


def _masked_tokens(subject: Subject) -> str:
    for fields in _variants(subject):
        loss, leaves = subject.loss(fields)
        other, _ = subject.loss(with_rubbish(fields, shift=2))
        if not equal(loss, other):
            raise Fault("what stands at masked tokens changes the loss.")
        for name, slope in slopes_of(loss, leaves).items():
            if not (slope[~fields["mask"]] == 0).all():
                raise Fault(f"masked tokens get gradient to {name}.")
    return "gradient exactly 0, no influence on the loss"


def _padding(subject: Subject) -> str:
    for per_token in (False, True):
        fields = token_fields(subject.seed, per_token=per_token)
        (loss, leaves), (wide, wide_leaves) = subject.loss(fields), subject.loss(widened(fields))
        alike(wide, loss, "more padding changes the loss")
        slopes, wide_slopes = slopes_of(loss, leaves), slopes_of(wide, wide_leaves)
        for name, slope in slopes.items():
            alike(wide_slopes[name][:, :TOKENS], slope, f"more padding changes the gradient to {name}")
            if wide_slopes[name][:, TOKENS:].any():
                raise Fault(f"padding gets gradient to {name}.")
    return "more of it changes neither loss nor gradient"


_EXTREME = (
    "at log ratios of ±80 nats in float32. Take batch.ratio or batch.sequence_ratio, which stay finite there, or "
    "kit.objective.batch.bounded_exp in place of exp."
)


def _extreme_ratios(subject: Subject) -> str:
    for flip in (1.0, -1.0):
        fields = extreme_fields(subject.seed)
        fields["advantages"] = flip * fields["advantages"]
        batch, leaves = token_batch(fields)
        out = counted(subject(batch), batch.mask)
        if not torch.isfinite(out).all():
            raise Fault(f"NaN or infinity {_EXTREME}")
        if out.requires_grad and subject.kind != "weight":
            for name, slope in zip(
                leaves, torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True), strict=True
            ):
                if slope is not None and not torch.isfinite(slope).all():
                    raise Fault(f"NaN or infinity in the gradient to {name} {_EXTREME}")
    return "finite at log ratios of ±80 nats in float32"


def _empty(subject: Subject) -> str:
    for window in (0.0, 5.0):
        fields = token_fields(subject.seed)
        fields = with_rubbish(fields | {"mask": torch.zeros_like(fields["mask"])})
        loss, leaves = subject.loss(fields, LossScale(1.0, window, TOKENS))
        zero_and_attached(subject, loss, leaves)
    return "a differentiable 0"


def _sign(subject: Subject) -> str | None:
    if subject.kind != "weight":
        return None
    seen = [counted(subject(batch := token_batch(fields)[0]), batch.mask) for fields in _variants(subject)]
    if any((values < 0).any() for values in seen):
        return Note("some weights are negative: there the surrogate is turned around")
    return "no weight is negative"


def _advantage(subject: Subject) -> str | None:
    """On policy, and of the loss's own gradient: whether it follows the advantages, and in which direction."""
    if subject.kind != "clip":
        return None
    fields = token_fields(subject.seed, off_policy=False)
    given = fields["advantages"]
    tried = (given, -given, numbers(given.shape, subject.seed + 1))
    slopes = []
    for advantages in tried:
        loss, leaves = subject.loss(fields | {"advantages": advantages})
        if not loss.requires_grad:
            return Note("skipped: there is no gradient to compare")
        slopes.append(slopes_of(loss, leaves).get("logps", torch.zeros_like(fields["logps"])))
    if not any(slope.any() for slope in slopes):
        return Note("not seen: on policy the gradient is 0 at every token, so the first step would change nothing")
    if all(equal(slope, slopes[0]) for slope in slopes):
        raise Fault(
            "ignores batch.advantages: on policy the gradient is the same whatever they are, so no reward is learned."
        )
    moved = torch.cat([(slope * a)[slope != 0] for slope, a in zip(slopes[:2], tried[:2], strict=True)])
    right, total = int((moved < 0).sum()), moved.numel()
    if 2 * right <= total:
        return Note(
            f"a positive advantage lowers the probability: is a sign missing? (at {total - right} of {total} tokens)"
        )
    return f"on policy the gradient has the sign of -A at {right} of {total} tokens where it is not 0"


TOKEN_CHECKS: dict[str, Check] = {
    "runs": _runs,
    "needs": _needs,
    "inputs": _inputs,
    "same again": _same_again,
    "finite": _finite,
    "gradient": _gradient,
    "finite differences": _finite_differences,
    "masked tokens": _masked_tokens,
    "padding": _padding,
    "extreme ratios": _extreme_ratios,
    "empty micro-batch": _empty,
    "sign": _sign,
    "advantage": _advantage,
}
