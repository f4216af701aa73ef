"""From what a user writes to a spec with every part in it. No torch here.

A spec is the name of a recipe, or a dict:

    recipe: dapo                    # the default if left out
    clip: {eps_high: 0.3}           # without `name`: changes the recipe's own clip
    advantage: {name: group_mean}   # with `name`, or as a bare name: replaces the recipe's, from its own defaults
    regularizers:                   # a list replaces the recipe's list
      - {name: kl, coef: 0.01}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.errors import ConfigError
from kit.objective.recipes import DEFAULT_RECIPE, recipe
from kit.registry import did_you_mean

SINGLE = ("advantage", "clip", "reduction")
LISTS = ("weights", "regularizers")
KEYS = ("recipe", "advantage", "clip", "weights", "regularizers", "reduction")


def resolve(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """The parts of an objective, without `recipe`. Raises `ConfigError` on an unknown key or a wrong type."""
    if isinstance(spec, str):
        return recipe(spec)
    if not isinstance(spec, Mapping):
        raise ConfigError(f"An objective is the name of a recipe or a mapping, got {spec!r}.")
    for key in spec:
        if key not in KEYS:
            raise ConfigError(f"objective has no key '{key}'.{did_you_mean(str(key), KEYS)} Known: {', '.join(KEYS)}.")
    parts = recipe(spec.get("recipe", DEFAULT_RECIPE))
    for key in SINGLE:
        if key in spec:
            parts[key] = _merge(key, parts[key], spec[key])
    for key in LISTS:
        if key in spec:
            parts[key] = _listed(key, spec[key])
    return parts


def _merge(key: str, base: dict[str, Any], change: Any) -> Any:
    if not isinstance(change, Mapping):
        return change
    return dict(change) if "name" in change else {**base, **change}


def _listed(key: str, entries: Any) -> list[Any]:
    if entries is None:
        return []
    if isinstance(entries, str | Mapping) or not isinstance(entries, list | tuple):
        raise ConfigError(f"objective.{key} must be a list, got {entries!r}. Write [{entries!r}].")
    return list(entries)
