"""The peak memory of a run in bytes, estimated term by term, and whether the run fits.

docs/memory.md has the formula; the functions below compute its rows in the same order. Docstrings use its symbols:

    N, N_lin       weights; weights of linear layers without the head      L, V   layers; vocabulary
    H, I, Q, K     hidden size; feed-forward width; heads and key-value heads times head size; r: LoRA rank
    B, b, P, C, T  completions per step and per micro-batch; tokens of a prompt, of a completion, and of both
    U, U1          tokens of one update graph; tokens that go through the model together
    s, w           bytes of an activation and of a loaded weight

The peak is everything that is always present (`fixed_terms`) plus the largest phase: rollout, evaluation, scoring,
teaching, update or optimiser. The sizes of a model come from its configuration (`kit.models.shape`).
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
from kit.models.backend import UNSLOTH, Backend, choose_backend
from kit.models.shape import ModelShape
from kit.runs.lock import gpu_holder

if TYPE_CHECKING:
    from kit.objective import Objective

# --- the formula ------------------------------------------------------------------------------------------------------


MIB, GIB = 1024**2, 1024**3
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4 with double quantisation: 4 bits, an 8-bit scale per 64 weights, a float32 per 256 scales."""
TILE_BYTES = 2 * 8 * MIB
"""Bytes of the scorer's two tile buffers on the CPU (kit/scoring/head.py)."""
TILE_ROWS, TILE_ELEMENTS, TILE_WIDTH = 1024, 1 << 21, 8192
GPU_TILE_ELEMENTS = 1 << 24
DIVERGENCE_BYTES = 8 * 4
"""Bytes per logit of a slice of GPU_TILE_ELEMENTS (kit/scoring/divergence.py): eight float32 buffers. Measured."""
PACK_TOKENS = 8192
"""Tokens of a pack on a GPU, as in `kit.scoring.scorer`."""
CPU_BASELINE = 1060 * MIB
"""Resident memory of a training process before its model: Python, torch, transformers, TRL, datasets. Measured."""
CUDA_CONTEXT = 0.6 * GIB
"""GPU memory of the driver, cuBLAS and kernels before the first tensor. A typical value; it varies by GPU."""
VLLM_CPU_BYTES = 1.5 * GIB
"""vLLM on the CPU: 1 GiB of cache, as the kit sets it, and its code. Its copy of the weights is not counted."""
ENGINE_TOKENS = 4096
"""Most tokens of a pass of vLLM, as TRL sets `max_num_batched_tokens`."""
ENGINE_OVERHEAD = 0.4 * GIB
"""GPU memory of vLLM's CUDA graphs and libraries. A typical value; it varies by model and GPU."""
UNSLOTH_ROWS = 512
"""Rows by which the key-value cache of Unsloth's generation grows (unsloth/models/llama.py)."""
SLACK = {"cpu": 0.10, "cuda": 0.10}
"""Memory that the allocator reserves beyond the allocations of a phase, as a share of them."""


@dataclass(frozen=True)
class TeacherLoad:
    """A teacher's weights, and the prompts of its pass over every completion."""

    shape: ModelShape | None  # None: the teacher has the policy's weights
    prompt: int  # tokens of its longest prompt, without the completions that the prompt contains
    completions_in_prompt: int = 0
    weight_bytes: int = 4  # per loaded weight, if `shape` is set
    four_bit: bool = False
    keeps_hidden: bool = True  # whether its hidden states are stored for divergences over the vocabulary

    def prompt_with_completions(self, completion: int) -> int:
        """Returns the tokens of its longest prompt if each completion has `completion` tokens."""
        return self.prompt + self.completions_in_prompt * completion


