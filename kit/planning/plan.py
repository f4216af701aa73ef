"""`grpo-kit plan`: memory by terms, what would fit on which card, seconds a step, and the changes that make a run fit.

Needs a model's config.json and nothing else of it. Where its tokenizer and the data can be read, the longest prompt is
measured; else `data.max_prompt_tokens` stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig
from kit.errors import KitError, ModelError
from kit.models.memory import GIB, MemoryPlan, ModelShape, Workload, plan_memory, prompt_tokens, shape_of, workload
from kit.planning.cards import CARDS, Card
from kit.planning.feasible import fixes, largest
from kit.planning.timing import cpu_speed, estimate, speed_of, this_card

if TYPE_CHECKING:
    from kit.objective import Objective


@dataclass(frozen=True)
class Subject:
    """What is planned: a configuration, the shape of its model, its objective and its longest prompt."""

    config: RunConfig
    shape: ModelShape
    context: int
    objective: Objective
    prompt: int
    notes: list[str]

    def work(self, device: str, config: RunConfig | None = None, room: float | None = None) -> Workload:
        return workload(config or self.config, device, self.objective, self.prompt, room)

    def memory(self, device: str, config: RunConfig | None = None, room: float | None = None) -> MemoryPlan:
        return plan_memory(self.shape, self.work(device, config, room))


def subject(config: RunConfig) -> Subject:
    """Reads what planning needs. Raises `KitError`."""
    from kit.runner.prepare import build_objective

    objective = build_objective(config)
    model_config = read_config(config)
    shape = shape_of(model_config)
    if shape is None:
        raise ModelError(
            f"{config.model.name} is made of Python code of its own, so its shape is not known before that code runs. "
            "Plan with a model of a family that transformers knows."
        )
    longest, notes = longest_prompt(config)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    return Subject(config, shape, context, objective, prompt_tokens(config, longest), notes)


def read_config(config: RunConfig) -> Any:
    """The model's configuration; the folder may hold nothing else. Raises `ModelError`."""
    from transformers import AutoConfig

    from kit.models.embedded import source_of

    name = source_of(config.model.name)
    try:
        return AutoConfig.from_pretrained(
            name, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"The configuration of {name} could not be read ({reason}). Give a folder with a config.json, or a hub id that "
            "can be reached from here."
        ) from error


def longest_prompt(config: RunConfig) -> tuple[int | None, list[str]]:
    """Tokens of the longest prompt that the run keeps, measured; None and a note where it cannot be."""
    from kit.data import load_data
    from kit.evaluation.heldout import lengths_of
    from kit.generation.tools import load_interaction

    limit = config.data.max_prompt_tokens
    try:
        tools = load_interaction(config.generation).all_tools()
        lengths = lengths_of(tokenizer_of(config), load_data(config.data).train, tools)
    except KitError as error:
        assumed = prompt_tokens(config)
        reason = str(error).partition(". ")[0]
        return None, [f"prompts were not measured; they are taken to have {assumed} tokens. ({reason}.)"]
    kept = [length for length in lengths if limit is None or length <= limit]
    return max(kept, default=limit), []


def tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer alone. Raises `ModelError` where it cannot be read."""
    from kit.models.embedded import source_of
    from kit.models.loading import load_tokenizer

    source = source_of(config.model.name)
    keywords = {"revision": config.model.revision, "trust_remote_code": config.model.trust_remote_code}
    return load_tokenizer(source, chat=config.data.chat, chat_template=config.model.chat_template, **keywords)


def plan(
    config: RunConfig,
    *,
    card: Card | None = None,
    room: float | None = None,
    name: str = "CONFIG",
    given: Sequence[str] = (),
) -> dict[str, Any]:
    """The plan as plain values, for this machine, or for `card`.

    `room` (bytes) replaces what is free on this machine. `name` and `given` are what the user calls the configuration and
    the overrides that came with it, for the command that is printed. Raises `KitError`.
    """
    from kit.trainer.savings import planned

    found = subject(config)
    device, place, room = _place(card, room)
    memory = found.memory(device, room=room)
    fits = memory.peak <= room
    changes = None if fits else fixes(config, lambda c: found.memory(device, c, room), room, device)
    speed = speed_of(card) if card else cpu_speed() if device == "cpu" else speed_of(_present())
    seconds = estimate(found.shape, found.work(device), speed, config.optimisation.iterations)
    return {
        "model": {"name": config.model.name, "parameters": found.shape.parameters},
        "place": place,
        "room_bytes": round(room),
        "fits": fits,
        "memory": memory.as_dict(),
        "fixes": None if changes is None else [{"override": c.override, "harm": c.harm} for c in changes],
        "command": None if not changes else command(name, replaced(given, [c.override for c in changes])),
        "prompt_tokens": found.prompt,
        "seconds_per_step": seconds,
        "hours": seconds["step"] * config.optimisation.steps / 3600,
        "time_is": "estimated",
        "cards": [_on(card, found) for card in CARDS],
        "notes": found.notes + ([] if device == "cpu" else [GPU_NOTE]),
        "vllm": vllm(found, room if device == "cuda" else 0.0),
        "savings": planned(config, found.objective),
    }


GPU_NOTE = "figures for GPUs follow from formulas that were checked against measurements on the CPU only"


def _place(card: Card | None, room: float | None) -> tuple[str, str, float]:
    """(device, its name, bytes that a run may take)."""
    import torch

    from kit.models.memory import CUDA_CONTEXT, free_memory

    if card is not None:
        return "cuda", card.name, card.usable * GIB if room is None else room
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "this machine's CPU"
    # The context of this very process is in use already, and is counted in the plan.
    free = free_memory(device) + (CUDA_CONTEXT if device == "cuda" else 0.0)
    return device, name, free if room is None else room


def _present() -> Card:
    import torch

    return this_card(torch.cuda.get_device_name())


def _on(card: Card, found: Subject) -> dict[str, Any]:
    room = card.usable * GIB
    work = found.work("cuda", room=room)
    memory = plan_memory(found.shape, work)
    seconds = estimate(found.shape, work, speed_of(card), found.config.optimisation.iterations)["step"]
    return {
        "card": card.name,
        "usable_gib": card.usable,
        "fits": memory.peak <= room,
        "peak_gib": memory.peak / GIB,
        "seconds_per_step": seconds,
        "largest": largest(found.shape, work, room, found.context),
    }


def vllm(found: Subject, room: float) -> dict[str, Any]:
    """Peaks with vLLM beside the trainer, asleep or awake while weights are updated. A formula only: not run on a GPU yet."""
    share = found.config.generation.vllm.gpu_memory_utilization * room
    work = replace(found.work("cuda"), vllm_bytes=share)
    return {
        "tested": False,
        "share_bytes": round(share),
        "peak_bytes_sleep_on": round(plan_memory(found.shape, replace(work, vllm_sleeps=True)).peak),
        "peak_bytes_sleep_off": round(plan_memory(found.shape, replace(work, vllm_sleeps=False)).peak),
    }


def replaced(given: Sequence[str], changes: Sequence[str]) -> list[str]:
    """The overrides `given` and `changes` after them, without those whose key (or a parent of it) is changed."""
    keys = [change.partition("=")[0] for change in changes]

    def stands(override: str) -> bool:
        own = override.partition("=")[0].strip()
        return not any(own == key or own.startswith(f"{key}.") for key in keys)

    return [*filter(stands, given), *changes]


def command(name: str, overrides: list[str]) -> str:
    """The training command with `overrides`, quoted for a shell."""
    import shlex

    return " ".join(["grpo-kit", "train", shlex.quote(name), *(f"-o {shlex.quote(one)}" for one in overrides)])
