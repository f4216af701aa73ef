"""What an objective does to one token, over the ratio of its new to its old probability: evaluated, not written down again.

Each point of the grid is a completion of one token with that ratio, advantage +1 or -1, and the reference policy where the
old one is. The hooks of the objective give the loss, and autograd its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kit.objective.batch import TokenBatch
from kit.objective.hook import Hook, call_on_tokens
from kit.objective.objective import Objective

POINTS = 161
WIDEST = 3.5
"""Log ratio up to which a bound of the clip is looked for."""
SIGNS = {"better": 1.0, "worse": -1.0}
"""Of a completion than its group: the advantage."""


@dataclass(frozen=True)
class Curve:
    """Of one advantage, over the ratios: what is gained (minus the loss), and how hard the log-probability is pulled up."""

    gain: list[float]
    pull: list[float]
    clipped: list[bool]
    """Where the clip says that its bound is active."""


@dataclass(frozen=True)
class Curves:
    """Of an objective without its advantage and reduction, which are not of one token."""

    ratios: list[float]
    clip: dict[str, Curve]
    """By `SIGNS`: the weights times the clip."""
    penalties: dict[str, Curve]
    """Coefficient times regularizer, as a loss: `gain` is negative where it costs. No advantage enters."""
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "ratios": self.ratios,
            "clip": {name: vars(curve) for name, curve in self.clip.items()},
            "penalties": {name: vars(curve) for name, curve in self.penalties.items()},
            "notes": self.notes,
        }


def curves(
    spec: str | Mapping[str, Any] | Objective, *, base: Path | None = None, ratios: Tensor | None = None
) -> Curves:
    """The curves of an objective at its first step, over (n,) ratios. Raises `ConfigError` as `Objective.from_spec` does."""
    objective = spec if isinstance(spec, Objective) else Objective.from_spec(spec, base=base)
    ratios = grid(objective) if ratios is None else ratios
    notes = [
        f"{hook.title} looks at the tokens of a batch together: with one token alone its curve shows little."
        for hook in (objective.clip, *objective.weights, *objective.regularizers)
        if not hook.row_separable and not hook.factory.custom
    ]
    clip = {name: _clip(objective, ratios, sign) for name, sign in SIGNS.items()}
    penalties = {}
    for hook in objective.regularizers:
        coef = hook.coef_at(0)
        if coef:
            penalties[hook.short_name] = _curve(hook, ratios, 1.0, coef)
        else:
            notes.append(
                f"{hook.title} has coefficient 0 at the first step: it is measured and logged, and pulls at nothing."
            )
    return Curves([round(ratio, 6) for ratio in ratios.tolist()], clip, penalties, notes)


def grid(*objectives: Objective) -> Tensor:
    """Ratios on both sides of 1, as far as it takes to see every bound of each objective's clip."""
    ends = [_reach(objective) for objective in objectives]
    return torch.linspace(min(low for low, _ in ends), max(high for _, high in ends), POINTS, dtype=torch.float64)


def _reach(objective: Objective) -> tuple[float, float]:
    """(lowest, highest) ratio to draw: well beyond the nearest bound of each side, and past its farthest."""
    below, above = _bounds(objective.clip, -1.0), _bounds(objective.clip, 1.0)
    usual = [math.expm1(bound) for bound in below or above] or [0.25]
    low, high = (
        float(f"{max(min(2.5 * min(found), 7.0), 1.25 * max(found)):.2g}")
        for found in (
            [-math.expm1(-bound) for bound in below] or usual,
            [math.expm1(bound) for bound in above] or usual,
        )
    )
    return max(0.1, 1 - low), 1 + high


def _bounds(clip: Hook, side: float) -> list[float]:
    """Distances from 0, as log ratios, at which the clip begins to act above (1) or below (-1), for each of `SIGNS`: where it
    says that a bound is active, or the pull falls to 0, as beyond two_sided's delta and dual_clip's c, of which it says nothing.
    """
    log_ratios = torch.logspace(-5, math.log10(WIDEST), 120, dtype=torch.float64)
    found = []
    for sign in SIGNS.values():
        batch = batch_of((side * log_ratios).exp(), sign)
        pull = _pull(call_on_tokens(clip, batch), batch)[:, 0].abs()
        stops = (pull == 0) & (torch.cat([pull[:1], pull[:-1]]) > 1e-3)
        begins = log_ratios[_clipped(clip, batch).bool() | stops]
        found += begins[:1].tolist()
    return found


def batch_of(ratios: Tensor, advantage: float) -> TokenBatch:
    """(n,) ratios as n completions of one token each, with all that a hook may ask for."""
    column = ratios.double()[:, None]
    old = torch.full_like(column, -1.0)
    logps = (old + column.log()).requires_grad_()
    known = torch.ones_like(column)
    return TokenBatch(
        logps=logps,
        old_logps=old,
        advantages=advantage * known,
        mask=torch.ones_like(column, dtype=torch.bool),
        ref_logps=old,
        sampler_logps=old,
        entropy=known,
        full_kl=0 * known,
        teacher_logps=old,
        teacher_kl=0 * known,
        rewards=known,
        all_lengths=torch.ones(len(column), dtype=torch.float64),
        truncated=torch.zeros_like(column, dtype=torch.bool),
        weight_norm=torch.zeros((), dtype=torch.float64),
    )


def _clip(objective: Objective, ratios: Tensor, sign: float) -> Curve:
    batch = batch_of(ratios, sign)
    loss = call_on_tokens(objective.clip, batch)
    for hook in objective.weights:
        loss = loss * call_on_tokens(hook, batch).detach()
    return _told(loss, batch, _clipped(objective.clip, batch))


def _curve(hook: Hook, ratios: Tensor, sign: float, coef: float) -> Curve:
    batch = batch_of(ratios, sign)
    term = coef * call_on_tokens(hook, batch)
    return _told(term.expand(batch.logps.shape), batch, torch.zeros(len(ratios)))


def _told(loss: Tensor, batch: TokenBatch, clipped: Tensor) -> Curve:
    return Curve(_numbers(-loss), _numbers(_pull(loss, batch)), [bool(one) for one in clipped.tolist()])


def _pull(loss: Tensor, batch: TokenBatch) -> Tensor:
    """(n, 1): minus the gradient of the loss by the log-probability."""
    (gradient,) = torch.autograd.grad(loss.sum(), batch.logps, allow_unused=True) if loss.requires_grad else (None,)
    return torch.zeros_like(batch.logps) if gradient is None else -gradient


def _clipped(clip: Hook, batch: TokenBatch) -> Tensor:
    """(n,) 1 where one of the bounds that the hook tells of is active."""
    told = clip.clipped(batch) or {}
    found = torch.zeros(len(batch.logps), dtype=torch.float64)
    for active in told.values():
        found = torch.maximum(found, active.double().expand(batch.logps.shape)[:, 0])
    return found


def _numbers(values: Tensor) -> list[float]:
    return [float(f"{one:.5g}") for one in values.detach()[:, 0].tolist()]
