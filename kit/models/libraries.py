"""Imports libraries quickly, checks their versions, filters their import messages, and configures malloc.

transformers, PEFT, datasets and TRL import all optional packages that are installed, used or not. Garbage collections take an
eighth of the CPU time before a run starts, and find nothing during imports.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kit.errors import EnvironmentUnsupported
from kit.models.backend import TRANSFORMERS, choose_backend, is_of_the_kit, without_collections

if TYPE_CHECKING:
    from kit.config import ModelConfig

UNUSED = ("sklearn", "trackio")
"""Packages for assisted generation, and a tracker that the kit runs in a separate process."""


def load_libraries(model: ModelConfig, *, training: bool = True) -> None:
    """Imports the libraries for `model`, and TRL for `training`. Raises the errors of `choose_backend`.

    Does nothing in a process that the kit did not start, where other code may need the hidden packages, and for Unsloth, which
    needs all of them and must be imported before TRL.
    """
    if not is_of_the_kit():
        return
    with without_collections():
        if training and choose_backend(model).name != TRANSFORMERS:  # imports torch
            return
        with hidden(UNUSED):
            import datasets  # noqa: F401
            import peft  # noqa: F401
            import transformers.generation.utils
            import transformers.modeling_utils  # noqa: F401

            if training:
                import trl.trainer.grpo_trainer  # noqa: F401


@contextmanager
def hidden(names: Iterable[str]) -> Iterator[None]:
    """Hides packages that are not imported yet inside the block, as if they were not installed."""
    names = [name for name in names if name not in sys.modules]
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]  # `import` and `find_spec` treat None as missing
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)  # missing if it was imported in another way


# --- versions ---------------------------------------------------------------------------------------------------------


TESTED_TRL = "1.15"


def check_trl() -> None:
    """Raises `EnvironmentUnsupported` for an untested version of TRL, unless `KIT_ALLOW_UNTESTED=1`."""
    import trl

    if trl.__version__.startswith(f"{TESTED_TRL}.") or os.environ.get("KIT_ALLOW_UNTESTED") == "1":
        return
    raise EnvironmentUnsupported(
        f"TRL {trl.__version__} is installed, but the trainer was only tested with TRL {TESTED_TRL}.*. Install it: "
        f"pip install 'trl=={TESTED_TRL}.*', or set KIT_ALLOW_UNTESTED=1 to try this version."
    )


# --- import messages --------------------------------------------------------------------------------------------------


IMPORT_NOISE = {
    # for every Enum that torchao registers; transformers and peft import it
    "torch.utils._pytree": "register_constant() on Enum subclasses is deprecated",
    # about a faster 4-bit product on the CPU, whenever bitsandbytes is installed
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
"""Messages that libraries log during their import, by logger, without use for the user."""


def silence_import_noise() -> None:
    """Filters `IMPORT_NOISE` from its loggers."""
    for name in IMPORT_NOISE:
        logger = logging.getLogger(name)
        if _is_not_noise not in logger.filters:
            logger.addFilter(_is_not_noise)


def _is_not_noise(record: logging.LogRecord) -> bool:
    return IMPORT_NOISE[record.name] not in record.getMessage()


# --- freed memory -----------------------------------------------------------------------------------------------------


LARGE_BLOCK = 4 * 1024**2
"""Bytes."""
SMALL_MODEL = 10_000_000
"""Number of weights below which speed matters more than memory."""
M_MMAP_THRESHOLD = -3  # malloc.h


def return_freed_memory(parameters: int) -> bool:
    """Makes malloc return freed memory, if the model is large enough. Returns False if the C library does not support it."""
    if parameters < SMALL_MODEL:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK))
    except (OSError, AttributeError, TypeError):  # musl, macOS, Windows
        return False
