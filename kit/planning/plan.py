"""`grpo-kit plan`: memory by terms, whether a run fits, seconds per step, and the changes that make the run fit.

A plan needs the model's config.json only. If the tokenizer and the data can be read, the longest prompt is measured;
otherwise the plan uses `data.max_prompt_tokens`.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import ConfigError, KitError, ModelError
from kit.generation.engine import backend_incompatibilities, choose_engine, resolve
from kit.models.backend import BFLOAT16, UNSLOTH, Backend, Machine, quantization_config
from kit.models.memory import GIB, MemoryPlan, Workload, fixed_terms, plan_memory, planned_workload, prompt_tokens
from kit.models.shape import ModelShape, is_in_4_bits, shape_of
from kit.registry import did_you_mean
from kit.runs.lock import gpu_holder

if TYPE_CHECKING:
    from kit.objective import Objective

Planner = Callable[[RunConfig], MemoryPlan]


# --- GPUs, and the seconds of a step on one ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU model. `usable` is the total memory that torch reports, less than the nominal one."""

    name: str
    usable: float  # GiB
    teraflops: float  # dense, half precision with tensor cores, as the maker states
    bandwidth: float  # GB/s
    bf16: bool = True


GPUS = (
    Gpu("RTX 4060 8", 7.6, 60, 272),
    Gpu("RTX 3060 Ti 8", 7.7, 65, 448),
    Gpu("RTX 3080 10", 9.6, 119, 760),
    Gpu("RTX 5070 12", 11.5, 123, 672),
    Gpu("RTX 3060 12", 11.6, 51, 360),
    Gpu("RTX 4070 12", 11.6, 117, 504),
    Gpu("T4 16", 14.6, 65, 320, bf16=False),
    Gpu("RTX 5060 Ti 16", 15.4, 95, 448),
    Gpu("RTX 5070 Ti 16", 15.4, 176, 896),
    Gpu("RTX 5080 16", 15.4, 225, 960),
    Gpu("RTX 4060 Ti 16", 15.5, 88, 288),
    Gpu("RTX 4070 Ti Super 16", 15.5, 176, 672),
    Gpu("RTX 4080 16", 15.6, 195, 717),
    Gpu("RTX A4000 16", 15.6, 77, 448),
    Gpu("A10 24", 22.0, 125, 600),
    Gpu("L4 24", 22.0, 121, 300),
    Gpu("A10G 24", 22.1, 70, 600),
    Gpu("RTX 3090 24", 23.5, 71, 936),
    Gpu("RTX 4090 24", 23.5, 165, 1008),
    Gpu("RTX 5090 32", 31.3, 209, 1792),
    Gpu("A100 40", 39.4, 312, 1555),
    Gpu("L40S 48", 44.4, 362, 864),
    Gpu("RTX A6000 48", 47.4, 155, 768),
    Gpu("A100 80", 79.1, 312, 2039),
    Gpu("H100 80", 79.1, 989, 3350),
    Gpu("H200 141", 139.8, 989, 4800),
)


def find_gpu(name: str) -> Gpu:
    """Return the GPU with the shortest name that contains every word of `name` ("t4", "a100 80"). Raises `ConfigError`.

    A size ("16", "16gb", "16 GiB") is the nominal memory. Alone, it means the GPU of that size with the least usable memory.
    """
    plain = re.sub(r"(\d)\s*gi?b\b|nvidia|geforce", r"\1", name.lower())
    words, matches = plain.replace("-", " ").replace("rtx", "rtx ").split(), []
    for gpu in GPUS:
        model, size = gpu.name.lower().rsplit(" ", 1)
        if words and all(word == size if word.isdigit() and len(word) < 4 else word in model for word in words):
            matches.append(gpu)
    if matches:
        return min(matches, key=lambda gpu: gpu.name.count(" "))
    names = [gpu.name for gpu in GPUS]
    raise ConfigError(f"There is no GPU '{name}' in the list.{did_you_mean(name, names)} It has: {', '.join(names)}.")


