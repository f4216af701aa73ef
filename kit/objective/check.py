"""Is a hook sound? `check_hook` tries it on random batches and says what it found; nothing is trained.

    finding             what must hold                                                     kinds of hook
    runs                the contract of a run (`hook.checked`): shape, finite, gradient;   all
                        float32 and float64, on and off policy, advantages (B, 1) and
                        (B, T); `clipped` and `metrics` of its function
    needs               runs on a batch that holds no more than it declares                all but reductions
    same again          same inputs, same output                                           all
    gradient            reaches what it should                                             clip, regularizer, reduction
    finite differences  autograd gives the derivative of the value, in float64             clip, regularizer, reduction
    masked tokens       gradient exactly 0, no influence, through an objective             all but advantages
    padding             more of it changes nothing                                         all
    extreme ratios      finite, gradient too, at log ratios of ±80 nats in float32         clip, weight, regularizer
    empty micro-batch   gives a differentiable 0                                           all but advantages
    advantage           it moves the gradient, on policy; a note if in the wrong direction clip
    accumulation        a note if micro-batches do not add up to the batch                 reduction
    unscorable          a NaN reward: advantage 0, and no influence on others              advantage
    order               groups interleaved, in any order, of any ids                       advantage
    no spread           finite where rewards are equal or unknown, and for one completion  advantage

Schedules stand at step 0. State that a hook keeps is put back before every call: with it a hook must be deterministic,
or no run could be resumed.

Finite differences (`torch.autograd.gradcheck`): a hook may cut the graph on purpose, as cispo does with its weight. So a
gradient that is not that of the value is a note and no failure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kit.errors import KitError
from kit.objective import check_inputs as inputs
from kit.objective.batch import REWARD_FIELDS, TOKEN_FIELDS, TokenBatch
from kit.objective.check_inputs import TOKENS, Fields
from kit.objective.hook import Hook, call_on_tokens
from kit.objective.objective import Objective, call_on_losses
from kit.objective.reduction import LossScale

__all__ = ["Finding", "check_hook"]

EXACT = 1e-9
"""Relative: of sums in another order."""


@dataclass(frozen=True)
class Finding:
    """What one check found. A `note` is worth knowing and no failure."""

    name: str
    passed: bool
    detail: str
    note: bool = False

    @property
    def result(self) -> str:
        """passed, failed or note."""
        return ("note" if self.note else "passed") if self.passed else "failed"


class Fault(Exception):
    """A check failed; the message says how."""


class Note(str):
    """The detail of a check that passed, but is worth a second look."""


def check_hook(hook: Hook, seed: int = 0) -> list[Finding]:
    """Tries a hook of any kind on random batches, with the checks of docs/objective.md. Takes a tenth of a second.

    If it does not run at all, that is the only finding. Raises nothing that the hook raises: that is a finding, too.
    """
    subject = Subject(hook, seed)
    findings: list[Finding] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for name, check in CHECKS[hook.kind].items():
            finding = _tried(name, check, subject)
            findings += [finding] if finding else []
            if name == "runs" and not findings[0].passed:
                break
    subject.restore()
    return findings


def _tried(name: str, check: Check, subject: Subject) -> Finding | None:
    try:
        detail = check(subject)
    except (Fault, KitError) as fault:
        return Finding(name, False, str(fault))
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")
    return None if detail is None else Finding(name, True, str(detail), isinstance(detail, Note))


# --- the hook that is looked at, and what it is called with -----------------------------------------------------------


class Subject:
    """The hook that is looked at.

    Calling it calls the hook as a run calls a user's own, from the state in which it was handed over. Raises
    `ObjectiveError` where the contract is broken.
    """

    def __init__(self, hook: Hook, seed: int) -> None:
        self.hook, self.kind, self.seed = hook, hook.kind, seed
        self.silent = hook.kind == "regularizer" and hook.values["coef"] == 0.0  # only logged: no gradient is asked for
        self._contracted = copy.copy(hook)
        self._contracted.factory = replace(hook.factory, custom=True)
        self._state = {key: copy.deepcopy(part.state_dict()) for key, part in hook.stateful().items()}
        muted = hook.kind == "regularizer" and hook.coef_at(0) == 0.0 and not self.silent
        louder = hook.factory(**hook.values | {"coef": 1.0}) if muted else hook
        many = {"weight": "weights", "regularizer": "regularizers"}.get(hook.kind)
        # An objective around the hook, of parts that hide nothing.
        plain: dict[str, Any] = {"advantage": "group_mean", "clip": "reinforce", "reduction": "global_token_mean"}
        self.objective = Objective(**plain | ({many: [louder]} if many else {hook.kind: louder}))

    def restore(self) -> None:
        """Puts back the state that the hook had at first."""
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

    def cases(self, keep: Collection[str] | None = None) -> Iterator[tuple[Any, ...]]:
        """Arguments of calls that it must be able to take. `keep`: without optional fields of the batch but these."""
        return inputs.cases(self.kind, self.seed, keep)

    def loss(self, fields: Fields, scale: LossScale | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of an objective with this hook in it, and the leaves of its batch."""
        self.restore()
        batch, leaves = inputs.token_batch(fields)
        return self.objective.loss(batch, scale or inputs.scale_of(fields["mask"])).loss, leaves

    def advantages(self, fields: Fields) -> Tensor:
        """The advantages as an objective passes them on; 0 at tokens that do not train."""
        advantages = self(inputs.reward_batch(fields))
        return advantages if advantages.dim() == 1 else advantages.masked_fill(~fields["mask"], 0.0)


