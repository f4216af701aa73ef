"""Random inputs for `kit.objective.check`: small, ragged, and with rubbish wherever nothing may be read.

Five completions of up to nine tokens: one with a hole (as a tool call leaves), one of a single token, one without a live
token. Fields are raw, as a trainer has them, so that what is left of the rubbish is `TokenBatch`'s doing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kit.objective.batch import REWARD_FIELDS, TOKEN_FIELDS, Draw, RewardBatch, TokenBatch, fields_where
from kit.objective.reduction import LossScale

Fields = dict[str, Any]

TOKENS = 9
_LENGTHS = (TOKENS, 5, 1, 7, 0)
_RUBBISH = (torch.nan, torch.inf, -torch.inf, 1e30)


@torch.inference_mode(False)
def token_fields(
    seed: int, dtype: torch.dtype = torch.float64, *, off_policy: bool = True, per_token: bool = False
) -> Fields:
    """Every field of a `TokenBatch`. On-policy ones have little entropy, so that a floor under it is felt."""
    mask, draw = _mask(), Draw(len(_LENGTHS), TOKENS, seed, off_policy=off_policy)
    fields: Fields = {
        "logps": draw.near(0.4) if off_policy else draw.old.clone(),
        "old_logps": draw.old,
        "advantages": draw.normal() if per_token else draw.normal(draw.rows, 1),
        **{name: spec.sample(draw) for name, spec in TOKEN_FIELDS.items()},
    }
    fields = {name: value.to(dtype) if value.is_floating_point() else value for name, value in fields.items()}
    return with_rubbish(fields | {"mask": mask, "step": 0})


def extreme_fields(seed: int, reach: float = 80.0) -> Fields:
    """Float32 fields whose log ratios, to the old, the reference and the engine's policy, are all `reach` or -`reach`."""
    fields = token_fields(seed, torch.float32, per_token=True)
    sign = torch.ones(len(_LENGTHS), TOKENS)
    sign[1] = -1.0
    sign[3:, ::2] = -1.0
    high, low = torch.tensor(-0.1), torch.tensor(-0.1 - reach)
    current, other = torch.where(sign > 0, high, low), torch.where(sign > 0, low, high)
    changes = {"logps": current, "old_logps": other, "ref_logps": other.clone(), "sampler_logps": current.clone()}
    changes["full_kl"] = changes["teacher_kl"] = torch.full_like(current, reach)
    changes["teacher_logps"] = other.clone()
    return with_rubbish(fields | changes)


def with_rubbish(fields: Mapping[str, Any], shift: int = 0) -> Fields:
    """The fields with NaN, infinities and huge numbers at padding; another `shift` puts others."""
    dead = ~fields["mask"]
    count = torch.arange(dead.numel()).view(dead.shape) + shift
    rubbish = torch.tensor(_RUBBISH)[count % len(_RUBBISH)]
    changed = dict(fields)
    for name, value in fields.items():
        over = isinstance(value, Tensor) and name != "mask" and value.is_floating_point()
        if over and value.shape == dead.shape:
            changed[name] = torch.where(dead, rubbish.to(value.dtype), value)
    return changed


def widened(fields: Mapping[str, Any], by: int = 5) -> Fields:
    """The same completions with more padding, full of rubbish."""
    shape = fields["mask"].shape
    wide = {
        name: torch.nn.functional.pad(value, (0, by))
        if isinstance(value, Tensor) and value.shape == shape and value.dim() == 2
        else value
        for name, value in fields.items()
    }
    return with_rubbish(wide, shift=1)


def token_batch(fields: Mapping[str, Any], keep: Collection[str] | None = None) -> tuple[TokenBatch, dict[str, Tensor]]:
    """A `TokenBatch`, and the leaves whose gradient can be looked at. `keep`: leave out all optional fields but these."""
    leaves = {name: fields[name].detach().clone() for name in ("logps", *sorted(fields_where(gradient=True)))}
    if not torch.is_inference_mode_enabled():
        for leaf in leaves.values():
            leaf.requires_grad_()
    values = _copied(fields) | leaves
    always = {"logps", "old_logps", "advantages", "mask", "step"}
    return TokenBatch.of(
        **{name: v for name, v in values.items() if keep is None or name in always | set(keep)}
    ), leaves


