"""`generation:` how completions are sampled, and with which engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kit.sections.base import Section


class GenerationConfig(Section):
    """How completions are sampled."""

    engine: Literal["auto", "hf", "vllm"] = "auto"
    """`hf`: transformers' generate. `auto`: in this version always hf; `vllm` is refused."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions a prompt (the group size G)."""
    max_completion_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens after which a completion is cut."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of sampling; the loss divides logits by it, too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability mass."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k most likely tokens; 0 is no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Penalty on repeated tokens (arXiv 1909.05858); 1 is none. Other values make sampling differ from the policy."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of GPU memory for vLLM's weights and cache; read with engine vllm only, hence not in this version."""