GPU_EFFICIENCY = 0.35
"""Share of a GPU's nominal FLOPS that transformers reaches in training."""
GPU_LAYER_SECONDS = 0.9e-3
"""Time of one decoder layer per token if kernel launches dominate (transformers' generate)."""
CPU_LAYER_SECONDS = 0.5e-3
CPU_BANDWIDTH = 8e9  # bytes per second
CPU_EFFICIENCY = 0.5


@dataclass(frozen=True)
class Speed:
    """The throughput that a device reaches: FLOP per second, bytes per second, and seconds per layer and token."""

    flops: float
    bandwidth: float
    layer_seconds: float


def cpu_speed(compute_bytes: int = 4) -> Speed:
    """Measure this CPU's matrix multiplication in float32 or, with 2 bytes, bfloat16, scaled to torch's threads.

    The time is the CPU time of one thread, so that other programs do not lower the result.
    """
    import torch

    threads = torch.get_num_threads()
    matrix = torch.ones(512, 512, dtype=torch.bfloat16 if compute_bytes == 2 else torch.float32)
    torch.set_num_threads(1)
    try:
        torch.mm(matrix, matrix)
        started, count = time.thread_time(), 0
        while (spent := time.thread_time() - started) < 0.1:
            torch.mm(matrix, matrix)
            count += 1
    finally:
        torch.set_num_threads(threads)
    return Speed(CPU_EFFICIENCY * threads * count * 2 * 512**3 / spent, CPU_BANDWIDTH, CPU_LAYER_SECONDS)


def estimate(shape: ModelShape, work: Workload, speed: Speed, iterations: int = 1) -> dict[str, float]:
    """Estimate the seconds of an optimiser step, by part. Assumes completions of full length."""
    prefill = 2 * shape.parameters * work.batch * work.prompt / speed.flops
    rollout = prefill + work.completion * _token(shape, work, speed)
    scored = (int(work.reference) + int(work.old_logps)) * shape.parameters * work.tokens
    if work.teacher is not None:
        tokens = work.teacher.prompt_with_completions(work.completion) + work.completion
        scored += (work.teacher.shape or shape).parameters * tokens
    scoring = 2 * scored * work.batch / speed.flops
    # Operations per weight and token: forward 2, backward 4; 2 less if weights are frozen, 2 more with checkpointing.
    per_weight = (6 if work.rank is None else 4) + (2 if work.checkpointing else 0)
    prompt = work.prompt / work.group if work.packed else work.prompt  # a group shares its prompt in packs
    update = per_weight * shape.parameters * work.batch * (prompt + work.completion) / speed.flops
    parts = {"rollout": rollout / iterations, "scoring": scoring / iterations, "update": update}
    return parts | {"step": sum(parts.values())}


def _token(shape: ModelShape, work: Workload, speed: Speed) -> float:
    """Seconds to generate one token of every completion: the maximum of arithmetic, memory traffic and kernel launches."""
    cache = 2 * shape.layers * shape.key * work.weight_bytes * work.batch * (work.prompt + work.completion / 2)
    traffic = (fixed_terms(shape, work)["weights"] + cache) / speed.bandwidth
    return max(2 * shape.parameters * work.batch / speed.flops, traffic, shape.layers * speed.layer_seconds)


START_SECONDS = 20.0
"""Time to start Python, import torch and load the weights."""


def run_seconds(config: RunConfig, step: float, completion: float) -> dict[str, float]:
    """Estimate the seconds of a run, by part: start, held-out scores, steps.

    `step` is the seconds per optimiser step, `completion` the seconds per completion of a sampled batch.
    """
    evaluation, steps = config.evaluation, config.optimisation.steps
    between = (steps - 1) // evaluation.every if evaluation.every else 0
    times = between + int(evaluation.before) + int(evaluation.after)
    problems = min(evaluation.prompts, config.data.heldout)
    scored = times * problems * (1 + evaluation.k) * completion
    return {"start": START_SECONDS, "held-out scores": scored, "steps": steps * step}


def this_gpu(name: str) -> Gpu:
    """Return the listed GPU that `name` (as torch reports it) belongs to, else one with average speed."""
    words = name.lower().replace("-", " ").split()
    matches = [gpu for gpu in GPUS if {*gpu.name.lower().split()[:-1]}.issubset(words)]
    return max(reversed(matches), key=lambda gpu: gpu.name.count(" "), default=Gpu(name, 0.0, 100, 600))


