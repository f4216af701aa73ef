"""Named objectives as plain data. No torch here: forms and the command line read this too.

    name      advantage       clip                   reduction            source
    grpo      group_zscore    ppo_clip(0.2, 0.2)     sequence_mean        DeepSeekMath, arXiv 2402.03300
    bnpo      group_zscore    ppo_clip(0.2, 0.2)     token_mean           TRL's `loss_type="bnpo"`
    dr_grpo   group_mean      ppo_clip(0.2, 0.2)     fixed_length         Dr. GRPO, arXiv 2503.20783
    dapo      group_zscore    ppo_clip(0.2, 0.28)    global_token_mean    DAPO, arXiv 2503.14476
    cispo     group_zscore    cispo(5)               global_token_mean    arXiv 2506.13585 and 2510.13786
    gspo      group_zscore    gspo(3e-4, 4e-4)       sequence_mean        GSPO, arXiv 2507.18071
    rloo      leave_one_out   reinforce              sequence_sum         RLOO, arXiv 2402.14740

RLOO treats a whole completion as one action: its loss is -A · (sum of the token logps), averaged over completions,
which is `reinforce` under `sequence_sum`. There is no ratio, so it is meant for one optimiser step per rollout, as in
the paper, where clipping was found to be hardly ever active. No recipe has a KL term; add one to `regularizers`.
"""

from __future__ import annotations

import copy
from typing import Any

from kit.errors import ConfigError
from kit.registry import did_you_mean

DEFAULT_RECIPE = "dapo"

_RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage": {"name": "group_zscore"},
        "clip": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
        "reduction": {"name": "sequence_mean"},
    },
    "bnpo": {
        "advantage": {"name": "group_zscore"},
        "clip": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
        "reduction": {"name": "token_mean"},
    },
    "dr_grpo": {
        "advantage": {"name": "group_mean"},
        "clip": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
        "reduction": {"name": "fixed_length"},
    },
    "dapo": {
        "advantage": {"name": "group_zscore"},
        "clip": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28},
        "reduction": {"name": "global_token_mean"},
    },
    "cispo": {
        "advantage": {"name": "group_zscore"},
        "clip": {"name": "cispo", "eps_high": 5.0},
        "reduction": {"name": "global_token_mean"},
    },
    "gspo": {
        "advantage": {"name": "group_zscore"},
        "clip": {"name": "gspo", "eps_low": 3e-4, "eps_high": 4e-4},
        "reduction": {"name": "sequence_mean"},
    },
    "rloo": {
        "advantage": {"name": "leave_one_out"},
        "clip": {"name": "reinforce"},
        "reduction": {"name": "sequence_sum"},
    },
}


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes, `grpo` first."""
    return tuple(_RECIPES)


def recipe(name: str) -> dict[str, Any]:
    """A copy of a recipe: every part, lists included. Raises `ConfigError` with the nearest name if there is none."""
    if name not in _RECIPES:
        raise ConfigError(f"No recipe is called '{name}'.{did_you_mean(name, _RECIPES)} Known: {', '.join(_RECIPES)}.")
    parts = copy.deepcopy(_RECIPES[name])
    return {
        "advantage": parts["advantage"],
        "clip": parts["clip"],
        "weights": parts.get("weights", []),
        "regularizers": parts.get("regularizers", []),
        "reduction": parts["reduction"],
    }
