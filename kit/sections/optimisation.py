"""`optimisation:` steps, batch, learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kit.sections.base import Section


class OptimisationConfig(Section):
    """Steps, batch, learning rate."""

    steps: Annotated[int, Field(ge=1)] = 200
    """Optimiser steps."""
    batch_size: Annotated[int, Field(ge=2)] = 64
    """Completions per optimiser step (prompts × num_generations)."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Completions per forward and backward pass; null: the whole batch at once, at most 16 on a GPU."""
    iterations: Annotated[int, Field(ge=1)] = 1
    """Optimiser steps on the same completions (μ); above 1 the later ones are off-policy."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps over which the learning rate rises from 0."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW in the weights' precision, or with 8-bit states (bitsandbytes)."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of AdamW's first and second moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0 turns it off."""
    gradient_checkpointing: bool | Literal["unsloth"] | None = None
    """Recompute activations in the backward pass to save memory. `unsloth`: keep them in main memory as well (model.backend:
    unsloth; elsewhere refused, on its CPU backend the same as true). Null: on with a GPU, off on the CPU."""
