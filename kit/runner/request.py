"""From what a person gives to a configuration with a run id."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError
from kit.registry import did_you_mean
from kit.runs.store import RunStore

if TYPE_CHECKING:
    from kit.config import RunConfig


SHORTCUTS = {"steps": "optimisation.steps", "seed": "run.seed", "objective": "objective", "run_id": "run.id"}


def resolve_config(
    config: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = (), **shortcuts: Any
) -> RunConfig:
    """The configuration with shortcuts and overrides applied, and with a run id. Raises `ConfigError`."""
    from kit.config import load_config

    unknown = [name for name in shortcuts if name not in SHORTCUTS]
    if unknown:
        hint = did_you_mean(unknown[0], SHORTCUTS)
        raise ConfigError(
            f"train() has no argument '{unknown[0]}'.{hint} It has: config, overrides, progress, "
            f"{', '.join(SHORTCUTS)}. Any other key goes by overrides=['section.key=value']."
        )
    given = {name: value for name, value in shortcuts.items() if value is not None}
    resolved = load_config(config, [*_as_overrides(given), *overrides])
    if resolved.run.id is None:
        stem = Path(config).stem if isinstance(config, (str, Path)) else "run"
        resolved.run.id = RunStore(resolved.run.root).new_id(stem)
    return resolved


def _as_overrides(shortcuts: Mapping[str, Any]) -> list[str]:
    if isinstance(shortcuts.get("objective"), str):
        shortcuts = {**shortcuts, "objective": {"recipe": shortcuts["objective"]}}
    try:
        return [f"{SHORTCUTS[name]}={json.dumps(value)}" for name, value in shortcuts.items()]
    except TypeError:
        raise ConfigError(
            "A shortcut of train() must be a plain value. objective= takes a recipe's name or a mapping such as "
            "{'recipe': 'dapo', 'clip': {'eps_high': 0.28}}; hooks of your own go by 'file.py:function'."
        ) from None
