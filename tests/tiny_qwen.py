"""Tiny random Qwen3 models with the tokenizers of the embedded models, and settings and configurations of most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY = 512
SPOKEN = range(20, 28)
"""Ids that completions may contain besides the end token. There are so few that completions end early, at ragged lengths."""
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def tiny_tokenizer(name: str = "embedded") -> Any:
    """Return the tokenizer of an embedded model, with padding on the left for generation."""
    from transformers import AutoTokenizer

    from kit.models.embedded import source_of

    return AutoTokenizer.from_pretrained(source_of(name), padding_side="left")


def one_thread() -> Iterator[None]:
    """Limit torch to one thread; a fixture of a session."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_qwen(tokenizer: Any, context: int = 256) -> Any:
    """Return a float32 model of two layers in evaluation mode, with the same random weights at each call."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).eval()


def tiny_settings(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Return fields of a `GRPOConfig` in float32 on the CPU: micro-batches of 4 completions of one prompt, 1 to 8 tokens each."""
    silent = {*range(VOCABULARY)} - {tokenizer.eos_token_id, *SPOKEN}
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 1,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "generation_kwargs": {"suppress_tokens": sorted(silent)},
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def tiny_run(model_folder: Path, root: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run of two steps of eight completions, with changes by section.

    It has no evaluation, and a checkpoint at the end only. Nine tokens are enough for an answer, and some completions end
    earlier. With six, all rewards are 0 and nothing trains.
    """
    tree: dict[str, dict[str, Any]] = {
        "model": {"name": str(model_folder), "dtype": "float32", "lora": {"rank": 4, "alpha": 8}},
        "data": {
            "source": "reasoning-gym:chain_sum",
            "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "limit": 40,
            "heldout": 8,
        },
        "reward": {"preset": "reasoning-gym"},
        "generation": {"num_generations": 4, "max_completion_tokens": 9},
        "optimisation": {"steps": 2, "batch_size": 8, "learning_rate": 1e-3},
        "evaluation": {"before": False, "after": False, "prompts": 4, "k": 2},
        "run": {"id": "it", "root": str(root), "threads": 1, "save_every": 0},
    }
    return {section: tree.get(section, {}) | changes.get(section, {}) for section in [*tree, *changes]}


def placed_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward that differs for nearly every completion: the sum of id times position, mod 101, divided by 101."""
    return [sum(place * token for place, token in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids]