@dataclass(frozen=True)
class Workload:
    """The sizes of a run apart from its model, in completions and tokens."""

    device: str
    weight_bytes: int  # w: 4 or 2 per loaded weight
    compute_bytes: int  # s: per element of an activation
    four_bit: bool
    rank: int | None  # r; None: all weights train
    targets: str | list[str]
    eight_bit_optimiser: bool
    batch: int  # B
    micro_batch: int  # b
    group: int
    prompt: int  # P
    completion: int  # C
    checkpointing: bool
    reference: bool  # whether the objective needs a reference policy
    old_logps: bool  # whether a pass computes old log-probabilities
    entropy_gradient: bool
    hidden_rows: int  # (N, H) buffers of hidden states that hooks need for the whole batch: full KL, values
    divergence: bool  # whether a divergence over the whole vocabulary is computed
    evaluation: int  # completions generated at once for a held-out score; 0: no evaluation
    vllm_bytes: float = 0.0
    vllm_sleeps: bool = True
    unsloth: bool = False  # its engine and its trainer share the frozen weights, and it has its own generation
    token_budget: int | None = None
    packed: bool = False  # no padding, a prompt once per group, and LoRA layers without copies (`kit.models.fused`)
    single_pass: bool = True
    """Whether parts of a micro-batch need one forward pass (`kit.objective.objective.parts_obstacle`)."""
    teacher: TeacherLoad | None = None
    generated_at_once: int | None = None  # completions; None: the batch
    offload: bool = False  # whether checkpointed layer inputs move from the GPU to main memory
    reward_models: float = 0.0  # bytes of the weights of models that score completions

    @property
    def autocast(self) -> bool:
        return self.compute_bytes < 4

    @property
    def tokens(self) -> int:
        """T = P + C."""
        return self.prompt + self.completion

    @property
    def cached_tokens(self) -> int:
        """The most tokens of a completion in the key-value caches of its layers: T.

        With Unsloth's generation max(P + [P + 513], [T + 1], P + 1 + 512 ceil(C / 512)), where [] rounds up to 256: it copies the
        prompt's cache into one that grows, in rollouts by CUDA graphs for rounded sizes.
        """
        if not self.unsloth:
            return self.tokens
        first, last = (256 * math.ceil(rows / 256) for rows in (self.prompt + UNSLOTH_ROWS + 1, self.tokens + 1))
        return max(
            self.prompt + first, last, self.prompt + 1 + UNSLOTH_ROWS * math.ceil(self.completion / UNSLOTH_ROWS)
        )

    @property
    def tokens_at_once(self) -> int:
        """U, the most tokens of one graph: b T, or the token budget if that is less, but at least T.

        In packs a prompt counts once for the completions of a pack, so that b T becomes b C and P per such set.
        """
        sharing = min(self.group, max(1, (self.pack - self.prompt) // self.completion)) if self.packed else 1
        all_tokens = self.micro_batch * self.completion + math.ceil(self.micro_batch / sharing) * self.prompt
        return all_tokens if self.token_budget is None else min(all_tokens, max(self.token_budget, self.tokens))

    @property
    def tokens_of_a_pass(self) -> int:
        """U1, tokens that go through the model together: the packs of a graph follow one another, padded rows do not."""
        return min(self.tokens_at_once, max(self.pack, self.tokens)) if self.packed else self.tokens_at_once

    @property
    def pack(self) -> int:
        """The most tokens of a pack, as in `kit.scoring.scorer`."""
        return max(PACK_TOKENS, 4 * self.prompt)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by term."""

    device: str
    always: dict[str, float]
    phases: dict[str, dict[str, float]]
    workload: Workload = field(repr=False)
    engine_lacks: float = 0.0
    """Bytes by which vLLM's share is smaller than `engine_bytes`; vLLM then does not start."""

    @property
    def phase(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> float:
        """Bytes at the highest point of the run."""
        return sum(self.always.values()) + sum(self.phases[self.phase].values())

    def excess(self, room: float) -> float:
        """Returns the bytes above `room`, summed over phases, so that lowering any phase that is too large lowers it."""
        always = sum(self.always.values())
        return self.engine_lacks + sum(max(0.0, always + sum(terms.values()) - room) for terms in self.phases.values())

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for JSON and for the page."""
        return {
            "device": self.device,
            "peak_bytes": round(self.peak),
            "phase": self.phase,
            "always": {name: round(size) for name, size in self.always.items()},
            "phases": {name: {k: round(v) for k, v in terms.items()} for name, terms in self.phases.items()},
        }


def plan_memory(shape: ModelShape, work: Workload, baseline: float | None = None) -> MemoryPlan:
    """Estimates all terms of a run. baseline: measured resident memory of the process before its model (CPU)."""
    always = fixed_terms(shape, work)
    always["process" if work.device == "cpu" else "CUDA context"] = (
        CUDA_CONTEXT if work.device == "cuda" else CPU_BASELINE if baseline is None else baseline
    )
    engine, lacks = work.vllm_bytes, 0.0
    if engine and work.device == "cuda":
        lacks = max(0.0, engine_bytes(shape, work) - engine)
        shared = loaded_bytes(shape, work.compute_bytes, four_bit=work.four_bit) if work.unsloth else 0.0
        engine += lacks - shared
    if engine and not work.vllm_sleeps:
        always["vLLM"] = engine
    generated = min(work.batch, work.generated_at_once or work.batch)
    phases = {"rollout": rollout_terms(shape, work, generated), "update": update_terms(shape, work)}
    if work.vllm_bytes:
        phases["rollout"] = {"vLLM": engine if work.vllm_sleeps else 0.0}
    if work.evaluation:
        phases["evaluation"] = rollout_terms(shape, work, work.evaluation)
    if work.reference or work.old_logps:
        phases["scoring"] = scoring_terms(shape, work)
    if work.teacher is not None:
        phases["teaching"] = teaching_terms(shape, work, work.teacher)
    gradients, largest = 4.0 * trained(shape, work), shape.largest if work.rank is None else 0
    # AdamW needs buffers for all weights at once on a GPU (foreach), for one weight at a time on the CPU.
    arithmetic = gradients if work.device == "cuda" else 8.0 * largest
    phases["optimiser"] = {"gradients": gradients, "arithmetic": arithmetic}
    for terms in phases.values():
        terms["allocator"] = SLACK[work.device] * (sum(terms.values()) - terms.get("vLLM", 0.0))
    return MemoryPlan(work.device, always, phases, work, lacks)


def trained(shape: ModelShape, work: Workload) -> int:
    """Returns the number of weights that an optimiser step changes: N, or r Σ(in + out) for adapters."""
    return shape.parameters if work.rank is None else shape.lora_parameters(work.rank, work.targets)


def fixed_terms(shape: ModelShape, work: Workload) -> dict[str, float]:
    """Returns what is always present, except for the process or CUDA context and vLLM."""
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
    """Returns the bytes of a model's weights: w N, or in 4 bits NF4_BYTES N_lin + w (N - N_lin)."""
    quantised = shape.linear if four_bit else 0
    return quantised * NF4_BYTES + (shape.parameters - quantised) * weight_bytes


def engine_bytes(shape: ModelShape, work: Workload) -> float:
    """Returns the least share with which vLLM starts: its weights and adapter, a pass of ENGINE_TOKENS, one completion's cache.

    w N or in 4 bits (1/2 + 1/16) N_lin + w (N - N_lin), because vllm-bnb-plugin undoes double quantisation; 2 per weight of the
    adapter; (2H + 4I) s ENGINE_TOKENS; 2 L K s T; and ENGINE_OVERHEAD.
    """
    weights = loaded_bytes(shape, work.compute_bytes, four_bit=work.four_bit)
    double = (0.5 + 4 / 64 - NF4_BYTES) * shape.linear if work.four_bit else 0.0
    adapter = 2.0 * trained(shape, work) if work.rank is not None else 0.0
    activations = (2 * shape.hidden + 4 * shape.intermediate) * float(work.compute_bytes) * ENGINE_TOKENS
    cache = 2.0 * shape.layers * shape.key * work.compute_bytes * work.tokens
    return weights + double + adapter + activations + cache + ENGINE_OVERHEAD


def certain_bytes(shape: ModelShape, work: Workload) -> float:
    """Returns `fixed_terms` plus gradients, a lower bound: with less memory no step is possible."""
    return sum(fixed_terms(shape, work).values()) + 4.0 * trained(shape, work)


def rollout_terms(shape: ModelShape, work: Workload, sequences: int) -> dict[str, float]:
    """Returns the terms of transformers' `generate`, or Unsloth's, for B = `sequences` completions at once.

    key-value cache 2 L K s B T (for Unsloth, `cached_tokens` in place of T) and transients (K + 2Q) s B T at the last token, or
    the prompts' cache 2 L K s B P and transients `forward_elements` s B P at the first, whichever sum is larger; sampling 16 B V.
    """
    size = work.weight_bytes if work.rank is not None else 4  # s; a model whose weights all train is stored in float32
    cache = 2.0 * shape.layers * shape.key * size * sequences * work.cached_tokens
    # The cache of a layer grows by concatenation, so its old and new keys (or values) exist at the same time. Attention
    # under a padding mask repeats keys and values to the number of query heads.
    transients = float(shape.key + 2 * shape.query) * size * sequences * work.tokens
    prompt_cache = cache * work.prompt / work.cached_tokens
    prompt_transients = forward_elements(shape, work) * size * sequences * work.prompt
    if prompt_cache + prompt_transients > cache + transients:
        cache, transients = prompt_cache, prompt_transients
    terms = {
        "key-value cache": cache,
        "transients": transients,
        "sampling": sequences * shape.vocab * 4 * 4.0,  # float32 logits, their copy, scaled logits, probabilities
    }
    if work.autocast and work.rank is None:
        terms["half-precision weights"] = 2.0 * shape.linear  # autocast's copies, cached for the whole generation
    return terms


def forward_elements(shape: ModelShape, work: Workload) -> float:
    """Returns the elements per token that a feed-forward block needs without a backward pass: 3H + 4I, without LoRA 3H + 3I.

    Activated gate, up projection and product; an adapter adds its scaled output to that of its layer.
    """
    return 3 * shape.hidden + (3 if work.rank is None else 4) * shape.intermediate


def scoring_terms(shape: ModelShape, work: Workload) -> dict[str, float]:
    """Returns the terms of a forward pass without gradients: (`forward_elements` + 2Q) s U1, and the scorer."""
    tokens = work.tokens_of_a_pass
    transients = forward_elements(shape, work) * work.compute_bytes * tokens
    return {
        "transients": transients + 2 * shape.query * work.compute_bytes * tokens,
        "scorer": scorer_terms(shape, work, False),
    }


def teaching_terms(shape: ModelShape, work: Workload, teacher: TeacherLoad) -> dict[str, float]:
    """Returns the terms of scoring by the teacher with its own P, and 3 s B C H for its hidden states of the batch."""
    teacher_work = replace(work, prompt=teacher.prompt_with_completions(work.completion))
    if teacher.shape is not None:
        shape, teacher_work = teacher.shape, replace(teacher_work, rank=None, compute_bytes=teacher.weight_bytes)
    terms = scoring_terms(shape, teacher_work)
    if teacher.keeps_hidden:  # three copies: per token, arranged in rows, and merged with rows that have no teacher
        terms["hidden states"] = 3.0 * teacher_work.compute_bytes * work.batch * work.completion * shape.hidden
    return terms


def layer_bytes(shape: ModelShape, work: Workload, padded: bool = True) -> float:
    """Returns the bytes per token that autograd saves for one decoder layer, as tests compare with its saved tensors."""
    s, all_train = work.compute_bytes, work.rank is None
    hidden, query, key = shape.hidden, shape.query, shape.key
    norms = shape.norms * (hidden * 4.0 + 4.0)  # inputs in float32, and 1 / rms
    if all_train:
        norms += shape.norms * hidden * 4.0  # the normalised input, for the gradient of the norm's weight
    if shape.qk_norm:
        norms += (query + key) * 4.0 + (shape.heads + shape.heads * key / query) * 4.0
        norms += (query + key) * s if all_train else 0.0
    # Autocast casts the input of each linear layer separately, except for LoRA layers in one autograd node.
    linear_inputs = (5 if work.autocast and (all_train or not work.packed) else 2) * hidden * s
    # Query, key, value, output and log-sums. Under a padding mask keys and values are repeated, and the mask is saved.
    attention = (2 * query + 2 * (query if padded else key)) * s + shape.heads * 4.0
    attention += work.tokens * s if padded else 0.0
    attention += query * s if work.autocast and not all_train else 0.0
    feed_forward = 4 * shape.intermediate * s  # gate, activated gate, up projection, product
    adapters = len(shape.adapted(work.targets)) / shape.layers * work.rank * s if work.rank is not None else 0.0
    return norms + linear_inputs + attention + feed_forward + adapters


def transient_bytes(shape: ModelShape, work: Workload) -> float:
    """Returns the bytes per token that the backward pass of a feed-forward block allocates.

    (3I + 3H) s: gradients of product, gate, up projection and adapters' outputs. 2I s if LoRA layers are one node.
    """
    fused = work.packed and work.rank is not None
    return (2 * shape.intermediate if fused else 3 * shape.intermediate + 3 * shape.hidden) * float(work.compute_bytes)


def scorer_terms(shape: ModelShape, work: Workload, gradient: bool) -> float:
    """Returns the bytes of the log-probability scorer for one pass: tiles and hidden states, never b C V.

    Rows are the completion tokens of the pass: b C, at most U within a token budget, if prompts are short. On the CPU the
    terms are tiles, a slice of the head, and rows H (s + 4), with `gradient` 4 rows H more for each gradient by row.
    """
    rows = work.micro_batch * work.completion
    rows = min(rows, work.tokens_at_once) if gradient or work.token_budget is not None else rows
    hidden = rows * shape.hidden * (work.compute_bytes + 4.0)
    row_gradients = rows * shape.hidden * ((2 if work.entropy_gradient else 1) if gradient else 0)
    if work.device == "cuda":
        tile = min(float(GPU_TILE_ELEMENTS), float(rows) * shape.vocab) * (4 + work.compute_bytes)
        if not gradient:
            return tile + hidden
        # The tiles are freed before the backward pass of a layer, which needs more memory unless the model is small.
        layer_backward = layer_bytes(shape, work, padded=not work.packed) + transient_bytes(shape, work)
        return work.compute_bytes * row_gradients + max(0.0, tile + hidden - work.tokens_of_a_pass * layer_backward)
    width = min(shape.vocab, TILE_WIDTH, TILE_ELEMENTS // max(1, min(rows, TILE_ROWS)))
    tiles = min(float(TILE_BYTES), 8.0 * min(rows, TILE_ROWS) * width)
    head_slice = width * shape.hidden * (work.compute_bytes + 4)
    return tiles + head_slice + hidden + 4.0 * row_gradients


def update_terms(shape: ModelShape, work: Workload) -> dict[str, float]:
    """Returns the terms of the forward and backward pass of one graph.

    activations: L `layer_bytes` U; with checkpointing L H s U + `layer_bytes` U1, and with offload H s U1 in place of
    L H s U. transients: `transient_bytes` U1. gradients: 4 per trained weight.
    """
    graph_tokens, pass_tokens = work.tokens_at_once, work.tokens_of_a_pass
    layer = layer_bytes(shape, work, padded=not work.packed)
    if work.checkpointing:
        input_bytes = shape.hidden * (4 if work.autocast and work.rank is None else work.compute_bytes)
        # Offloading returns the input of a layer to the GPU when that layer is recomputed.
        layer_inputs = input_bytes * (pass_tokens if work.offload else shape.layers * graph_tokens)
        activations = layer_inputs + layer * pass_tokens
    else:
        activations = shape.layers * layer * graph_tokens
    terms = {
        "activations": activations,
        "transients": transient_bytes(shape, work) * pass_tokens,
        "scorer": scorer_terms(shape, work, True),
        "gradients": 4.0 * trained(shape, work),
    }
    if work.rank is None:
        terms["scorer"] += 4.0 * shape.vocab * shape.hidden  # the head's gradient, before the embedding's is added
        if work.autocast:
            terms["half-precision weights"] = 2.0 * shape.linear  # autocast's copies, cached for the backward pass
    if work.four_bit:
        terms["dequantised layer"] = work.compute_bytes * max((a * b for _, a, b in shape.modules), default=0)
    if work.divergence:
        rows = min(work.micro_batch * work.completion, graph_tokens)
        terms["divergence"] = float(DIVERGENCE_BYTES * min(GPU_TILE_ELEMENTS, rows * shape.vocab))
    if work.hidden_rows:
        width = work.hidden_rows * shape.hidden
        if work.teacher is not None and work.teacher.keeps_hidden and work.teacher.shape is not None:
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
    """Returns the workload of `config` on `device` ("cpu" or "cuda") for prompts of `prompt` tokens.

    card: total memory of the GPU in bytes, of which a colocated vLLM takes a share; None leaves vLLM out. teacher: from
    `teacher_load`; None leaves it out, e.g. if its weights are loaded already. float32: the backend computes in float32
    (`Backend.computes_in_float32`) and loads weights that are not quantised in it.
    """
    from kit.objective.batch import fields_where
    from kit.objective.objective import parts_obstacle

    optimisation, generation, lora = config.optimisation, config.generation, config.model.lora
    compute = 4 if float32 else precision(config.model.dtype, device)
    checkpointing = optimisation.gradient_checkpointing
    evaluates = config.evaluation.before or config.evaluation.after or config.evaluation.every
    held_out_completions = config.evaluation.prompts * config.evaluation.k
    needs, vllm, engine = objective.needs, config.generation.vllm, 0.0
    backend = choose_backend(config.model).name if config.model.backend == "auto" else config.model.backend
    if config.generation.engine == "vllm":
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
        evaluation=min(config.evaluation.batch_size, held_out_completions) if evaluates else 0,
        vllm_bytes=engine,
        vllm_sleeps=vllm.standby,
        unsloth=backend == UNSLOTH,
        token_budget=optimisation.token_budget or None,
        packed=device == "cuda" and optimisation.packing,  # the constants for the CPU were measured with padded rows
        single_pass=parts_obstacle(objective) is None,
        teacher=teacher,
        reward_models=reward_model_bytes(config, device),
    )


def precision(dtype: str, device: str) -> int:
    """Returns the bytes of a number in `dtype`, a value of `model.dtype`."""
    return {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2 if device == "cuda" else 4}[dtype]


def teacher_load(
    config: RunConfig, device: str, objective: Objective, prompt: int, shape: ModelShape | None = None
) -> TeacherLoad | None:
    """Returns the load of `config`'s teacher, None if it has none; the arguments are fields of `TeacherLoad`."""
    if config.teacher.model is None:
        return None
    return TeacherLoad(
        shape,
        prompt,
        completions_in_prompt=sum(
            (config.teacher.prompt or "").count(f"{{{name}}}") for name in ("completion", "demonstration")
        ),
        weight_bytes=precision(config.teacher.dtype, device),
        four_bit=config.teacher.load_in_4bit,
        keeps_hidden="teacher_kl" in objective.needs,
    )


def choose_budget(shape: ModelShape, work: Workload, room: float) -> int | None:
    """Returns the largest token budget whose update fits into `room` bytes; None if whole micro-batches fit.

    On a GPU the budget is at most one pack, because the graph of a pack is freed before the next pack, unless parts need
    a second forward pass. Smaller budgets are powers of two; the last is one completion, whether it fits or not.
    """
    always = sum(plan_memory(shape, work).always.values())

    def fits(budget: int | None) -> bool:
        terms = update_terms(shape, replace(work, token_budget=budget))
        return always + (1 + SLACK[work.device]) * sum(terms.values()) <= room

    all_tokens = replace(work, token_budget=None).tokens_at_once
    one_pack = work.device == "cuda" and work.single_pass
    largest = max(PACK_TOKENS, work.tokens) if one_pack else all_tokens
    if all_tokens <= largest and fits(None):
        return None
    powers = [1 << bits for bits in range(largest.bit_length(), -1, -1)]
    sizes = [size for size in (largest, *powers) if work.tokens < size <= largest]
    return next((size for size in sizes if size < all_tokens and fits(size)), work.tokens)


def generation_batch_of(config: RunConfig, shape: ModelShape | None, work: Workload, room: float) -> int | None:
    """Returns the most completions that transformers' `generate` (also Unsloth's) samples at once in `room` bytes on a GPU.

    None if the whole batch fits, on the CPU and with vLLM. The number is a multiple of the group size if a group fits, and
    at least 1, whether that fits or not.
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
    """Returns `optimisation.token_budget`, None if it is 0. If it is not set, memory decides; None if `shape` is unknown."""
    if config.optimisation.token_budget is not None:
        return config.optimisation.token_budget or None
    return None if shape is None else choose_budget(shape, work, room)


def reward_model_bytes(config: RunConfig, device: str) -> float:
    """Returns the bytes of the weights that `reward-model` presets load on `device`."""
    reward = config.reward
    presets = [(reward.preset, reward.params), *((function.preset, function.params) for function in reward.functions)]
    models = {str(params["model"]): params for name, params in presets if name == "reward-model" and "model" in params}
    if not models:
        return 0.0
    from rewards.components.reward_model import ModelFiles

    keys = ("device", "dtype", "revision")
    files = [ModelFiles(name, **{key: params[key] for key in keys if key in params}) for name, params in models.items()]
    return sum(model_files.bytes_on(device) for model_files in files)


GPU_MICRO_BATCH = 16


def micro_batch_size(config: RunConfig, backend: Backend, processes: int = 1) -> int:
    """Returns `optimisation.micro_batch_size`; if not set, a process's share of the batch, on a GPU a divisor up to 16."""
    batch = config.optimisation.batch_size // processes
    if config.optimisation.micro_batch_size is not None:
        return config.optimisation.micro_batch_size
    if backend.device == "cpu":
        return batch
    return max(size for size in range(1, min(GPU_MICRO_BATCH, batch) + 1) if batch % size == 0)


# --- does it fit? -----------------------------------------------------------------------------------------------------


def free_memory(device: str) -> float:
    """Returns the bytes that can still be allocated: on the GPU, or in RAM within the control group's limit."""
    if device == "cuda":
        import torch

        return float(torch.cuda.mem_get_info()[0])
    import psutil

    free, group = float(psutil.virtual_memory().available), Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = float((group / "memory.max").read_text())  # "max" if there is no limit
        usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        page_cache = float(usage.get("inactive_file", 0)) + float(usage.get("active_file", 0))  # the kernel can free it
        free = min(free, limit - float((group / "memory.current").read_text()) + page_cache)
    return free


def free_at_start(device: str) -> float:
    """Returns the bytes that are free when a new run begins, which waits until no other run holds the GPU."""
    if device == "cuda" and gpu_holder() is not None:
        return (card_of(device) or 0.0) - CUDA_CONTEXT
    return free_memory(device)


def room_of(device: str, *, waits: bool = False) -> float:
    """Returns free memory plus this process's memory without a model. waits: use `free_at_start` for a run to come."""
    free = free_at_start(device) if waits else free_memory(device)
    return free + (CUDA_CONTEXT if device == "cuda" else CPU_BASELINE)


def card_of(device: str) -> float | None:
    """Returns the total memory of the GPU in bytes, free or not; None on the CPU.

    Unlike `free_memory`, it creates no CUDA context, which would take memory from a run that holds the GPU.
    """
    if device != "cuda":
        return None
    import torch

    return float(torch.cuda.get_device_properties().total_memory)


def check_memory(
    config: RunConfig, shape: ModelShape | None, device: str, objective: Objective, *, waits: bool = False
) -> None:
    """Raises `ModelError` with remedies if free memory is less than `certain_bytes`. waits: as in `room_of`."""
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
    hints += [f"use a model of at most {billions:.1f} billion weights", "close other programs that use it"]
    copy = ", a reference copy included," if work.reference and work.rank is None else ""
    raise ModelError(
        f"{config.model.name} has {shape.parameters / 1e9:.2f} billion weights and needs at least {needed / GIB:.1f} GiB of "
        f"{kind}{copy} before the first completion; {free / GIB:.1f} GiB are free. Either {', or '.join(hints)}."
    )


def prompt_tokens(config: RunConfig, longest: int | None = None) -> int:
    """Returns the tokens of the longest prompt: `longest` if it was measured, otherwise the limit of the configuration."""
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
    """Returns the workload with the sizes chosen for `room` bytes. lengths: from `kit.runner.prepare.longest_prompts`."""
    prompt = prompt_tokens(config, lengths.get("policy"))
    load = teacher_load(config, device, objective, lengths.get("teacher") or prompt, teacher)
    work = workload(config, device, objective, prompt, card, load, float32=float32)
    at_once = generation_batch_of(config, shape, work, room)
    return replace(work, token_budget=budget_of(config, shape, work, room), generated_at_once=at_once)


def note(plan: MemoryPlan, room: float) -> str:
    """Returns the memory line of `validate`."""
    kind = "GPU memory" if plan.device == "cuda" else "memory"
    line = f"memory: {plan.peak / GIB:.1f} GiB of {kind} planned ({plan.phase}), {room / GIB:.1f} GiB free"
    return line if not plan.excess(room) else f"{line}. It will not fit: see grpo-kit plan for what to change"