Check = Callable[[Subject], str | None]  # the detail, None where it does not apply; raises `Fault`


# --- comparisons ------------------------------------------------------------------------------------------------------


def _equal(a: Tensor, b: Tensor) -> bool:
    """To the last bit; NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _alike(a: Tensor, b: Tensor, what: str, hint: str = "Count with the mask, not with the number of columns.") -> None:
    """Raises `Fault` where two tensors differ by more than rounding."""
    if a.shape != b.shape or not torch.allclose(a, b, rtol=EXACT, atol=EXACT, equal_nan=True):
        raise Fault(f"{what}. {hint}")


def _require_finite(values: Tensor, where: str) -> None:
    if not torch.isfinite(values).all():
        raise Fault(f"NaN or infinity {where}. Bound what is exponentiated, and what is divided by.")


def _gradients(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """d (sum of `out`) by each leaf that it depends on."""
    gradients = torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}


def _over_tokens(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of these gradients those over tokens (B, T)."""
    return {name: gradient for name, gradient in _gradients(loss, leaves).items() if gradient.dim() == 2}


# --- hooks of every kind ----------------------------------------------------------------------------------------------


def _runs(subject: Subject) -> str:
    for arguments in subject.cases():
        out = subject(*arguments)
    if subject.kind in ("clip", "regularizer"):
        subject.loss(next(inputs.variants(subject.seed)))  # calls what its function reports, too
    return f"finite, shape {tuple(out.shape)}, in float32 and float64"


def _needs(subject: Subject) -> str:
    known = set(REWARD_FIELDS if subject.kind == "advantage" else TOKEN_FIELDS)
    needs = set(subject.hook.needs)

    def error_with(fields: set[str]) -> Exception | None:
        try:
            subject(*next(subject.cases(fields)))
        except Exception as error:
            return error
        return None

    error = error_with(needs)
    if error is not None:
        lacking = [name for name in sorted(known - needs) if error_with(known - {name}) is not None]
        if not lacking:
            raise error
        names = ", ".join(f"'{name}'" for name in lacking)
        raise Fault(
            f"reads {', '.join(lacking)} without declaring it; a run fills in only what is declared. Set "
            f"function.needs = {{{names}}}. ({error})"
        )
    return f"needs {', '.join(sorted(needs))}" if needs else "needs nothing beyond what every batch has"


def _same_again(subject: Subject) -> str:
    first, second = ([subject(*arguments) for arguments in subject.cases()] for _ in range(2))
    if not all(map(_equal, first, second)):
        raise Fault(
            "gives something else the second time: a run could be neither repeated nor resumed. Draw from a generator "
            "seeded with batch.step, or keep what changes in state_dict() and load_state_dict()."
        )
    return "to the last bit"


# --- gradients --------------------------------------------------------------------------------------------------------


def _gradient(subject: Subject) -> str | None:
    if subject.silent:
        return Note("its coef is 0, so it is only logged")
    reached: set[str] = set()
    for fields in inputs.variants(subject.seed):
        batch, leaves = inputs.token_batch(fields)
        for name, slope in _gradients(subject(batch), leaves).items():
            _require_finite(slope, f"in the gradient to {name}, {inputs.kind_of(fields)}")
            reached |= {name} if slope.any() else set()
    if subject.kind == "clip" and "logps" not in reached:
        raise Fault("the gradient to logps is 0 at every token of every batch: the policy would not move.")
    if not reached:
        return Note(f"attached, but 0 at every token of these small batches ({TOKENS} tokens, rewards 0 to 2)")
    return f"to {', '.join(sorted(reached))}"


def _gradient_of_reduction(subject: Subject) -> str:
    per_token, mask = inputs.losses(subject.seed)
    out = subject(per_token.requires_grad_(), mask, inputs.scale_of(mask))
    (slope,) = torch.autograd.grad(out, per_token)
    _require_finite(slope, "in the gradient to per_token")
    lost, live = int((mask & (slope == 0)).sum()), int(mask.sum())
    if lost == live:
        raise Fault("the gradient is 0 at every token: the policy would not move.")
    return Note(f"{lost} of {live} live tokens get no gradient") if lost else "to every live token"


