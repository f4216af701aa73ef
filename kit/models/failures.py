"""Failures of libraries below, told as what a person can do about them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from kit.errors import KitError, ModelError, RunError

OUT_OF_MEMORY = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc",
    "cublas_status_alloc_failed", "cudnn_status_alloc_failed",
)  # fmt: skip
MEMORY_ADVICE = (
    "In this order: lower optimisation.micro_batch_size (same result, less memory), set "
    "optimisation.gradient_checkpointing: true, lower generation.max_completion_tokens, set model.load_in_4bit: true, or "
    "optimisation.optimizer: adamw_8bit; `grpo-kit plan` says how much each of them saves."
)
DISK_FULL = ("no space left on device", "disk quota exceeded", "pytorchstreamwriter failed")


@contextmanager
def explained() -> Iterator[None]:
    """Turns out-of-memory and full-disk failures into `ModelError` and `RunError` with advice; others pass."""
    try:
        yield
    except KitError:
        raise  # explained already
    except Exception as error:
        text = str(error).lower()
        if is_out_of_memory(error):
            raise ModelError(f"The run is out of memory ({first_line(error)}). {MEMORY_ADVICE}") from error
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(sign in text for sign in DISK_FULL):
            raise RunError(
                f"The disk is full ({first_line(error)}). Free some space, lower run.keep_checkpoints, set "
                "run.save_completions: false, or set run.root to another disk, and start again."
            ) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up, on the host or on the GPU; torch says so by a RuntimeError or a subclass of it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        return any(sign in text for sign in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def first_line(error: BaseException) -> str:
    """The first line of a message, or the error's name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
