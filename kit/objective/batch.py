"""The inputs of hooks: `TokenBatch` for terms of the loss, `RewardBatch` for advantages.

Both are checked when they are built, so that a hook needs no checks of its own. `bounded_exp` computes ratios that neither
overflow nor lose their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kit.errors import ObjectiveError

# --- the table of fields that a hook may ask for ------------------------------------------------------------------------

NO_COST = "nothing worth mentioning"
_NO_TEACHER = "the run has no teacher. Set teacher.model: self, or to a model's folder or hub id"
_NO_REFERENCE = "the run has no reference policy. Set model.reference: base"


class Draw:
    """Random numbers for the samples of `grpo-kit objective check`: B completions of T tokens."""

    def __init__(self, rows: int, tokens: int, seed: int, *, off_policy: bool = True) -> None:
        self.rows, self.tokens, self.off_policy = rows, tokens, off_policy
        self._generator = torch.Generator().manual_seed(seed)
        self.old = -self.normal().abs() - 0.1  # (B, T) nats, log-probabilities at the rollout

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed, float64; (B, T) if no shape is given."""
        return torch.randn(shape or (self.rows, self.tokens), generator=self._generator, dtype=torch.float64)

    def near(self, distance: float) -> Tensor:
        """(B, T) nats: log-probabilities at a distance from `old`."""
        return self.old + distance * self.normal()

    def replaced(self, values: Tensor, row: int, value: float) -> Tensor:
        """The values, with those of one row set to `value`."""
        values[row] = value
        return values


@dataclass(frozen=True)
class Field:
    """A field that a hook may request by `needs`. Checks, sample batches, memory estimates and the trainer read this."""

    shape: Literal["(B, T)", "(B, 1)", "(N,)", "(N, K)"]
    sample: Callable[[Draw], Tensor]  # values for `grpo-kit objective check`
    remedy: str  # message for a batch without it: the cause, and what to do
    cost: str = NO_COST  # additional work of a run that computes it
    source: str | Callable[[Any], Tensor | None] | None = None
    """Key of the trainer's micro-batch, or a function of it; None: the trainer computes it in the scoring pass."""
    gradient: bool = False  # whether it carries a gradient to the policy
    hidden: bool = False  # whether it is computed from hidden states (N, H), which are kept for it
    model: Literal["reference", "teacher"] | None = None  # the other model that it needs
    dtype: torch.dtype | None = None  # None: a floating point number


TOKEN_FIELDS: dict[str, Field] = {
    "ref_logps": Field(
        "(B, T)",
        lambda draw: draw.near(0.3),
        _NO_REFERENCE,
        "one scoring pass of the reference policy per generation batch",
        source="ref_per_token_logps",
        model="reference",
    ),
    "full_kl": Field(
        "(B, T)",
        lambda draw: draw.normal().abs(),
        _NO_REFERENCE,
        "one scoring pass of the reference policy per generation batch, its hidden states kept (B x T x H), and both models' "
        "logits, a slice of the tokens at a time",
        gradient=True,
        hidden=True,
        model="reference",
    ),
    "sampler_logps": Field(
        "(B, T)",
        lambda draw: draw.near(0.2).index_put_((torch.tensor(1), torch.tensor(0)), torch.tensor(torch.nan).double()),
        "the generation engine reported no log-probabilities. Generate with an engine that does",
        "nothing, but it requires an engine that reports them",
        source="sampling_per_token_logps",
    ),
    "entropy": Field(
        "(B, T)",
        lambda draw: (1.0 if draw.off_policy else 0.05) * draw.normal().abs(),
        "the batch carries no entropy. Let the trainer compute it",
        gradient=True,
    ),
    "rewards": Field(
        "(B, 1)",
        lambda draw: torch.tensor([1.0, 0.0, torch.nan, 2.0, 1.0]).resize_(draw.rows, 1),
        "the batch carries no rewards. Let the trainer fill in TokenBatch.rewards",
        source="rewards",
    ),
    "truncated": Field(
        "(B, 1)",
        lambda draw: torch.arange(draw.rows)[:, None] % 3 == 1,
        "the batch does not say which completions were cut. Fill in TokenBatch.truncated",
        source="truncated",
        dtype=torch.bool,
    ),
    "teacher_logps": Field(
        "(B, T)",
        lambda draw: draw.replaced(draw.near(0.3), 3, torch.nan),
        _NO_TEACHER,
        "one scoring pass of the teacher per generation batch",
        source="teacher_logps",
        model="teacher",
    ),
    "teacher_kl": Field(
        "(B, T)",
        lambda draw: draw.replaced(draw.normal().abs(), 3, 0.0),
        _NO_TEACHER,
        "one scoring pass of the teacher per generation batch, its hidden states kept (B x T x H), and both models' logits, a "
        "slice of the tokens at a time",
        gradient=True,
        hidden=True,
        model="teacher",
    ),
}
"""Fields of a `TokenBatch`. An entry added here is read from the micro-batch by its `source` and passed to hooks."""

