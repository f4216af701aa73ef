"""Which combinations of methods cannot be, said before anything is made, and with what to set instead."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig
from kit.config.sections import SelectionConfig
from kit.errors import ConfigError
from kit.models.backend import choose_backend
from kit.models.memory import micro_batch_size

if TYPE_CHECKING:
    from kit.objective import Objective

BY_FLATNESS = ("dynamic_sampling", "greso")
"""Methods for which a group whose rewards are all equal teaches nothing."""
SEES_MORE = {
    "greedy_rewards": "compares with a greedy completion",
    "components": "compares the components of the reward",
    "token_rewards": "compares tokens over the whole batch",
    "values": "compares with a value head",
}
"""What an advantage may need that makes it differ from 0 in such a group."""


def check_selection(config: RunConfig, objective: Objective, *, processes: int = 1, images: bool = False) -> None:
    """Refuses what the methods cannot do in this run. Raises `ConfigError`."""
    selection, generation, optimisation = config.selection, config.generation, config.optimisation
    if not selection.methods:
        return
    micro = micro_batch_size(config, choose_backend(config.model), processes)
    found = next(
        incompatibilities(
            selection,
            objective,
            size=generation.num_generations,
            rows=optimisation.batch_size,
            parts=max(1, optimisation.batch_size // (micro * processes)),
            turns=bool(generation.tools or generation.environment or generation.rollout),
            processes=processes,
            images=images,
        ),
        None,
    )
    if found is not None:
        raise ConfigError(found)


def check_trainer(trainer: Any, selection: SelectionConfig) -> None:
    """The same of a trainer as it was built, for those who make one themselves. Raises `ConfigError`."""
    if not selection.methods:
        return
    args = trainer.args
    if trainer.objective is None:
        raise ConfigError("selection needs an objective: pass one, e.g. objective='grpo', or take the methods out.")
    found = next(
        incompatibilities(
            selection,
            trainer.objective,
            size=trainer.num_generations,
            rows=args.per_device_train_batch_size * args.steps_per_generation,
            parts=args.steps_per_generation,
            turns=bool(trainer.tools or trainer.environment_factories or trainer.rollout_func),
            processes=trainer.accelerator.num_processes,
            images=trainer._is_vlm,
        ),
        None,
    )
    if found is not None:
        raise ConfigError(found)
    if not hasattr(trainer.train_dataset, "__getitem__"):
        raise ConfigError("selection draws fresh prompts, and a streamed dataset cannot be drawn from. Load it whole.")


def incompatibilities(
    selection: SelectionConfig,
    objective: Objective,
    *,
    size: int,
    rows: int,
    parts: int,
    turns: bool,
    processes: int,
    images: bool,
) -> Iterator[str]:
    """Every reason why the methods that are on cannot be, a sentence or two each.

    `size`: completions of a prompt, `rows`: of a generation batch, which is split into `parts` micro-batches.
    """
    on = selection.methods
    if not on:
        return
    first = f"selection.{on[0]}"
    if processes > 1:
        yield (
            f"{first} in a run of {processes} processes: each would choose for itself, and their batches would differ in "
            f"size. Start one process, or set {_null(on)}."
        )
    if turns:
        yield (
            f"{first} with generation.tools, .environment or .rollout: completions are made aside and again, and their calls "
            f"would act twice. Set {_null(on)}."
        )
    if images:
        yield f"{first} with pictures is not made in this version. Set data.image_column: none, or {_null(on)}."
    yield from _of_sizes(selection, size, rows, parts)
    yield from _of_objective(selection, objective, on)


def _of_sizes(selection: SelectionConfig, size: int, rows: int, parts: int) -> Iterator[str]:
    for name, section in (("pods", selection.pods), ("cppo", selection.cppo)):
        if section is None:
            continue
        if section.keep > size:
            yield (
                f"selection.{name}.keep: {section.keep} of the completions of a prompt, but generation.num_generations makes "
                f"{size}. Set selection.{name}.keep to at most {size}, or make more."
            )
        elif (kept := rows // size * section.keep) % parts:
            fitting = [
                keep for keep in range(1, size + 1) if rows // size * keep % parts == 0 and keep >= (name == "pods") + 1
            ]
            yield (
                f"selection.{name}.keep: {section.keep} leaves {kept} completions a step, which cannot be split into "
                f"{parts} equal micro-batches. Set it to {' or '.join(map(str, fitting))}, or optimisation.micro_batch_size "
                "to another number."
            )
    if selection.pods and selection.cppo:
        yield "selection.pods and selection.cppo both choose among the completions of a prompt. Set one of them to null."


def _of_objective(selection: SelectionConfig, objective: Objective, on: Collection[str]) -> Iterator[str]:
    by_flatness = [name for name in BY_FLATNESS if name in on]
    more = [reason for need, reason in SEES_MORE.items() if need in objective.advantage.needs]
    if by_flatness and more:
        yield (
            f"selection.{by_flatness[0]} takes a group whose rewards are all equal for one that teaches nothing, but "
            f"{objective.advantage.title} {more[0]}, and learns from it. Set {_null(by_flatness)}, or another advantage, "
            "e.g. group_zscore."
        )
    if not by_flatness and "greedy_rewards" in objective.advantage.needs:
        yield (
            f"selection.{next(iter(on))} with {objective.advantage.title}: greedy completions are not made beside chosen "
            f"ones. Set {_null(on)}, or another advantage, e.g. leave_one_out."
        )


def _null(names: Collection[str]) -> str:
    return ", ".join(f"selection.{name}: null" for name in names)
