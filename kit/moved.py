"""Old names of modules, which import for one release, with a warning. Can go with the release after 0.1."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "kit.comparison": "kit.studies.arms",
    "kit.figures": "kit.report.figures",
    "kit.models.out_of_memory": "kit.models.failures",
    "kit.notebook": "kit.api.notebook",
    "kit.run": "kit.api.run",
    "kit.schema": "kit.config.schema",
    "kit.sections": "kit.config.sections",
    "kit.sweeps": "kit.studies.sweep",
    "kit.smoke": "kit.api.smoke",
    "kit.training": "kit.trainer",
    "kit.training.arguments": "kit.trainer.arguments",
    "kit.training.backend": "kit.models.backend",
    "kit.training.models": "kit.models.loading",
    "kit.training.out_of_memory": "kit.models.failures",
    "kit.training.trainer": "kit.trainer.trainer",
}
"""What scripts outside may have imported: the public faces, and what docs and benchmarks showed."""


class MovedModules(MetaPathFinder, Loader):
    """Finds a module under its old name; what is imported is the one module under its new name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now {new}; the old name goes after this release.", FutureWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._own = module.__spec__, module.__loader__  # the import system is about to put others there
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__ = self._own


def keep_old_names() -> None:
    """Once a process. At the end of the path: it is asked only for what is not there."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
