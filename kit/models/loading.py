"""Loads model and tokenizer from a folder or a hub id, and explains failures."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import SMOLLM2, ModelConfig
from kit.errors import KitError, ModelError
from kit.models import unsloth as unsloth_model
from kit.models.backend import TRANSFORMERS, UNSLOTH, Backend, choose_backend, quantization_config, suited, torch_dtype
from kit.models.embedded import source_of
from kit.models.failures import OUT_OF_MEMORY, converting_weights, first_line, raise_fatal
from kit.models.family import FamilyAdapter, adapter_of, auto_class, end_ids, is_multimodal, is_remote
from kit.models.shape import ModelShape, is_in_4_bits, shape_of
from kit.models.start import find_start, peft_config
from kit.models.unsloth import Loading
from kit.registry import did_you_mean

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model. The weights are not loaded yet."""

    source: str
    revision: str | None
    config: Any
    tokenizer: Any
    backend: Backend
    shape: ModelShape | None
    """None if the architecture is remote code, which is unknown before it runs."""
    family: FamilyAdapter | None = None
    """None for remote code too."""
    processor: Any | None = None
    """Converts pictures to model inputs; None if the model reads text only or has no processor."""
    chat: bool = True

    @property
    def parameters(self) -> int:
        """Number of weights; 0 if unknown."""
        return self.shape.parameters if self.shape is not None else 0

    @property
    def context(self) -> int | None:
        """Maximum number of tokens by the configuration; None if it has no limit."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        return getattr(text, "max_position_embeddings", None)


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model for a trainer: base model, tokenizer, and configuration of the adapter (None: all weights train)."""

    model: Any
    tokenizer: Any
    peft_config: Any | None
    backend: Backend
    processor: Any | None = None
    """For prompts with pictures. Text-only prompts only need the tokenizer."""
    start: Path | None = None
    """Folder of the adapter with which training starts (`kit.models.start.begin`)."""

    def processing_class(self, *, pictures: bool) -> Any:
        """The tokenizer or processor that converts prompts to model inputs."""
        return self.processor if pictures and self.processor is not None else self.tokenizer


log = logging.getLogger("kit")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json", "*.py")


def find_model(config: ModelConfig, *, chat: bool, template: Mapping[str, Any] | None = None) -> ModelFiles:
    """Finds the model, and reads its configuration and tokenizer. Raises `ModelError` if something is missing.

    template: variables of the chat template (`data.chat_template_kwargs`).
    """
    backend = choose_backend(config)
    weights_dtype(config, backend)
    source = source_of(config.name, config.revision)
    keywords = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    folder = Path(source).expanduser()
    parts = {"configuration": ["config.json"], "tokenizer": TOKENIZER_FILES, "weights": ["*.safetensors"]}
    for part, patterns in parts.items() if folder.is_dir() else ():  # libraries replace some missing files silently
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            advice = f"expected {patterns[0]}; copy the missing files from the original model"
            if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
                advice = "it contains only an adapter; merge it into its base model first"
            raise ModelError(f"{source}: the folder has no {part} ({advice}). It contains: {_listing(folder)}.")
    start = find_start(config)
    tokenizer_source, tokenizer_revision = source, config.revision
    if start is not None and (start / "tokenizer.json").is_file():  # the tokenizer with which the adapter was trained
        tokenizer_source, tokenizer_revision = str(start), None
    tokenizer_keywords = keywords | {"revision": tokenizer_revision}
    tokenizer = load_tokenizer(tokenizer_source, chat=chat, chat_template=config.chat_template, **tokenizer_keywords)
    if template:
        tokenizer.chat_template = with_defaults(tokenizer.chat_template, template, source)
    model_config = read_config(config)
    config.load_in_4bit |= is_in_4_bits(model_config)  # for the memory of the run, and for exports
    if config.load_in_4bit:
        if config.lora is None:
            raise ModelError(
                "model.load_in_4bit freezes the weights, so with model.lora: null there is nothing to train. "
                "Set model.lora, or load_in_4bit: false."
            )
        quantization_config()
    shape, family = shape_of(model_config), family_of(model_config, tokenizer, chat=chat)
    if config.lora is not None and shape is not None and not isinstance(config.lora.targets, str):
        names = sorted({name for name, _, _ in shape.modules})
        for target in config.lora.targets:
            if target.rpartition(".")[2] not in names:
                raise ModelError(
                    f"model.lora.targets: {source} has no linear layer called '{target}'.{did_you_mean(target, names)} It has: "
                    f"{', '.join(names)}. Or set model.lora.targets: all-linear."
                )
    backend = suited(backend, config, model_config)
    processor = load_processor(source, tokenizer, **keywords) if is_multimodal(model_config) else None
    return ModelFiles(source, config.revision, model_config, tokenizer, backend, shape, family, processor, chat)


