"""The memory of a run by terms, in bytes: the one formula of the kit, and whether a run fits. docs/memory.md derives it.

A run holds some things throughout (weights, adapters, optimiser states, a reference copy, the process itself) and others
in one of its phases only. The peak is what stays plus the largest phase:

    rollout      key-value cache, transients of the forward pass, sampling over the vocabulary
    evaluation   the same for `evaluation.batch_size` completions
    scoring      a forward pass of one micro-batch without gradients (reference, or old log-probabilities)
    teaching     the same by the teacher, whose prompts are longer, and its hidden states of the whole batch
    update       activations of one micro-batch, or of the part of it that a token budget lets through; transients, the
                 scorer, gradients
    optimiser    gradients, and what the optimiser's arithmetic needs besides

What a model is like comes from its configuration alone (`kit.models.shape`): no weight is read or allocated.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig
from kit.errors import ModelError
from kit.models.backend import Backend
from kit.models.shape import ModelShape
from kit.runs.lock import gpu_holder

if TYPE_CHECKING:
    from kit.objective import Objective

# --- the formula ------------------------------------------------------------------------------------------------------


MIB, GIB = 1024**2, 1024**3
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A weight in NF4 with double quantisation: 4 bits, an 8-bit scale for 64 weights, a float32 for 256 scales."""
TILE_BYTES = 2 * 8 * MIB
"""Two buffers of the scorer's tiles (kit/scoring/head.py)."""
TILE_ROWS, TILE_ELEMENTS, TILE_WIDTH = 1024, 1 << 21, 8192
GPU_TILE_ELEMENTS = 1 << 24
DIVERGENCE_BYTES = 8 * 4
"""A logit of a slice of as many (kit/scoring/divergence.py): eight float32 numbers. Measured."""
PACK_TOKENS = 8192
"""Tokens of a pack on a GPU, as `kit.scoring.scorer` has them."""
CPU_BASELINE = 1060 * MIB
"""Resident memory of a training process before its model: Python, torch, transformers, TRL, datasets. Measured."""
CUDA_CONTEXT = 0.6 * GIB
"""What the driver, cuBLAS and the kernels take of a GPU before the first tensor. A usual value; it varies by GPU."""
VLLM_CPU_BYTES = 1.5 * GIB
"""vLLM on the CPU: 1 GiB of cache, as the kit sets it, and its code. Its copy of the weights is not counted."""
SLACK = {"cpu": 0.10, "cuda": 0.10}
"""Share of what a phase allocates that the allocator holds besides."""


@dataclass(frozen=True)
class TeacherLoad:
    """The load of a teacher: its weights, and one more pass over every completion."""

    shape: ModelShape | None  # of another model; None: the policy itself
    prompt: int  # tokens of its longest prompt, completions that it is shown aside
    shown: int = 0  # completions in that prompt
    weight_bytes: int = 4  # of another model's weight
    four_bit: bool = False
    hidden: bool = True  # whether its hidden states are kept, for divergences over the vocabulary

    def reads(self, completion: int) -> int:
        """Tokens before a completion, for completions of `completion` tokens."""
        return self.prompt + self.shown * completion


