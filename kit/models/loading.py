"""Model folder or hub id to a model and a tokenizer that can be trained, with errors that say what to do."""

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

from kit.config import ModelConfig
from kit.errors import KitError, ModelError
from kit.models import unsloth as unsloth_model
from kit.models.backend import (
    TRANSFORMERS,
    UNSLOTH,
    Backend,
    choose_backend,
    quantization_config,
    suited,
    torch_dtype,
)
from kit.models.embedded import source_of
from kit.models.failures import OUT_OF_MEMORY, converting_weights, first_line, raise_fatal
from kit.models.family import (
    FamilyAdapter,
    adapter_of,
    auto_class,
    end_ids,
    is_multimodal,
    is_remote,
)
from kit.models.shape import ModelShape, shape_of
from kit.models.start import find_start, peft_config
from kit.models.unsloth import Loading
from kit.registry import did_you_mean

if TYPE_CHECKING:
    import torch


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

    @property
    def context(self) -> int | None:
        """Tokens that the model reads at most, as its configuration says; None where it does not."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        return getattr(text, "max_position_embeddings", None)


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model for a trainer: the base model, its tokenizer, and the adapter to put on it (None: all weights train)."""

    model: Any
    tokenizer: Any
    peft_config: Any | None
    backend: Backend
    processor: Any | None = None
    """For prompts with pictures; text-only prompts need the tokenizer alone."""
    start: Path | None = None
    """Folder of the adapter that the one of the finished trainer begins as (`kit.models.start.begin`)."""

    def processing_class(self, *, pictures: bool) -> Any:
        """The tokenizer or processor that turns prompts into model inputs."""
        return self.processor if pictures and self.processor is not None else self.tokenizer


log = logging.getLogger("kit")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json", "*.py")


def find_model(config: ModelConfig, *, chat: bool, template: Mapping[str, Any] | None = None) -> ModelFiles:
    """Finds the model, and reads its configuration and tokenizer. Raises `ModelError` when something is missing.

    template: what the chat template is told besides (`data.chat_template_kwargs`).
    """
    backend = choose_backend(config)
    if config.load_in_4bit:
        if config.lora is None:
            raise ModelError(
                "model.load_in_4bit freezes the weights, and model.lora: null leaves nothing to train. "
                "Keep the LoRA section, or set load_in_4bit: false."
            )
        quantization_config()
    weights_dtype(config, backend)
    source = source_of(config.name, config.revision)
    keywords = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    folder = Path(source).expanduser()
    parts = {"configuration": ["config.json"], "tokenizer": TOKENIZER_FILES, "weights": ["*.safetensors"]}
    for part, patterns in parts.items() if folder.is_dir() else ():  # libraries fill some gaps silently
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            advice = f"expected {patterns[0]}; copy what is missing from the model it was made of"
            if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
                advice = "it holds an adapter alone; merge it into its base model first"
            raise ModelError(f"{source}: the folder has no {part} ({advice}). It holds: {_listing(folder)}.")
    start = find_start(config)
    tokenizer_source, tokenizer_revision = source, config.revision
    if start is not None and (start / "tokenizer.json").is_file():  # the one that the adapter was made with
        tokenizer_source, tokenizer_revision = str(start), None
    tokenizer_keywords = keywords | {"revision": tokenizer_revision}
    tokenizer = load_tokenizer(tokenizer_source, chat=chat, chat_template=config.chat_template, **tokenizer_keywords)
    if template:
        tokenizer.chat_template = with_defaults(tokenizer.chat_template, template, source)
    model_config = _load(source, "its configuration", _auto("AutoConfig"), keywords)
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


