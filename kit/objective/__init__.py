"""The GRPO loss, composed of an advantage, a clip, weights, regularizers and a reduction.

    file                 contents
    objective.py         Objective: the loss, its state, and which work may be skipped for the same gradient
    batch.py             TokenBatch, RewardBatch: the inputs of hooks; arithmetic on ratios
    advantage.py         rewards -> advantages of completions or tokens; returns and value loss of a value head
    clip.py              TokenBatch -> per-token surrogate loss
    weight.py            TokenBatch -> detached per-token multiplier
    regularizer.py       TokenBatch -> per-token penalty
    reduction.py         per-token loss -> scalar; LossScale
    schedules.py         hyper-parameters that follow the optimiser step or a measured mean
    recipes.py           named recipes as plain data, and merging a spec over one (no torch)
    metrics.py           the logged metrics of a micro-batch
    check.py             checks of a hook on random batches
    hook.py, registry.py hyper-parameters, needs and run-time checks of a hook; hooks by name, path or callable
    verl.py              the objective as functions of verl's registries

Names are imported on first use, so that `import kit.objective` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.objective.advantage import advantages as advantages
    from kit.objective.batch import RewardBatch as RewardBatch
    from kit.objective.batch import TokenBatch as TokenBatch
    from kit.objective.clip import clips as clips
    from kit.objective.hook import Hook as Hook
    from kit.objective.objective import LossOutput as LossOutput
    from kit.objective.objective import Mean as Mean
    from kit.objective.objective import Objective as Objective
    from kit.objective.recipes import recipe_names as recipe_names
    from kit.objective.reduction import LossScale as LossScale
    from kit.objective.reduction import reductions as reductions
    from kit.objective.regularizer import regularizers as regularizers
    from kit.objective.schedules import Schedule as Schedule
    from kit.objective.weight import weights as weights

_HOME = {
    "Hook": "hook",
    "LossOutput": "objective",
    "LossScale": "reduction",
    "Mean": "objective",
    "Objective": "objective",
    "RewardBatch": "batch",
    "Schedule": "schedules",
    "TokenBatch": "batch",
    "advantages": "advantage",
    "clips": "clip",
    "recipe_names": "recipes",
    "reductions": "reduction",
    "regularizers": "regularizer",
    "weights": "weight",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
