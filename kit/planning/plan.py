"""`grpo-kit plan`: memory by terms, whether it fits, seconds a step, and the changes that make a run fit.

Needs a model's config.json and nothing else of it. Where its tokenizer and the data can be read, the longest prompt is
measured; else `data.max_prompt_tokens` stands for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import ConfigError, KitError, ModelError
from kit.models.backend import BFLOAT16, overflows_in_float16
from kit.models.memory import GIB, MemoryPlan, Workload, fixed_terms, plan_memory, planned_workload, prompt_tokens
from kit.models.shape import ModelShape, shape_of
from kit.registry import did_you_mean
from kit.runs.lock import gpu_holder

if TYPE_CHECKING:
    from kit.config.sections import ModelConfig
    from kit.objective import Objective

Planner = Callable[[RunConfig], MemoryPlan]


# --- GPUs, and the seconds of a step on one ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU. `usable` is what torch reports as its total memory, less than the number on the box."""

    name: str
    usable: float  # GiB
    teraflops: float  # dense, half precision with tensor cores, as the maker states
    bandwidth: float  # GB/s
    bf16: bool = True


GPUS = (
    Gpu("RTX 3060 12", 11.6, 51, 360),
    Gpu("T4 16", 14.6, 65, 320, bf16=False),
    Gpu("V100 16", 15.7, 125, 900, bf16=False),
    Gpu("L4 24", 22.0, 121, 300),
    Gpu("A10G 24", 22.1, 70, 600),
    Gpu("RTX 3090 24", 23.5, 71, 936),
    Gpu("RTX 4090 24", 23.5, 165, 1008),
    Gpu("RTX 5090 32", 31.3, 209, 1792),
    Gpu("A100 40", 39.4, 312, 1555),
    Gpu("L40S 48", 44.4, 362, 864),
    Gpu("A6000 48", 47.4, 155, 768),
    Gpu("A100 80", 79.1, 312, 2039),
    Gpu("H100 80", 79.1, 989, 3350),
    Gpu("H200 141", 139.8, 989, 4800),
)


def find_gpu(name: str) -> Gpu:
    """The GPU whose name contains every word of `name` ("t4", "a100 80", "rtx3060"). Raises `ConfigError`."""
    words = name.lower().replace("-", " ").replace("rtx", "rtx ").split()
    matches = [gpu for gpu in GPUS if all(word in gpu.name.lower() for word in words)]
    if words and matches:
        return matches[0]
    names = [gpu.name for gpu in GPUS]
    raise ConfigError(f"There is no GPU '{name}' in the list.{did_you_mean(name, names)} It has: {', '.join(names)}.")


GPU_EFFICIENCY = 0.35
"""Share of a GPU's stated arithmetic that transformers reaches in training."""
GPU_LAYER_SECONDS = 0.9e-3
"""Time of one decoder layer for one token when only the launching of kernels counts (transformers' generate)."""
CPU_LAYER_SECONDS = 0.5e-3
CPU_BANDWIDTH = 8e9  # bytes a second
CPU_EFFICIENCY = 0.5


@dataclass(frozen=True)
class Speed:
    """What a device does in a second, as far as it is reached."""

    flops: float
    bandwidth: float
    layer_seconds: float


def speed_of(gpu: Gpu) -> Speed:
    """A share of what the maker states."""
    return Speed(GPU_EFFICIENCY * gpu.teraflops * 1e12, 0.6 * gpu.bandwidth * 1e9, GPU_LAYER_SECONDS)


def cpu_speed(compute_bytes: int = 4) -> Speed:
    """The arithmetic of this CPU, in float32 or (2 bytes) bfloat16, on the threads that torch would use.

    Measured on one thread by the time that it was running, so that other programs do not make it slower.
    """
    import torch

    threads = torch.get_num_threads()
    left = torch.ones(512, 512, dtype=torch.bfloat16 if compute_bytes == 2 else torch.float32)
    torch.set_num_threads(1)
    try:
        torch.mm(left, left)
        running, count = time.thread_time(), 0
        while (spent := time.thread_time() - running) < 0.1:
            torch.mm(left, left)
            count += 1
    finally:
        torch.set_num_threads(threads)
    rate = threads * count * 2 * 512**3 / spent
    return Speed(CPU_EFFICIENCY * rate, CPU_BANDWIDTH, CPU_LAYER_SECONDS)