def load_model(files: ModelFiles, config: ModelConfig, with_: Loading | None = None) -> LoadedModel:
    """Reads the weights, quantised if asked. Raises `ModelError`.

    `with_`: what a run that trains loads them for. None: to generate, or to put a trained adapter on, which transformers
    does whatever trained it.
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
    if config.load_in_4bit and backend.device == "cpu":
        keep_differentiable(model)
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
        # Gemma 2 caps the scores of attention. transformers' own choice, sdpa, leaves the cap out, and would train another
        # policy than vLLM serves.
        keywords["attn_implementation"] = "eager"
    if config.load_in_4bit:
        keywords["quantization_config"] = quantization_config(dtype)
    if (device_map := place_of(files.backend.device, quantized=config.load_in_4bit)) is not None:
        keywords["device_map"] = device_map
    keywords["output_loading_info"] = True
    model, info = _load(files.source, "its weights", auto_class(files.config).from_pretrained, keywords)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{files.source}: its files lack {len(missing)} of the weights that its config.json asks for ({missing[0]}, for "
            "example); they would start at random. Give the folder of the whole model, not of an adapter or of another one."
        )
    return model


def place_of(device: str, *, quantized: bool) -> dict[str, Any] | None:
    """`device_map` of a model that is loaded onto "cuda" or "cpu"; None: transformers loads it onto the CPU by itself.

    Quantised weights it takes to a GPU wherever there is one.
    """
    import torch

    if device == "cuda":
        return {"": torch.cuda.current_device()}
    return {"": "cpu"} if quantized else None


def weights_dtype(config: ModelConfig, backend: Backend, *, trains: bool = True) -> torch.dtype:
    """Precision of the loaded weights. Raises `ModelError`.

    float32 for weights that train, and where transformers computes in float32; otherwise as configured.

    `trains`: a trainer scores with them, whose kernels know no bfloat16 on a GPU without it. To generate, that takes half the
    memory of float32 and overflows as little.

    At usual learning rates an update is smaller than half a step of bfloat16 and would round away; float16 gradients
    cannot be unscaled. Training all weights computes in half precision by autocast instead.
    """
    import torch

    if config.lora is not None:
        if backend.computes_in_float32 and backend.name == TRANSFORMERS:
            return torch.float32 if trains else torch.bfloat16
        return torch_dtype(config.dtype, backend.device)
    if config.dtype in ("float16", "bfloat16"):
        raise ModelError(
            f"model.dtype: {config.dtype} with model.lora: null would lose most updates to rounding. Set model.dtype: auto "
            "(float32 weights, computed in half precision on a GPU), or keep model.lora and train adapters."
        )
    return torch.float32


def autocast_dtype(config: ModelConfig, backend: Backend) -> torch.dtype | None:
    """The autocast precision of float32 weights that all train on a GPU; None: in the precision of the weights."""
    if config.lora is not None or backend.device != "cuda" or config.dtype == "float32" or backend.computes_in_float32:
        return None
    return torch_dtype(config.dtype, backend.device)


def keep_trainable_in_float32(model: Any) -> None:
    """Makes every weight that trains float32, for the reason that `weights_dtype` gives.

    TRL casts the adapters of a quantised model to bfloat16 when a trainer is built; call this after that, and before the
    optimiser is made. PEFT casts an adapter's input to the adapter's precision.
    """
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


def keep_only_tokens(model: Any) -> None:
    """Drops a model's own sampling settings: transformers fills what a run leaves out from them.

    A repetition penalty that came with the model would sample and score another policy than the one that is trained.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    ids = {name: getattr(own, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    dropped = set(own.to_diff_dict()) - set(ids) - {"transformers_version", "_from_model_config"}
    if dropped:
        log.info("the model's own generation settings are not used: %s", ", ".join(sorted(dropped)))
    model.generation_config = GenerationConfig(**ids)


def load_processor(source: str, tokenizer: Any, **keywords: Any) -> Any | None:
    """The processor of a multimodal model, with the tokenizer that the run uses. None where it comes without one."""
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


def keep_differentiable(model: Any) -> None:
    """Keeps bitsandbytes from repacking 4-bit weights at the first forward in evaluation.

    On CPUs with AVX512-BF16 the repacked weights go through a kernel without a backward pass, so that every gradient after
    the first evaluation would be wrong. Can go when bitsandbytes repacks back, or refuses, in training.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def adapter(config: ModelConfig, family: FamilyAdapter | None = None) -> Any | None:
    """PEFT's description of the adapter, or None when all weights train.

    `all-linear` means the language model; what looks at pictures stays as it is.
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
    """A tokenizer that pads on the left and has a padding token. Raises `ModelError` if it lacks what the run needs."""
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
            f"The tokenizer of {source} has no end-of-sequence token, so no completion could ever end. "
            "Set one (tokenizer.eos_token = ...) and save the tokenizer again."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks come from lengths, never from the padding id
    tokenizer.padding_side = "left"
    return tokenizer


def with_defaults(template: Any, values: Mapping[str, Any], source: str) -> str:
    """A chat template whose variables have these values where nobody says otherwise. Raises `ModelError`.

    They stand in the template itself, so that training, evaluation, chat and every export follow it.
    """
    text = str(template["default"] if isinstance(template, dict) else template)
    head = ""
    for name, value in values.items():
        if not re.search(rf"\b{name}\b", text):
            known = "it reads enable_thinking" if "enable_thinking" in text else "it reads no enable_thinking, either"
            raise ModelError(
                f"data.chat_template_kwargs: {name}, but the chat template of {source} never reads it, so nothing would change "
                f"({known}). Take it out, or set model.chat_template to a template that does."
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
        raise ModelError(f"model.name: there is no folder {source}. Give a model folder, a hub id, or 'embedded'.")
    try:
        return loader(source, **keywords)
    except ImportError as error:
        raise ModelError(f"Loading {what} of {source} needs a package that is not installed: {error}") from error
    except Exception as error:  # readers of files raise what they like; what is not about the files passes
        raise_fatal(error)
        if isinstance(error, KitError) or any(sign in str(error).lower() for sign in OUT_OF_MEMORY):
            raise
        first, folder = first_line(error), Path(source).expanduser()
        if folder.is_dir():
            why = (
                f"could not be loaded ({first}). A file is broken, or of another model; copy the folder again from the model it "
                f"was made of. It holds: {_listing(folder)}."
            )
        elif "trust_remote_code" in str(error):
            why = (
                "comes with Python code of its own. Read that code, and if you trust it set model.trust_remote_code: true. "
                f"({first})"
            )
        else:
            why = (
                "could not be loaded. There is no such folder here; as a hub id it could not be fetched either: check the "
                f"spelling, the network, and HF_TOKEN for gated models, or download it and give the folder. ({first})"
            )
        raise ModelError(f"{source}: {what} {why}") from error


def end_where_turns_end(model: Any, files: ModelFiles, family: FamilyAdapter) -> None:
    """Adds what the tokenizer and the chat template end a completion with to what the model declares.

    Base models declare the end of a text, and never stop in a chat whose turns end otherwise.
    """
    template = family.template if files.chat else None
    ends = list(end_ids(model.generation_config, files.tokenizer, template))
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends


def family_of(model_config: Any, tokenizer: Any, *, chat: bool) -> FamilyAdapter | None:
    """Reads the family before the weights are loaded; None where the architecture is remote code."""
    return None if is_remote(model_config) else adapter_of(model_config, tokenizer, chat=chat)
