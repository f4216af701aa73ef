"""Old names of modules, which import for one release, with a warning. Can go with the release after 0.1."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "kit.api.smoke": "kit.api.notebook",
    "kit.comparison": "kit.studies.arms",
    "kit.evaluation.compare": "kit.studies.compare",
    "kit.evaluation.compare_scores": "kit.studies.scores",
    "kit.evaluation.paired": "kit.studies.statistics",
    "kit.figures": "kit.report.charts",
    "kit.models.out_of_memory": "kit.models.failures",
    "kit.notebook": "kit.api.notebook",
    "kit.objective.ratios": "kit.objective.batch",
    "kit.planning.memory": "kit.models.memory",
    "kit.planning.shapes": "kit.models.shape",
    "kit.run": "kit.api.run",
    "kit.schema": "kit.config.schema",
    "kit.scoring.trl_kernel": "kit.scoring.head",
    "kit.sections.base": "kit.config.sections",
    "kit.sections.data": "kit.config.sections",
    "kit.sections.evaluation": "kit.config.sections",
    "kit.sections.generation": "kit.config.sections",
    "kit.sections.model": "kit.config.sections",
    "kit.sections.objective": "kit.config.sections",
    "kit.sections.optimisation": "kit.config.sections",
    "kit.sections.reward": "kit.config.sections",
    "kit.sections.run": "kit.config.sections",
    "kit.sections.selection": "kit.config.sections",
    "kit.sections.vllm": "kit.config.sections",
    "kit.smoke": "kit.api.notebook",
    "kit.sweeps": "kit.studies.sweep",
    "kit.training.arguments": "kit.trainer.arguments",
    "kit.training.backend": "kit.models.backend",
    "kit.training.embedded": "kit.models.embedded",
    "kit.training.engine_side": "kit.trainer.engine",
    "kit.training.evaluating": "kit.runner.evaluation",
    "kit.training.families": "kit.models.family",
    "kit.training.first_steps": "kit.trainer.sanity_checks",
    "kit.training.logps": "kit.scoring.head",
    "kit.training.models": "kit.models.loading",
    "kit.training.out_of_memory": "kit.models.failures",
    "kit.training.packed_attention": "kit.scoring.packed_attention",
    "kit.training.packing": "kit.scoring.packing",
    "kit.training.precision": "kit.models.backend",
    "kit.training.preparation": "kit.runner.prepare",
    "kit.training.quiet": "kit.runner.console",
    "kit.training.savings": "kit.trainer.savings",
    "kit.training.selection": "kit.trainer.selection",
    "kit.training.step_phases": "kit.trainer.metric_log",
    "kit.training.trainer": "kit.trainer.trainer",
    "kit.training.trl_kernel": "kit.scoring.head",
    "kit.training.unsloth_model": "kit.models.unsloth",
}
"""What scripts outside may have imported: the public faces, and what docs, notebooks and benchmarks showed.

The modules inside a package that is named here keep their names: `kit.training.selection.rules` is
`kit.trainer.selection.rules`.
"""

DIVIDED = {
    "kit.sections": "kit.config.sections",
    "kit.training": "kit.models, kit.generation, kit.scoring, kit.trainer and kit.runner",
}
"""Packages whose place no package took. Empty ones, so that the names inside them in `MOVED` can be imported."""


def new_name(old: str) -> str | None:
    """The present name of a module by the longest part of `old` that has moved; None: no part of it has."""
    kept, inside = old, ""
    while kept:
        if kept in MOVED:
            return MOVED[kept] + inside
        kept, _, last = kept.rpartition(".")
        inside = f".{last}{inside}"
    return None


class MovedModules(MetaPathFinder, Loader):
    """Finds a module under its old name; what is imported is the one module under its new name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("kit."):
            return None
        if fullname in DIVIDED:
            return ModuleSpec(fullname, self, is_package=True)
        new = new_name(fullname)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        new = DIVIDED.get(spec.name) or new_name(spec.name)
        warnings.warn(f"{spec.name} is now {new}; the old name goes after this release.", FutureWarning, stacklevel=2)
        if spec.name in DIVIDED:
            return None  # an empty module
        module = importlib.import_module(str(new))
        spec.loader_state = module.__spec__, module.__loader__  # the import system is about to put others there
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        if module.__spec__.loader_state is not None:
            module.__spec__, module.__loader__ = module.__spec__.loader_state


def keep_old_names() -> None:
    """Once a process. First of the finders: those after it would load modules of a moved package twice, from their files."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