def estimate(shape: ModelShape, work: Workload, speed: Speed, iterations: int = 1) -> dict[str, float]:
    """Estimated seconds of an optimiser step, by part. Completions are taken to be of full length."""
    prefill = 2 * shape.parameters * work.batch * work.prompt / speed.flops
    rollout = prefill + work.completion * _token(shape, work, speed)
    passes = int(work.reference) + int(work.old_logps)
    scored = passes * shape.parameters * work.tokens
    if work.teacher is not None:
        scored += (work.teacher.shape or shape).parameters * (
            work.teacher.prompt_with_completions(work.completion) + work.completion
        )
    scoring = 2 * scored * work.batch / speed.flops
    # Forward 2, backward 4 operations a weight and token; 2 less where weights are frozen, 2 more with checkpointing.
    per_weight = (6 if work.rank is None else 4) + (2 if work.checkpointing else 0)
    prompt = work.prompt / work.group if work.packed else work.prompt  # in packs, once for a group
    update = per_weight * shape.parameters * work.batch * (prompt + work.completion) / speed.flops
    parts = {"rollout": rollout / iterations, "scoring": scoring / iterations, "update": update}
    return parts | {"step": sum(parts.values())}


def _token(shape: ModelShape, work: Workload, speed: Speed) -> float:
    """One token of every completion: arithmetic, reading weights and cache, or launching, whichever takes longest."""
    cache = 2 * shape.layers * shape.key * work.weight_bytes * work.batch * (work.prompt + work.completion / 2)
    traffic = (fixed_terms(shape, work)["weights"] + cache) / speed.bandwidth
    return max(2 * shape.parameters * work.batch / speed.flops, traffic, shape.layers * speed.layer_seconds)


START_SECONDS = 20.0
"""Python, torch and the weights, before a run's first answer."""


def run_seconds(config: RunConfig, step: float, completion: float) -> dict[str, float]:
    """Estimated seconds of a whole run, by part: its start, its held-out scores, its steps.

    `step` is the seconds of an optimiser step, `completion` those of a completion when a batch is sampled.
    """
    evaluation, steps = config.evaluation, config.optimisation.steps
    between = (steps - 1) // evaluation.every if evaluation.every else 0
    times = between + int(evaluation.before) + int(evaluation.after)
    problems = min(evaluation.prompts, config.data.heldout)
    scored = times * problems * (1 + evaluation.k) * completion
    return {"start": START_SECONDS, "held-out scores": scored, "steps": steps * step}


