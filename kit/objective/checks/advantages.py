"""Checks of advantage estimators: see `kit.objective.check`."""

from __future__ import annotations

import torch
from torch import Tensor

from kit.objective.checks.inputs import Fields, reward_batch, reward_fields, rows, widened, with_rubbish
from kit.objective.checks.tools import (
    Check,
    Fault,
    Subject,
    alike,
    declared,
    equal,
    finite,
    repeated,
    untouched,
)
from kit.objective.hook import REWARD_REMEDIES

_BOTH = (torch.float64, torch.float32)


def _computed(subject: Subject, fields: Fields) -> Tensor:
    """The advantages as an objective passes them on."""
    subject.restore()
    return subject.objective.compute_advantages(reward_batch(fields))


def _runs(subject: Subject) -> str:
    shape: tuple[int, ...] = ()
    for dtype in _BOTH:
        fields = reward_fields(subject.seed, dtype)
        out, expected = subject(reward_batch(fields)), fields["mask"].shape
        if out.shape not in (expected, expected[:1]):
            raise Fault(
                f"returned shape {tuple(out.shape)}, expected (N,) = ({expected[0]},) or (N, T) = {tuple(expected)}."
            )
        shape = tuple(out.shape)
    return f"{'one for each completion' if len(shape) == 1 else 'one for each token'}, in float32 and float64"


def _needs(subject: Subject) -> str:
    fields = reward_fields(subject.seed)
    return declared(subject, REWARD_REMEDIES, lambda keep: subject(reward_batch(fields, keep)))


def _inputs(subject: Subject) -> str:
    for inference in (False, True):
        with torch.inference_mode(inference):
            batch = reward_batch(reward_fields(subject.seed))
            untouched(subject, (batch,), vars(batch))
    return "not edited, inference tensors neither"


def _same_again(subject: Subject) -> str:
    return repeated(lambda: [subject(reward_batch(reward_fields(subject.seed, dtype))) for dtype in _BOTH])


def _finite(subject: Subject) -> str:
    for dtype in _BOTH:
        fields = reward_fields(subject.seed, dtype)
        scored = fields["rewards"].isfinite()
        if not torch.isfinite(_live(subject(reward_batch(fields)), fields)[scored]).all():
            raise Fault(
                f"NaN or infinity for completions that have a reward, in {dtype}. Two others of the batch have none (NaN): "
                f"leave them out of means and deviations, with batch.scorable or nanmean."
            )
    return "although some rewards are NaN"


def _unscorable(subject: Subject) -> str:
    fields = reward_fields(subject.seed)
    unknown = fields["rewards"].isnan()
    before = _computed(subject, fields)
    if not (before[unknown] == 0).all():
        raise Fault("a completion whose reward is NaN has an advantage other than 0.")
    changed = dict(fields)
    for name in ("components", "greedy_rewards", "token_rewards", "values"):
        value = fields[name].clone()
        value[unknown] = value[unknown] + 3.0
        changed[name] = value
    after = _computed(subject, changed)
    if not equal(before, after):
        raise Fault("what a completion without a reward (NaN) brings along changes the advantages of others.")
    return "a completion without a reward has 0 and no influence"


def _order(subject: Subject) -> str:
    fields = reward_fields(subject.seed)
    order = torch.randperm(fields["rewards"].shape[0], generator=torch.Generator().manual_seed(subject.seed))
    renamed = rows(fields, order)
    renamed["group"] = 100 - renamed["group"]
    alike(
        _live(_computed(subject, renamed), renamed),
        _live(_computed(subject, fields), fields)[order],
        "another order of the completions, or other group ids, change the advantages",
        "Tell groups by batch.group, not by position.",
    )
    return "groups may be interleaved, in any order"


def _padding(subject: Subject) -> str:
    fields = reward_fields(subject.seed)
    length = fields["mask"].shape[1]
    before = _live(_computed(subject, fields), fields)
    for other in (with_rubbish(fields, shift=2), widened(fields)):
        after = _live(_computed(subject, other), other)
        after = after if after.dim() == 1 else after[:, :length]
        alike(after, before, "more padding changes the advantages")
    return "more of it changes nothing"


def _live(advantages: Tensor, fields: Fields) -> Tensor:
    """What of the advantages is used: 0 at tokens that do not train."""
    return advantages if advantages.dim() == 1 else advantages.masked_fill(~fields["mask"], 0.0)


def _no_spread(subject: Subject) -> str:
    for dtype in _BOTH:
        fields = reward_fields(subject.seed, dtype)
        known = fields["rewards"].isfinite()
        for rewards in (torch.where(known, 0.5, torch.nan), torch.full_like(fields["rewards"], torch.nan)):
            same = fields | {"rewards": rewards.to(dtype), "components": torch.ones_like(fields["components"])}
            _finite_where_scored(subject, same, "where all rewards of a group are equal, or none is known")
        _finite_where_scored(subject, rows(fields, torch.tensor([0])), "for a batch of one completion")
    return "finite where all rewards are equal, for groups of one, and without any reward"


def _finite_where_scored(subject: Subject, fields: Fields, where: str) -> None:
    finite(_live(subject(reward_batch(fields)), fields)[fields["rewards"].isfinite()], where)


def _targets(subject: Subject) -> str | None:
    if "values" not in subject.hook.needs:
        return None
    fields = reward_fields(subject.seed)
    subject.restore()
    subject.objective.value_targets(reward_batch(fields))
    return "(N, T) and finite"


ADVANTAGE_CHECKS: dict[str, Check] = {
    "runs": _runs,
    "needs": _needs,
    "inputs": _inputs,
    "same again": _same_again,
    "finite": _finite,
    "unscorable": _unscorable,
    "order": _order,
    "padding": _padding,
    "no spread": _no_spread,
    "value targets": _targets,
}