def read_config(config: ModelConfig) -> Any:
    """Reads the model's configuration without its weights. Raises `ModelError`."""
    keywords = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    return _load(source_of(config.name, config.revision), "its configuration", _auto("AutoConfig"), keywords)


def load_model(files: ModelFiles, config: ModelConfig, with_: Loading | None = None) -> LoadedModel:
    """Loads the weights, quantised if configured. Raises `ModelError`.

    `with_`: the loading settings of a training run. None: load with transformers, for generation or for a trained adapter of any
    backend.
    """
    backend = files.backend
    if with_ is None and backend.name != TRANSFORMERS:
        backend = replace(backend, name=TRANSFORMERS, reason="no training")
    start, dtype = find_start(config), weights_dtype(config, backend, trains=with_ is not None)
    with converting_weights():
        if with_ is not None and backend.name != TRANSFORMERS:
            load = partial(unsloth_model.load, files.revision, config, dtype, backend, with_)
            model = _load(files.source, "its weights", load, {})
        else:
            model = _load_with_transformers(files, config, dtype)
    model.config.use_cache = True
    keep_only_tokens(model)
    family = files.family or adapter_of(model, files.tokenizer, chat=files.chat)
    end_where_turns_end(model, files, family)
    if config.load_in_4bit and backend.name != UNSLOTH:
        set_up_four_bits(model, dtype)
    made = adapter(config, family)
    if start is not None and config.lora is not None:
        made = peft_config(start, config.lora.dropout)
    if with_ is not None and backend.name == UNSLOTH and made is not None:
        model, made = unsloth_model.with_adapter(model, made, backend, with_), None
    return LoadedModel(model, files.tokenizer, made, backend, files.processor, start)


def _load_with_transformers(files: ModelFiles, config: ModelConfig, dtype: torch.dtype) -> Any:
    keywords: dict[str, Any] = {
        "revision": files.revision,
        "trust_remote_code": config.trust_remote_code,
        "dtype": dtype,
        "use_safetensors": True,
    }
    if config.attention is not None:
        keywords["attn_implementation"] = config.attention
    elif getattr(files.config.get_text_config(), "attn_logit_softcapping", None):
        # Gemma 2 caps attention scores. transformers' default, sdpa, ignores the cap and would train another policy than vLLM
        # serves.
        keywords["attn_implementation"] = "eager"
    if config.load_in_4bit:
        keywords["quantization_config"] = quantization_config(dtype)
    if (device_map := place_of(files.backend.device, quantized=config.load_in_4bit)) is not None:
        keywords["device_map"] = device_map
    keywords["output_loading_info"] = True
    model, info = _load(files.source, "its weights", auto_class(files.config).from_pretrained, keywords)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{files.source}: its files lack {len(missing)} of the weights of its config.json (e.g. {missing[0]}); they "
            "would be random. Use the folder of the complete model, not of an adapter or another model."
        )
    return model


def place_of(device: str, *, quantized: bool) -> dict[str, Any] | None:
    """`device_map` of a model for "cuda" or "cpu"; None: transformers loads it on the CPU by default.

    Without a map, transformers loads quantised weights on a GPU if there is one.
    """
    import torch

    if device == "cuda":
        return {"": torch.cuda.current_device()}
    return {"": "cpu"} if quantized else None


