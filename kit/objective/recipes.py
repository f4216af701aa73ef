"""Named objectives as plain data. The module does not import torch, because forms and the command line use it too.

RLOO treats a completion as one action: its loss is -A · (sum of the token logps), averaged over completions, i.e.
`reinforce` with `sequence_sum`. It has no ratio, so use one optimiser step per rollout, as in the paper, where clipping
was hardly ever active. `opo` is on-policy too. It weighs all tokens equally, so that over a batch the direction is that of
the sum of the token logps. `ppo` trains a value head. No recipe has a KL term to a reference; add one to `regularizers`.

`opd`, `sdpo` and `grpo_sdpo` learn from a teacher (section `teacher`). The loss of the first two is the divergence from the
teacher: the reverse KL of `distill`, and the Jensen-Shannon divergence. `grpo_sdpo` uses the teacher in the advantage.

A spec is the name of a recipe, or a dict that changes one (`resolve`):

    recipe: dapo                    # optional; this is the default
    clip: {eps_high: 0.3}           # without `name`: changes hyper-parameters of the recipe's clip
    advantage: {name: group_mean}   # with `name`, or only a name: replaces the recipe's advantage
    regularizers:                   # a list replaces the recipe's list
      - {name: kl, coef: 0.01}
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kit.errors import ConfigError
from kit.registry import did_you_mean

DEFAULT_RECIPE = "dapo"

_PPO: dict[str, Any] = {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2}
_VESPO: dict[str, Any] = {"name": "vespo", "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


def _distill(divergence: str) -> dict[str, Any]:
    return {"name": "distill", "coef": 1.0, "divergence": divergence}


# Advantage, clip and reduction, and the regularizers if a recipe has any; with the source.
_RECIPES: dict[str, tuple[Any, ...]] = {
    "grpo": ("group_zscore", _PPO, "sequence_mean"),  # DeepSeekMath, arXiv 2402.03300
    "bnpo": ("group_zscore", _PPO, "token_mean"),  # TRL's `loss_type="bnpo"`
    "dr_grpo": ("group_mean", _PPO, "fixed_length"),  # Dr. GRPO, arXiv 2503.20783
    "dapo": ("group_zscore", {**_PPO, "eps_high": 0.28}, "global_token_mean"),  # DAPO, arXiv 2503.14476
    "cispo": ("group_zscore", {"name": "cispo", "eps_high": 5.0}, "global_token_mean"),  # arXiv 2506.13585
    "gspo": ("group_zscore", {"name": "gspo", "eps_low": 3e-4, "eps_high": 4e-4}, "sequence_mean"),  # arXiv 2507.18071
    "sapo": ("group_zscore", {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}, "sequence_mean"),  # arXiv 2511.20347
    "vespo": ("group_zscore", _VESPO, "global_token_mean"),  # VESPO, arXiv 2602.10693
    "luspo": ("group_zscore", {"name": "gspo", "eps_low": 2e-3, "eps_high": 2.5e-3}, "sequence_sum"),  # 2602.05261
    "gmpo": ("group_zscore", {"name": "gmpo", "eps_low": 0.4, "eps_high": 0.4}, "sequence_mean"),  # arXiv 2507.20673
    "rloo": ("leave_one_out", {"name": "reinforce"}, "sequence_sum"),  # RLOO, arXiv 2402.14740
    "opo": ("opo", _PPO, "global_token_mean"),  # OPO, arXiv 2505.23585
    "gdpo": ("gdpo", _PPO, "sequence_mean"),  # GDPO, arXiv 2601.05242, as in TRL
    "reinforce_pp": ("reinforce_pp", _PPO, "global_token_mean"),  # REINFORCE++, arXiv 2501.03262
    "ppo": ("gae", _PPO, "global_token_mean"),  # PPO, arXiv 1707.06347
    "opd": ("none", _PPO, "global_token_mean", [_distill("reverse")]),  # on-policy distillation, arXiv 2306.13649
    "sdpo": ("none", _PPO, "global_token_mean", [_distill("jensen_shannon")]),  # SDPO, arXiv 2601.20802
    "grpo_sdpo": ({"name": "sdpo", "mix": 0.5}, _PPO, "global_token_mean"),  # its mix with GRPO, arXiv 2601.20802
}


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes, `grpo` first."""
    return tuple(_RECIPES)


def recipe(name: str) -> dict[str, Any]:
    """A deep copy of a recipe. Raises `ConfigError` with the nearest name if the name is unknown."""
    if name not in _RECIPES:
        raise ConfigError(f"No recipe is called '{name}'.{did_you_mean(name, _RECIPES)} Known: {', '.join(_RECIPES)}.")
    advantage, clip, reduction, *more = copy.deepcopy(_RECIPES[name])
    return {
        "advantage": {"name": advantage} if isinstance(advantage, str) else advantage,
        "clip": clip,
        "weights": [],
        "regularizers": more[0] if more else [],
        "reduction": {"name": reduction},
    }


def changed_parts(objective: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a section `objective` that differ from its recipe. A run's config.yaml contains all parts."""
    parts, changed = recipe(objective["recipe"]), {}
    for name, part in objective.items():
        values = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part
        if name in parts and values is not None and values != parts[name]:
            changed[name] = part
    return changed


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
            changes_hook = isinstance(spec[key], Mapping) and "name" not in spec[key]
            parts[key] = parts[key] | dict(spec[key]) if changes_hook else spec[key]
    for key in LISTS:
        if key in spec:
            parts[key] = _listed(key, spec[key])
    return parts


def _listed(key: str, entries: Any) -> list[Any]:
    if entries is None:
        return []
    if isinstance(entries, str | Mapping) or not isinstance(entries, list | tuple):
        raise ConfigError(f"objective.{key} must be a list, got {entries!r}. Write [{entries!r}].")
    return list(entries)