@dataclass(frozen=True)
class Workload:
    """The sizes of a run apart from its model, in completions and tokens."""

    device: str
    weight_bytes: int  # of a loaded weight: 4 or 2
    compute_bytes: int  # of an activation
    four_bit: bool
    rank: int | None  # None: all weights train
    targets: str | list[str]
    eight_bit_optimiser: bool
    batch: int
    micro_batch: int
    group: int
    prompt: int
    completion: int
    checkpointing: bool
    reference: bool  # whether the objective asks for a reference policy
    old_logps: bool  # whether the rollout is scored once more
    entropy_gradient: bool
    hidden_rows: int  # (N, H) buffers that hooks keep for the whole batch: full KL, values
    divergence: bool  # whether a divergence over the whole vocabulary is computed
    evaluation: int  # completions generated at once for a held-out score; 0: none
    vllm_bytes: float = 0.0
    vllm_sleeps: bool = True
    vllm_shares_weights: bool = False  # Unsloth's engine and its trainer have the frozen weights once
    token_budget: int | None = None
    packed: bool = False  # without padding, a prompt once a group, and LoRA layers without copies (`kit.models.fused`)
    single_pass: bool = (
        True  # whether parts of a micro-batch go through the model once (`kit.objective.objective.to_parts`)
    )
    teacher: TeacherLoad | None = None
    generated_at_once: int | None = None  # completions; None: the batch
    offload: bool = False  # whether what checkpointing keeps of every layer waits in main memory, away from a GPU
    reward_models: float = 0.0  # bytes of the weights of models that score completions

    @property
    def autocast(self) -> bool:
        return self.compute_bytes < 4

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion

    @property
    def tokens_at_once(self) -> int:
        """Tokens that one graph holds at most: a micro-batch, or the budget; one completion always goes through.

        In packs a prompt counts once for its completions, and once more in each further pack that they take.
        """
        together = min(self.group, max(1, (self.pack - self.prompt) // self.completion)) if self.packed else 1
        all_tokens = self.micro_batch * self.completion + math.ceil(self.micro_batch / together) * self.prompt
        return all_tokens if self.token_budget is None else min(all_tokens, max(self.token_budget, self.tokens))

    @property
    def tokens_of_a_pass(self) -> int:
        """Tokens that go through the model together: packs of one graph go one after the other."""
        return min(self.tokens_at_once, max(self.pack, self.tokens)) if self.packed else self.tokens_at_once

    @property
    def pack(self) -> int:
        """Tokens of a pack, at most, as `kit.scoring.scorer` has them."""
        return max(PACK_TOKENS, 4 * self.prompt)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by term."""

    device: str
    always: dict[str, float]
    phases: dict[str, dict[str, float]]
    workload: Workload = field(repr=False)
    engine_lacks: float = 0.0
    """Bytes that vLLM's share lacks for its weights and the cache of one completion; without them it does not start."""

    @property
    def phase(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> float:
        """Bytes at the highest point of the run."""
        return sum(self.always.values()) + sum(self.phases[self.phase].values())

    def excess(self, room: float) -> float:
        """Bytes that the run lacks in `room`, summed over phases: of two equal phases either can be lowered first."""
        always = sum(self.always.values())
        return self.engine_lacks + sum(max(0.0, always + sum(terms.values()) - room) for terms in self.phases.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON and for the page."""
        return {
            "device": self.device,
            "peak_bytes": round(self.peak),
            "phase": self.phase,
            "always": {name: round(size) for name, size in self.always.items()},
            "phases": {name: {k: round(v) for k, v in terms.items()} for name, terms in self.phases.items()},
        }


def plan_memory(shape: ModelShape, work: Workload, baseline: float | None = None) -> MemoryPlan:
    """The plan of a run; `baseline` is the measured resident memory of the process before its model (CPU)."""
    always = fixed_terms(shape, work)
    always["process" if work.device == "cpu" else "CUDA context"] = (
        CUDA_CONTEXT if work.device == "cuda" else CPU_BASELINE if baseline is None else baseline
    )
    engine, lacks = work.vllm_bytes, 0.0
    if engine and work.device == "cuda":
        frozen = loaded_bytes(shape, work.compute_bytes, four_bit=work.four_bit)
        lacks = max(0.0, frozen + 2.0 * shape.layers * shape.key * work.compute_bytes * work.tokens - engine)
        engine -= min(engine, frozen) if work.vllm_shares_weights else 0.0
    if engine and not work.vllm_sleeps:
        always["vLLM"] = engine
    at_once = min(work.batch, work.generated_at_once or work.batch)
    phases = {"rollout": rollout_terms(shape, work, at_once), "update": update_terms(shape, work)}
    if work.vllm_bytes:
        phases["rollout"] = {"vLLM": engine if work.vllm_sleeps else 0.0}
    if work.evaluation:
        phases["evaluation"] = rollout_terms(shape, work, work.evaluation)
    if work.reference or work.old_logps:
        phases["scoring"] = scoring_terms(shape, work)
    if (teacher := work.teacher) is not None:  # a scoring pass with its prompts, and what it says of the whole batch
        reading, own = replace(work, prompt=teacher.reads(work.completion)), teacher.shape or shape
        if teacher.shape is not None:
            reading = replace(reading, rank=None, compute_bytes=teacher.weight_bytes)
        terms = phases["teaching"] = scoring_terms(own, reading)
        if teacher.hidden:  # three times: token after token, laid out in rows, and beside rows without a teacher
            terms["hidden states"] = 3.0 * reading.compute_bytes * work.batch * work.completion * own.hidden
    # AdamW: on the GPU all weights at once (foreach), on the CPU one after the other.
    count, largest = trained(shape, work), shape.largest if work.rank is None else 0
    phases["optimiser"] = {
        "gradients": 4.0 * count,
        "arithmetic": 4.0 * count if work.device == "cuda" else 8.0 * largest,
    }
    for terms in phases.values():
        terms["allocator"] = SLACK[work.device] * (sum(terms.values()) - terms.get("vLLM", 0.0))
    return MemoryPlan(work.device, always, phases, work, lacks)


def trained(shape: ModelShape, work: Workload) -> int:
    """Weights that an optimiser step changes."""
    return shape.parameters if work.rank is None else shape.lora_parameters(work.rank, work.targets)


def fixed_terms(shape: ModelShape, work: Workload) -> dict[str, float]:
    """Bytes that stay for the whole run, the process itself aside."""
    terms = {"weights": loaded_bytes(shape, work.weight_bytes, four_bit=work.four_bit)}
    if work.rank is not None:
        terms["adapters"] = 4.0 * trained(shape, work)
    elif work.reference:
        terms["reference copy"] = 4.0 * shape.parameters
    terms["optimiser states"] = (2.0 if work.eight_bit_optimiser else 8.0) * trained(shape, work)
    teacher = work.teacher
    if teacher is not None and teacher.shape is not None:
        terms["teacher"] = loaded_bytes(teacher.shape, teacher.weight_bytes, four_bit=teacher.four_bit)
    if work.reward_models:
        terms["reward models"] = work.reward_models
    return terms


def loaded_bytes(shape: ModelShape, weight_bytes: int, *, four_bit: bool) -> float:
    """Bytes of a model's weights; in 4 bits the linear layers but the head."""
    packed = shape.linear if four_bit else 0
    return packed * NF4_BYTES + (shape.parameters - packed) * weight_bytes


def certain_bytes(shape: ModelShape, work: Workload) -> float:
    """The least that a run needs: what stays, and the gradients. Below this it cannot take a single step."""
    return sum(fixed_terms(shape, work).values()) + 4.0 * trained(shape, work)


def rollout_terms(shape: ModelShape, work: Workload, sequences: int) -> dict[str, float]:
    """transformers' generate, all `sequences` at once."""
    size = work.weight_bytes if work.rank is not None else 4
    cache = 2.0 * shape.layers * shape.key * size * sequences * work.tokens
    logits = sequences * shape.vocab * 4 * 4.0  # logits, a copy of them, scaled logits, probabilities: all float32
    # At the last token: the cache of a layer grows by concatenation, so that its old and new keys (or values) exist side
    # by side; attention under a padding mask repeats keys and values to the number of query heads.
    growing = float(shape.key + 2 * shape.query) * size * sequences * work.tokens
    # At the first: the prompts go through at once, and the cache holds no more than them.
    prefill = forward_elements(shape, work) * size * sequences * work.prompt
    first = cache * work.prompt / work.tokens
    if first + prefill > cache + growing:
        cache, growing = first, prefill
    terms = {"key-value cache": cache, "transients": growing, "sampling": logits}
    if work.autocast and work.rank is None:
        terms["half-precision weights"] = 2.0 * shape.linear  # autocast's copies, kept until all tokens are made
    return terms


def forward_elements(shape: ModelShape, work: Workload) -> float:
    """Elements a token that one layer needs at once, nothing kept for a backward pass: its feed-forward part.

    The activated gate, and up or the product; where an adapter is added, its scaled output and the sum beside them.
    """
    with_adapter = 1 if work.rank is not None else 0
    return 3 * shape.hidden + (3 + with_adapter) * shape.intermediate


def layer_bytes(shape: ModelShape, work: Workload, padded: bool = True) -> float:
    """Bytes a token that autograd keeps of one decoder layer. Each term was checked against autograd's saved tensors."""
    s, full = work.compute_bytes, work.rank is None
    hidden, query, key, wide = shape.hidden, shape.query, shape.key, shape.intermediate
    norms = shape.norms * (hidden * 4.0 + 4.0)  # inputs in float32, and 1 / rms
    # inputs of linear layers; autocast makes each its own, but for LoRA layers of one node
    normed = (5 if work.autocast and not (work.packed and not full) else 2) * hidden * s
    if full:
        norms += shape.norms * hidden * 4.0  # the normalised input, for the gradient of the norm's weight
    if shape.qk_norm:
        norms += (query + key) * 4.0 + (shape.heads + shape.heads * key / query) * 4.0
        norms += (query + key) * s if full else 0.0
    # query, key, value and output of attention; a padding mask makes it repeat keys and values, and is kept itself
    attention = (2 * query + 2 * (query if padded else key)) * s + shape.heads * 4.0
    attention += work.tokens * s if padded else 0.0
    attention += query * s if work.autocast and not full else 0.0
    adapters = 0.0
    if work.rank is not None:
        per_layer = len(shape.adapted(work.targets)) / shape.layers
        adapters = per_layer * work.rank * s
    return norms + normed + attention + 4 * wide * s + adapters


def scorer_terms(shape: ModelShape, work: Workload, gradient: bool) -> float:
    """Bytes of the log-probability scorer for one pass: rows of completions, tiles, never (N, V).

    A part within a token budget may have short prompts, and so be all but made of completions.
    """
    rows = work.micro_batch * work.completion
    rows = min(rows, work.tokens_at_once) if gradient or work.token_budget is not None else rows
    width = min(shape.vocab, TILE_WIDTH, TILE_ELEMENTS // max(1, min(rows, TILE_ROWS)))
    tiles = min(float(TILE_BYTES), 8.0 * min(rows, TILE_ROWS) * width) + width * shape.hidden * (work.compute_bytes + 4)
    hidden = rows * shape.hidden * (work.compute_bytes + 4.0)
    copies = (2 if work.entropy_gradient else 1) if gradient else 0
    if work.device == "cuda":  # the tiles are gone before the backward pass of a layer needs more, but for small models
        tile = min(float(GPU_TILE_ELEMENTS), float(rows) * shape.vocab) * (4 + work.compute_bytes)
        once = work.tokens_of_a_pass * (layer_bytes(shape, work, padded=not work.packed) + transient_bytes(shape, work))
        stored = work.compute_bytes * rows * shape.hidden * copies
        return stored + max(0.0, tile + hidden - once) if gradient else tile + hidden
    return tiles + hidden + 4.0 * rows * shape.hidden * copies


def transient_bytes(shape: ModelShape, work: Workload) -> float:
    """Bytes a token of the backward pass of a feed-forward part, in addition to what autograd keeps of it.

    Gradients of product, gate, up and of what the adapters add; of the product and one more, where LoRA layers are one node.
    """
    fused = work.packed and work.rank is not None
    return (2 * shape.intermediate if fused else 3 * shape.intermediate + 3 * shape.hidden) * float(work.compute_bytes)


def scoring_terms(shape: ModelShape, work: Workload) -> dict[str, float]:
    """One micro-batch through the model without gradients, or what a budget lets through at once."""
    tokens = work.tokens_of_a_pass
    transients = forward_elements(shape, work) * work.compute_bytes * tokens
    return {
        "transients": transients + 2 * shape.query * work.compute_bytes * tokens,
        "scorer": scorer_terms(shape, work, False),
    }


def update_terms(shape: ModelShape, work: Workload) -> dict[str, float]:
    """Forward and backward pass of one micro-batch, or of its largest part."""
    tokens, once = work.tokens_at_once, work.tokens_of_a_pass
    layer = layer_bytes(shape, work, padded=not work.packed)
    stream = 4 if work.autocast and work.rank is None else work.compute_bytes
    kept_layers = 1 if work.offload else shape.layers  # the layer that is recomputed has its input back
    boundaries = kept_layers * shape.hidden * stream * (once if work.offload else tokens)
    activations = boundaries + layer * once if work.checkpointing else shape.layers * layer * tokens
    transients = transient_bytes(shape, work) * once
    terms = {
        "activations": activations,
        "transients": transients,
        "scorer": scorer_terms(shape, work, True),
        "gradients": 4.0 * trained(shape, work),
    }
    if work.rank is None:
        terms["scorer"] += 4.0 * shape.vocab * shape.hidden  # the head's gradient, before it joins the embedding's
        if work.autocast:
            terms["half-precision weights"] = 2.0 * shape.linear  # autocast's copies, kept for the backward pass
    if work.four_bit:
        terms["dequantised layer"] = work.compute_bytes * max((a * b for _, a, b in shape.modules), default=0)
    if work.divergence:
        rows = min(work.micro_batch * work.completion, work.tokens_at_once)
        terms["divergence"] = float(DIVERGENCE_BYTES * min(GPU_TILE_ELEMENTS, rows * shape.vocab))
    if work.hidden_rows:
        width = work.hidden_rows * shape.hidden
        if work.teacher is not None and work.teacher.hidden and work.teacher.shape is not None:
            width += work.teacher.shape.hidden - shape.hidden
        terms["hidden states kept"] = 4.0 * width * work.batch * work.completion
    return terms


def workload(
    config: RunConfig,
    device: str,
    objective: Objective,
    prompt: int,
    card: float | None = None,
    teacher: TeacherLoad | None = None,
    *,
    float32: bool = False,
) -> Workload:
    """The workload of `config` on `device` ("cpu" or "cuda"), for prompts of `prompt` tokens.

    `card` (bytes) is all the memory of the GPU, of which a colocated vLLM takes a share; None leaves the engine out.
    `teacher`: as `teacher_load` says it; None leaves it out, e.g. where its weights are loaded already. `float32`: what the
    backend computes in (`Backend.computes_in_float32`); weights that are not quantised are counted in it.
    """

    from kit.objective.batch import fields_where
    from kit.objective.objective import to_parts

    optimisation, generation, lora = config.optimisation, config.generation, config.model.lora
    compute = 4 if float32 else precision(config.model.dtype, device)
    checkpointing = optimisation.gradient_checkpointing
    evaluates = config.evaluation.before or config.evaluation.after or config.evaluation.every
    drawn = config.evaluation.prompts * config.evaluation.k
    needs, vllm, engine = objective.needs, config.generation.vllm, 0.0
    if config.generation.engine == "vllm":  # its share of the whole GPU, or the cache that it is given on the CPU
        engine = VLLM_CPU_BYTES if device == "cpu" else vllm.gpu_memory_utilization * (card or 0.0)
    return Workload(
        device=device,
        weight_bytes=compute if lora is not None else 4,
        compute_bytes=compute,
        four_bit=config.model.load_in_4bit,
        rank=None if lora is None else lora.rank,
        targets="all-linear" if lora is None else lora.targets,
        eight_bit_optimiser=optimisation.optimizer == "adamw_8bit",
        batch=optimisation.batch_size,
        micro_batch=micro_batch_size(config, Backend("transformers", device, "")),
        group=generation.num_generations,
        prompt=prompt,
        completion=generation.max_completion_tokens,
        checkpointing=device == "cuda" if checkpointing is None else bool(checkpointing),
        offload=device == "cuda" and checkpointing == "offload",
        reference=bool(needs & fields_where(model="reference")),
        old_logps=optimisation.iterations > 1 or "old_logps" in needs,
        entropy_gradient=objective.needs_entropy_gradient,
        hidden_rows=len(needs & fields_where(hidden=True)),
        divergence=bool(needs & {"full_kl", "teacher_kl"}),
        evaluation=min(config.evaluation.batch_size, drawn) if evaluates else 0,
        vllm_bytes=engine,
        vllm_sleeps=vllm.standby,
        vllm_shares_weights=config.model.backend == "unsloth",
        token_budget=optimisation.token_budget or None,
        packed=device == "cuda"
        and optimisation.packing,  # the figures of the CPU are those of padded rows, as measured
        single_pass=to_parts(objective) is None,
        teacher=teacher,
        reward_models=reward_model_bytes(config, device),
    )


def precision(dtype: str, device: str) -> int:
    """Bytes of a number, for `model.dtype`."""
    return {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2 if device == "cuda" else 4}[dtype]


def teacher_load(
    config: RunConfig, device: str, objective: Objective, prompt: int, shape: ModelShape | None = None
) -> TeacherLoad | None:
    """The load of `config`'s teacher; None without one.

    prompt: tokens of its longest prompt, completions that it is shown aside. shape: of another model; None: the policy's.
    """
    if config.teacher.model is None:
        return None
    return TeacherLoad(
        shape,
        prompt,
        shown=sum((config.teacher.prompt or "").count(f"{{{name}}}") for name in ("completion", "demonstration")),
        weight_bytes=precision(config.teacher.dtype, device),
        four_bit=config.teacher.load_in_4bit,
        hidden="teacher_kl" in objective.needs,
    )


def choose_budget(shape: ModelShape, work: Workload, room: float) -> int | None:
    """The token budget with which an update fits into `room` bytes; None where whole micro-batches do.

    On a GPU no more than a pack, whose graph then ends before that of the next one, unless parts would go through the model
    twice for it. Below that powers of two, and at last one completion, whether that fits or not.
    """
    always = sum(plan_memory(shape, work).always.values())

    def fits(budget: int | None) -> bool:
        terms = update_terms(shape, replace(work, token_budget=budget))
        return always + (1 + SLACK[work.device]) * sum(terms.values()) <= room

    all_tokens = replace(work, token_budget=None).tokens_at_once
    most = max(PACK_TOKENS, work.tokens)
    if work.device == "cuda" and work.single_pass:
        if all_tokens <= most and fits(None):
            return None
    elif fits(None):
        return None
    else:
        most = all_tokens
    powers = [1 << bits for bits in range(most.bit_length(), -1, -1)]
    sizes = [size for size in (most, *powers) if work.tokens < size <= most]
    return next((size for size in sizes if size < all_tokens and fits(size)), work.tokens)


def generation_batch_of(config: RunConfig, shape: ModelShape | None, work: Workload, room: float) -> int | None:
    """Completions that transformers' loop, which Unsloth's models have as well, makes at once within `room` bytes on a GPU.

    None where the whole batch fits, on the CPU, and under vLLM.
    Whole groups where one fits, and at last one completion, whether that fits or not.
    """
    if shape is None or work.device != "cuda" or config.generation.engine == "vllm":
        return None
    always = sum(fixed_terms(shape, work).values()) + CUDA_CONTEXT

    def fits(rows: int) -> bool:
        return always + (1 + SLACK[work.device]) * sum(rollout_terms(shape, work, rows).values()) <= room

    if fits(work.batch):
        return None
    groups = range(work.batch - work.batch % work.group, work.group, -work.group)
    return next((rows for rows in (*groups, *range(min(work.group, work.batch), 1, -1)) if fits(rows)), 1)


def budget_of(config: RunConfig, shape: ModelShape | None, work: Workload, room: float) -> int | None:
    """`optimisation.token_budget`: as it is set, none for 0, else by the memory. None without a shape to go by."""
    if config.optimisation.token_budget is not None:
        return config.optimisation.token_budget or None
    return None if shape is None else choose_budget(shape, work, room)


def sized(config: RunConfig, shape: ModelShape, work: Workload, room: float) -> Workload:
    """Returns the workload with the token budget and generation batch that a run chooses for `room` bytes."""
    at_once = generation_batch_of(config, shape, work, room)
    return replace(work, token_budget=budget_of(config, shape, work, room), generated_at_once=at_once)


def reward_model_bytes(config: RunConfig, device: str) -> float:
    """Bytes of the weights of `reward-model` presets that are loaded on `device`."""
    reward = config.reward
    presets = [(reward.preset, reward.params), *((function.preset, function.params) for function in reward.functions)]
    models = {str(params["model"]): params for name, params in presets if name == "reward-model" and "model" in params}
    if not models:
        return 0.0
    from rewards.components.reward_model import ModelFiles

    keys = ("device", "dtype", "revision")
    files = [ModelFiles(name, **{key: params[key] for key in keys if key in params}) for name, params in models.items()]
    return sum(each.bytes_on(device) for each in files)


GPU_MICRO_BATCH = 16


def micro_batch_size(config: RunConfig, backend: Backend, processes: int = 1) -> int:
    """Completions per forward pass: as configured, else the whole batch (CPU) or its largest divisor up to 16 (GPU).

    Of several processes each has its share of the batch.
    """
    batch = config.optimisation.batch_size // processes
    if config.optimisation.micro_batch_size is not None:
        return config.optimisation.micro_batch_size
    if backend.device == "cpu":
        return batch
    return max(size for size in range(1, min(GPU_MICRO_BATCH, batch) + 1) if batch % size == 0)


# --- does it fit? -----------------------------------------------------------------------------------------------------


def free_memory(device: str) -> float:
    """Bytes that can still be allocated: on the GPU, or in RAM within the control group's limit."""
    if device == "cuda":
        import torch

        return float(torch.cuda.mem_get_info()[0])
    import psutil

    free, group = float(psutil.virtual_memory().available), Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = float((group / "memory.max").read_text())  # "max" where there is none
        usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = float(usage.get("inactive_file", 0)) + float(usage.get("active_file", 0))  # given up when asked for
        free = min(free, limit - float((group / "memory.current").read_text()) + files)
    return free


def free_at_start(device: str) -> float:
    """Bytes that are free once a run that is started now begins: it waits for a run that holds the GPU."""
    if device == "cuda" and gpu_holder() is not None:
        return (card_of(device) or 0.0) - CUDA_CONTEXT
    return free_memory(device)


def room_of(device: str, *, waits: bool = False) -> float:
    """Bytes that a run may take on this machine, those that this very process takes without a model included.

    waits: the run is yet to start (`free_at_start`).
    """
    free = free_at_start(device) if waits else free_memory(device)
    return free + (CUDA_CONTEXT if device == "cuda" else CPU_BASELINE)


def card_of(device: str) -> float | None:
    """Bytes of the whole GPU, whatever is free of them; None on the CPU."""
    if device != "cuda":
        return None
    import torch

    return float(torch.cuda.mem_get_info()[1])


def check_memory(
    config: RunConfig, shape: ModelShape | None, device: str, objective: Objective, *, waits: bool = False
) -> None:
    """Refuses a model that cannot take a single step in the free memory. Raises `ModelError` with what would fit.

    Counted is what is certain: weights, gradients, optimiser states, and the reference copy where there is one.
    `waits`: as in `room_of`.
    """
    if shape is None:
        return
    work = workload(config, device, objective, prompt_tokens(config))
    needed, free = certain_bytes(shape, work), free_at_start(device) if waits else free_memory(device)
    if needed <= free:
        return
    kind = "GPU memory" if device == "cuda" else "memory"
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
        f"{kind}{copy} before the first completion; {free / GIB:.1f} GiB are free. Either {', or '.join(hints)}."
    )


def prompt_tokens(config: RunConfig, longest: int | None = None) -> int:
    """Tokens of the longest prompt: as measured, else as the configuration allows."""
    return longest or config.data.max_prompt_tokens or 1024


def planned_workload(
    config: RunConfig,
    shape: ModelShape,
    device: str,
    objective: Objective,
    lengths: Mapping[str, int | None],
    *,
    room: float,
    card: float | None,
    teacher: ModelShape | None = None,
    float32: bool = False,
) -> Workload:
    """Returns the workload of a run, with the sizes that it chooses for `room` bytes. teacher: another model's shape.

    lengths: tokens of the longest prompts, as `kit.runner.prepare.longest_prompts` measures them.
    """
    prompt = prompt_tokens(config, lengths.get("policy"))
    load = teacher_load(config, device, objective, lengths.get("teacher") or prompt, teacher)
    return sized(config, shape, workload(config, device, objective, prompt, card, load, float32=float32), room)


def note(plan: MemoryPlan, room: float) -> str:
    """Returns the memory line of `validate`."""
    kind = "GPU memory" if plan.device == "cuda" else "memory"
    line = f"memory: {plan.peak / GIB:.1f} GiB of {kind} planned ({plan.phase}), {room / GIB:.1f} GiB free"
    return line if not plan.excess(room) else f"{line}. It will not fit: see grpo-kit plan for what to change"
