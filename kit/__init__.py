"""grpo-kit: fine-tune language models with GRPO on one GPU or on a CPU.

    import kit
    run = kit.train("quickstart", steps=20)      # in a separate process; returns a handle on the run
    run.metrics(); run.plot(); run.evaluate()

    from kit import HookedGRPOTrainer, Objective  # a drop-in for trl.GRPOTrainer with a loss of hooks

Names are imported on first use, so that `import kit` loads neither torch nor pydantic. The import sets how OpenMP threads wait
for each other (`kit.threads`), in this process and in its children.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kit.threads import let_threads_sleep

if TYPE_CHECKING:
    from kit.api import Run as Run
    from kit.api import resume as resume
    from kit.api import start as start
    from kit.config import RunConfig as RunConfig
    from kit.config import load_config as load_config
    from kit.objective import Objective as Objective
    from kit.objective import TokenBatch as TokenBatch
    from kit.objective import advantages as advantages
    from kit.objective import clips as clips
    from kit.objective import recipes as recipes
    from kit.objective import reductions as reductions
    from kit.objective import regularizers as regularizers
    from kit.objective import weights as weights
    from kit.studies.arms import Comparison as Comparison
    from kit.studies.arms import compare as compare

__version__ = "0.1.0"

let_threads_sleep()

_HOME = {
    "Comparison": "kit.studies.arms",
    "HookedGRPOTrainer": "kit.trainer.trainer",  # made on first use: another package may have to patch TRL before that
    "Run": "kit.api",
    "compare": "kit.studies.arms",
    "resume": "kit.api",
    "start": "kit.api",
    "train": "kit.api",
    "RunConfig": "kit.config",
    "load_config": "kit.config",
    "recipes": "kit.objective.recipes",
}
_HOOKS = ("Objective", "TokenBatch", "advantages", "clips", "reductions", "regularizers", "weights")
_HOME |= dict.fromkeys(_HOOKS, "kit.objective")

__all__ = sorted(["__version__", *_HOME])


class CallableModule(ModuleType):
    """Lets `kit.train` be called although importing the file kit/train.py binds the module to that very name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Run:
        from kit.api import train

        return train(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kit' has no attribute '{name}'")
    module = importlib.import_module(_HOME[name])
    value = globals()[name] = module if name == "recipes" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