def this_gpu(name: str) -> Gpu:
    """The listed GPU that a GPU's name stands for, else a middling one."""
    words = name.lower().replace("-", " ").replace("gb", " ").split()
    matches = [gpu for gpu in GPUS if gpu.name.lower().split()[-2] in words]
    return matches[-1] if matches else Gpu(name, 0.0, 100, 600)


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One override, and what it costs."""

    override: str
    harm: str

    @property
    def key(self) -> str:
        """The key of the configuration that it changes."""
        return self.override.partition("=")[0]


BUDGET, MICRO_BATCH = "optimisation.token_budget", "optimisation.micro_batch_size"
SHARE = "generation.vllm.gpu_memory_utilization"
FOUR_BIT = Change("model.load_in_4bit=true", "frozen weights are rounded, slower; needs bitsandbytes")


def fixes(config: RunConfig, plan: Planner, room: float, device: str) -> list[Change] | None:
    """The changes that make `config` fit into `room` bytes, the least harmful first; None if no changes do.

    vLLM first gets the share with which it starts. Then the first change that lowers the excess of the phases is made, until all
    fit. Changes that are not needed are dropped, and the others made as small as possible, the most harmful first.
    """

    def excess(changes: Mapping[str, Change]) -> float:
        changed = apply(config, list(changes.values()))
        return math.inf if changed is None else plan(changed).excess(room)

    chosen: dict[str, Change] = {}
    first = plan(config)
    ladder = list(_ladder(config, first.workload, device))
    if first.engine_lacks:
        for change in ladder:
            changed = apply(config, [change]) if change.key == SHARE else None
            if changed is not None and not plan(changed).engine_lacks:
                chosen = {SHARE: change}
                break
    while (now := excess(chosen)) > 0:
        # A smaller micro-batch lowers whatever a budget does.
        steps = (change for change in ladder if change.key != BUDGET)
        lower = next((change for change in steps if excess(chosen | {change.key: change}) < now), None)
        if lower is None:
            return None
        chosen[lower.key] = lower
    for key in sorted(chosen, key=lambda key: -ladder.index(chosen[key])):
        rest = {other: change for other, change in chosen.items() if other != key}
        # Where a token budget does as well as a smaller micro-batch, it is better: short completions go through together.
        keys = [BUDGET, MICRO_BATCH] if key == MICRO_BATCH else [key]
        milder = [rest | {other.key: other} for each in keys for other in ladder if other.key == each]
        chosen = next((changes for changes in [rest, *milder] if not excess(changes)), chosen)
    return sorted(chosen.values(), key=ladder.index)


def apply(config: RunConfig, changes: Sequence[Change]) -> RunConfig | None:
    """The changed configuration; None where the parts do not go together."""
    try:
        changed = load_config(config, [change.override for change in changes])
    except KitError:
        return None
    optimisation, keys = changed.optimisation, {change.key for change in changes}
    is_divided = optimisation.batch_size % (optimisation.micro_batch_size or 1) == 0
    if "optimisation.batch_size" in keys and MICRO_BATCH not in keys and not is_divided:
        return None
    trains = changed.model.lora is not None or not changed.model.load_in_4bit  # weights in 4 bits are frozen
    return changed if trains else None


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
    colocated = config.generation.engine == "vllm"
    if device == "cuda":
        if colocated and not config.generation.vllm.standby:
            yield Change("generation.vllm.standby=true", "same result; vLLM reloads its weights at each step")
        if colocated:
            share = config.generation.vllm.gpu_memory_utilization
            for larger in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
                if larger > share:
                    yield Change(f"{SHARE}={larger}", "vLLM takes more of the card")
            for smaller in (0.7, 0.5, 0.3):
                if smaller < share:
                    yield Change(f"{SHARE}={smaller}", "vLLM generates fewer answers at once")
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
    return [
        size
        for size in [*(power for power in powers if power > work.tokens), work.tokens]
        if size < work.tokens_at_once
    ]


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """The input of a plan: a configuration, the shape of its model, its objective and its longest prompts.

    lengths: as `kit.runner.prepare.longest_prompts` has them. teacher_shape: of another model that teaches.
    overflows: in float16, so that a GPU without bfloat16 computes it in float32.
    """

    config: RunConfig
    shape: ModelShape
    objective: Objective
    lengths: Mapping[str, int | None]
    notes: list[str]
    teacher_shape: ModelShape | None = None
    overflows: bool = False

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt."""
        return prompt_tokens(self.config, self.lengths.get("policy"))

    def work(self, place: Place, config: RunConfig | None = None) -> Workload:
        """With the token budget and generation batch that a run would choose there."""
        config = config or self.config
        float16 = config.model.dtype == "float16" or (config.model.dtype == "auto" and not place.bf16)
        return planned_workload(
            config,
            self.shape,
            place.device,
            self.objective,
            self.lengths,
            room=place.room,
            card=place.card,
            teacher=self.teacher_shape,
            float32=self.overflows and place.device == "cuda" and float16,
        )

    def memory(self, place: Place, config: RunConfig | None = None) -> MemoryPlan:
        return plan_memory(self.shape, self.work(place, config))


@dataclass(frozen=True)
class Place:
    """Where a run would be: `room`, the bytes that it may take, `card`, all those of a GPU, and whether that has bfloat16."""

    device: str
    name: str
    room: float
    card: float | None
    bf16: bool = True


def subject(config: RunConfig) -> Subject:
    """Reads what planning needs. Raises `KitError`."""
    from kit.runner.prepare import build_objective, teacher_model
    from kit.trainer.teacher import SELF

    objective, model_config = build_objective(config), read_config(config.model)
    shape = known_shape(config.model.name, model_config)
    lengths, notes = measured_prompts(config)
    teacher = None
    if config.teacher.model not in (None, SELF):
        teacher = known_shape(str(config.teacher.model), read_config(teacher_model(config)))
    return Subject(config, shape, objective, lengths, notes, teacher, overflows_in_float16(model_config))


def known_shape(name: str, model_config: Any) -> ModelShape:
    """The shape of a model. Raises `ModelError` where it is remote code."""
    shape = shape_of(model_config)
    if shape is None:
        raise ModelError(
            f"{name} is made of Python code of its own, so its shape is not known before that code runs. "
            "Plan with a model of a family that transformers knows."
        )
    return shape


def read_config(model: ModelConfig) -> Any:
    """The model's configuration; the folder may hold nothing else. Raises `ModelError`."""
    from transformers import AutoConfig

    from kit.models.embedded import source_of

    name = source_of(model.name, model.revision)
    try:
        return AutoConfig.from_pretrained(name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"The configuration of {name} could not be read ({reason}). Give a folder with a config.json, or a hub id that "
            "can be reached from here."
        ) from error


