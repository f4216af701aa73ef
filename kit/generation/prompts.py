"""What the model is given of a row: its prompt rendered, with its pictures, tokenised and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.data.images import IMAGES, opened
from kit.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.data import DataSplit
    from kit.models.loading import ModelFiles
    from rewards import Preset


@dataclass(frozen=True)
class LazyPrompt:
    """A row whose prompt is rendered when it is asked, with the tools that may be called, or with its pictures."""

    row: dict[str, Any]

    def __len__(self) -> int:
        return len(str(self.row["prompt"]))


def render(tokenizer: Any, prompt: str | list[dict[str, Any]], tools: Sequence[Any] = (), **variables: Any) -> str:
    """The text that the model is given; `tools` are described in it, and the template is `told` the rest."""
    if isinstance(prompt, str):
        return prompt
    described = {"tools": list(tools)} if tools else {}
    return str(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **described, **variables)
    )


def thinking_note(files: ModelFiles) -> str | None:
    """A note on a template that opens the model's thinking, or could; None for other templates."""
    template = files.family.template if files.family is not None else None
    if template is None or not (template.opens_thinking or template.thinking_switch):
        return None
    habit = "opens <think> before the model writes" if template.opens_thinking else "leaves thinking to the model"
    if not template.thinking_switch:
        return f"the chat template {habit}, and has no switch for it"
    return f"the chat template {habit}; data.chat_template_kwargs: {{enable_thinking: true or false}} switches it"


def note_opened_thinking(preset: Preset, tokenizer: Any, prompts: Sequence[Any]) -> None:
    """Tells a preset whether the chat template opens a `<think>` before the model writes.

    Templates of some reasoning models do. Rewards see messages only, and would take what follows for an answer.
    """
    if preset.thinking_opened is None and prompts and not isinstance(prompts[0], str):
        preset.thinking_opened = render(tokenizer, prompts[0]).rstrip().endswith("<think>")


def is_plain(prompts: Sequence[Any]) -> bool:
    """Whether prompts are texts to which the tokenizer adds its special tokens; a chat template brings its own."""
    return bool(prompts) and isinstance(prompts[0], str)


def count_tokens(tokenizer: Any, prompts: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
    """Tokens of each prompt, as the model is given it."""
    return [len(ids) for ids in encode(tokenizer, prompts, tools)]


def encode(tokenizer: Any, prompts: Sequence[Any], tools: Sequence[Any] = ()) -> list[list[int]]:
    """Token ids of each prompt, as the model is given it."""
    texts = [render(tokenizer, prompt, tools) for prompt in prompts]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=is_plain(prompts))["input_ids"]
    return ids


def lengths_of(tokenizer: Any, rows: Any, tools: Sequence[Any] = ()) -> list[int]:
    """Tokens of the prompt of each row, as the model is given it. rows: a dataset."""
    return count_tokens(tokenizer, list(rows["prompt"]), tools) if len(rows) else []


def question(prompt: str | list[dict[str, Any]]) -> str:
    """The question for people to read: the last message's text, or the text itself."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


# --- pictures ---------------------------------------------------------------------------------------------------------


class ImagePrompt(LazyPrompt):
    """A row with pictures."""


def has_pictures(row: Mapping[str, Any]) -> bool:
    """Whether a row has a picture."""
    return bool(row.get(IMAGES))


def with_pictures(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt as messages of parts, the pictures before the first user message's text: as the trainer gives them."""
    left = [{"type": "image", "image": picture} for picture in opened(list(row.get(IMAGES) or ()))]
    messages = []
    for message in row["prompt"]:
        text = {"type": "text", "text": message["content"]}
        pictures, left = (left, []) if message["role"] == "user" else ([], left)
        messages.append({**message, "content": [*pictures, text]})
    return messages


def model_inputs(processor: Any, rows: Sequence[Mapping[str, Any]], accepts: frozenset[str]) -> Any:
    """Inputs of a model that takes those called `accepts`, padded on the left."""
    batch = processor.apply_chat_template(
        [with_pictures(row) for row in rows],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    for name in [name for name in batch if name not in accepts]:
        del batch[name]
    return batch


def count_tokens_with_images(processor: Any, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens of each prompt with its pictures. What pictures take depends on their sizes only, and is counted once a size."""
    known: dict[tuple[tuple[int, int], ...], int] = {}
    counts = []
    for row in rows:
        bare = len(_ids(processor, {**row, IMAGES: []}))
        sizes = tuple(picture.size for picture in opened(list(row.get(IMAGES) or ())))
        if sizes and sizes not in known:
            known[sizes] = len(_ids(processor, row)) - bare
        counts.append(bare + known.get(sizes, 0))
    return counts


def _ids(processor: Any, row: Mapping[str, Any]) -> list[int]:
    made = processor.apply_chat_template(
        [with_pictures(row)], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    ids: list[int] = made["input_ids"][0]
    return ids


def fit_pictures(config: RunConfig, data: DataSplit, files: ModelFiles) -> DataSplit:
    """Leaves out rows that are longer than `data.max_prompt_tokens` with their pictures.

    Raises `DataError` if none is left, `ModelError` and `ConfigError` for pictures and a model that takes none.
    """
    if IMAGES not in data.train.column_names:
        return data
    if files.processor is None:
        column = data.info["mapping"]["images"]
        if files.family is not None and files.family.multimodal:
            raise ModelError(
                f"{config.model.name}: the rows have pictures (column '{column}'), and the model comes without a processor "
                "(processor_config.json or preprocessor_config.json). Copy it from the model it was made of, or set "
                "data.image_column: none to train on the text alone."
            )
        raise ConfigError(
            f"The rows have pictures (column '{column}'), and {config.model.name} takes text only. Choose a model that takes "
            "both (a '...ForConditionalGeneration' architecture, e.g. Qwen2.5-VL), or set data.image_column: none."
        )
    if config.data.max_prompt_tokens is None:
        return data
    from kit.data import filter_by_length

    return filter_by_length(
        data, partial(count_tokens_with_images, files.processor), config.data.max_prompt_tokens, with_pictures=True
    )


def without_pictures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as rewards see them: text alone."""
    return [{name: value for name, value in row.items() if name != IMAGES} for row in rows]


def text_of(prompt: Any) -> Any:
    """A prompt whose messages are made of parts, as messages of text; anything else as it is."""
    if not isinstance(prompt, list) or all(not isinstance(message.get("content"), list) for message in prompt):
        return prompt
    return [{**message, "content": _text(message.get("content"))} for message in prompt]


def _text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
