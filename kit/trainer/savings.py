"""Work that is left out for the same gradient: each saving is a switch, and where it is not exact it says so and stays off.

The trainer's `savings_report` tells of every saving `on`, or why not. A reason is logged once, and kept in `env.json`.
"""

from __future__ import annotations

import logging
from typing import Any

from kit.objective import Objective
from kit.objective.objective import to_skipping

log = logging.getLogger("kit")
ON = "on"
OFF = "switched off"
VALUES_LEARN = "the value head learns from every completion"


def at_most(token_budget: int | None) -> str:
    """Describes a token budget."""
    return f"at most {token_budget} tokens at once"


def not_skippable(objective: Objective, *, critic: bool, balanced: bool, dropout: bool) -> str | None:
    """Why completions of flat groups have to be scored all the same; None where they need not.

    critic: a value head learns. balanced: the load of experts is balanced over a micro-batch. dropout: of the model.
    """
    reasons = (
        to_skipping(objective),
        VALUES_LEARN if critic else None,
        "the load balance of the router is one of all completions" if balanced else None,
        "the model has dropout, and its random numbers would fall on other completions" if dropout else None,
    )
    return next((reason for reason in reasons if reason is not None), None)


def settle(
    objective: Objective,
    *,
    token_budget: int | None,
    skip_flat_groups: bool,
    critic: bool,
    balanced: bool,
    dropout: bool,
) -> dict[str, str]:
    """What is left out of every step: `on`, or why not, by the name of the switch; other arguments as `not_skippable`."""
    reason = not_skippable(objective, critic=critic, balanced=balanced, dropout=dropout) if skip_flat_groups else OFF
    if reason not in (None, OFF):
        log.info("skip_flat_groups is off: %s", reason)
    return {"token_budget": ON if token_budget else "no budget is set", "skip_flat_groups": reason or ON}


def balances_experts(model: Any, *, configured: bool) -> bool:
    """Whether the loss balances the load of experts. configured: as TRL took it from the model's configuration.

    TRL adds that for every configuration with `output_router_logits`. Granite 4's has it, with experts or without, and the
    architecture gives no router logits: a step would fail.
    """
    if not configured:
        return False
    recorded = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    if any(recorded) and not any("router_logits" in outputs for outputs in recorded):
        log.info("the load of experts is not balanced: the architecture gives no router logits")
        return False
    return True
