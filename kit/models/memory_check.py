"""Does a run fit into this machine? Asked before loading, by `validate` and by `plan`, of the one formula."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.config import RunConfig
from kit.errors import ModelError
from kit.models.memory import GIB, MemoryPlan, certain_bytes, plan_memory, workload
from kit.models.shape import ModelShape

if TYPE_CHECKING:
    from kit.objective import Objective


def check_memory(config: RunConfig, shape: ModelShape | None, device: str, objective: Objective) -> None:
    """Refuses a model that cannot take a single step in the free memory. Raises `ModelError` with what would fit.

    Counted is what is certain: weights, gradients, optimiser states, and the reference copy where there is one.
    """
    if shape is None:
        return
    from kit.models.loading import free_memory

    work = workload(config, device, objective, prompt_tokens(config))
    needed, free = certain_bytes(shape, work), free_memory(device)
    if needed <= free:
        return
    place = "GPU memory" if device == "cuda" else "memory"
    hints = []
    if config.model.lora is None:
        hints.append("train adapters instead of all weights (keep model.lora)")
    elif not config.model.load_in_4bit:
        hints.append("set model.load_in_4bit: true")
    billions = free / needed * shape.parameters / 1e9
    hints += [f"use a model of at most {billions:.1f} billion weights", "close what else uses it"]
    copy = ", a reference copy included," if work.reference and work.rank is None else ""
    raise ModelError(
        f"{config.model.name} has {shape.parameters / 1e9:.2f} billion weights and needs at least {needed / GIB:.1f} GiB of "
        f"{place}{copy} before the first completion; {free / GIB:.1f} GiB are free. Either {', or '.join(hints)}."
    )


def prompt_tokens(config: RunConfig, longest: int | None = None) -> int:
    """Tokens of the longest prompt: as measured, else as the configuration allows."""
    return longest or config.data.max_prompt_tokens or 1024


def planned(
    config: RunConfig, shape: ModelShape, device: str, objective: Objective, longest: int | None = None
) -> MemoryPlan:
    """The memory plan of a run on this machine."""
    return plan_memory(shape, workload(config, device, objective, prompt_tokens(config, longest)))


def note(plan: MemoryPlan, free: float) -> str:
    """One line for `validate`."""
    place = "GPU memory" if plan.device == "cuda" else "memory"
    line = f"memory: {plan.peak / GIB:.1f} GiB of {place} planned ({plan.phase}), {free / GIB:.1f} GiB free"
    return line if plan.peak <= free else f"{line}. It will not fit: see grpo-kit plan for what to change"
