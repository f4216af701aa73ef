"""Imports of the libraries below the kit: quick, in tested versions, without noise; and malloc's settings.

transformers, PEFT, datasets and TRL import whatever optional package is installed beside them, used or not: in an
environment with all of `UNUSED` and `OF_LARGE_MODELS` (Colab's has most) that is a quarter of the 11 s of CPU time before
a run begins. Another eighth are garbage collections, which find nothing while modules are loaded.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kit.config import EMBEDDED_MODELS
from kit.errors import EnvironmentUnsupported
from kit.models.backend import TRANSFORMERS, choose_backend, is_of_the_kit, without_collections

if TYPE_CHECKING:
    from kit.config import ModelConfig

UNUSED = ("sklearn", "trackio")
"""For assisted generation, and a tracker, which the kit runs in a process of its own."""
OF_LARGE_MODELS = ("bitsandbytes", "torchao")
"""For quantised weights and optimizers. Hidden for the embedded models, which have none: transformers asks once and remembers,
so in such a process its `is_bitsandbytes_available()` and `is_torchao_available()` go on saying no."""


def load_libraries(model: ModelConfig, *, training: bool = True) -> None:
    """Imports what `model` is loaded with, and TRL for `training`. Raises what `choose_backend` raises.

    Does nothing in a process that the kit did not start: there, what else wants the packages is not known. And nothing
    for Unsloth, which wants them all, and has to come before TRL.
    """
    if not is_of_the_kit():
        return
    small = model.name in EMBEDDED_MODELS and not model.load_in_4bit
    with without_collections():
        if training and choose_backend(model).name != TRANSFORMERS:  # which imports torch to look at this machine
            return
        with hidden(UNUSED + OF_LARGE_MODELS * small):
            import datasets  # noqa: F401
            import peft  # noqa: F401
            import transformers.generation.utils
            import transformers.modeling_utils  # noqa: F401

            if training:
                import trl.trainer.grpo_trainer  # noqa: F401
    remember_packages()


def remember_packages() -> None:
    """Lets accelerate look for peft once.

    Otherwise it reads peft's metadata from the disk whenever a model is unwrapped: several times a step, 1 ms each.
    """
    from accelerate.utils import imports

    ask = getattr(imports, "_is_package_available", None)
    if ask is not None and not hasattr(ask, "cache_info"):
        imports._is_package_available = functools.cache(ask)


@contextmanager
def hidden(names: Iterable[str]) -> Iterator[None]:
    """Hides packages that are not loaded yet, as if they were not installed; afterwards they can be imported."""
    names = [name for name in names if name not in sys.modules]
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]  # what `import` and `find_spec` take for "there is none"
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)  # gone already where somebody has imported it by other means


# --- versions ---------------------------------------------------------------------------------------------------------


TESTED_TRL = "1.15"


def check_trl() -> None:
    """Refuses a TRL outside the tested range. Raises `EnvironmentUnsupported`; `KIT_ALLOW_UNTESTED=1` lets it pass."""
    import trl

    if trl.__version__.startswith(f"{TESTED_TRL}.") or os.environ.get("KIT_ALLOW_UNTESTED") == "1":
        return
    raise EnvironmentUnsupported(
        f"TRL {trl.__version__} is installed; the trainer is a subclass of TRL {TESTED_TRL}.* and was tested with that only. "
        f"Install it (pip install 'trl=={TESTED_TRL}.*'), or set KIT_ALLOW_UNTESTED=1 to try anyway."
    )


# --- noise ------------------------------------------------------------------------------------------------------------


IMPORT_NOISE = {
    # of every Enum that torchao registers, which comes with transformers and peft
    "torch.utils._pytree": "register_constant() on Enum subclasses is deprecated",
    # of a faster 4-bit product on the CPU, wherever bitsandbytes is installed
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
"""What libraries say as soon as they are imported, by logger: nobody here can act on it."""


def silence_import_noise() -> None:
    """Filters `IMPORT_NOISE` out of its loggers; their other messages pass."""
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
"""Weights below which a model's memory does not matter and its time does."""
M_MMAP_THRESHOLD = -3  # malloc.h


def return_freed_memory(parameters: int) -> bool:
    """Sets it for the rest of the process, if the model is large enough. False where the C library has no such switch."""
    if parameters < SMALL_MODEL:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK))
    except (OSError, AttributeError, TypeError):  # musl, macOS, Windows
        return False
