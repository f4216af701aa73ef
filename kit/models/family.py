"""Properties of a model family, read from the model and not from a list of names.

`adapter_of` reads a model's class, configuration, and tokenizer or processor. The result determines how the trainer treats each
input of the model, which tokens end a completion, and what the chat template supports.
"""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any

from kit.errors import ModelError
from kit.models.failures import first_line

# --- properties of a chat template, determined by rendering it ---------------------------------------------------------


ASKED, ANSWERED, SHOWN_VALUES = "kitquestion", "kitanswer", "kitsystem"
USER, REPLY, SYSTEM = (
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": ANSWERED},
    {"role": "system", "content": SHOWN_VALUES},
)
TOOL = {
    "type": "function",
    "function": {
        "name": "kittool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


@dataclass(frozen=True)
class ChatTemplate:
    """Properties of a chat template."""

    system: bool
    """Whether the rendered text contains a system message. Some templates refuse or ignore it."""
    tools: bool
    """Whether the rendered text contains declared tools."""
    opens_thinking: bool
    """Whether the generation prompt ends inside `<think>`."""
    thinking_switch: bool
    """It reads `enable_thinking`."""
    turn_end: str | None
    """The special token after an assistant's message."""


def read_template(processing_class: Any) -> ChatTemplate | None:
    """Reads the properties by rendering the template a few times. None if there is none or if it renders nothing."""
    source = getattr(processing_class, "chat_template", None)
    if not source:
        return None
    plain, opened = _render(processing_class, [USER]), _render(processing_class, [USER], add_generation_prompt=True)
    if plain is None or opened is None:
        return None
    return ChatTemplate(
        system=SHOWN_VALUES in (_render(processing_class, [SYSTEM, USER]) or ""),
        tools="kittool" in (_render(processing_class, [USER], tools=[TOOL], add_generation_prompt=True) or ""),
        opens_thinking=opened.rstrip().endswith("<think>"),
        thinking_switch="enable_thinking" in str(source),
        turn_end=_turn_end(processing_class),
    )


def _render(processing_class: Any, messages: list[dict[str, Any]], **keywords: Any) -> str | None:
    """The rendered text; None if the template raises. Some processors need the content in parts."""
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for form in (messages, parts):
        try:
            text = str(processing_class.apply_chat_template(form, tokenize=False, **keywords))
        except Exception:  # templates may raise any error of jinja or Python
            continue
        if ASKED in text:
            return text
    return None


def _turn_end(processing_class: Any) -> str | None:
    """The first special token after an assistant's message, from the token ids of the rendered text."""
    rendered = _render(processing_class, [USER, REPLY])
    if rendered is None or ANSWERED not in rendered:
        return None
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tail = rendered.rpartition(ANSWERED)[2]
    if not tail.strip():
        return None
    # Some tokenizers do not list all special added tokens in their special ids.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {
        *tokenizer.all_special_ids,
        *(index for index, token in added.items() if getattr(token, "special", False)),
    }
    for token in tokenizer(tail, add_special_tokens=False)["input_ids"]:
        if token in special:
            return str(tokenizer.convert_ids_to_tokens(token))
        if str(tokenizer.decode([token])).strip():
            return None  # the template ends turns with text
    return None


def end_ids(generation_config: Any, tokenizer: Any, template: ChatTemplate | None) -> tuple[int, ...]:
    """All token ids that end a completion, the tokenizer's first."""
    declared = getattr(generation_config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *([declared] if isinstance(declared, int) else list(declared or []))]
    if template is not None and template.turn_end is not None:
        ids.append(tokenizer.convert_tokens_to_ids(template.turn_end))
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))


# --- the family -------------------------------------------------------------------------------------------------------


TOKEN_FIELD = re.compile(r"(.*_)?token_type_ids")
"""A model input with one entry per token, where 0 is text."""
POSITION_TABLE = re.compile(
    r"(.*\.)?(wpe|embed_positions|position_embeddings?|pos_embed|position_embed|pos_emb)(\.weight)?"
)
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
UNSEEN = 10**9
"""Tokenizers without a limit report a larger number than this."""


