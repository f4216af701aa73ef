"""A model before and after its weights are read: what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit.models.backend import Backend
from kit.models.family import FamilyAdapter
from kit.models.shape import ModelShape


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found, its weights not read yet."""

    source: str
    revision: str | None
    config: Any
    tokenizer: Any
    backend: Backend
    shape: ModelShape | None
    """None where the architecture is remote code, of which nothing is known before it runs."""
    family: FamilyAdapter | None = None
    """None likewise."""
    processor: Any | None = None
    """What makes model inputs of pictures; None where the model takes text only, or comes without."""
    chat: bool = True

    @property
    def parameters(self) -> int:
        """Weights of the model; 0 where they are not known."""
        return self.shape.parameters if self.shape is not None else 0


@dataclass(frozen=True)
class LoadedModel:
    """What a trainer needs: the base model, its tokenizer, and the adapter to put on it (None: all weights train)."""

    model: Any
    tokenizer: Any
    peft_config: Any | None
    backend: Backend
    processor: Any | None = None
    """For prompts with pictures; text-only prompts need the tokenizer alone."""

    def processing_class(self, *, pictures: bool) -> Any:
        """What the trainer turns prompts into model inputs with."""
        return self.processor if pictures and self.processor is not None else self.tokenizer
