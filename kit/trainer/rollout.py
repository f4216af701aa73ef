"""What the parts of a trainer share: one generation batch of this process, and each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kit.errors import ObjectiveError
from kit.models.family import FamilyAdapter
from kit.objective import Objective
from kit.scoring.head import Projection
from kit.scoring.layouts import Scores
from kit.scoring.scorer import Scorer
from kit.trainer.metric_log import MetricLog
from kit.trainer.value_head import Critic


@dataclass(frozen=True)
class Rollout:
    """One scored generation batch of this process, as handed to `rollout_sinks`. N completions, K reward components."""

    step: int
    mode: str
    rows: list[dict[str, Any]]
    completions: list[Any]
    completion_ids: list[list[int]]
    truncated: list[bool]
    rewards: Tensor  # (N, K), NaN where a component does not apply
    reward_names: list[str]
    advantages: Tensor  # (N,) or (N, T)
    extra: Mapping[str, list[Any]]
    prompt_ids: list[list[int]] | None = None  # as the model was given them
    tool_mask: list[list[int]] | None = None  # 1 for the policy's tokens, 0 for those of a tool; None: no tools


@dataclass(frozen=True)
class RewardResult:
    """Inputs and outputs of the reward functions: rewards of all processes, the rest of this one."""

    rewards: Tensor  # (N, K)
    total: Tensor  # (N,) weighted sum, NaN where no component applied
    completions: list[Any]
    completion_ids: list[list[int]]  # whole, also where `mask_truncated_completions` keeps them from training
    extra: dict[str, list[Any]]


@dataclass(frozen=True)
class ReplayedRollout:
    """N completions, in groups, that were generated and scored before; the trainer gives them to TRL as its own."""

    completion_ids: list[list[int]]
    logps: list[list[float]] | None  # nats, of the engine that sampled them
    components: Tensor  # (N, K)
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]  # that the reward functions logged when they were made


@dataclass
class RolloutState:
    """A generation batch while TRL makes it: what one of its methods learns and a later one needs."""

    rows: Sequence[dict[str, Any]] = ()
    replayed: ReplayedRollout | None = None
    prompt_ids: list[list[int]] | None = None  # as the model was given them
    tool_mask: list[list[int]] | None = None  # 1 for the policy's tokens, 0 for those of a tool
    extra_inputs: dict[str, list[Any]] | None = None  # of the prompts: pieces of the inputs that TRL has no place for
    result: RewardResult | None = None
    passes: list[Scores] = field(default_factory=list)  # scoring passes whose hidden states were kept

    @property
    def rewards(self) -> RewardResult:
        """The result of the reward functions."""
        assert self.result is not None, "rewards are read before TRL has computed them"
        return self.result

    def pass_of(self, logps: Tensor) -> Scores:
        """The scoring pass that gave these log-probabilities. Raises `ObjectiveError` where nobody saw it."""
        match = next((scores for scores in self.passes if scores.logps is logps), None)
        if match is None:
            raise ObjectiveError(
                "The hidden states of the rollout's scoring were not seen, which a hook needs (full KL, or values): the "
                "backend scores in a way of its own."
            )
        return match


# --- the parts of a trainer -------------------------------------------------------------------------------------------


@dataclass
class RolloutMemory:
    """Values of a rollout that its steps need beside its micro-batches."""

    reference_head: Projection | None = None  # that the reference policy was scored with, without hidden states
    teacher_head: Projection | None = None  # likewise, of the teacher


@dataclass(frozen=True)
class Services:
    """Built once by a trainer with an objective, and handed to its parts.

    model: the policy that trains, as accelerate wraps it. accelerator: of several processes, gathers and reduces.
    temperature: of sampling, by which logits are divided.
    """

    objective: Objective
    model: Any
    accelerator: Any
    family: FamilyAdapter
    scorer: Scorer
    temperature: float
    metrics: MetricLog
    memory: RolloutMemory
    critic: Critic | None