def scale_of(mask: Tensor, accumulation: float = 1.0) -> LossScale:
    """The scale of a window that is this one micro-batch, whatever its padding."""
    return LossScale(accumulation, mask.sum(), TOKENS)


@torch.inference_mode(False)
def reward_fields(seed: int, dtype: torch.dtype = torch.float64) -> Fields:
    """Every field of a `RewardBatch`: groups of 5, 4, 1 and 2, interleaved; two rewards unknown, one without tokens."""
    group = torch.tensor([7, 3, 7, 3, 7, 12, 7, 3, 7, 3, 5, 5])
    size = group.shape[0]
    draw = Draw(size, TOKENS, seed)
    mask = _mask().repeat(3, 1)[:size]
    mask[9, 0] = True  # the scored members of every group have some tokens
    fields: Fields = {name: spec.sample(draw) for name, spec in REWARD_FIELDS.items()}
    components = fields["components"]
    components[1, 2] = components[6] = torch.nan
    components[10] = torch.nan
    weights = torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    rewards = (components.nan_to_num(0.0) * weights).sum(1)
    rewards[[6, 10]] = torch.nan
    fields |= {"rewards": rewards, "component_weights": weights}
    fields = {name: value.to(dtype) for name, value in fields.items()}
    return with_rubbish(fields | {"group": group, "lengths": mask.sum(1), "mask": mask, "step": 0})


def reward_batch(fields: Mapping[str, Any], keep: Collection[str] | None = None) -> RewardBatch:
    """A `RewardBatch`. `keep`: leave out all optional fields but these."""
    names = None if keep is None else {"rewards", "group", "step", *keep}
    if names is not None and any(spec.shape == "(B, T)" for name, spec in REWARD_FIELDS.items() if name in names):
        names.add("mask")
    if names is not None and "components" in names:
        names.add("component_weights")
    values = _copied(fields)
    return RewardBatch(**{name: value for name, value in values.items() if names is None or name in names})


def rows(fields: Mapping[str, Any], order: Tensor) -> Fields:
    """The completions of a `RewardBatch` in another order."""
    size = fields["rewards"].shape[0]
    return {
        name: value[order] if isinstance(value, Tensor) and value.shape[:1] == (size,) else value
        for name, value in fields.items()
    }


def _copied(fields: Mapping[str, Any]) -> Fields:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in fields.items()}


def _mask() -> Tensor:
    mask = torch.arange(TOKENS) < torch.tensor(_LENGTHS)[:, None]
    mask[0, 2] = mask[3, 0] = False
    return mask


# --- the calls that a hook must be able to take -----------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32)


def cases(kind: str, seed: int, keep: Collection[str] | None = None) -> Iterator[tuple[Any, ...]]:
    """Arguments of calls that a hook of such a kind must be able to take. `keep`: without optional fields but these."""
    if kind == "advantage":
        for dtype in DTYPES:
            yield (reward_batch(reward_fields(seed, dtype), keep),)
    elif kind == "reduction":
        for dtype in DTYPES:
            per_token, mask = losses(seed, dtype)
            for scale in (scale_of(mask), LossScale(2.0, mask.sum(), TOKENS)):
                yield per_token, mask, scale
    else:
        for fields in variants(seed):
            yield (token_batch(fields, keep)[0],)


def variants(seed: int) -> Iterator[Fields]:
    """Float32 and float64, on and off policy, advantages (B, 1) and (B, T)."""
    for dtype in DTYPES:
        for off_policy in (True, False):
            for per_token in (False, True):
                yield token_fields(seed, dtype, off_policy=off_policy, per_token=per_token)


def kind_of(fields: Fields) -> str:
    """`on policy, float32`, for messages."""
    policy = "on" if torch.equal(fields["logps"][fields["mask"]], fields["old_logps"][fields["mask"]]) else "off"
    return f"{policy} policy, {str(fields['logps'].dtype).removeprefix('torch.')}"


def losses(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """What a reduction is given: a per-token loss (B, T) that is 0 at padding, and the mask."""
    mask = _mask()
    return numbers(mask.shape, seed + 2).to(dtype).masked_fill(~mask, 0.0), mask


def numbers(shape: torch.Size, seed: int) -> Tensor:
    """Normally distributed, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