# --- changes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A configuration override and its drawback."""

    override: str
    harm: str

    @property
    def key(self) -> str:
        """The configuration key that it changes."""
        return self.override.partition("=")[0]


BUDGET, MICRO_BATCH = "optimisation.token_budget", "optimisation.micro_batch_size"
SHARE = "generation.vllm.gpu_memory_utilization"
FOUR_BIT = Change("model.load_in_4bit=true", "frozen weights are rounded, slower; needs bitsandbytes")
BUDGET_HARM = "same result up to rounding; long completions are split"
HEADROOM = 0.05  # share of the memory, at least 0.5 GiB, that a plan should leave free, because it is an estimate
SHARED = Change("model.backend=unsloth", "vLLM and trainer share the weights; needs Unsloth")


def fixes(config: RunConfig, plan: Planner, room: float, device: str, *, experts: bool = False) -> list[Change] | None:
    """Return the changes that make `config` fit into `room` bytes, the least harmful first; None if no changes do.

    First vLLM gets the memory share that it needs to start. Then the least harmful change that lowers the excess is added until
    every phase fits. Finally, starting with the most harmful, each change is dropped or made as small as possible.
    `experts`: do not propose Unsloth, which does not train a mixture of experts.
    """

    def excess(changes: Mapping[str, Change]) -> float:
        changed = apply(config, list(changes.values()))
        return math.inf if changed is None else plan(changed).excess(room)

    first = plan(config)
    ladder = [change for change in _ladder(config, first.workload, device) if change is not SHARED or not experts]
    shares = [change for change in ladder if change.key == SHARE] if first.engine_lacks else []
    enough = (share for share in shares if (changed := apply(config, [share])) and not plan(changed).engine_lacks)
    chosen = {change.key: change for change in itertools.islice(enough, 1)}
    while (now := excess(chosen)) > 0:
        # A smaller micro-batch lowers everything that a token budget lowers.
        candidates = (change for change in ladder if change.key != BUDGET)
        helpful = next((change for change in candidates if excess(chosen | {change.key: change}) < now), None)
        if helpful is None:
            return None
        chosen[helpful.key] = helpful
    for key in sorted(chosen, key=lambda key: -ladder.index(chosen[key])):
        rest = {other: change for other, change in chosen.items() if other != key}
        # A token budget that suffices is better than a smaller micro-batch: short completions share a forward pass.
        keys = [BUDGET, MICRO_BATCH] if key == MICRO_BATCH else [key]
        milder = [rest | {other.key: other} for each in keys for other in ladder if other.key == each]
        chosen = next((changes for changes in [rest, *milder] if not excess(changes)), chosen)
    return sorted(chosen.values(), key=ladder.index)


