"""Check a hook on random batches with `check_hook`. Nothing is trained.

docs/objective.md lists the checks of each kind of hook.

Schedules are at step 0. The state of a hook is restored before every call: with the same state a hook must be deterministic,
or runs could not be resumed.

Inputs are small and ragged: five completions of up to nine tokens, one with a hole (as after a tool call), one with a single
token, one without live tokens. Values that no hook may use are NaN, infinite or huge. Fields are those of a trainer, before
`TokenBatch` cleans them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kit.errors import KitError, ObjectiveError
from kit.objective.batch import REWARD_FIELDS, TOKEN_FIELDS, Draw, RewardBatch, TokenBatch, fields_where
from kit.objective.hook import Hook, call_on_tokens
from kit.objective.objective import Objective, call_on_losses
from kit.objective.reduction import LossScale

__all__ = ["Finding", "check_hook", "require_sound"]

EXACT = 1e-9
"""Relative tolerance for sums in another order."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. A `note` is no failure."""

    name: str
    passed: bool
    detail: str
    note: bool = False

    @property
    def result(self) -> str:
        """passed, failed or note."""
        return ("note" if self.note else "passed") if self.passed else "failed"


class Fault(Exception):
    """Raised by a check that fails, with the reason."""


class Note(str):
    """The detail of a check that passed with a note."""


def check_hook(hook: Hook, seed: int = 0) -> list[Finding]:
    """Check a hook of any kind on random batches, as in docs/objective.md. Takes a tenth of a second.

    If the hook does not run at all, there is only that finding. Exceptions of the hook become findings.
    """
    subject = Subject(hook, seed)
    findings: list[Finding] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for name, check in CHECKS[hook.kind].items():
            try:
                detail = check(subject)
                if detail is not None:
                    findings.append(Finding(name, True, str(detail), isinstance(detail, Note)))
            except (Fault, KitError) as fault:
                findings.append(Finding(name, False, str(fault)))
            except Exception as error:
                findings.append(Finding(name, False, f"{type(error).__name__}: {error}"))
            if name == "runs" and not findings[0].passed:
                break
    subject.restore()
    return findings


def require_sound(objective: Objective, checks: Collection[str] = ("runs", "direction")) -> None:
    """Try the user's own hooks on random batches. Raises `ObjectiveError` for a hook that fails one of `checks`."""
    for _, hook in objective.hooks:
        for finding in check_hook(hook) if hook.factory.custom else ():
            if finding.name in checks and not finding.passed:
                raise ObjectiveError(
                    f"{hook.title} fails on a random batch: {finding.detail} Try it alone: grpo-kit objective check "
                    f"{hook.name} --kind {hook.kind}"
                )


# --- random inputs -----------------------------------------------------------------------------------------------------

Fields = dict[str, Any]

TOKENS = 9
_LENGTHS = (TOKENS, 5, 1, 7, 0)
_INVALID = (torch.nan, torch.inf, -torch.inf, 1e30)


@torch.inference_mode(False)
def token_fields(
    seed: int, dtype: torch.dtype = torch.float64, *, off_policy: bool = True, per_token: bool = False
) -> Fields:
    """All fields of a `TokenBatch`. On-policy ones have little entropy, so that a lower bound of it has an effect."""
    mask, draw = _mask(), Draw(len(_LENGTHS), TOKENS, seed, off_policy=off_policy)
    fields: Fields = {
        "logps": draw.near(0.4) if off_policy else draw.old.clone(),
        "old_logps": draw.old,
        "advantages": draw.normal() if per_token else draw.normal(draw.rows, 1),
        **{name: spec.sample(draw) for name, spec in TOKEN_FIELDS.items()},
    }
    fields = {name: value.to(dtype) if value.is_floating_point() else value for name, value in fields.items()}
    return with_invalid_padding(fields | {"mask": mask, "step": 0})


def extreme_fields(seed: int, reach: float = 80.0) -> Fields:
    """Float32 fields whose log ratios to the old, the reference and the engine's policy are `reach` or -`reach`."""
    fields = token_fields(seed, torch.float32, per_token=True)
    sign = torch.ones(len(_LENGTHS), TOKENS)
    sign[1] = -1.0
    sign[3:, ::2] = -1.0
    high, low = torch.tensor(-0.1), torch.tensor(-0.1 - reach)
    current, other = torch.where(sign > 0, high, low), torch.where(sign > 0, low, high)
    changes = {"logps": current, "old_logps": other, "ref_logps": other.clone(), "sampler_logps": current.clone()}
    changes["full_kl"] = changes["teacher_kl"] = torch.full_like(current, reach)
    changes["teacher_logps"] = other.clone()
    return with_invalid_padding(fields | changes)


