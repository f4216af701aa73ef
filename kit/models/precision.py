"""Which precision a device computes in, as rules on its compute capability that need no device to be tested."""

from __future__ import annotations

from kit.errors import EnvironmentUnsupported, ModelError

Capability = tuple[int, int]
"""CUDA compute capability, (7, 5) for a T4; None stands for the CPU."""

BFLOAT16 = (8, 0)
"""Ampere; earlier GPUs emulate bfloat16, at a fraction of the speed."""
VLLM = (7, 0)
"""Volta, the oldest that vLLM generates on."""


def precision(asked: str, capability: Capability | None, device_name: str = "this GPU") -> str:
    """float32, bfloat16 or float16: as asked, else the best that the device computes in.

    Raises `ModelError` for bfloat16 on a GPU without it, `EnvironmentUnsupported` for float16 on the CPU.
    """
    if capability is None:
        if asked == "float16":
            raise EnvironmentUnsupported(
                "model.dtype: float16 trains on a GPU only, and this machine has none that torch can use. "
                "Set model.dtype: float32 (or auto)."
            )
        return "float32" if asked == "auto" else asked
    if asked == "bfloat16" and capability < BFLOAT16:
        raise ModelError(
            f"model.dtype: bfloat16, but {device_name} (compute capability {capability[0]}.{capability[1]}) has no bfloat16. "
            "Use float16 or auto."
        )
    if asked != "auto":
        return asked
    return "bfloat16" if capability >= BFLOAT16 else "float16"


def standby(asked: bool, capability: Capability | None, device_name: str = "this GPU") -> bool:
    """Whether an engine that shares the GPU may hand its memory back between rollouts.

    Raises `EnvironmentUnsupported` where it was asked for and cannot be had.
    """
    if asked and (capability is None or capability < BFLOAT16):
        where = (
            "the CPU" if capability is None else f"{device_name} (compute capability {capability[0]}.{capability[1]})"
        )
        raise EnvironmentUnsupported(
            f"generation.vllm.standby: true needs a GPU of compute capability 8.0 or newer, not {where}. "
            "Set generation.vllm.standby: false, and generation.vllm.gpu_memory_utilization lower."
        )
    return asked


def fast_inference(asked: bool, capability: Capability | None, device_name: str = "this GPU") -> bool:
    """Whether vLLM may serve a model that Unsloth has loaded. Raises `EnvironmentUnsupported` where it cannot.

    Unsloth itself would go on without the engine, and only print so.
    """
    if asked and (capability is None or capability < VLLM):
        where = (
            "the CPU" if capability is None else f"{device_name} (compute capability {capability[0]}.{capability[1]})"
        )
        raise EnvironmentUnsupported(
            f"generation.engine: vllm under Unsloth needs a GPU of compute capability 7.0 or newer, not {where}. "
            "Set generation.engine: hf, or model.backend: transformers."
        )
    return asked
