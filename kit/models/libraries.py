"""Loads transformers, PEFT, datasets and TRL quickly, in processes that belong to the kit.

They import whatever optional package is installed beside them, used or not: in an environment with all of `UNUSED` and
`OF_LARGE_MODELS` (Colab's has most) that is a quarter of the 11 s of CPU time before a run begins. Another eighth are
garbage collections, which find nothing while modules are loaded.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kit.config import EMBEDDED_MODELS
from kit.models.backend import TRANSFORMERS, choose_backend

if TYPE_CHECKING:
    from kit.config import ModelConfig

UNUSED = ("sklearn", "trackio")
"""For assisted generation, and a tracker, which the kit runs in a process of its own."""
OF_LARGE_MODELS = ("bitsandbytes", "torchao")
"""For quantised weights and optimizers."""


def load_libraries(model: ModelConfig, *, training: bool = True) -> None:
    """Imports what `model` is loaded with, and TRL for `training`. Raises what `choose_backend` raises.

    Does nothing in a process that the kit did not start: there, what else wants the packages is not known. And nothing
    for Unsloth, which wants them all, and has to come before TRL.
    """
    if not _is_of_the_kit() or (training and choose_backend(model).name != TRANSFORMERS):
        return
    small = model.name in EMBEDDED_MODELS
    with hidden(UNUSED + OF_LARGE_MODELS * small), _without_collections():
        import datasets  # noqa: F401
        import peft  # noqa: F401
        import transformers.generation.utils
        import transformers.modeling_utils  # noqa: F401

        if training:
            import trl.trainer.grpo_trainer  # noqa: F401


@contextmanager
def hidden(names: Iterable[str]) -> Iterator[None]:
    """Inside, packages that are not loaded yet look as if they were not installed; afterwards they can be imported."""
    names = [name for name in names if name not in sys.modules]
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]  # what `import` and `find_spec` take for "there is none"
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Inside, no garbage is collected; what is there afterwards is left out of later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _is_of_the_kit() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and (spec.name or "").startswith("kit.")
