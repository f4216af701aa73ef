"""What would fit: the largest group, completion and micro-batch, and the changes that make a run fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kit.config import RunConfig, load_config
from kit.errors import KitError
from kit.models.memory import MemoryPlan, ModelShape, Workload, plan_memory

GROUPS = (4, 8, 16, 32)
STEP = 64
"""Tokens by which the largest completion is searched."""
Planner = Callable[[RunConfig], MemoryPlan]


@dataclass(frozen=True)
class Change:
    """One override, and what it costs."""

    override: str
    harm: str


BUDGET, MICRO_BATCH = "optimisation.token_budget", "optimisation.micro_batch_size"
FOUR_BIT = Change("model.load_in_4bit=true", "frozen weights are rounded, slower; needs bitsandbytes")


def largest_completion(shape: ModelShape, work: Workload, room: float, context: int, step: int = STEP) -> int:
    """Tokens of the longest completion that fits, a multiple of `step`; 0 where not even `step` does."""
    low, high = 0, max(0, context - work.prompt) // step
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan_memory(shape, replace(work, completion=middle * step)).peak <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * step


def largest_micro_batch(shape: ModelShape, work: Workload, room: float) -> int:
    """The largest divisor of the batch that fits; 0 where 1 does not."""
    sizes = [size for size in range(work.batch, 0, -1) if work.batch % size == 0]
    return next((s for s in sizes if plan_memory(shape, replace(work, micro_batch=s)).peak <= room), 0)


def largest(shape: ModelShape, work: Workload, room: float, context: int) -> list[dict[str, int]]:
    """For each group size: the longest completion (with micro-batches of 1), and the largest micro-batch beside it.

    Held-out completions are taken to be generated in batches no larger than the training batch.
    """
    prompts = max(1, work.batch // work.group)
    rows = []
    for group in GROUPS:
        batch = prompts * group
        one = replace(work, group=group, batch=batch, micro_batch=1, evaluation=min(work.evaluation, batch))
        completion = largest_completion(shape, one, room, context)
        micro = largest_micro_batch(shape, replace(one, completion=completion), room) if completion else 0
        rows.append({"group": group, "batch": batch, "completion": completion, "micro_batch": micro})
    return rows


def fixes(config: RunConfig, plan: Planner, room: float, device: str) -> list[Change] | None:
    """The changes that make `config` fit into `room` bytes, in order of least harm; None where nothing here does.

    The first change that lowers what the phases exceed the room by is made, until it fits. Changes that turn out not to be
    needed are dropped again, and the others made as small as fits, the most harmful first.
    """
    chosen: list[Change] = []
    memory = plan(config)
    excess = _excess(memory, room)
    ladder = list(_ladder(config, memory.workload, device))
    # A smaller micro-batch lowers whatever a budget does.
    steps = [change for change in ladder if _key(change) != BUDGET]
    while excess > 0:
        better = next((f for change in steps if (f := _lower(config, plan, chosen, change, room, excess))), None)
        if better is None:
            return None
        chosen, excess = better
    return _least(config, plan, sorted(chosen, key=ladder.index), ladder, room)


def _excess(memory: MemoryPlan, room: float) -> float:
    """Bytes by which each phase exceeds `room`, summed over phases: of two equal phases either can be lowered first."""
    always = sum(memory.always.values())
    return sum(max(0.0, always + sum(terms.values()) - room) for terms in memory.phases.values())


def _lower(
    config: RunConfig, plan: Planner, chosen: list[Change], change: Change, room: float, excess: float
) -> tuple[list[Change], float] | None:
    """The changes with one more, which takes the place of an earlier one of its key, if that lowers the excess."""
    changes = _with(chosen, change)
    tried = _apply(config, changes)
    lower = _excess(plan(tried), room) if tried is not None else excess
    return (changes, lower) if lower < excess else None


def _least(config: RunConfig, plan: Planner, chosen: list[Change], ladder: list[Change], room: float) -> list[Change]:
    """`chosen` without what is not needed, and with the mildest values of the rest that still fit.

    Where a token budget does as well as a smaller micro-batch, it is better: short completions still go through together.
    """

    def fits(changes: list[Change]) -> bool:
        tried = _apply(config, changes)
        return tried is not None and plan(tried).peak <= room

    for change in reversed(list(chosen)):
        rest = [other for other in chosen if other is not change]
        keys = [BUDGET, MICRO_BATCH] if _key(change) == MICRO_BATCH else [_key(change)]
        milder = [_with(rest, other) for key in keys for other in ladder if _key(other) == key]
        chosen = next((changes for changes in [rest, *milder] if fits(changes)), chosen)
    return sorted(chosen, key=ladder.index)


def _with(chosen: list[Change], change: Change) -> list[Change]:
    return [*(known for known in chosen if _key(known) != _key(change)), change]


def _ladder(config: RunConfig, work: Workload, device: str) -> Iterator[Change]:
    batch, group = config.optimisation.batch_size, config.generation.num_generations
    for budget in budgets(work):
        yield Change(f"{BUDGET}={budget}", "same result but for rounding; long completions go through in smaller parts")
    for size in range(work.micro_batch - 1, 0, -1):
        if batch % size == 0:
            yield Change(f"{MICRO_BATCH}={size}", "same result but for rounding")
    evaluation = config.evaluation.batch_size
    while (evaluation := evaluation // 2) >= 1:
        yield Change(f"evaluation.batch_size={evaluation}", "slower evaluation, other random draws in it")
    yield Change("optimisation.gradient_checkpointing=true", "same result, about a third slower")
    colocated = config.generation.engine == "vllm" and config.generation.vllm.mode == "colocate"
    if device == "cuda":
        if colocated and not config.generation.vllm.standby:
            yield Change("generation.vllm.standby=true", "same result; the engine takes its weights anew at each step")
        if config.model.dtype == "float32":
            yield Change("model.dtype=auto", "half precision, the usual choice on a GPU; faster")
        yield Change("optimisation.optimizer=adamw_8bit", "optimiser states are rounded; needs bitsandbytes")
        if config.model.lora is not None and not colocated:
            yield FOUR_BIT
    if config.model.lora is None:
        yield Change("model.lora={rank: 64, alpha: 128}", "trains adapters in place of all weights")
        if device == "cuda" and not colocated:
            yield FOUR_BIT
    fewer = batch
    while (fewer := fewer // 2) >= group:
        if fewer % group == 0:
            yield Change(f"optimisation.batch_size={fewer}", "noisier steps")
    tokens = config.generation.max_completion_tokens
    while (tokens := tokens // 2) >= 32:
        yield Change(f"generation.max_completion_tokens={tokens}", "longer answers are cut")


def budgets(work: Workload) -> list[int]:
    """Token budgets that lower the largest pass, the largest first: powers of two, and at last one whole completion."""
    powers = [1 << bits for bits in range(work.tokens_at_once.bit_length(), -1, -1)]
    return [size for size in [*(one for one in powers if one > work.tokens), work.tokens] if size < work.tokens_at_once]


def _key(change: Change) -> str:
    return change.override.partition("=")[0]


def _apply(config: RunConfig, changes: Sequence[Change]) -> RunConfig | None:
    """The changed configuration; None where the parts do not go together."""
    overrides = [change.override for change in changes]
    micro = config.optimisation.micro_batch_size
    sizes = [override.partition("=") for override in overrides]
    batch = next((int(value) for key, _, value in sizes if key == "optimisation.batch_size"), None)
    if (
        batch is not None
        and micro is not None
        and batch % micro
        and not any("micro_batch" in key for key, _, _ in sizes)
    ):
        return None
    try:
        changed = load_config(config, overrides)
    except KitError:
        return None
    trains = changed.model.lora is not None or not changed.model.load_in_4bit  # weights in 4 bits are frozen
    return changed if trains else None
