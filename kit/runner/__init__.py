"""The steps that the main loop (kit/train.py) calls.

`from kit import runner` names all of them and imports none: each module is imported when it is first used. So the order of
imports is that of the loop. It matters twice: `kit.models.libraries.load_libraries` loads transformers and its company quickly
only where nothing has before, and Unsloth refuses to come after TRL, which `build` brings.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.runner import build as build
    from kit.runner import console as console
    from kit.runner import distributed as distributed
    from kit.runner import evaluation as evaluation
    from kit.runner import lifecycle as lifecycle
    from kit.runner import prepare as prepare
    from kit.runner import recording as recording
    from kit.runner import resume as resume
    from kit.runner import trackers as trackers

MODULES = (
    "build", "console", "distributed", "evaluation", "lifecycle", "prepare", "recording", "resume", "trackers",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(f"kit.runner.{name}")
    raise AttributeError(f"module 'kit.runner' has no attribute '{name}'")
