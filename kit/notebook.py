"""The settings that `KIT_SMOKE=1` gives a notebook: the same cells with a tiny model and few steps, so that all can be tried."""

from __future__ import annotations

import os
from typing import Any

SHORT = [
    "optimisation.steps=4",
    "optimisation.batch_size=16",
    "generation.num_generations=4",
    "evaluation.prompts=10",
    "evaluation.k=2",
    "evaluation.every=2",
    "run.save_every=2",
    "run.threads=1",
]
"""A run of seconds. One thread: the tiny model gains nothing from more, and loses by them on a machine that is busy."""
EMBEDDED = [
    "model={name: embedded, dtype: float32}",
    "data={source: 'reasoning-gym:chain_sum', task_params: {min_terms: 2, max_terms: 4, min_digits: 1, max_digits: 1}, "
    "limit: 220, heldout: 20}",
    "reward={preset: reasoning-gym}",
    "generation={engine: hf, max_completion_tokens: 64}",
    "objective.weights=[]",
    "optimisation={learning_rate: 5.0e-4}",
]
"""Model, data, reward and engine that need no GPU and no network, in place of whatever is configured.

Without the weights of the objective, since some of them ask for an engine's own log-probabilities.
"""


def smoke(*, everything: bool = False) -> list[str]:
    """Overrides of a notebook's configuration: none, unless the environment has KIT_SMOKE=1.

    Then a run takes seconds; `everything` replaces model, data, reward and engine, too, where they need a GPU or the network.
    """
    if os.environ.get("KIT_SMOKE") != "1":
        return []
    return [*EMBEDDED, *SHORT] if everything else list(SHORT)


def smoke_model(architecture: str | None = None, folder: str = "smoke-model") -> str:
    """A model's folder, for where a name on the hub would stand: the embedded model, or one of another architecture.

    Args:
        architecture: a `model_type` of transformers; a tiny model of it with random weights is written.
        folder: where to, with the embedded model's tokenizer.
    """
    from kit.models.embedded import source_of

    embedded = source_of("embedded")
    if architecture is None:
        return embedded
    from transformers import AutoConfig, AutoTokenizer

    from kit.model_check.tiny import tiny_config, tiny_model

    tokenizer = AutoTokenizer.from_pretrained(embedded)
    config = tiny_config(AutoConfig.for_model(architecture), len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    tiny_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def smoke_sums(rows: int) -> Any:
    """A `datasets.Dataset` of sums with the columns `question` and `answer`, as GSM8K has them."""
    from datasets import Dataset

    question = "State the final answer to the following arithmetic problem: {} + {} ="
    sums = [(number % 10, (number + number // 10) % 10) for number in range(rows)]
    return Dataset.from_list([{"question": question.format(a, b), "answer": str(a + b)} for a, b in sums])
