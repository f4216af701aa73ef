"""Who loads the model, in which precision, on which device. The only place that may import Unsloth.

Unsloth rewrites TRL's classes when it is imported, so the choice is made here, before anything imports `trl`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.errors import EnvironmentUnsupported, ModelError

if TYPE_CHECKING:
    import torch

    from kit.config import ModelConfig


@dataclass(frozen=True)
class Backend:
    """The chosen loader and why."""

    name: str
    device: str
    reason: str


def choose_backend(config: ModelConfig) -> Backend:
    """The loader for this machine. Raises `EnvironmentUnsupported` when the configuration asks for one it cannot have."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.backend == "unsloth":
        raise EnvironmentUnsupported(
            "model.backend: unsloth is not available in this version. Set model.backend: transformers (or auto), which "
            "trains the same configuration; with a GPU add model.load_in_4bit: true for the memory saving."
        )
    return Backend("transformers", device, "transformers + PEFT: runs on every machine")


def use_threads(threads: int | None) -> int:
    """Sets torch's CPU threads: as asked, else one a physical core that this process may use. Returns the number.

    Processes that a launcher has started on one machine share its cores.
    """
    import torch

    threads = threads or max(1, physical_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    return threads


def physical_cores() -> int:
    """Cores that this process may run on, hyper-threads not counted."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in allowed:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as handle:
                siblings.add(handle.read().strip())
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))


def torch_dtype(name: str, device: str) -> torch.dtype:
    """The precision of the weights; `auto` is the best that the device computes in."""
    import torch

    if name != "auto":
        if name == "bfloat16" and device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ModelError(
                f"model.dtype: bfloat16, but {torch.cuda.get_device_name()} has no bfloat16. Use float16 or auto."
            )
        return getattr(torch, name)  # type: ignore[no-any-return]
    if device == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def quantization_config(dtype: torch.dtype, device: str) -> Any:
    """NF4 with double quantisation (QLoRA, arXiv 2305.14314), after a probe that bitsandbytes works on this device."""
    import torch

    try:
        import bitsandbytes.functional as bnb

        sample = torch.linspace(-1, 1, 4096, device=device, dtype=torch.float32)
        packed, state = bnb.quantize_4bit(sample, quant_type="nf4", compress_statistics=True)
        error = (bnb.dequantize_4bit(packed, state) - sample).abs().max().item()
    except ImportError:
        raise EnvironmentUnsupported(
            "model.load_in_4bit needs bitsandbytes. Install it with: uv sync --extra bnb  (or: pip install 'grpo-kit[bnb]')"
        ) from None
    except Exception as failure:
        raise EnvironmentUnsupported(
            f"bitsandbytes is installed but does not work on this {device} ({type(failure).__name__}: {failure}). "
            "Set model.load_in_4bit: false, or reinstall it for this machine."
        ) from failure
    if not error < 0.2:  # the widest gap between NF4 levels is 0.3: rounding is off by at most half of it
        raise EnvironmentUnsupported(
            f"bitsandbytes rounds wrongly on this {device} (largest error {error:.3g}, expected under 0.2). "
            "Set model.load_in_4bit: false."
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