def _finite_differences(subject: Subject) -> str:
    """`gradcheck` along a random direction of each input, in float64."""
    value: Callable[..., Tensor]
    if subject.kind == "reduction":
        per_token, mask = inputs.losses(subject.seed)
        names, leaves = ("per_token",), (per_token.requires_grad_(),)

        def value(leaf: Tensor) -> Tensor:
            return subject(leaf.masked_fill(~mask, 0.0), mask, inputs.scale_of(mask))

    else:
        fields = inputs.token_fields(subject.seed, per_token=True)
        weight = inputs.numbers(fields["mask"].shape, subject.seed + 1)
        names, leaves = zip(*inputs.token_batch(fields)[1].items(), strict=True)

        def value(*leaves: Tensor) -> Tensor:
            out = subject(TokenBatch.of(**fields | dict(zip(names, leaves, strict=True))))
            return out if out.dim() == 0 else (out * weight).sum()

    if not value(*leaves).requires_grad:
        return Note("skipped: there is no gradient to compare")
    if torch.autograd.gradcheck(
        value, leaves, atol=1e-6, rtol=1e-5, raise_exception=False, check_undefined_grad=False, fast_mode=True
    ):
        return "autograd agrees, in float64"
    return Note(
        "gradient is not that of the value: intended if the hook detaches a weight, as cispo does; else look for a "
        "torch.autograd.Function whose backward is wrong"
    )


# --- terms of the loss ------------------------------------------------------------------------------------------------


def _masked_tokens(subject: Subject) -> str:
    for fields in inputs.variants(subject.seed):
        loss, leaves = subject.loss(fields)
        other, _ = subject.loss(inputs.with_rubbish(fields, shift=2))
        if not _equal(loss, other):
            raise Fault("what stands at masked tokens changes the loss.")
        for name, slope in _over_tokens(loss, leaves).items():
            if not (slope[~fields["mask"]] == 0).all():
                raise Fault(f"masked tokens get gradient to {name}.")
    return "gradient exactly 0, no influence on the loss"


def _padding(subject: Subject) -> str:
    for per_token in (False, True):
        fields = inputs.token_fields(subject.seed, per_token=per_token)
        (loss, leaves), (wide, wide_leaves) = subject.loss(fields), subject.loss(inputs.widened(fields))
        _alike(wide, loss, "more padding changes the loss")
        slopes, wide_slopes = _over_tokens(loss, leaves), _over_tokens(wide, wide_leaves)
        for name, slope in slopes.items():
            _alike(wide_slopes[name][:, :TOKENS], slope, f"more padding changes the gradient to {name}")
            if wide_slopes[name][:, TOKENS:].any():
                raise Fault(f"padding gets gradient to {name}.")
    return "more of it changes neither loss nor gradient"


def _extreme_ratios(subject: Subject) -> str:
    for flip in (1.0, -1.0):
        fields = inputs.extreme_fields(subject.seed)
        fields["advantages"] = flip * fields["advantages"]
        batch, leaves = inputs.token_batch(fields)
        out = subject(batch)
        if out.requires_grad and subject.kind != "weight":
            for name, slope in _gradients(out, leaves).items():
                _require_finite(slope, f"in the gradient to {name} at log ratios of ±80 nats in float32")
    return "finite at log ratios of ±80 nats in float32"


def _empty(subject: Subject) -> str:
    what = "a micro-batch whose tokens are all masked"
    for window in (0.0, 5.0):
        fields = inputs.token_fields(subject.seed)
        fields = inputs.with_rubbish(fields | {"mask": torch.zeros_like(fields["mask"])})
        loss, leaves = subject.loss(fields, LossScale(1.0, window, TOKENS))
        if loss != 0:
            raise Fault(f"{what} has the loss {float(loss):g}, not 0.")
        for name, slope in _over_tokens(loss, leaves).items():
            if not (slope == 0).all():
                raise Fault(f"{what} gives gradient to {name}.")
    return "a differentiable 0"


def _advantage(subject: Subject) -> str:
    """On policy, and of the loss's own gradient: whether it follows the advantages, and in which direction."""
    fields = inputs.token_fields(subject.seed, off_policy=False)
    original = fields["advantages"]
    tried = (original, -original, inputs.numbers(original.shape, subject.seed + 1))
    slopes = []
    for advantages in tried:
        loss, leaves = subject.loss(fields | {"advantages": advantages})
        if not loss.requires_grad:
            return Note("skipped: there is no gradient to compare")
        slopes.append(_over_tokens(loss, leaves).get("logps", torch.zeros_like(fields["logps"])))
    if not any(slope.any() for slope in slopes):
        return Note("not seen: on policy the gradient is 0 at every token, so the first step would change nothing")
    if all(_equal(slope, slopes[0]) for slope in slopes):
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


