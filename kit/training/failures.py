"""Failures of libraries below, told as what a person can do about them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from kit.errors import KitError, ModelError, RunError

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "std::bad_alloc")
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
        if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY):
            raise ModelError(
                f"The run is out of memory ({_first_line(error)}). In this order: lower optimisation.micro_batch_size (same "
                "result, less memory), set optimisation.gradient_checkpointing: true, lower "
                "generation.max_completion_tokens, set model.load_in_4bit: true."
            ) from error
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(sign in text for sign in DISK_FULL):
            raise RunError(
                f"The disk is full ({_first_line(error)}). Free some space, lower run.keep_checkpoints, set "
                "run.save_completions: false, or set run.root to another disk, and start again."
            ) from error
        raise


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