@dataclass(frozen=True)
class FamilyAdapter:
    """The properties of a model and its tokenizer or processor that a trainer needs."""

    model_type: str
    architecture: str
    multimodal: bool
    """Whether it also reads pictures. It is then loaded with `AutoModelForImageTextToText`."""
    accepts: frozenset[str]
    """Names of the parameters of `forward`."""

    positions: bool
    """Whether positions index a learned table. With left padding they must then be counted from the attention mask."""
    template: ChatTemplate | None
    ends: tuple[int, ...]
    """All token ids that end a completion, from generation config, tokenizer and chat template."""
    context: int | None
    """Maximum number of tokens of prompt and completion; None if unknown."""
    decoder: str | None
    """Path of the language model inside a multimodal one. Only it gets adapters."""
    refused: tuple[str, ...]
    """Names of layers for which PEFT raises in this architecture."""
    placeholders: tuple[int, ...]
    """Placeholder token ids of pictures, video and audio. A completion with one could not be scored."""

    @property
    def fills(self) -> tuple[str, ...]:
        """Token fields that a multimodal model may need in text-only batches too. They are set to zeros."""
        return tuple(sorted(name for name in self.accepts if TOKEN_FIELD.fullmatch(name))) if self.multimodal else ()

    def rule(self, name: str) -> str:
        """Returns how the trainer treats a model input: `extend`, `slice` or `drop`.

        `extend`: one entry per token, zeros over completions. `slice`: a variable number of entries per sample. `drop`: not an
        input of the model.
        """
        if name not in self.accepts and not name.startswith("pixel_values"):  # never drop pictures silently
            return "drop"
        return "extend" if TOKEN_FIELD.fullmatch(name) else "slice"

    def completed(self, model: Any) -> Any:
        """`model`, or a callable that adds inputs which a scoring pass does not provide."""
        if not self.positions and not self.fills:
            return model
        return functools.partial(_call, self, model)

    @property
    def exclude(self) -> str | None:
        """Regular expression of modules without an adapter under `all-linear`; None: no such modules."""
        parts = [] if self.decoder is None else [rf"(?!{re.escape(self.decoder)}\.).*"]
        parts += [rf"(.*\.)?{re.escape(name)}" for name in self.refused]
        return "|".join(parts) or None


def _call(family: FamilyAdapter, model: Any, **inputs: Any) -> Any:
    """A forward pass with positions counted from the mask, and zeros for missing token fields."""
    import torch

    mask = inputs["attention_mask"]
    if family.positions and inputs.get("position_ids") is None:
        inputs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    for name in family.fills:
        if inputs.get(name) is None:
            inputs[name] = torch.zeros_like(inputs["input_ids"])
    return model(**inputs)


def adapter_of(model_or_config: Any, processing_class: Any = None, *, chat: bool = True) -> FamilyAdapter:
    """Reads the properties of a model that a trainer needs.

    Args:
        model_or_config: a transformers or PEFT model, or a configuration, whose architecture is built on the meta device.
        processing_class: its tokenizer or processor; None: templates and fields are unknown.
        chat: whether the chat template is used. Its end of turn then ends a completion too.

    Raises `ModelError` if the configuration is neither of a causal language model nor of a conditional-generation one.
    """
    if hasattr(model_or_config, "named_parameters"):
        model = model_or_config.get_base_model() if hasattr(model_or_config, "get_base_model") else model_or_config
    else:
        model = meta_model(model_or_config)
    config, text = model.config, model.config.get_text_config()
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    # From the class, because the forward of the instance may be wrapped already.
    forwards = (type(model).forward, type(getattr(model, "base_model", model)).forward)
    parameters = {name for forward in forwards for name in inspect.signature(forward).parameters}
    accepts = frozenset(parameters - {"self", "args", "kwargs"})

    limits = [getattr(text, name, None) for name in CONTEXT_FIELDS]
    limits = [
        next((limit for limit in limits if isinstance(limit, int)), None),
        getattr(tokenizer, "model_max_length", None),
    ]
    template = read_template(processing_class) if processing_class is not None else None
    return FamilyAdapter(
        model_type=config.model_type,
        architecture=type(model).__name__,
        multimodal=is_multimodal(config),
        accepts=accepts,
        positions="position_ids" in accepts and has_position_table(model),
        template=template,
        ends=end_ids(model.generation_config, tokenizer, template if chat else None) if tokenizer is not None else (),
        context=min((limit for limit in limits if isinstance(limit, int) and 0 < limit < UNSEEN), default=None),
        decoder=decoder_path(model) if is_multimodal(config) else None,
        refused=refused_layers(model),
        placeholders=placeholders(config),
    )