# --- reductions -------------------------------------------------------------------------------------------------------


def _accumulation(subject: Subject) -> str:
    """Two micro-batches of equally many full completions against one of all: here every mean agrees with every other."""
    per_token = inputs.numbers(torch.Size([4, TOKENS]), subject.seed + 3)
    mask = torch.ones_like(per_token, dtype=torch.bool)
    whole = subject(per_token, mask, inputs.scale_of(mask))
    halves = sum(subject(per_token[i : i + 2], mask[i : i + 2], LossScale(2.0, mask.sum(), TOKENS)) for i in (0, 2))
    factor = float(halves / whole)
    if abs(factor - 1.0) > EXACT:
        return Note(
            f"two micro-batches of two completions add up to {factor:.3g} times the loss of one of four: the gradient "
            f"depends on the accumulation. Divide by scale.accumulation, or by scale.window_tokens."
        )
    return "two micro-batches add up to the loss of one"


# --- advantages -------------------------------------------------------------------------------------------------------


def _unscorable(subject: Subject) -> str:
    fields = inputs.reward_fields(subject.seed)
    unknown = fields["rewards"].isnan()
    before = subject.advantages(fields)
    changed = dict(fields)
    for name in REWARD_FIELDS.keys() - {"lengths"}:
        value = fields[name].clone()
        value[unknown] = value[unknown] + 3.0
        changed[name] = value
    if not _equal(before, subject.advantages(changed)):
        raise Fault("what a completion without a reward (NaN) brings along changes the advantages of others.")
    return "a completion without a reward has 0 and no influence"


def _order(subject: Subject) -> str:
    fields = inputs.reward_fields(subject.seed)
    order = torch.randperm(fields["rewards"].shape[0], generator=torch.Generator().manual_seed(subject.seed))
    renamed = inputs.rows(fields, order)
    renamed["group"] = 100 - renamed["group"]
    _alike(
        subject.advantages(renamed),
        subject.advantages(fields)[order],
        "another order of the completions, or other group ids, change the advantages",
        "Tell groups by batch.group, not by position.",
    )
    return "groups may be interleaved, in any order"


def _padding_of_advantages(subject: Subject) -> str:
    fields = inputs.reward_fields(subject.seed)
    length = fields["mask"].shape[1]
    before = subject.advantages(fields)
    for other in (inputs.with_rubbish(fields, shift=2), inputs.widened(fields)):
        after = subject.advantages(other)
        _alike(after if after.dim() == 1 else after[:, :length], before, "more padding changes the advantages")
    return "more of it changes nothing"


def _no_spread(subject: Subject) -> str:
    for dtype in inputs.DTYPES:
        fields = inputs.reward_fields(subject.seed, dtype)
        known = fields["rewards"].isfinite()
        for rewards in (torch.where(known, 0.5, torch.nan), torch.full_like(fields["rewards"], torch.nan)):
            same = fields | {"rewards": rewards.to(dtype), "components": torch.ones_like(fields["components"])}
            subject(inputs.reward_batch(same))
        subject(inputs.reward_batch(inputs.rows(fields, torch.tensor([0]))))
    return "finite where all rewards are equal, for groups of one, and without any reward"


# --- what is checked, by kind -----------------------------------------------------------------------------------------

_OF_EVERY_HOOK: dict[str, Check] = {
    "runs": _runs,
    "needs": _needs,
    "same again": _same_again,
}
_DERIVED: dict[str, Check] = {"gradient": _gradient, "finite differences": _finite_differences}
_OF_A_TERM: dict[str, Check] = {
    "masked tokens": _masked_tokens, "padding": _padding, "extreme ratios": _extreme_ratios, "empty micro-batch": _empty,
}  # fmt: skip

CHECKS: dict[str, dict[str, Check]] = {
    "advantage": {
        **_OF_EVERY_HOOK,
        "unscorable": _unscorable,
        "order": _order,
        "padding": _padding_of_advantages,
        "no spread": _no_spread,
    },
    "clip": {**_OF_EVERY_HOOK, **_DERIVED, **_OF_A_TERM, "advantage": _advantage},
    "weight": {**_OF_EVERY_HOOK, **_OF_A_TERM},
    "regularizer": {**_OF_EVERY_HOOK, **_DERIVED, **_OF_A_TERM},
    "reduction": {
        **{name: check for name, check in _OF_EVERY_HOOK.items() if name != "needs"},
        "gradient": _gradient_of_reduction,
        "finite differences": _finite_differences,
        "masked tokens": _masked_tokens,
        "padding": _padding,
        "empty micro-batch": _empty,
        "accumulation": _accumulation,
    },
}
