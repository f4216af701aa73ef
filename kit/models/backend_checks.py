"""What a backend refuses of a run, said before it starts and with what to set instead.

Where `model.backend: auto` has chosen Unsloth, a refusal is the reason to take transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.config import ModelConfig
from kit.errors import ModelError
from kit.models.backend import TRANSFORMERS, UNSLOTH, UNSLOTH_CPU, Backend

if TYPE_CHECKING:
    pass

TRANSFORMERS_INSTEAD = "Set model.backend: transformers."


def suited(backend: Backend, config: ModelConfig, model_config: Any) -> Backend:
    """The backend, or transformers where `auto` has chosen one that stops at this architecture. Raises `ModelError`."""
    try:
        check_architecture(model_config, backend, config.name)
    except ModelError as error:
        if config.backend != "auto":
            raise
        return Backend(TRANSFORMERS, backend.device, f"transformers + PEFT: {error}")
    return backend


def check_architecture(model_config: Any, backend: Backend, source: str) -> None:
    """Refuses a model that the backend's trainer stops at. Raises `ModelError`."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    experts = [getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    if backend.name == UNSLOTH and any(isinstance(count, int) and count > 1 for count in experts):
        raise ModelError(
            f"{source} is a mixture of experts, whose balancing loss Unsloth's trainer does not compute. {TRANSFORMERS_INSTEAD}"
        )


def check_merge(backend: str, load_in_4bit: bool) -> None:
    """Refuses to merge an adapter where the backend cannot. Raises `ModelError`."""
    if backend == UNSLOTH_CPU and load_in_4bit:
        raise ModelError(
            "Unsloth's CPU backend does not merge an adapter into 4-bit weights. Export the adapter alone, or load the base "
            "model with model.load_in_4bit: false (model.backend: transformers) and merge into that."
        )
