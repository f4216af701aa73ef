"""`model:` the policy: weights, precision, adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kit.config.sections.base import Section

EMBEDDED = "embedded"
EMBEDDED_TOOLS = "embedded-tools"
EMBEDDED_MODELS = (EMBEDDED, EMBEDDED_TOOLS)


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank r of the update B·A."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scaling numerator: the update is multiplied by alpha / rank (alpha / sqrt(rank) with `rslora`)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter's input. Above 0, old and new log-probabilities differ even on-policy."""
    targets: str | list[str] = "all-linear"
    """`all-linear`, or the names of the modules that get an adapter."""
    rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""


class ModelConfig(Section):
    """The policy: weights, precision, adapters."""

    name: str = EMBEDDED
    """`embedded` (the tiny model that comes with the kit; `embedded-tools`: one that can call tools), a model folder, or a
    hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; null is its default branch."""
    backend: Literal["auto", "transformers", "unsloth", "unsloth-cpu"] = "auto"
    """Who loads the model. `auto`: Unsloth on a CUDA GPU where it is installed and can do what is asked, else transformers +
    PEFT; `grpo-kit doctor` says which and why. `unsloth` needs CUDA; `unsloth-cpu` is Unsloth's CPU backend."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. `auto`: bfloat16 on a GPU that has it, float16 on an older one, float32 on the CPU."""
    load_in_4bit: bool = False
    """Quantise the frozen weights to 4-bit NF4 with bitsandbytes (QLoRA, arXiv 2305.14314)."""
    lora: LoraConfig | None = Field(default_factory=LoraConfig)
    """Adapters; null trains every weight."""
    reference: Literal["auto", "base", "none"] = "auto"
    """Reference policy for KL terms. `base`: the weights before training (with LoRA: the same model, adapters off, no
    extra memory). `auto`: base if a term needs it. `none`: never; such a term is then refused."""
    attention: str | None = None
    """Attention implementation of transformers (`sdpa`, `eager`, `flash_attention_2`); null lets it choose."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: read the repository first, it runs with your rights."""
