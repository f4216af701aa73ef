"""The parts of a trainer that score, lose, check and log share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit.models.family import FamilyAdapter
from kit.objective import Objective
from kit.scoring.head import Projection
from kit.scoring.scorer import Scorer
from kit.trainer.metric_log import MetricLog
from kit.trainer.value_head import Critic


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
