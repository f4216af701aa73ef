"""`generation.vllm:` the engine vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kit.config.sections.base import Section


class VllmConfig(Section):
    """The engine vLLM; read only where completions come from it."""

    mode: Literal["colocate", "server"] = "colocate"
    """`colocate`: in the training process, on the same GPU (or CPU). `server`: a `trl vllm-serve` on another GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the GPU's memory for the engine's weights and cache. On the CPU: VLLM_CPU_KVCACHE_SPACE (GiB)."""
    standby: bool = False
    """Sleep while weights are updated: the engine's memory is free for the update, and its weights are handed over again
    before it generates. Needs a GPU."""
    max_model_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and completion that the engine makes room for. Null: data.max_prompt_tokens +
    generation.max_completion_tokens, or the model's context where prompts are not limited."""
    regex: str | None = None
    """Regular expression that every completion must match (structured output). The policy is then sampled under that
    constraint, and its log-probabilities are those of the constrained distribution."""
    eager: bool | None = None
    """No compilation and no CUDA graphs: starts sooner, generates slower. Null: on the CPU only, under Unsloth never."""
    float8_kv_cache: bool = False
    """Keep the cache in 8-bit floats: twice the tokens in the same memory, log-probabilities further off. GPU only."""
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Largest adapter rank that an engine which loads adapters (Unsloth's) makes room for. Null: model.lora.rank."""
    seed: int | None = None
    """Seed of the engine's sampling. Null: run.seed. A server has a seed of its own (`--seed`), Unsloth's engine takes none."""
    timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that one generation batch, or handing over the weights, may take. After that the engine counts as hung, and
    the run ends as failed, with a checkpoint."""
    max_logp_difference: Annotated[float, Field(gt=0)] = 0.01
    """Nats: mean |trainer - engine| log-probability of a step above which the run says so, once. It goes on."""
    url: str | None = None
    """Server: its address, http://HOST:PORT. Null: made of `host` and `port`."""
    host: str = "127.0.0.1"
    """Server: its host."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Server: its port."""
    group_port: Annotated[int, Field(ge=1, le=65535)] = 51216
    """Server: the port over which weights are handed over."""
    connect_timeout: Annotated[float, Field(ge=0)] = 10.0
    """Server: seconds to wait for it at the start."""

    @model_validator(mode="after")
    def _is_an_address(self) -> VllmConfig:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"generation.vllm.url: {self.url!r} is no address of the form http://HOST:PORT")
        return self

    @property
    def address(self) -> str:
        """Where the server is asked."""
        return (self.url or f"http://{self.host}:{self.port}").rstrip("/")