def weights_dtype(config: ModelConfig, backend: Backend, *, trains: bool = True) -> torch.dtype:
    """Precision of the loaded weights. Raises `ModelError`.

    float32 for weights that train, and if the backend computes in float32; otherwise as configured.

    `trains`: whether a trainer scores with them. Its kernels need a GPU with bfloat16 for that dtype. Generation can use
    bfloat16 on any GPU, with half the memory of float32 and the same range.

    Weights that train are float32, because usual updates are smaller than half a step of bfloat16 and would be lost in rounding,
    and float16 gradients cannot be unscaled. Training all weights uses half precision by autocast instead.
    """
    import torch

    if config.lora is not None:
        if backend.computes_in_float32 and backend.name == TRANSFORMERS:
            return torch.float32 if trains else torch.bfloat16
        return torch_dtype(config.dtype, backend.device)
    if config.dtype in ("float16", "bfloat16"):
        raise ModelError(
            f"model.dtype: {config.dtype} with model.lora: null would lose most updates in rounding. Set model.dtype: auto "
            "(float32 weights, half precision by autocast on a GPU), or set model.lora to train adapters."
        )
    return torch.float32


def autocast_dtype(config: ModelConfig, backend: Backend) -> torch.dtype | None:
    """The autocast dtype if all weights train in float32 on a GPU; None: no autocast."""
    if config.lora is not None or backend.device != "cuda" or config.dtype == "float32" or backend.computes_in_float32:
        return None
    return torch_dtype(config.dtype, backend.device)


def keep_trainable_in_float32(model: Any) -> None:
    """Casts all weights that train to float32; see `weights_dtype` for the reason.

    TRL's constructor casts the adapters of a quantised model to bfloat16. Call this after it and before the optimiser is created.
    PEFT casts an adapter's input to the adapter's dtype.
    """
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


def keep_only_tokens(model: Any) -> None:
    """Removes a model's own sampling settings, because transformers would use them as defaults.

    A repetition penalty of the model, for example, would sample from another policy than the trained one.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    ids = {name: getattr(own, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    dropped = set(own.to_diff_dict()) - set(ids) - {"transformers_version", "_from_model_config"}
    if dropped:
        log.info("the model's own generation settings are not used: %s", ", ".join(sorted(dropped)))
    model.generation_config = GenerationConfig(**ids)


def load_processor(source: str, tokenizer: Any, **keywords: Any) -> Any | None:
    """The processor of a multimodal model, with the run's tokenizer. None if it has none."""
    folder = Path(source).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return None
    processor = _load(source, "its processor", _auto("AutoProcessor"), keywords)
    if not hasattr(processor, "tokenizer"):
        return None
    processor.tokenizer.padding_side = "left"
    processor.tokenizer.pad_token = tokenizer.pad_token
    if tokenizer.chat_template:
        processor.chat_template = tokenizer.chat_template
    return processor


