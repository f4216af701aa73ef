"""What benchmarks/gpu_check.py compares: whose loss, on which backend, with which engine, and the run that each is."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STEPS = 5
LEARNING_RATE = 1e-5
ENGINE_LEARNING_RATE = 5e-3
"""Where an engine samples: adapters move so far that weights which were not handed over are seen in a few steps."""
ENGINE_SHARE = 0.3
"""Of the GPU, for a colocated engine."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One process: whose loss, on which backend, with which engine."""

    loss: str  # ours | unsloth | trl
    backend: str
    engine: str = "hf"
    sixteen_bit: bool = False
    packing: bool = True

    @property
    def name(self) -> str:
        more = (", 16-bit" if self.sixteen_bit else "") + ("" if self.packing else ", padded")
        return f"{self.loss} ({self.backend}, {self.engine}{more})"


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is done."""

    batch: int
    micro_batch: int
    group: int
    completion: int
    four_bit: bool


def size_of(smoke: bool) -> Size:
    return Size(8, 4, 4, 8, False) if smoke else Size(16, 8, 8, 256, True)


def arms(smoke: bool, room: bool = True) -> list[Arm]:
    """What this machine can compare; `ours` on transformers comes first and makes the rollouts.

    room: whether the card has room for an engine with 16-bit weights of its own.
    """
    unsloth, vllm = not smoke and find_spec("unsloth") is not None, not smoke and find_spec("vllm") is not None
    found = [Arm("ours", "transformers"), Arm("ours", "transformers", packing=False), Arm("trl", "transformers")]
    if unsloth:
        found += [Arm("ours", "unsloth"), Arm("unsloth", "unsloth")]
    if vllm and unsloth:
        found.append(Arm("ours", "unsloth", "vllm"))
    if vllm and room:
        found.append(Arm("ours", "transformers", "vllm", sixteen_bit=True))
    return found


def holds_engine(weights: int, card: int) -> bool:
    """Whether `ENGINE_SHARE` of a card holds these weights with a fifth of them for the cache. All in bytes."""
    return 1.2 * weights <= ENGINE_SHARE * card


def configuration(arm: Arm, model: Path, folder: Path, size: Size) -> Any:
    """The run that `grpo-kit train` would make of this arm."""
    from kit.config import load_config

    four_bit = size.four_bit and not arm.sixteen_bit
    return load_config(
        {
            "model": {
                "name": str(model),
                "backend": arm.backend,
                "load_in_4bit": four_bit,
                "lora": {"rank": 16, "alpha": 16.0},
                **({} if size.four_bit else {"dtype": "float32"}),
            },
            "data": {"source": "reasoning-gym:chain_sum", "limit": 64, "heldout": 8, "chat": False},
            "reward": {"preset": "reasoning-gym"},
            "objective": {"recipe": "dapo"},
            "generation": {
                "engine": arm.engine,
                "vllm": {"gpu_memory_utilization": ENGINE_SHARE},
                "num_generations": size.group,
                "max_completion_tokens": size.completion,
            },
            "optimisation": {
                "steps": STEPS,
                "batch_size": size.batch,
                "micro_batch_size": size.micro_batch,
                "learning_rate": LEARNING_RATE if arm.engine == "hf" else ENGINE_LEARNING_RATE,
                "packing": arm.packing,
            },
            "run": {"id": "gpu-check", "root": str(folder), "save_every": 0},
        }
    )