def is_multimodal(config: Any) -> bool:
    """Whether the configuration has a vision part."""
    return any(getattr(config, name, None) is not None for name in ("vision_config", "vision_tower", "vq_config"))


def placeholders(config: Any) -> tuple[int, ...]:
    """Placeholder ids of the configuration for pictures, video and audio."""
    names = [name for name in vars(config) if re.fullmatch(r"(image|video|audio)_token_(id|index)", name)]
    return tuple(sorted({value for name in names if type(value := getattr(config, name)) is int}))


def auto_class(config: Any) -> Any:
    """The Auto class of transformers for a trainable model of this configuration. Raises `ModelError`."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind = getattr(config, "model_type", None)
    if is_multimodal(config) and kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    if kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    raise ModelError(
        f"model_type '{kind}' is neither a causal language model nor a conditional-generation one in transformers "
        f"{transformers.__version__}, so it cannot generate completions. Use a decoder (a '...ForCausalLM' or "
        "'...ForConditionalGeneration' architecture), or a newer transformers if the model is new."
    )


def is_remote(config: Any) -> bool:
    """Whether the architecture is Python code of the model's repository.

    `auto_map` in config.json is not sufficient: old uploads keep it after transformers has added their architecture.
    """
    from transformers.models.auto import modeling_auto as auto

    if type(config).__module__.partition(".")[0] == "transformers_modules":
        return True
    kind = getattr(config, "model_type", None)
    native = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return bool(getattr(config, "auto_map", None)) and not native


_META: dict[str, Any] = {}
"""The most recent architecture: a start uses the same one several times."""


def meta_model(config: Any) -> Any:
    """The architecture on the meta device, without memory for its weights.

    Raises `ModelError` if transformers cannot build it.
    """
    import torch

    auto, written = auto_class(config), f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if (known := _META.get(written)) is not None:
        return known
    try:
        with torch.device("meta"):
            made = auto.from_config(config)
    except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError, ImportError) as error:
        raise ModelError(
            f"The architecture of model_type '{config.model_type}' could not be built: {first_line(error)}"
        ) from error
    _META.clear()
    _META[written] = made
    return made


def has_position_table(model: Any) -> bool:
    """Whether the language model has a learned table of positions."""
    path = decoder_path(model) if is_multimodal(model.config) else None
    names = (name for name, _ in model.named_parameters() if path is None or name.startswith(f"{path}."))
    return any(POSITION_TABLE.fullmatch(name) for name in names)


def decoder_path(model: Any) -> str | None:
    """Dotted path of the language model inside `model`, or None if it is not a separate module."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for name, module in model.named_modules():
        if name and module is decoder and name != model.base_model_prefix:
            return str(name)
    return next((name for name, _ in model.named_modules() if name.rpartition(".")[2] == "language_model"), None)


def refused_layers(model: Any) -> tuple[str, ...]:
    """Names of layers for which PEFT raises (output projections of some state-space models)."""
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    # Remove when PEFT skips them by itself.
    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    if check is None:
        return ()
    names = sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if name})
    refused = []
    for name in names:
        try:
            check(LoraConfig(), model, name)
        except ValueError:
            refused.append(name)
    return tuple(refused)
