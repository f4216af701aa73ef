"""`Objective`: a loss composed of hooks.

loss = reduction( Π weights · clip  +  Σ coef_i · regularizer_i )

A regularizer that returns a scalar, e.g. a penalty on the weights, is added after the reduction, once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from kit.errors import ConfigError, ObjectiveError
from kit.objective.advantage import ValueSettings, advantages, discounted_returns
from kit.objective.batch import Divergence, RewardBatch, TokenBatch
from kit.objective.clip import clips
from kit.objective.hook import Hook, attribute, call_on_tokens, checked, remedy, require_needs
from kit.objective.metrics import Mean, Meter
from kit.objective.recipes import resolve
from kit.objective.reduction import LossScale, reductions
from kit.objective.registry import Entry
from kit.objective.regularizer import regularizers as regularizer_registry
from kit.objective.schedules import Controller, Schedule
from kit.objective.weight import weights as weight_registry

__all__ = ["LossOutput", "Mean", "Objective"]


class LossOutput(NamedTuple):
    """The loss of one micro-batch and its metrics."""

    loss: Tensor  # scalar, carries gradient
    metrics: dict[str, Mean]  # sums and counts; add them over micro-batches and processes, then divide
    samples: dict[str, Tensor]  # detached (n,) values of up to 1024 tokens each, NaN at padding, for quantiles
    observed: dict[str, Mean]  # for `Objective.observe`; empty without controllers


class Objective:
    """A loss composed of hooks: an advantage, a clip, weights, regularizers and a reduction.

    Each is a name, a dict `{"name": ..., **hyper-parameters}`, an import path, a `Hook` (`clips.ppo_clip(eps_high=0.28)`) or a
    Python callable (see `kit.objective.registry`).

    A relative `file.py:function` is resolved against `base`. Raises `ConfigError` on an unknown name or hyper-parameter
    and on a value out of range.
    """

    def __init__(
        self,
        advantage: Entry = "group_zscore",
        clip: Entry = "ppo_clip",
        weights: Iterable[Entry] = (),
        regularizers: Iterable[Entry] = (),
        reduction: Entry = "sequence_mean",
        *,
        base: Path | None = None,
    ) -> None:
        self.advantage: Hook = advantages.build(advantage, base)
        self.clip: Hook = clips.build(clip, base)
        self.weights: tuple[Hook, ...] = tuple(weight_registry.build(entry, base) for entry in weights)
        self.regularizers: tuple[Hook, ...] = tuple(regularizer_registry.build(entry, base) for entry in regularizers)
        self.reduction: Hook = reductions.build(reduction, base)

    @classmethod
    def from_spec(cls, spec: str | Mapping[str, Any], *, base: Path | None = None) -> Objective:
        """Build one from the name of a recipe or a dict that changes one (`kit.objective.recipes`). Raises `ConfigError`."""
        return cls(**resolve(spec), base=base)

    def to_spec(self) -> dict[str, Any]:
        """A plain dict with all defaults, which `from_spec` reads. Raises `ConfigError` for a lambda or closure."""
        return {
            "advantage": self.advantage.to_spec(),
            "clip": self.clip.to_spec(),
            "weights": [hook.to_spec() for hook in self.weights],
            "regularizers": [hook.to_spec() for hook in self.regularizers],
            "reduction": self.reduction.to_spec(),
        }

    def to_yaml(self) -> str:
        """`to_spec()` as YAML."""
        return str(yaml.safe_dump(self.to_spec(), sort_keys=False, allow_unicode=True))

    def describe(self) -> str:
        """One line for each part, with its formula."""
        return "\n".join(f"{hook.kind:<12} {hook.describe()}" for _, hook in self.hooks)

    @property
    def needs(self) -> frozenset[str]:
        """Names of the required fields of the batches, from `kit.objective.batch.TOKEN_FIELDS` and `REWARD_FIELDS`."""
        return frozenset().union(*(hook.needs for _, hook in self.hooks))

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether a term of the loss uses the entropy. Weights do not count: they are detached."""
        return any("entropy" in hook.needs for hook in (self.clip, *self.regularizers))

    def compute_advantages(self, batch: RewardBatch) -> Tensor:
        """(N,) or (N, T), detached; 0 where the reward is NaN. Raises `ObjectiveError` on a broken contract."""
        hook = self.advantage
        require_needs(hook, batch)
        size = len(batch.rewards)
        shapes: list[tuple[int | str, ...]] = [(size,), (size, "T" if batch.mask is None else batch.mask.shape[1])]
        with torch.no_grad():
            return checked(hook, lambda: hook(batch), vars(batch), shapes, mask=batch.scorable)

    @property
    def value_settings(self) -> ValueSettings | None:
        """The settings of the value head, or None if the advantage needs none.

        The advantage's function may define them as `function.value`. Raises `ConfigError` if one follows a schedule.
        """
        hook = self.advantage
        if "values" not in hook.needs:
            return None
        for name in ("value_learning_rate", "value_clip"):
            if isinstance(hook.values.get(name), Schedule):
                raise ConfigError(
                    f"{hook.title}: {name} cannot follow a schedule, got {hook.values[name]}. Set a number."
                )
        settings = attribute(hook.at(0), "value")
        return settings if isinstance(settings, ValueSettings) else ValueSettings()

    @property
    def divergence(self) -> Divergence | None:
        """The divergence in `TokenBatch.teacher_kl`, or None if no hook needs it.

        A hook sets it by `function.divergence`; the default is KL(policy || teacher) over the whole vocabulary. Raises
        `ConfigError` if two hooks need different ones.
        """
        hooks = [hook for hook in (self.clip, *self.weights, *self.regularizers) if "teacher_kl" in hook.needs]
        by_divergence = {attribute(hook.at(0), "divergence", Divergence()): hook for hook in hooks}
        if len(by_divergence) > 1:
            raise ConfigError(
                f"{' and '.join(hook.title for hook in by_divergence.values())} need different divergences from the teacher "
                f"({', '.join(map(str, by_divergence))}); only one is computed. Remove one of the hooks."
            )
        return next(iter(by_divergence), None)

    def value_targets(self, batch: RewardBatch) -> Tensor:
        """The targets of the value head (N, T), detached; 0 at tokens that do not train.

        They are `function.returns(batch)` of the advantage, if it is defined, or the undiscounted sums of the rewards from
        each token on. The targets of a completion without a score are its values at the rollout, so that it has no effect.
        Raises `ObjectiveError` if the batch lacks a field, and if the result has another shape or is not finite.
        """
        hook = self.advantage
        require_needs(hook, batch)
        returns = attribute(hook.at(batch.step), "returns")
        for name in ("values",) if returns else ("values", "token_rewards"):
            if getattr(batch, name) is None:
                raise ObjectiveError(f"The targets of the value head need {name}, but {remedy(name)}.")
        assert batch.mask is not None, "a RewardBatch has one whenever it has values"
        assert batch.values is not None
        mask, values, rewards = batch.mask, batch.values, batch.token_rewards

        def targets() -> Tensor:
            if returns:
                output: Tensor = returns(batch)
            else:
                assert rewards is not None
                output = discounted_returns(rewards, mask, 1.0)
            return torch.where(batch.scorable[:, None], output, values) if output.shape == mask.shape else output

        with torch.no_grad():
            return checked(hook, targets, vars(batch), [tuple(mask.shape)], mask=mask)

    def loss(self, batch: TokenBatch, scale: LossScale | None = None) -> LossOutput:
        """The scalar loss of a micro-batch and its metrics. Raises `ObjectiveError` for a missing field or an invalid hook."""
        scale = scale or LossScale()
        for hook in (self.clip, *self.weights, *self.regularizers):
            require_needs(hook, batch)
        meter = Meter(batch)
        per_token = _live_part(self.clip, batch)
        meter.log("objective/clip", per_token, filled=True, of_all=True)
        for hook in self.weights:
            multiplier = call_on_tokens(hook, batch).detach()
            meter.log(f"weight/{hook.short_name}", multiplier)
            meter.log(f"masked/{hook.short_name}", multiplier == 0)
            per_token = per_token * multiplier
        scalar: Tensor | None = None
        for index, hook in enumerate(self.regularizers):
            coef = hook.coef_at(batch.step)
            with torch.set_grad_enabled(torch.is_grad_enabled() and coef != 0.0):
                penalty = _live_part(hook, batch)
            meter.log_term(f"regularizers.{index}", hook, penalty, coef)
            if coef != 0.0 and penalty.dim() == 0:
                scalar = coef * penalty if scalar is None else scalar + coef * penalty
            elif coef != 0.0:
                per_token = per_token + coef * penalty
        loss = call_on_losses(self.reduction, per_token, batch.mask, scale, batch.step)
        if scalar is not None:
            loss = loss + scalar / scale.accumulation
        for hook in (self.clip, *self.regularizers):
            meter.log_reports(hook)
        meter.log_batch()
        for _, hook in self.hooks:
            scheduled = {k: v for k, v in hook.values.items() if isinstance(v, Schedule) and k != "coef"}
            for key, value in scheduled.items():
                meter.log(f"coef/{hook.short_name}.{key}", loss.new_tensor(value(batch.step)))
        return LossOutput(loss, meter.means, meter.samples, meter.observed)

    def observe(self, observed: Mapping[str, Mean], completions: int) -> None:
        """Pass the means of an optimiser step to the controllers.

        `observed` is `LossOutput.observed`, added up over micro-batches and processes; `completions` is their number.
        """
        hooks = dict(self.hooks)
        for part, mean in observed.items():
            if mean.count > 0:
                hooks[part].values["coef"].observe(float(mean.value), completions)

    def state_dict(self) -> dict[str, Any]:
        """The state of controllers and hooks with state, by part and hyper-parameter; empty if there are none."""
        return {key: part.state_dict() for key, part in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises `ObjectiveError` if it is the state of an objective with other parts."""
        parts = self._stateful()
        if set(parts) != set(state):
            raise ObjectiveError(
                f"The saved objective state is for {sorted(state) or 'no parts'}, "
                f"this objective keeps state for {sorted(parts) or 'no parts'}. Resume with the objective of the run."
            )
        for key, part in parts.items():
            part.load_state_dict(state[key])

    @property
    def hooks(self) -> list[tuple[str, Hook]]:
        """All hooks with their keys: `advantage`, `clip`, `weights.0`, ..., `regularizers.0`, ..., `reduction`."""
        listed = [(f"weights.{i}", hook) for i, hook in enumerate(self.weights)]
        listed += [(f"regularizers.{i}", hook) for i, hook in enumerate(self.regularizers)]
        return [("advantage", self.advantage), ("clip", self.clip), *listed, ("reduction", self.reduction)]

    def _stateful(self) -> dict[str, Any]:
        stateful = [(key, hook.stateful()) for key, hook in self.hooks]
        return {f"{key}.{name}".rstrip("."): part for key, parts in stateful for name, part in parts.items()}


def call_on_losses(hook: Hook, per_token: Tensor, mask: Tensor, scale: LossScale, step: int = 0) -> Tensor:
    """Reduce a per-token loss (B, T) to a scalar. The result of a user's own reduction is checked: `ObjectiveError`."""
    function = hook.at(step)
    if not hook.factory.custom:
        return function(per_token, mask, scale)
    inputs = {"per_token": per_token, "mask": mask}
    return checked(hook, lambda: function(per_token, mask, scale), inputs, [()], sources=[per_token])


def _live_part(hook: Hook, batch: TokenBatch) -> Tensor:
    """A term (B, T) with 0 at padding, or a scalar. The check of a user's own hook has already applied the mask."""
    out = call_on_tokens(hook, batch)
    return out if hook.factory.custom or hook.factory.filled or out.dim() == 0 else out * batch.live


# --- what work may be left out for the same gradient ------------------------------------------------------------------

# Two properties of hooks decide. They are declared at registration, or by a user as attributes of the function. Tests over
# the registries verify each declaration:
#
#     row_separable            the gradient of a completion depends on its own log-probabilities, entropies and full KL, and
#                              on values that are known before scoring (masks, advantages, old log-probabilities), but not
#                              on other completions. A micro-batch can then be scored in parts, in one pass each.
#     zero_at_zero_advantage   a completion whose advantages are all 0 has loss 0 and gradient 0. If this holds for every
#                              term, and all terms are separable, such completions need no scoring.


def parts_obstacle(objective: Objective) -> str | None:
    """Why the gradient of a completion may depend on the scores of others, as a message; None if it does not."""
    for hook in (objective.clip, *objective.weights, *_acting(objective), objective.reduction):
        if not hook.row_separable:
            if hook.factory.custom:
                return f"{hook.title} may depend on other completions (if not: {hook.short_name}.row_separable = True)"
            return f"{hook.title} depends on other completions"
    return None


def skipping_obstacle(objective: Objective) -> str | None:
    """Why completions without an advantage must be scored, as a message; None if skipping them is exact."""
    if (across := parts_obstacle(objective)) is not None:
        return across
    for hook in (objective.clip, *_acting(objective)):
        if not hook.zero_at_zero_advantage:
            if hook.factory.custom:
                declaration = f"{hook.short_name}.zero_at_zero_advantage = True"
                return f"{hook.title} may have a gradient for completions without an advantage (if not: {declaration})"
            return f"{hook.title} has a gradient for completions without an advantage"
    for hook in objective.regularizers:
        if isinstance(hook.values["coef"], Controller):
            return f"the coef of {hook.title} follows a mean over all completions"
    return None


WHOLE_WINDOW = {"sequence_mean", "global_token_mean", "fixed_length", "sequence_sum"}
"""Reductions whose sum over micro-batches of equal size does not depend on how completions are assigned to them."""


def regrouping_obstacle(objective: Objective) -> str | None:
    """Why the gradient depends on which completions share a micro-batch, as a message; None if it does not."""
    if (across := parts_obstacle(objective)) is not None:
        return across
    if objective.reduction.factory.name not in WHOLE_WINDOW:
        return f"{objective.reduction.title} divides by the tokens of a micro-batch"
    return None


def _acting(objective: Objective) -> list[Hook]:
    """Regularizers with an effect on the loss."""
    return [hook for hook in objective.regularizers if hook.values["coef"] != 0]
