"""Loads a model with Unsloth. Separate functions compute the keywords of its two calls, so that tests need no GPU.

On CUDA Unsloth also adds the adapters, for its fused LoRA kernels; its trainer accepts no others. With its CPU backend the
model is that of transformers, and TRL adds the adapters, with the same random numbers as without Unsloth.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.errors import EngineError, KitError, ModelError
from kit.models.backend import UNSLOTH, Backend, active_backend, fast_language_model, stdout_to_log, switched, switches

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from peft import LoraConfig

    from kit.config import ModelConfig, RunConfig

CHECKPOINTING = "unsloth"
"""Gradient checkpointing with activations in main memory."""
OFFLOAD = "offload"
"""Gradient checkpointing by the default method of the backend."""


@dataclass(frozen=True)
class Loading:
    """Settings for loading a model in addition to the section `model`."""

    max_seq_length: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's context."""
    seed: int = 0
    checkpointing: bool | str = CHECKPOINTING
    fast_inference: Mapping[str, Any] = field(default_factory=dict)
    """Keywords for an engine that shares the weights; empty: no engine."""


def loading(config: RunConfig, backend: Backend, context: int | None) -> Loading:
    """Returns the loading settings of a run. `context`: the maximum number of tokens of the model; None: unknown."""
    vllm, lora, fast_inference = config.generation.vllm, config.model.lora, dict[str, Any]()
    if backend.name == UNSLOTH and config.generation.engine == "vllm":
        fast_inference["gpu_memory_utilization"] = vllm.gpu_memory_utilization
        fast_inference |= {"max_lora_rank": lora.rank} if lora is not None else {}
        # All completions of a step at once, if the cache holds them: Unsloth's limit on an L4 is 16 or 32. It ignores 256.
        fast_inference["max_num_seqs"] = min(config.optimisation.batch_size, 256) | 1
        fast_inference |= {"enforce_eager": True} if vllm.eager else {}  # Unsloth refuses the key without an engine
    known = [length for length in (room(config), context) if length is not None]
    return Loading(
        max_seq_length=min(known) if known else None,
        seed=config.run.seed,
        checkpointing=checkpointing(config.optimisation.gradient_checkpointing, backend),
        fast_inference=fast_inference,
    )


def checkpointing(setting: bool | str | None, backend: Backend) -> bool | str:
    """Returns the method of gradient checkpointing. `None`: Unsloth's if it is active, else recomputation on a GPU only."""
    if setting is None:
        return CHECKPOINTING if backend.name == UNSLOTH else backend.device == "cuda"
    if setting == OFFLOAD:
        return CHECKPOINTING if backend.name == UNSLOTH else True  # transformers: `ModelPass.offload`
    if setting == CHECKPOINTING and backend.name != UNSLOTH:
        return True  # its CPU backend has no other memory for them, and recomputes
    return setting


def model_arguments(
    source: str, revision: str | None, config: ModelConfig, dtype: torch.dtype, with_: Loading
) -> dict[str, Any]:
    """Keywords of `FastLanguageModel.from_pretrained`. The name is not mapped to another upload, except by vLLM's start."""
    full = config.lora is None
    arguments: dict[str, Any] = {
        "model_name": source,
        "dtype": dtype,
        "load_in_4bit": config.load_in_4bit,
        "load_in_8bit": False,
        "load_in_16bit": not full and not config.load_in_4bit,
        "full_finetuning": full,
        "revision": revision,
        "trust_remote_code": config.trust_remote_code,
        "use_gradient_checkpointing": with_.checkpointing,
        "use_exact_model_name": True,
        "fix_tokenizer": False,  # the kit loads the tokenizer
        "random_state": with_.seed,
        "fast_inference": bool(with_.fast_inference),
    }
    if with_.max_seq_length is not None:
        arguments["max_seq_length"] = with_.max_seq_length
    if full:
        arguments["float32_mixed_precision"] = True  # float32 weights, half precision in computation
    return arguments | dict(with_.fast_inference)


def adapter_arguments(adapter: LoraConfig, with_: Loading, model: Any) -> dict[str, Any]:
    """Keywords of `FastLanguageModel.get_peft_model` except the model. `adapter`: PEFT's configuration.

    For Unsloth `all-linear` includes all towers of a multimodal model, and it has no `exclude_modules`. So the layers are listed.
    """
    import torch

    targets, exclude = adapter.target_modules, str(adapter.exclude_modules or "(?!)")
    if targets == "all-linear":  # for PEFT: linear layers except the head and excluded modules
        head = model.get_output_embeddings()
        names = {
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head and not re.fullmatch(exclude, name)
        }
        alike = {
            r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")) for name in names
        }
        targets = "|".join(sorted(alike))
    return {
        "r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "lora_dropout": adapter.lora_dropout,
        "target_modules": targets if isinstance(targets, str) else sorted(targets or ()),
        "use_rslora": adapter.use_rslora,
        "bias": adapter.bias,
        "use_gradient_checkpointing": with_.checkpointing,
        "random_state": with_.seed,
    }