REWARD_FIELDS: dict[str, Field] = {
    "components": Field(
        "(N, K)",
        lambda draw: draw.normal(draw.rows, 3),
        "the rewards come without their components. Pass RewardBatch.components",
    ),
    "lengths": Field(
        "(N,)",
        lambda draw: torch.arange(1.0, draw.rows + 1),
        "the completions come without their lengths. Pass RewardBatch.lengths",
    ),
    "token_rewards": Field(
        "(B, T)",
        lambda draw: 0.1 * draw.normal(),
        "the rewards are not laid out over tokens. Pass RewardBatch.token_rewards and mask",
    ),
    "values": Field(
        "(B, T)",
        lambda draw: draw.normal(),
        "there is no value head. Let the trainer make one, or pass RewardBatch.values and mask",
        "a linear head on the policy's hidden states, and one scoring pass without gradient per generation batch unless "
        "optimisation.iterations > 1",
        hidden=True,
    ),
    "old_logps": Field(
        "(B, T)",
        lambda draw: draw.old,
        "the rollout was not scored by the policy. Let the trainer do it, or pass RewardBatch.old_logps and mask",
        "one scoring pass of the policy per generation batch unless optimisation.iterations > 1",
    ),
    "teacher_logps": Field(
        "(B, T)",
        lambda draw: draw.replaced(draw.near(0.3), 2, torch.nan),
        _NO_TEACHER,
        "one scoring pass of the teacher per generation batch",
        model="teacher",
    ),
}
"""Fields of a `RewardBatch` that advantages may request."""


def fields_where(**attributes: Any) -> set[str]:
    """Names of the fields of both batches that have these attributes, e.g. `hidden=True`."""
    both = (*TOKEN_FIELDS.items(), *REWARD_FIELDS.items())
    return {name for name, spec in both if all(getattr(spec, key) == value for key, value in attributes.items())}


# --- arithmetic ---------------------------------------------------------------------------------------------------------

LOG_RATIO_LIMIT = 20.0
"""Nats. `bounded_exp` equals `exp` up to this limit. Sums of squares of e^20 = 4.9e8 are finite in float32."""