def measured_prompts(config: RunConfig) -> tuple[dict[str, int | None], list[str]]:
    """Tokens of the longest prompts (`kit.runner.prepare.longest_prompts`); none and a note where they cannot be measured.

    A function of the user's is not called: its prompts are taken to be as long as the policy's.
    """
    from kit.data import load_data
    from kit.generation.tools import load_tools
    from kit.runner.prepare import longest_prompts

    try:
        tools = load_tools(config.generation).all_tools()
        return longest_prompts(config, tokenizer_of(config), load_data(config.data).train, tools), []
    except KitError as error:
        reason = str(error).partition(". ")[0]
        return {}, [f"prompts were not measured; they are taken to have {prompt_tokens(config)} tokens. ({reason}.)"]


def tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer alone. Raises `ModelError` where it cannot be read."""
    from kit.models.embedded import source_of
    from kit.models.loading import load_tokenizer

    source = source_of(config.model.name, config.model.revision)
    keywords = {"revision": config.model.revision, "trust_remote_code": config.model.trust_remote_code}
    return load_tokenizer(source, chat=config.data.chat, chat_template=config.model.chat_template, **keywords)


def plan(config: RunConfig, *, gpu: Gpu | None = None, room: float | None = None) -> dict[str, Any]:
    """The plan as plain values, for this machine, or for `gpu`.

    `room` (bytes) replaces what is free on this machine. Raises `KitError`.
    """
    planned = subject(config if gpu else with_own_engine(config))
    place = _place(gpu, room)
    device, room = place.device, place.room
    memory = planned.memory(place)
    fits = not memory.excess(room)
    changes = None if fits else fixes(config, lambda c: planned.memory(place, c), room, device)
    work = planned.work(place)
    speed = (
        speed_of(gpu) if gpu else cpu_speed(work.compute_bytes) if device == "cpu" else speed_of(this_gpu(place.name))
    )
    seconds = estimate(planned.shape, work, speed, config.optimisation.iterations)
    completion = seconds["rollout"] * config.optimisation.iterations / config.optimisation.batch_size
    run = run_seconds(config, seconds["step"], completion)
    return {
        "model": {"name": config.model.name, "parameters": planned.shape.parameters},
        "place": place.name,
        "room_bytes": round(room),
        "fits": fits,
        "memory": memory.as_dict(),
        "fixes": None if changes is None else [{"override": c.override, "harm": c.harm} for c in changes],
        "prompt_tokens": planned.prompt,
        "seconds_per_step": seconds,
        "run_seconds": run,
        "hours": sum(run.values()) / 3600,
        "time_is": "estimated",
        "notes": planned.notes + ([] if device == "cpu" else list(gpu_notes(config, gpu, memory))),
    }


def gpu_notes(config: RunConfig, gpu: Gpu | None, memory: MemoryPlan) -> Iterator[str]:
    """What a reader of a plan for a GPU should know. gpu: another machine's; None: this machine's."""
    yield "figures for GPUs follow from formulas that were checked against measurements on the CPU only"
    if memory.engine_lacks:
        yield (
            f"vLLM's share (generation.vllm.gpu_memory_utilization) is {memory.engine_lacks / GIB:.1f} GiB too small for its "
            "weights and the cache of one completion: it would not start"
        )
    if gpu is not None and config.generation.engine == "auto":
        yield "completions are planned with transformers' generate; for vLLM add -o generation.engine=vllm"
    if gpu is None and (holder := gpu_holder()):
        yield f"{holder}, counts as free: a run that is started now waits for it"


def with_own_engine(config: RunConfig) -> RunConfig:
    """With the engine that a run would choose on this machine; as it is where the run would be refused."""
    from kit.generation.engine import choose_engine, resolve
    from kit.runner.prepare import build_objective

    objective = build_objective(config)
    try:
        return resolve(config, choose_engine(config), objective=objective)[0]
    except KitError:
        return config


def _place(gpu: Gpu | None, room: float | None) -> Place:
    """This machine, or another one with that GPU; `room` replaces what may be taken there."""
    import torch

    from kit.models.memory import card_of, room_of

    if gpu is not None:
        return Place("cuda", gpu.name, gpu.usable * GIB if room is None else room, gpu.usable * GIB, gpu.bf16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "this machine's CPU"
    bf16 = device == "cpu" or torch.cuda.get_device_capability() >= BFLOAT16
    return Place(device, name, room_of(device, waits=True) if room is None else room, card_of(device), bf16)
