"""Work that is left out for the same gradient: each saving is a switch, and where it is not exact it says so and stays off.

The trainer's `savings_report` tells of every saving `on`, or why not. A reason is logged once, and kept in `env.json`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kit.objective import Objective
from kit.objective.objective import to_skipping

log = logging.getLogger("kit")
ON = "on"
OFF = "switched off"
NOT_NEEDED = "not needed: there is one step on each completion"
VALUES_SCORE = "the value head needs a scoring pass at the rollout, which gives them as well"
VALUES_LEARN = "the value head learns from every completion"


@dataclass(frozen=True)
class Situation:
    """What savings depend on beside the objective.

    accumulation: micro-batches of an optimiser step; parts: of a rollout; iterations: over a rollout.
    """

    critic: bool
    balanced: bool  # the load of experts is balanced over a micro-batch
    dropout: bool
    accumulation: int
    parts: int
    iterations: int


def settle(
    objective: Objective,
    situation: Situation,
    *,
    token_budget: int | None,
    skip_flat_groups: bool,
    reuse_old_logps: bool,
) -> dict[str, str]:
    """What is left out of every step: `on`, or why not, by the name of the switch."""
    budget = None if token_budget else "no budget is set"
    skipping = _not_skippable(objective, situation) if skip_flat_groups else OFF
    reuse = _not_reusable(situation) if reuse_old_logps else OFF
    found = {"token_budget": budget, "skip_flat_groups": skipping, "reuse_old_logps": reuse}
    quiet = {"token_budget": not token_budget, "reuse_old_logps": reuse == NOT_NEEDED}
    for name, reason in found.items():
        if reason not in (None, OFF) and not quiet.get(name):
            log.info("%s is off: %s", name, reason)
    return {name: reason or ON for name, reason in found.items()}


def at_most(token_budget: int | None) -> str:
    """What is said of a budget that is kept."""
    return f"at most {token_budget} tokens at once"


def _not_skippable(objective: Objective, situation: Situation) -> str | None:
    reasons = (
        to_skipping(objective),
        VALUES_LEARN if situation.critic else None,
        "the load balance of the router is one of all completions" if situation.balanced else None,
        "the model has dropout, and its random numbers would fall on other completions" if situation.dropout else None,
    )
    return next((reason for reason in reasons if reason is not None), None)


def _not_reusable(situation: Situation) -> str | None:
    accumulation, parts = situation.accumulation, situation.parts
    if accumulation % (parts * situation.iterations) == 0:  # TRL then computes none
        return NOT_NEEDED
    if accumulation % parts:
        return (
            f"some completions are first trained on after a step that follows their rollout (steps_per_generation "
            f"{parts}, gradient_accumulation_steps {accumulation})"
        )
    if situation.critic:
        return VALUES_SCORE
    return "the model has dropout, so that no two passes agree" if situation.dropout else None


def balances_experts(trainer: Any) -> bool:
    """Whether the loss of this trainer balances the load of experts.

    TRL adds that for every configuration with `output_router_logits`. Granite 4's has it, with experts or without, and the
    architecture gives no router logits: a step would fail.
    """
    if not trainer.aux_loss_enabled:
        return False
    recorded = [getattr(module, "_can_record_outputs", None) or {} for module in trainer.model.modules()]
    if any(recorded) and not any("router_logits" in one for one in recorded):
        log.info("the load of experts is not balanced: the architecture gives no router logits")
        return False
    return True
