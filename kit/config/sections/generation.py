"""`generation:` how completions are sampled, and with which engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kit.config.sections.base import Section
from kit.config.sections.vllm import VllmConfig


class GenerationConfig(Section):
    """How completions are sampled."""

    engine: Literal["auto", "hf", "vllm"] = "auto"
    """`hf`: transformers' generate. `vllm`: vLLM, or the run does not start. `auto`: vLLM where there is a GPU and vLLM is
    installed and can serve this run, else hf; which and why is said and recorded."""
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
    chunks: Annotated[int, Field(ge=1)] = 1
    """Parts, of whole groups, in which transformers' generate makes a batch; the rewards of a part are computed while the next
    is generated. Worth it where rewards take seconds (programs, judges). Each number of parts samples other completions."""
    tools: list[str] = Field(default_factory=list)
    """Functions that the model may call, `file.py:function` or `package.module:function`. What they answer is masked from
    the loss; it counts towards `max_completion_tokens`."""
    environment: str | dict[str, str] | None = None
    """Class (or function that makes one) whose methods are tools with a state of their own, one instance a completion:
    `file.py:Class`, or several by the value of the dataset's column `environment`: {name: file.py:Class}."""
    rollout: str | None = None
    """Function that makes completions in your own way, `file.py:function` called as rollout(prompts, trainer); in place of
    tools and environment. Held-out evaluation generates without it."""
    max_tool_calling_iterations: Annotated[int, Field(ge=1)] | None = None
    """Rounds of calls in a completion, each of any number of calls. Null: as many as fit."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of vLLM."""

    @model_validator(mode="after")
    def _chunks_are_plain(self) -> GenerationConfig:
        otherwise = [name for name in ("tools", "environment", "rollout") if getattr(self, name)]
        if self.chunks > 1 and (self.engine == "vllm" or otherwise):
            raise ValueError(
                "generation.chunks is for plain completions of transformers' generate; "
                + ("vLLM takes a batch at once" if self.engine == "vllm" else f"{otherwise[0]} makes whole batches")
                + ". Set it to 1."
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _has_moved(cls, tree: Any) -> Any:
        """Configurations of earlier runs have `gpu_memory_utilization` here; they can still be read."""
        if not isinstance(tree, Mapping) or "gpu_memory_utilization" not in tree or "vllm" in tree:
            return tree
        kept = {name: value for name, value in tree.items() if name != "gpu_memory_utilization"}
        return {**kept, "vllm": {"gpu_memory_utilization": tree["gpu_memory_utilization"]}}