def with_invalid_padding(fields: Mapping[str, Any], shift: int = 0) -> Fields:
    """The fields with NaN, infinities and huge numbers at padding, which depend on `shift`."""
    dead = ~fields["mask"]
    count = torch.arange(dead.numel()).view(dead.shape) + shift
    invalid = torch.tensor(_INVALID)[count % len(_INVALID)]
    changed = dict(fields)
    for name, value in fields.items():
        has_padding = isinstance(value, Tensor) and name != "mask" and value.is_floating_point()
        if has_padding and value.shape == dead.shape:
            changed[name] = torch.where(dead, invalid.to(value.dtype), value)
    return changed


def widened(fields: Mapping[str, Any], by: int = 5) -> Fields:
    """The same completions with more padding."""
    shape = fields["mask"].shape
    wide = {
        name: torch.nn.functional.pad(value, (0, by))
        if isinstance(value, Tensor) and value.shape == shape and value.dim() == 2
        else value
        for name, value in fields.items()
    }
    return with_invalid_padding(wide, shift=1)


def token_batch(fields: Mapping[str, Any], keep: Collection[str] | None = None) -> tuple[TokenBatch, dict[str, Tensor]]:
    """A `TokenBatch`, and the leaf tensors of its gradients. `keep` has the optional fields to include; None: all."""
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
    """The scale of a window with one micro-batch, independent of its padding."""
    return LossScale(accumulation, mask.sum(), TOKENS)


@torch.inference_mode(False)
def reward_fields(seed: int, dtype: torch.dtype = torch.float64) -> Fields:
    """All fields of a `RewardBatch`: groups of 5, 4, 1 and 2, interleaved; two rewards are unknown, one row has no tokens."""
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
    return with_invalid_padding(fields | {"group": group, "lengths": mask.sum(1), "mask": mask, "step": 0})


def reward_batch(fields: Mapping[str, Any], keep: Collection[str] | None = None) -> RewardBatch:
    """A `RewardBatch`. `keep` has the optional fields to include; None: all."""
    names = None if keep is None else {"rewards", "group", "step", "mask", *keep}
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


DTYPES = (torch.float64, torch.float32)


def cases(kind: str, seed: int, keep: Collection[str]) -> Iterator[tuple[Any, ...]]:
    """Arguments for calls of a hook of this kind. `keep` has the optional fields to include."""
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
    """Arguments of a reduction: a per-token loss (B, T) that is 0 at padding, and the mask."""
    mask = _mask()
    return numbers(mask.shape, seed + 2).to(dtype).masked_fill(~mask, 0.0), mask


def numbers(shape: torch.Size, seed: int) -> Tensor:
    """Normally distributed numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the hook under test ----------------------------------------------------------------------------------------------


class Subject:
    """The hook under test.

    Calling it calls the hook with its initial state and the checks for a user's own hook. Raises `ObjectiveError` if they
    fail.
    """

    def __init__(self, hook: Hook, seed: int) -> None:
        self.hook, self.kind, self.seed = hook, hook.kind, seed
        self.silent = hook.kind == "regularizer" and hook.values["coef"] == 0.0  # only logged, without gradient
        self._contracted = copy.copy(hook)
        self._contracted.factory = replace(hook.factory, custom=True)
        self._state = {key: copy.deepcopy(part.state_dict()) for key, part in hook.stateful().items()}
        muted = hook.kind == "regularizer" and hook.coef_at(0) == 0.0 and not self.silent
        louder = hook.factory(**hook.values | {"coef": 1.0}) if muted else hook
        many = {"weight": "weights", "regularizer": "regularizers"}.get(hook.kind)
        # An objective with the hook, whose other parts do not change its effect.
        plain: dict[str, Any] = {"advantage": "group_mean", "clip": "reinforce", "reduction": "global_token_mean"}
        self.objective = Objective(**plain | ({many: [louder]} if many else {hook.kind: louder}))

    def restore(self) -> None:
        """Restore the initial state of the hook."""
        for key, part in self.hook.stateful().items():
            part.load_state_dict(copy.deepcopy(self._state[key]))

    def __call__(self, *arguments: Any) -> Tensor:
        self.restore()
        if self.kind == "advantage":
            return self.objective.compute_advantages(*arguments)
        if self.kind == "reduction":
            return call_on_losses(self._contracted, *arguments)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.silent):
            return call_on_tokens(self._contracted, *arguments)

    def cases(self) -> Iterator[tuple[Any, ...]]:
        """Arguments for calls of the hook, with the fields that it declares."""
        return cases(self.kind, self.seed, self.hook.needs)

    def loss(self, fields: Fields, scale: LossScale | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of an objective with this hook, and the leaf tensors of its batch."""
        self.restore()
        batch, leaves = token_batch(fields)
        return self.objective.loss(batch, scale or scale_of(fields["mask"])).loss, leaves

    def advantages(self, fields: Fields) -> Tensor:
        """The advantages of the objective, 0 at tokens that do not train."""
        advantages = self(reward_batch(fields))
        return advantages if advantages.dim() == 1 else advantages.masked_fill(~fields["mask"], 0.0)


