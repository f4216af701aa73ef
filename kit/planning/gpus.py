"""GPUs that runs are planned for, and the seconds of a step on one: estimated from what its maker states."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.errors import ConfigError
from kit.models.memory import Workload, fixed_terms
from kit.models.shape import ModelShape
from kit.registry import did_you_mean

if TYPE_CHECKING:
    from kit.config import RunConfig


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
        scored += (work.teacher.shape or shape).parameters * (work.teacher.reads(work.completion) + work.completion)
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