def set_up_four_bits(model: Any, dtype: torch.dtype) -> None:
    """Makes 4-bit layers compute in the model's dtype; a model published in 4 bits has another one in its files.

    It also prevents bitsandbytes from repacking weights at the first forward pass in evaluation mode. On CPUs with AVX512-BF16
    the kernel for repacked weights has no backward pass, so that all gradients after the first evaluation would be wrong.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            module.compute_dtype = dtype
            if (state := getattr(module.weight, "quant_state", None)) is not None:
                state.dtype = dtype


def adapter(config: ModelConfig, family: FamilyAdapter | None = None) -> Any | None:
    """PEFT's configuration of the adapter, or None if all weights train.

    `all-linear` applies to the language model only, not to vision layers.
    """
    if config.lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.targets,
        exclude_modules=family.exclude if family is not None and config.lora.targets == "all-linear" else None,
        use_rslora=config.lora.rslora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _listing(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"


def load_tokenizer(source: str, *, chat: bool, chat_template: str | None = None, **keywords: Any) -> Any:
    """A tokenizer that pads on the left and has a padding token. Raises `ModelError` if a chat template or token is missing."""
    tokenizer = _load(source, "its tokenizer", _auto("AutoTokenizer"), keywords)
    if chat_template is not None:
        path = Path(chat_template)
        if not path.is_file():
            raise ModelError(f"model.chat_template: there is no file {path}.")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    if chat and not tokenizer.chat_template:
        raise ModelError(
            f"The tokenizer of {source} has no chat template, so messages cannot be turned into text. Use the model's "
            "'-Instruct' version, set model.chat_template to a Jinja file, or set data.chat: false to send plain text."
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"The tokenizer of {source} has no end-of-sequence token, so completions could not end. "
            "Set one (tokenizer.eos_token = ...) and save the tokenizer again."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks are computed from lengths, not from the padding id
    tokenizer.padding_side = "left"
    return tokenizer


def with_defaults(template: Any, values: Mapping[str, Any], source: str) -> str:
    """A chat template with these default values of its variables. Raises `ModelError`.

    The values are part of the template, so that training, evaluation, chat and exports use the same.
    """
    text = str(template["default"] if isinstance(template, dict) else template)
    head = ""
    for name, value in values.items():
        if not re.search(rf"\b{name}\b", text):
            known = (
                "it reads enable_thinking" if "enable_thinking" in text else "it does not read enable_thinking either"
            )
            raise ModelError(
                f"data.chat_template_kwargs: {name}, but the chat template of {source} does not read it, so it has no effect "
                f"({known}). Remove it, or set model.chat_template to a template that does."
            )
        head += f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}{{%- endif -%}}"
    return text if text.startswith(head) else head + text


def _auto(name: str) -> Callable[..., Any]:
    import transformers

    return getattr(transformers, name).from_pretrained  # type: ignore[no-any-return]


def _load(source: str, what: str, loader: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """Calls a `from_pretrained` and explains its failures."""
    looks_local = source.startswith((".", "/", "~")) or (os.sep in source and source.count("/") != 1)
    if looks_local and not Path(source).expanduser().is_dir():
        raise ModelError(f"model.name: there is no folder {source}. Use a model folder, a hub id, or 'embedded'.")
    try:
        return loader(source, **keywords)
    except ImportError as error:
        raise ModelError(f"Loading {what} of {source} needs a package that is not installed: {error}") from error
    except Exception as error:  # file readers may raise any error; errors without relation to files are re-raised
        raise_fatal(error)
        if isinstance(error, KitError) or any(sign in str(error).lower() for sign in OUT_OF_MEMORY):
            raise
        first, folder = first_line(error), Path(source).expanduser()
        if folder.is_dir():
            why = (
                f"could not be loaded ({first}). A file is damaged, or of another model. Copy the folder again from the "
                f"original model. It contains: {_listing(folder)}."
            )
        elif "trust_remote_code" in str(error):
            why = (
                "contains Python code. Read that code, and if you trust it set model.trust_remote_code: true. "
                f"({first})"
            )
        else:
            why = (
                "could not be loaded. There is no such folder, and downloading it as a hub id failed: check the spelling, the "
                f"network, and HF_TOKEN for gated models, or download it and use the folder. ({first})"
                + did_you_mean(source, ("embedded", "embedded-tools", SMOLLM2))
            )
        raise ModelError(f"{source}: {what} {why}") from error


def end_where_turns_end(model: Any, files: ModelFiles, family: FamilyAdapter) -> None:
    """Adds the end tokens of the tokenizer and the chat template to those of the model.

    A base model only declares the end of a text, and would not stop in a chat whose turns end with another token.
    """
    template = family.template if files.chat else None
    ends = list(end_ids(model.generation_config, files.tokenizer, template))
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends


def family_of(model_config: Any, tokenizer: Any, *, chat: bool) -> FamilyAdapter | None:
    """Reads the family before the weights are loaded; None for remote code."""
    return None if is_remote(model_config) else adapter_of(model_config, tokenizer, chat=chat)