Check = Callable[[Subject], str | None]  # returns the detail, None if it does not apply; raises `Fault`


# --- comparisons ------------------------------------------------------------------------------------------------------


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bit-identical; NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _require_close(
    a: Tensor, b: Tensor, message: str, hint: str = "Count with the mask, not with the number of columns."
) -> None:
    """Raise `Fault` if two tensors differ by more than rounding."""
    if a.shape != b.shape or not torch.allclose(a, b, rtol=EXACT, atol=EXACT, equal_nan=True):
        raise Fault(f"{message}. {hint}")


def _require_finite(values: Tensor, where: str) -> None:
    if not torch.isfinite(values).all():
        raise Fault(f"NaN or infinity {where}. Bound exponents and denominators.")


def _gradients(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the sum of `out` for each leaf on which it depends."""
    gradients = torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}


def _over_tokens(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of shape (B, T)."""
    return {name: gradient for name, gradient in _gradients(loss, leaves).items() if gradient.dim() == 2}


# --- hooks of every kind ----------------------------------------------------------------------------------------------


def _runs(subject: Subject) -> str:
    for arguments in subject.cases():
        out = subject(*arguments)
    if subject.kind in ("clip", "regularizer"):
        subject.loss(next(variants(subject.seed)))  # also calls `clipped` and `metrics`
    return f"finite, shape {tuple(out.shape)}, in float32 and float64"


def _same_again(subject: Subject) -> str:
    first, second = ([subject(*arguments) for arguments in subject.cases()] for _ in range(2))
    if not all(map(_equal, first, second)):
        raise Fault(
            "returns another result the second time, so that a run could be neither repeated nor resumed. Use a generator "
            "seeded with batch.step, or save changing values with state_dict() and load_state_dict()."
        )
    return "bit-identical"


# --- gradients --------------------------------------------------------------------------------------------------------


def _gradient(subject: Subject) -> str | None:
    if subject.silent:
        return Note("coef is 0, so it is only logged")
    reached: set[str] = set()
    for fields in variants(subject.seed):
        batch, leaves = token_batch(fields)
        for name, slope in _gradients(subject(batch), leaves).items():
            _require_finite(slope, f"in the gradient to {name}, {kind_of(fields)}")
            reached |= {name} if slope.any() else set()
    if subject.kind == "clip" and "logps" not in reached:
        raise Fault("the gradient to logps is 0 at every token of every batch, so the policy would not change.")
    if not reached:
        return Note(
            f"there is one, but it is 0 at every token of these small batches ({TOKENS} tokens, rewards 0 to 2)"
        )
    return f"to {', '.join(sorted(reached))}"


def _gradient_of_reduction(subject: Subject) -> str:
    per_token, mask = losses(subject.seed)
    out = subject(per_token.requires_grad_(), mask, scale_of(mask))
    (slope,) = torch.autograd.grad(out, per_token)
    _require_finite(slope, "in the gradient to per_token")
    lost, live = int((mask & (slope == 0)).sum()), int(mask.sum())
    if lost == live:
        raise Fault("the gradient is 0 at every token, so the policy would not change.")
    return Note(f"{lost} of {live} live tokens get no gradient") if lost else "to every live token"


# --- terms of the loss ------------------------------------------------------------------------------------------------


def _masked_tokens(subject: Subject) -> str:
    for fields in variants(subject.seed):
        loss, leaves = subject.loss(fields)
        other, _ = subject.loss(with_invalid_padding(fields, shift=2))
        if not _equal(loss, other):
            raise Fault("values at masked tokens change the loss.")
        for name, slope in _over_tokens(loss, leaves).items():
            if not (slope[~fields["mask"]] == 0).all():
                raise Fault(f"masked tokens get a gradient to {name}.")
    return "gradient exactly 0, no influence on the loss"


def _padding(subject: Subject) -> str:
    for per_token in (False, True):
        fields = token_fields(subject.seed, per_token=per_token)
        (loss, leaves), (wide, wide_leaves) = subject.loss(fields), subject.loss(widened(fields))
        _require_close(wide, loss, "more padding changes the loss")
        slopes, wide_slopes = _over_tokens(loss, leaves), _over_tokens(wide, wide_leaves)
        for name, slope in slopes.items():
            _require_close(wide_slopes[name][:, :TOKENS], slope, f"more padding changes the gradient to {name}")
            if wide_slopes[name][:, TOKENS:].any():
                raise Fault(f"padding gets a gradient to {name}.")
    return "more padding changes neither loss nor gradient"


def _extreme_ratios(subject: Subject) -> str:
    for flip in (1.0, -1.0):
        fields = extreme_fields(subject.seed)
        fields["advantages"] = flip * fields["advantages"]
        batch, leaves = token_batch(fields)
        out = subject(batch)
        if out.requires_grad and subject.kind != "weight":
            for name, slope in _gradients(out, leaves).items():
                _require_finite(slope, f"in the gradient to {name} at log ratios of ±80 nats in float32")
    return "finite at log ratios of ±80 nats in float32"


def _empty(subject: Subject) -> str:
    micro_batch = "a micro-batch whose tokens are all masked"
    for window in (0.0, 5.0):
        fields = token_fields(subject.seed)
        fields = with_invalid_padding(fields | {"mask": torch.zeros_like(fields["mask"])})
        loss, leaves = subject.loss(fields, LossScale(1.0, window, TOKENS))
        if loss != 0:
            raise Fault(f"{micro_batch} has the loss {float(loss):g}, not 0.")
        for name, slope in _over_tokens(loss, leaves).items():
            if not (slope == 0).all():
                raise Fault(f"{micro_batch} gives a gradient to {name}.")
    return "a differentiable 0"


def _slopes_on_policy(subject: Subject) -> tuple[tuple[Tensor, ...], list[Tensor]] | None:
    """Advantages, their negatives and others, and the gradients to logps (B, T) that they give; None without a gradient."""
    fields = token_fields(subject.seed, off_policy=False)
    original = fields["advantages"]
    variations = (original, -original, numbers(original.shape, subject.seed + 1))
    slopes = []
    for advantages in variations:
        loss, leaves = subject.loss(fields | {"advantages": advantages})
        if not loss.requires_grad:
            return None
        slopes.append(_over_tokens(loss, leaves).get("logps", torch.zeros_like(fields["logps"])))
    return variations, slopes


def _advantage(subject: Subject) -> str:
    """Whether the gradient of the loss depends on the advantages on policy."""
    if (result := _slopes_on_policy(subject)) is None:
        return Note("skipped, because there is no gradient")
    slopes = result[1]
    if not any(slope.any() for slope in slopes):
        return Note("not checked: on policy the gradient is 0 at every token, so the first step would change nothing")
    if all(_equal(slope, slopes[0]) for slope in slopes):
        raise Fault(
            "ignores batch.advantages: on policy the gradient does not depend on them, so no reward is learned."
        )
    return "on policy the gradient depends on them"


def _direction_of_loss(subject: Subject) -> str | None:
    """Whether a positive advantage raises the probability of a token on policy."""
    if (result := _slopes_on_policy(subject)) is None:
        return None
    pairs = list(zip(*result, strict=True))[:2]  # as many positive as negative advantages
    moved = torch.cat([(slope * advantages)[slope != 0] for advantages, slope in pairs])
    right, total = int((moved < 0).sum()), moved.numel()
    if total == 0:
        return None
    if right == 0:
        raise Fault("a positive advantage lowers the probability of every token. Change the sign of the loss.")
    if 2 * right <= total:
        return Note(f"a positive advantage lowers the probability at {total - right} of {total} tokens.")
    return f"a positive advantage raises the probability, and a negative one lowers it, at {right} of {total} tokens"


# --- reductions -------------------------------------------------------------------------------------------------------


def _accumulation(subject: Subject) -> str:
    """Compare two micro-batches of two full completions with one of all four, where all kinds of means agree."""
    per_token = numbers(torch.Size([4, TOKENS]), subject.seed + 3)
    mask = torch.ones_like(per_token, dtype=torch.bool)
    combined = subject(per_token, mask, scale_of(mask))
    halves = sum(subject(per_token[i : i + 2], mask[i : i + 2], LossScale(2.0, mask.sum(), TOKENS)) for i in (0, 2))
    factor = float(halves / combined)
    if abs(factor - 1.0) > EXACT:
        return Note(
            f"two micro-batches of two completions add up to {factor:.3g} times the loss of one of four: the gradient "
            f"depends on gradient accumulation. Divide by scale.accumulation or by scale.window_tokens."
        )
    return "two micro-batches add up to the loss of one"


# --- advantages -------------------------------------------------------------------------------------------------------


def _unscorable(subject: Subject) -> str:
    fields = reward_fields(subject.seed)
    unknown = fields["rewards"].isnan()
    original = subject.advantages(fields)
    changed = dict(fields)
    for name in REWARD_FIELDS.keys() - {"lengths"}:
        value = fields[name].clone()
        value[unknown] = value[unknown] + 3.0
        changed[name] = value
    if not _equal(original, subject.advantages(changed)):
        raise Fault("values of a completion without a reward (NaN) change the advantages of others.")
    return "a completion without a reward has advantage 0 and no influence"


def _order(subject: Subject) -> str:
    fields = reward_fields(subject.seed)
    order = torch.randperm(fields["rewards"].shape[0], generator=torch.Generator().manual_seed(subject.seed))
    renamed = rows(fields, order)
    renamed["group"] = 100 - renamed["group"]
    _require_close(
        subject.advantages(renamed),
        subject.advantages(fields)[order],
        "another order of the completions, or other group ids, change the advantages",
        "Identify groups by batch.group, not by position.",
    )
    return "groups may be interleaved, in any order"


def _direction(subject: Subject) -> str:
    """Whether a higher reward in a group gives a higher advantage."""
    fields = reward_fields(subject.seed)
    values, rewards = subject.advantages(fields), fields["rewards"]
    values = values if values.dim() == 1 else (values * fields["mask"]).sum(1) / fields["mask"].sum(1).clamp(min=1)
    # [i, j]: i has the higher reward
    pairs = (fields["group"][:, None] == fields["group"]) & (rewards[:, None] > rewards)
    differences = (values[:, None] - values)[pairs]
    higher, lower = int((differences > 0).sum()), int((differences < 0).sum())
    if lower and not higher:
        raise Fault("a higher reward gives a lower advantage in every pair of a group. Change the sign.")
    return f"the higher reward has the higher advantage in {higher} of {len(differences)} pairs of a group"


def _padding_of_advantages(subject: Subject) -> str:
    fields = reward_fields(subject.seed)
    length = fields["mask"].shape[1]
    original = subject.advantages(fields)
    for other in (with_invalid_padding(fields, shift=2), widened(fields)):
        result = subject.advantages(other)
        _require_close(
            result if result.dim() == 1 else result[:, :length], original, "more padding changes the advantages"
        )
    return "more padding changes nothing"


def _no_spread(subject: Subject) -> str:
    for dtype in DTYPES:
        fields = reward_fields(subject.seed, dtype)
        known = fields["rewards"].isfinite()
        for rewards in (torch.where(known, 0.5, torch.nan), torch.full_like(fields["rewards"], torch.nan)):
            same = fields | {"rewards": rewards.to(dtype), "components": torch.ones_like(fields["components"])}
            subject(reward_batch(same))
        subject(reward_batch(rows(fields, torch.tensor([0]))))
    return "finite for equal rewards, for groups of one, and without any reward"


# --- the checks by kind -----------------------------------------------------------------------------------------------

_OF_EVERY_HOOK: dict[str, Check] = {"runs": _runs, "same again": _same_again}
_OF_A_TERM: dict[str, Check] = {
    "masked tokens": _masked_tokens, "padding": _padding, "extreme ratios": _extreme_ratios, "empty micro-batch": _empty,
}  # fmt: skip

CHECKS: dict[str, dict[str, Check]] = {
    "advantage": {
        **_OF_EVERY_HOOK,
        "unscorable": _unscorable,
        "order": _order,
        "direction": _direction,
        "padding": _padding_of_advantages,
        "no spread": _no_spread,
    },
    "clip": {
        **_OF_EVERY_HOOK,
        "gradient": _gradient,
        **_OF_A_TERM,
        "advantage": _advantage,
        "direction": _direction_of_loss,
    },
    "weight": {**_OF_EVERY_HOOK, **_OF_A_TERM},
    "regularizer": {**_OF_EVERY_HOOK, "gradient": _gradient, **_OF_A_TERM},
    "reduction": {
        **_OF_EVERY_HOOK,
        "gradient": _gradient_of_reduction,
        "masked tokens": _masked_tokens,
        "padding": _padding,
        "empty micro-batch": _empty,
        "accumulation": _accumulation,
    },
}