def load(
    revision: str | None, config: ModelConfig, dtype: torch.dtype, backend: Backend, with_: Loading, source: str
) -> Any:
    """Loads the model without adapters. Raises `ModelError`, or any error of the loader."""
    import torch

    arguments = model_arguments(source, revision, config, dtype, with_)
    if backend.name != UNSLOTH:
        arguments |= {"use_gradient_checkpointing": False}  # the trainer enables it, as without Unsloth
        arguments |= {"attn_implementation": config.attention} if config.attention is not None else {}
        arguments |= {"use_safetensors": True}
        arguments.pop("float32_mixed_precision", None)
    # Unsloth takes a share of the free memory, not of the card's.
    if with_.fast_inference and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        arguments["gpu_memory_utilization"] *= total / free
    # In a run its environment variables are set already; elsewhere they are set while the model is loaded.
    with stdout_to_log(), switched({} if active_backend() else switches(backend)):
        fast = fast_language_model(backend)
        try:
            standby = os.environ.get("UNSLOTH_VLLM_STANDBY") == "1"
            model, _ = fast.from_pretrained(**arguments)
            check_engine(model, with_, standby=standby)
        except Exception as error:
            if not with_.fast_inference or isinstance(error, KitError):
                raise
            from kit.models.failures import EngineSettings, engine_failure

            settings = EngineSettings(gpu_memory_utilization=float(with_.fast_inference["gpu_memory_utilization"]))
            raise engine_failure(error, "starting with Unsloth's weights", settings) from error
    if config.load_in_4bit:  # if it cannot quantise, Unsloth only prints a message; an engine's weights have no flag
        from bitsandbytes.nn import Linear4bit

        if not any(isinstance(module, Linear4bit) for module in model.modules()):
            raise ModelError(
                f"model.load_in_4bit: true, but Unsloth loaded {source} in {model.dtype}: bitsandbytes did not quantise it "
                "(layers narrower than 64, or an unsupported machine). Set model.load_in_4bit: false, or model.backend: "
                "transformers."
            )
    if with_.fast_inference:  # a model from an engine's weights lacks its files' generation config, e.g. the end tokens
        from transformers import GenerationConfig

        with suppress(OSError):  # no such file
            model.generation_config = GenerationConfig.from_pretrained(source)
    for module in model.modules():  # otherwise Unsloth cuts padded rows above `max_seq_length`, e.g. a teacher's
        module._unsloth_allow_packed_overlength = True
    return model


def check_engine(model: Any, with_: Loading, *, standby: bool) -> None:
    """Raises `EngineError` if Unsloth has created another engine than configured. Unsloth only prints a message."""
    if not with_.fast_inference:
        return
    engine = getattr(model, "vllm_engine", None)
    if engine is None:
        raise EngineError("Unsloth cannot import vLLM and continued without it. Set generation.engine: hf.")
    made, length = engine.llm_engine.vllm_config.model_config, with_.max_seq_length
    if length is not None and made.max_model_len < length:
        raise EngineError(
            f"vLLM's engine supports sequences of {made.max_model_len} tokens, but the run needs {length}: Unsloth lowered it "
            "to the size of the cache, and longer completions would be cut. Raise "
            "generation.vllm.gpu_memory_utilization, or lower generation.max_completion_tokens or data.max_prompt_tokens."
        )
    if standby and not made.enable_sleep_mode:
        raise EngineError(
            "Unsloth has no standby for multimodal models, so the engine would keep its memory during updates. Set "
            "generation.vllm.standby: false, or model.backend: transformers."
        )


def with_adapter(model: Any, adapter: LoraConfig, backend: Backend, with_: Loading) -> Any:
    """The model with Unsloth's adapters."""
    with stdout_to_log():
        return fast_language_model(backend).get_peft_model(model, **adapter_arguments(adapter, with_, model))


def for_inference(model: Any) -> bool:
    """Switches a model of Unsloth on CUDA to generation. Returns False for other models. `for_training` switches back."""
    if not hasattr(model, "_unsloth_gradient_checkpointing") or not hasattr(model, "for_inference"):
        return False
    model.for_inference()
    return True


def for_training(model: Any) -> None:
    """Switches a model of Unsloth back to training, with its gradient checkpointing."""
    model.for_training(use_gradient_checkpointing=model._unsloth_gradient_checkpointing)


def free_cache(model: Any) -> None:
    """Removes the key-value cache that Unsloth's generation leaves on the attention layers.

    Otherwise it stays beside vLLM's until the next pass without a cache, which fails if memory ran out while it was allocated.
    """
    graphs = sys.modules.get("unsloth.models._decode_graphs")
    if graphs is not None:
        graphs.release_for_training(model)


def room(config: RunConfig) -> int | None:
    """Maximum tokens of prompt plus completion for the engine; None: the model's context."""
    prompt = config.data.max_prompt_tokens
    return None if prompt is None else prompt + config.generation.max_completion_tokens