def apply(config: RunConfig, changes: Sequence[Change]) -> RunConfig | None:
    """Return the changed configuration, or None if it is invalid."""
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
        yield Change(f"{BUDGET}={budget}", BUDGET_HARM)
    for size in range(work.micro_batch - 1, 0, -1):
        if batch % size == 0:
            yield Change(f"{MICRO_BATCH}={size}", "same result up to rounding")
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
    if config.model.lora is None:
        yield Change("model.lora={rank: 64, alpha: 128}", "trains adapters instead of all weights")
    if device == "cuda" and not (colocated and config.generation.vllm.hand_over == "merged"):
        yield FOUR_BIT
    if device == "cuda" and colocated:
        shared, unsloth = apply(config, [SHARED]), Backend(UNSLOTH, "cuda", "")
        if shared and not any(backend_incompatibilities(shared, unsloth, Machine(BFLOAT16), ())):
            yield SHARED
        yield Change("generation.engine=hf", "slower generation")
    fewer = batch
    while (fewer := fewer // 2) >= group:
        if fewer % group == 0:
            yield Change(f"optimisation.batch_size={fewer}", "noisier steps")
    tokens = config.generation.max_completion_tokens
    while (tokens := tokens // 2) >= 32:
        yield Change(f"generation.max_completion_tokens={tokens}", "longer answers are cut")


def budgets(work: Workload) -> list[int]:
    """Return the token budgets that shrink the largest pass, in descending order: powers of two, then one full completion."""
    powers = (1 << bits for bits in range(work.tokens_at_once.bit_length(), -1, -1))
    sizes = [*(power for power in powers if power > work.tokens), work.tokens]
    return [size for size in sizes if size < work.tokens_at_once]


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """The input of a plan: a configuration, the shape of its model, its objective and its longest prompts.

    `lengths` comes from `kit.runner.prepare.longest_prompts`. `teacher_shape` is the shape of a separate teacher model.
    `overflows`: it overflows in float16, so that a GPU without bfloat16 computes in float32. `experts`: a mixture of experts.
    """

    config: RunConfig
    shape: ModelShape
    objective: Objective
    lengths: Mapping[str, int | None]
    notes: list[str]
    teacher_shape: ModelShape | None = None
    overflows: bool = False
    experts: bool = False

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt."""
        return prompt_tokens(self.config, self.lengths.get("policy"))

    def work(self, place: Place, config: RunConfig | None = None) -> Workload:
        """Return the workload with the token budget and generation batch that a run would choose on `place`."""
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
    """The device of a run: `room` is the bytes that the run may use, `card` all bytes of the GPU."""

    device: str
    name: str
    room: float
    card: float | None
    bf16: bool = True


def subject(config: RunConfig) -> Subject:
    """Read the input of a plan. Raises `KitError`."""
    from kit.models.backend import has_experts, overflows_in_float16
    from kit.models.loading import read_config
    from kit.runner.prepare import build_objective, teacher_model
    from kit.trainer.teacher import SELF

    objective, model_config = build_objective(config), read_config(config.model)
    shape = known_shape(config.model.name, model_config)
    lengths, notes = measured_prompts(config)
    teacher = None
    if config.teacher.model not in (None, SELF):
        teacher = known_shape(str(config.teacher.model), read_config(teacher_model(config)))
    traits = overflows_in_float16(model_config), has_experts(model_config)
    return Subject(config, shape, objective, lengths, notes, teacher, *traits)


def known_shape(name: str, model_config: Any) -> ModelShape:
    """Return the shape of a model. Raises `ModelError` if the model needs remote code."""
    shape = shape_of(model_config)
    if shape is None:
        raise ModelError(
            f"{name} brings its own Python code, so its shape is unknown until that code runs. "
            "Plan with a model of an architecture in transformers."
        )
    return shape


def measured_prompts(config: RunConfig) -> tuple[dict[str, int | None], list[str]]:
    """Return the tokens of the longest prompts (`kit.runner.prepare.longest_prompts`); nothing and a note if that fails.

    Functions of a teacher are not called; their prompts are assumed to be as long as the policy's. `reset` of an environment is.
    """
    from kit.data import load_data
    from kit.generation.tools import load_tools
    from kit.runner.prepare import longest_prompts

    try:
        # The tokenizer comes first: if it is missing, the rows, which may take a minute, are not needed.
        tokenizer, interaction = tokenizer_of(config), load_tools(config.generation)
        return longest_prompts(config, tokenizer, load_data(config.data).train, interaction), []
    except Exception as error:  # `reset` of an environment may raise anything
        reason = str(error).partition(". ")[0]
        return {}, [f"prompts were not measured; they are taken to have {prompt_tokens(config)} tokens. ({reason}.)"]


def tokenizer_of(config: RunConfig) -> Any:
    """Load the tokenizer without the model. Raises `ModelError` if it cannot be read."""
    from kit.models.embedded import source_of
    from kit.models.loading import load_tokenizer

    source = source_of(config.model.name, config.model.revision)
    keywords = {"revision": config.model.revision, "trust_remote_code": config.model.trust_remote_code}
    return load_tokenizer(source, chat=config.data.chat, chat_template=config.model.chat_template, **keywords)


def plan(config: RunConfig, *, gpu: Gpu | None = None, room: float | None = None) -> dict[str, Any]:
    """Return the plan as plain values, for this machine or for `gpu`.

    `room` (bytes) replaces the free memory. `fixes` are changes with which the run fits, or leaves `HEADROOM`. Raises `KitError`.
    """
    from kit.models.loading import read_config

    config.model.load_in_4bit |= is_in_4_bits(read_config(config.model))
    config, obstacle = (config, "") if gpu else on_this_machine(config)
    planned = subject(config)
    place = _place(gpu, room)
    device, room = place.device, place.room
    memory = planned.memory(place)
    fits = not memory.excess(room)
    roomy = replace(place, room=room - max(HEADROOM * room, GIB / 2))
    changes: list[Change] | None = None
    if not obstacle and (not fits or memory.peak > roomy.room):
        changes = fixes(config, lambda c: planned.memory(roomy, c), roomy.room, device, experts=planned.experts)
        changed = apply(config, changes or [])
        budget, filled = (planned.work(where, changed).token_budget for where in (roomy, place))
        if changes is None and not fits:
            changes = fixes(config, lambda c: planned.memory(place, c), room, device, experts=planned.experts)
        elif changes is not None and budget != filled:  # a run would choose a budget that fills the memory
            changes.insert(0, Change(f"{BUDGET}={budget}", BUDGET_HARM))
    work = planned.work(place)
    if device == "cpu":
        speed = cpu_speed(work.compute_bytes)
    else:  # the reachable share of the manufacturer's figures
        card = gpu or this_gpu(place.name)
        speed = Speed(GPU_EFFICIENCY * card.teraflops * 1e12, 0.6 * card.bandwidth * 1e9, GPU_LAYER_SECONDS)
    seconds = estimate(planned.shape, work, speed, config.optimisation.iterations)
    completion = seconds["rollout"] * config.optimisation.iterations / config.optimisation.batch_size
    run = run_seconds(config, seconds["step"], completion)
    notes = [obstacle] * bool(obstacle) + planned.notes
    notes += gpu_notes(config, gpu, memory) if device == "cuda" else []
    return {
        "model": {"name": config.model.name, "parameters": planned.shape.parameters},
        "place": place.name,
        "room_bytes": round(room),
        "fits": fits,
        "starts": not obstacle,
        "is_tight": fits and not obstacle and memory.peak > roomy.room and changes != [],
        "memory": memory.as_dict(),
        "fixes": None if changes is None else [{"override": c.override, "harm": c.harm} for c in changes],
        "prompt_tokens": planned.prompt,
        "seconds_per_step": seconds,
        "run_seconds": run,
        "hours": sum(run.values()) / 3600,
        "time_is": "estimated",
        "notes": notes,
    }


def gpu_notes(config: RunConfig, gpu: Gpu | None, memory: MemoryPlan) -> Iterator[str]:
    """Yield the notes of a plan for a GPU; `gpu` is None for this machine's."""
    yield "figures for GPUs come from formulas that were compared with measurements on the CPU only"
    if memory.engine_lacks:
        yield (
            f"vLLM's share (generation.vllm.gpu_memory_utilization) is {memory.engine_lacks / GIB:.1f} GiB too small for its "
            "weights, a pass of the model and the cache of one completion: it would not start"
        )
    if gpu is not None and config.generation.engine == "auto":
        yield "completions are planned with transformers' generate; for vLLM add -o generation.engine=vllm"
    if gpu is None and (holder := gpu_holder()):
        yield f"{holder}, counts as free: a run started now waits for it"


def on_this_machine(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the configuration with the engine that a run would choose here, or unchanged with the reason why none starts."""
    from kit.runner.prepare import build_objective, check_environment

    objective = build_objective(config)
    try:
        check_environment(config)
        if config.model.load_in_4bit:
            quantization_config()
        return resolve(config, choose_engine(config), objective=objective)[0], ""
    except KitError as error:
        return config, f"this machine cannot run it: {error} To plan for another GPU, add --gpu NAME"


def _place(gpu: Gpu | None, room: float | None) -> Place:
    """Return this machine, or one with `gpu`; `room` replaces the bytes that a run may use."""
    import torch

    from kit.models.memory import card_of, room_of

    if gpu is not None:
        return Place("cuda", gpu.name, gpu.usable * GIB if room is None else room, gpu.usable * GIB, gpu.bf16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "this machine's CPU"
    bf16 = device == "cpu" or torch.cuda.get_device_capability() >= BFLOAT16
    return Place(device, name, room_of(device, waits=True) if room is None else room, card_of(device), bf16)