class _BoundedExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        slope = torch.exp(x.clamp(max=LOG_RATIO_LIMIT))
        ctx.save_for_backward(slope)
        return torch.addcmul(slope, slope, (x - LOG_RATIO_LIMIT).clamp_(min=0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        grown: Tensor = gradient * slope
        return grown


def bounded_exp(x: Tensor) -> Tensor:
    """`exp(x)` up to `LOG_RATIO_LIMIT`, and its tangent line from there on: finite, increasing, convex, smooth.

    A clamp would be finite too, but its gradient is zero: a token far above the limit would never be pulled back.
    Differentiable once.
    """
    # On a CPU, testing the values is cheaper than the tangent's arithmetic. On an accelerator it would synchronise.
    below = x.device.type == "cpu" and x.numel() > 0 and x.detach().amax().item() <= LOG_RATIO_LIMIT
    result: Tensor = torch.exp(x) if below else _BoundedExp.apply(x)  # type: ignore[no-untyped-call]
    return result


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as 0 and 1. The conversion goes through int8, which is five times faster on a CPU."""
    return mask.view(torch.int8).to(dtype)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the live tokens of each row: (B, T), (B, T) bool or 0 and 1 -> (B, 1). Without live tokens: 0."""
    live = mask if mask.is_floating_point() else as_numbers(mask, values.dtype)
    return (values * live).sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp(min=1.0)


@dataclass(frozen=True)
class Divergence:
    """The divergence from the teacher in `TokenBatch.teacher_kl`, between distributions of the next token.

    Args:
        kind: `reverse` KL(policy || teacher), `forward` KL(teacher || policy), or `jensen_shannon`, the mean of the KLs of
            policy and teacher to their even mixture.
        top_k: the number of the policy's likeliest tokens to compare, plus one bin for all others; None: the vocabulary.
    """

    kind: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    top_k: int | None = None

    def __str__(self) -> str:
        return self.kind if self.top_k is None else f"{self.kind}, top {self.top_k}"


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """`B` completions of one micro-batch, `T` completion tokens, right-padded.

    Half precision is converted to float32; float64 stays. At padding (mask False) every field is replaced by 0. This
    keeps `-inf` and NaN of padded positions out of sums and gives masked tokens a gradient of exactly 0, provided that the
    gradient of the hook is finite there (`shielded` does not need that). `sampler_logps` and `teacher_logps` keep NaN
    (unknown) at live positions.

    A completion that was not `scored` has placeholders for the values of the policy (log ratio 0, entropy 0). It counts in
    the denominators of the loss; logged means of the policy's values are over scored completions.

    Raises `ObjectiveError` on a wrong shape or dtype; the message names the field.
    """

    logps: Tensor  # (B, T) nats, current policy, carries gradient
    old_logps: Tensor  # (B, T) nats, policy at rollout; `logps.detach()` on-policy
    advantages: Tensor  # (B, 1) or (B, T)
    mask: Tensor  # (B, T) bool: tokens that train
    ref_logps: Tensor | None = None  # (B, T) nats, reference policy
    sampler_logps: Tensor | None = None  # (B, T) nats, as the generation engine reported them; NaN where unknown
    entropy: Tensor | None = None  # (B, T) nats, of the policy at each token; carries gradient if a term needs it
    full_kl: Tensor | None = None  # (B, T) nats, KL(policy || reference) over the whole vocabulary; carries gradient
    teacher_logps: Tensor | None = (
        None  # (B, T) nats, of the teacher at the rollout; NaN where a completion has no teacher
    )
    teacher_kl: Tensor | None = None  # (B, T) nats, divergence from the teacher; 0 without one; carries gradient
    rewards: Tensor | None = None  # (B, 1) weighted sum of the reward components; NaN where none could score
    truncated: Tensor | None = None  # (B, 1) bool: completions cut at the length limit
    scored: Tensor | None = None  # (B, 1) bool: completions that the policy has scored; None: all
    step: int = 0  # optimiser step
    extra: Mapping[str, Tensor | None] = field(default_factory=dict)  # fields that were added to `TOKEN_FIELDS`
    live: Tensor = field(init=False)  # (B, T) the mask as 0 and 1, in the precision of logps

    @classmethod
    def of(cls, **values: Any) -> TokenBatch:
        """A batch of these fields, including those that were added to `TOKEN_FIELDS`."""
        declared = {f.name for f in fields(cls)}
        declared_values = {name: value for name, value in values.items() if name in declared}
        return cls(**declared_values, extra={name: value for name, value in values.items() if name not in declared})

    def __post_init__(self) -> None:
        if self.logps.dim() != 2:
            raise _wrong_shape("logps", self.logps, "(B, T)")
        full = self.logps.shape
        _check_shape("mask", self.mask, full)
        if self.mask.dtype != torch.bool:
            raise ObjectiveError(f"TokenBatch.mask has dtype {self.mask.dtype}, expected torch.bool. Use mask.bool().")
        # 0 and 1 as numbers: on a CPU a product with them is several times faster than a selection by booleans.
        object.__setattr__(self, "live", as_numbers(self.mask, _at_least_float32("logps", self.logps).dtype))
        self._fill("logps", self.logps)
        _check_shape("old_logps", self.old_logps, full)
        self._fill("old_logps", self.old_logps)
        for name, value in self.extra.items():
            object.__setattr__(self, name, value)
        shapes = {"(B, T)": full, "(B, 1)": torch.Size((full[0], 1))}
        for name, spec in {**TOKEN_FIELDS, "scored": TOKEN_FIELDS["truncated"]}.items():
            value = getattr(self, name)
            if value is None:
                continue
            _check_shape(name, value, shapes[spec.shape])
            if spec.dtype is not None and value.dtype != spec.dtype:
                raise ObjectiveError(f"TokenBatch.{name} has dtype {value.dtype}, expected {spec.dtype}.")
            if spec.shape == "(B, T)":
                self._fill(name, value)
        if self.advantages.shape not in {full, (full[0], 1)}:
            raise _wrong_shape("advantages", self.advantages, f"({full[0]}, 1) or {tuple(full)}")
        if self.advantages.shape == full:
            self._fill("advantages", self.advantages)
        else:
            object.__setattr__(self, "advantages", _at_least_float32("advantages", self.advantages))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in TOKEN_FIELDS:  # an added field that this batch does not have
                return None
            raise AttributeError(f"TokenBatch has no field '{name}'")

    def _fill(self, name: str, value: Tensor) -> None:
        """Sets a field, 0 at padding. On a CPU a product is several times faster than a selection, but it keeps NaN."""
        value = _at_least_float32(name, value)
        if value.device.type == "cpu" and math.isfinite(value.detach().sum().item()):
            object.__setattr__(self, name, value * self.live.to(value.dtype))
        else:
            object.__setattr__(self, name, value.masked_fill(~self.mask, 0.0))

    @cached_property
    def shielded(self) -> TokenBatch:
        """The same batch for custom hooks: masked tokens get exactly no gradient.

        This holds even if the gradient of the hook's own arithmetic is NaN there.
        """
        names = [name for name, spec in TOKEN_FIELDS.items() if spec.gradient and spec.shape == "(B, T)"]
        values = {name: getattr(self, name) for name in ("logps", *names)}
        with torch.enable_grad():
            masked = {name: v.masked_fill(~self.mask, 0.0) for name, v in values.items() if v is not None}
        declared = {name: value for name, value in masked.items() if name not in self.extra}
        return replace(self, **declared, extra={name: masked.get(name, value) for name, value in self.extra.items()})

    # Cached at the first use, with gradient: a later hook may need it although the first one does not.

    @cached_property
    @torch.enable_grad()
    def log_ratio(self) -> Tensor:
        """(B, T) nats: log of current over old policy, 0 at padding."""
        return self.logps - self.old_logps

    @cached_property
    @torch.enable_grad()
    def ratio(self) -> Tensor:
        """(B, T): current over old policy, 1 at padding. Finite for any finite log ratio."""
        return bounded_exp(self.log_ratio)

    @cached_property
    @torch.enable_grad()
    def sequence_ratio(self) -> Tensor:
        """(B, 1): geometric mean of the ratios of a completion's live tokens; 1 when it has none."""
        return bounded_exp(self.log_ratio.sum(-1, keepdim=True) / self.live.sum(-1, keepdim=True).clamp(min=1.0))


@dataclass(frozen=True, eq=False)
class RewardBatch:
    """`N` completions of one generation batch, in groups that share a prompt. Groups may differ in size and order.

    Raises `ObjectiveError` on a wrong shape or dtype, and on an infinite reward.
    """

    rewards: Tensor  # (N,) weighted sum of the reward components; NaN where no component could score
    group: Tensor  # (N,) int64: completions of one prompt share an id
    components: Tensor | None = None  # (N, K) each component; NaN where it could not score
    component_weights: Tensor | None = None  # (K,)
    lengths: Tensor | None = None  # (N,) completion tokens that train
    mask: Tensor | None = None  # (N, T) bool: tokens that train; required by the fields below
    token_rewards: Tensor | None = None  # (N, T) reward at each token; the reward of the completion is at its last one
    values: Tensor | None = None  # (N, T) value before each token, at the rollout
    old_logps: Tensor | None = None  # (N, T) nats, policy at the rollout
    teacher_logps: Tensor | None = None  # (N, T) nats, of the teacher; NaN where there is none
    step: int = 0  # optimiser step

    def __post_init__(self) -> None:
        if self.rewards.dim() != 1:
            raise _wrong_shape("rewards", self.rewards, "(N,)", "RewardBatch")
        size = self.rewards.shape[0]
        object.__setattr__(self, "rewards", _at_least_float32("rewards", self.rewards, "RewardBatch"))
        if torch.isinf(self.rewards).any():
            raise ObjectiveError("RewardBatch.rewards hold infinity. Use NaN for a completion without a score.")
        _check_shape("group", self.group, torch.Size([size]), "RewardBatch")
        if self.group.dtype != torch.int64:
            raise ObjectiveError(f"RewardBatch.group has dtype {self.group.dtype}, expected torch.int64 group ids.")
        if self.lengths is not None:
            _check_shape("lengths", self.lengths, torch.Size([size]), "RewardBatch")
        if self.components is None:
            if self.component_weights is not None:
                raise ObjectiveError("RewardBatch.component_weights need components. Pass both.")
        else:
            if self.components.dim() != 2 or self.components.shape[0] != size:
                raise _wrong_shape("components", self.components, f"({size}, K)", "RewardBatch")
            components = _at_least_float32("components", self.components, "RewardBatch")
            object.__setattr__(self, "components", components)
            if self.component_weights is not None:
                _check_shape("component_weights", self.component_weights, components.shape[1:], "RewardBatch")
        names = [name for name, spec in REWARD_FIELDS.items() if spec.shape == "(B, T)"]
        present = [name for name in names if getattr(self, name) is not None]
        if self.mask is None:
            if present:
                raise ObjectiveError(f"RewardBatch.{present[0]} needs RewardBatch.mask. Pass both.")
            return
        if self.mask.dim() != 2 or self.mask.shape[0] != size or self.mask.dtype != torch.bool:
            actual = f"{tuple(self.mask.shape)} {self.mask.dtype}"
            raise ObjectiveError(f"RewardBatch.mask is {actual}, expected ({size}, T) torch.bool.")
        for name in present:
            value = getattr(self, name)
            _check_shape(name, value, self.mask.shape, "RewardBatch")
            value = _at_least_float32(name, value, "RewardBatch").masked_fill(~self.mask, 0.0)
            object.__setattr__(self, name, value)

    @property
    def scorable(self) -> Tensor:
        """(N,) bool: completions with a reward."""
        return ~torch.isnan(self.rewards)

    def zero_spread(self) -> Tensor:
        """(groups,) bool: groups whose scored completions all have the same reward."""
        ids, index = torch.unique(self.group, return_inverse=True)
        edge = self.rewards.new_full((ids.shape[0],), torch.inf)
        low = edge.scatter_reduce(0, index, self.rewards.nan_to_num(nan=torch.inf), "amin")
        high = (-edge).scatter_reduce(0, index, self.rewards.nan_to_num(nan=-torch.inf), "amax")
        return ~(high > low)


def _at_least_float32(name: str, value: Tensor, owner: str = "TokenBatch") -> Tensor:
    if not value.is_floating_point():
        raise ObjectiveError(f"{owner}.{name} has dtype {value.dtype}, expected a floating point dtype.")
    return value.float() if value.dtype.itemsize < 4 else value


def _check_shape(name: str, value: object, expected: torch.Size, owner: str = "TokenBatch") -> None:
    if not isinstance(value, Tensor):
        raise ObjectiveError(f"{owner}.{name} is {type(value).__name__}, expected a tensor of shape {tuple(expected)}.")
    if value.shape != expected:
        raise _wrong_shape(name, value, str(tuple(expected)), owner)


def _wrong_shape(name: str, value: Tensor, expected: str, owner: str = "TokenBatch") -> ObjectiveError:
    return ObjectiveError(f"{owner}.{name} has shape {tuple(value.shape)}, expected {expected}.")
