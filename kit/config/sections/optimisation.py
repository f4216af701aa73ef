"""`optimisation:` steps, batch, learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kit.config.sections.base import Section


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
    token_budget: Annotated[int, Field(ge=1)] | None = None
    """Tokens (prompt and completion) of which one forward and backward pass keeps activations, at most; a larger micro-batch
    goes through in parts, with the same gradient. Null: whole micro-batches. A single longer completion goes alone."""
    skip_flat_groups: bool = True
    """Leave completions whose advantages are all 0 out of the forward pass where the gradient is the same without it. What is
    logged of the policy (entropy, ratios, weights) is then of the completions that were scored."""
    reuse_old_logps: bool = True
    """With `iterations` above 1, take old log-probabilities from the first pass over the completions where that is exact,
    instead of a scoring pass of their own."""
    packing: bool = True
    """Score completions without padding: rows behind one another where the model's attention allows it, else batches of like
    length with their padding cut off. The gradient is the same; a model for which it would not be is scored as it comes."""
    share_prompts: bool = True
    """With `packing`, forward a prompt once for all of its completions in a micro-batch."""
