"""What `KIT_SMOKE=1` makes of a notebook: the same cells with a tiny model and few steps, to see that all of them work."""

from __future__ import annotations

import os

SHORT = [
    "optimisation.steps=4",
    "optimisation.batch_size=16",
    "generation.num_generations=4",
    "evaluation.prompts=16",
    "evaluation.k=2",
    "evaluation.every=2",
    "run.save_every=2",
]
"""A run of seconds."""
EMBEDDED = [
    "model={name: embedded, dtype: float32}",
    "data={source: 'reasoning-gym:chain_sum', task_params: {min_terms: 2, max_terms: 4, min_digits: 1, max_digits: 1}, "
    "limit: 220, heldout: 20}",
    "reward={preset: reasoning-gym}",
    "generation={engine: hf, max_completion_tokens: 64}",
    "optimisation={learning_rate: 5.0e-4}",
]
"""Model, data, reward and engine that need no GPU and no network, in place of whatever is configured."""


def smoke(*, everything: bool = False) -> list[str]:
    """Overrides of a notebook's configuration: none, unless the environment has KIT_SMOKE=1.

    Then a run takes seconds; `everything` replaces model, data, reward and engine, too, where they need a GPU or the network.
    """
    if os.environ.get("KIT_SMOKE") != "1":
        return []
    return [*EMBEDDED, *SHORT] if everything else list(SHORT)
