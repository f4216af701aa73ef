"""The steps that the main loop (kit/train.py) calls.

Each module is imported at its first use, so that imports happen in the order of the loop, for two reasons:
`kit.models.libraries.load_libraries` can load transformers, TRL and PEFT quickly only if none of them has been imported yet,
and Unsloth must be imported before TRL, which `build` imports.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.runner import build as build
    from kit.runner import console as console
    from kit.runner import distributed as distributed
    from kit.runner import evaluation as evaluation
    from kit.runner import follower as follower
    from kit.runner import lifecycle as lifecycle
    from kit.runner import prepare as prepare
    from kit.runner import recording as recording
    from kit.runner import resume as resume
    from kit.runner import trackers as trackers


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and importlib.util.find_spec(f"kit.runner.{name}") is not None:
        return importlib.import_module(f"kit.runner.{name}")
    raise AttributeError(f"module 'kit.runner' has no attribute '{name}'")
