"""What befell a vLLM engine, told as what a person can do about it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kit.errors import EngineError
from kit.models.failures import first_line, is_out_of_memory
from kit.runs.watchdog import Hung

log = logging.getLogger("kit")
NO_ROOM = ("no available memory for the cache", "free memory on device", "kv cache is needed", "insufficient memory")


@dataclass(frozen=True)
class EngineSettings:
    """What a watched vLLM engine is told beside TRL's arguments. `dtype` None: that of the model's weights."""

    seed: int = 0
    timeout: float = 1800.0  # seconds
    mode: str = "colocate"
    dtype: torch.dtype | None = None
    eager: bool | None = None
    float8_kv_cache: bool = False
    revision: str | None = None
    gpu_memory_utilization: float = 0.3
    max_logp_difference: float | None = 0.01  # nats; None: nobody is told
    tell: Callable[[str], None] = log.warning


def explained(error: Exception, doing: str, settings: EngineSettings) -> EngineError:
    """What befell the engine while it was `doing` something, told as what a person can do about it."""
    reason = first_line(error)
    where = "vLLM's engine" if settings.mode == "colocate" else "The vLLM server"
    if isinstance(error, Hung):
        return EngineError(
            f"{where} hangs: {reason} ({doing}). Resume the run; if a generation batch rightly takes longer, raise "
            f"generation.vllm.timeout (seconds), and if it hangs again, set generation.engine: hf."
        )
    if is_out_of_memory(error) or any(sign in str(error).lower() for sign in NO_ROOM):
        return EngineError(
            f"{where} is out of memory ({doing}: {reason}). Its share is generation.vllm.gpu_memory_utilization "
            f"{settings.gpu_memory_utilization:g} of the GPU (on the CPU VLLM_CPU_KVCACHE_SPACE GiB of cache): raise it if the "
            "engine found no room for its cache, lower it if the trainer left too little. Besides: generation.vllm.standby: "
            "true frees it while weights are updated, lower generation.max_completion_tokens, or set generation.engine: hf. "
            "Smaller micro-batches do not help: the engine divides its work by itself."
        )
    return EngineError(
        f"{where} died {doing}: {type(error).__name__}: {reason}. The log has the engine's own words. Resume the run; if it "
        "dies again, set generation.engine: hf."
    )
