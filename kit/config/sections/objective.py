"""`objective:` the loss, as a recipe and changes to it."""

from __future__ import annotations

from typing import Any

from kit.config.sections.base import Section

HookSpec = str | dict[str, Any]


class ObjectiveConfig(Section):
    """The loss, as a recipe and changes to it. Hooks: names, `file.py:function`, or {name: ..., hyper-parameters}."""

    recipe: str = "dapo"
    """Starting point: grpo, dr_grpo, dapo, gspo, ppo, ... (all of them: `grpo-kit objective list`)."""
    advantage: HookSpec | None = None
    """Advantage estimator. Null: the recipe's. A mapping without `name` changes only the given hyper-parameters."""
    clip: HookSpec | None = None
    """Per-token surrogate and its clipping. Null: the recipe's."""
    weights: list[HookSpec] | None = None
    """Detached per-token multipliers. Null: the recipe's."""
    regularizers: list[HookSpec] | None = None
    """Penalties, each with a `coef` (a number, a schedule, or a controller such as adaptive_kl). Null: the recipe's."""
    reduction: HookSpec | None = None
    """From per-token losses to one number. Null: the recipe's."""
