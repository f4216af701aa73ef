"""The model's input for a row: rendering, tokenising and counting prompts, with pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.data.images import IMAGES, opened
from kit.errors import ConfigError, ModelError
from kit.generation.tools import NOTHING, ToolSetup, open_row

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.data import DataSplit
    from kit.models.loading import ModelFiles
    from rewards import Preset


@dataclass(frozen=True)
class LazyPrompt:
    """A row whose prompt is rendered when it is needed, with its tools or pictures."""

    row: dict[str, Any]

    def __len__(self) -> int:
        return len(str(self.row["prompt"]))


def render(tokenizer: Any, prompt: str | list[dict[str, Any]], tools: Sequence[Any] = (), **variables: Any) -> str:
    """The text of a prompt for the model, with descriptions of `tools`. `variables` are passed to the template."""
    if isinstance(prompt, str):
        return prompt
    described = {"tools": list(tools)} if tools else {}
    return str(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **described, **variables)
    )


def thinking_note(files: ModelFiles) -> str | None:
    """A note about a template that opens the model's thinking or has a switch for it; None for other templates."""
    template = files.family.template if files.family is not None else None
    if template is None or not (template.opens_thinking or template.thinking_switch):
        return None
    habit = "opens <think> before the model writes" if template.opens_thinking else "leaves thinking to the model"
    if not template.thinking_switch:
        return f"the chat template {habit} and has no switch for it"
    return f"the chat template {habit}; data.chat_template_kwargs: {{enable_thinking: true or false}} switches it"


def note_opened_thinking(preset: Preset, tokenizer: Any, prompts: Sequence[Any]) -> None:
    """Sets in a preset whether the chat template opens a `<think>` before the completion.

    Templates of some reasoning models do. Rewards only see messages, and would otherwise treat the thinking as an answer.
    """
    if preset.thinking_opened is None and prompts and not isinstance(prompts[0], str):
        preset.thinking_opened = render(tokenizer, prompts[0]).rstrip().endswith("<think>")


def is_plain(prompts: Sequence[Any]) -> bool:
    """Whether prompts are plain texts, to which the tokenizer adds special tokens. A chat template contains them."""
    return bool(prompts) and isinstance(prompts[0], str)


def count_tokens(tokenizer: Any, prompts: Sequence[Any], tools: Sequence[Any] = (), added: int = 0) -> list[int]:
    """Number of tokens of each rendered prompt, plus `added`."""
    return [len(ids) + added for ids in encode(tokenizer, prompts, tools)] if prompts else []


def encode(tokenizer: Any, prompts: Sequence[Any], tools: Sequence[Any] = ()) -> list[list[int]]:
    """Token ids of each rendered prompt."""
    texts = [render(tokenizer, prompt, tools) for prompt in prompts]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=is_plain(prompts))["input_ids"]
    return ids


def lengths_of(tokenizer: Any, rows: Any, interaction: ToolSetup = NOTHING) -> list[int]:
    """Number of tokens of the rendered prompt of each row, with tools and `observation_tokens`. rows: a dataset."""
    added, prompts = observation_tokens(tokenizer, rows, interaction), list(rows["prompt"]) if len(rows) else []
    return count_tokens(tokenizer, prompts, interaction.all_tools(), added)


def observation_tokens(tokenizer: Any, rows: Any, interaction: ToolSetup) -> int:
    """The most tokens that `reset` of an environment adds to the prompts of the first 16 rows."""
    first = rows.select(range(min(16, len(rows)))).to_list() if interaction.environments else []
    opened = count_tokens(tokenizer, [open_row(interaction, row)[0] for row in first])
    before = count_tokens(tokenizer, [row["prompt"] for row in first])
    return max((longer - length for longer, length in zip(opened, before, strict=True)), default=0)


def question(prompt: str | list[dict[str, Any]]) -> str:
    """The question as readable text: the last message of a prompt, or the plain prompt."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


# --- pictures ---------------------------------------------------------------------------------------------------------


class ImagePrompt(LazyPrompt):
    """A row with pictures."""


def has_pictures(row: Mapping[str, Any]) -> bool:
    """Whether a row has a picture."""
    return bool(row.get(IMAGES))


def with_pictures(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt as messages with parts, as in the trainer: pictures before the text of the first user message."""
    left = [{"type": "image", "image": picture} for picture in opened(list(row.get(IMAGES) or ()))]
    messages = []
    for message in row["prompt"]:
        text = {"type": "text", "text": message["content"]}
        pictures, left = (left, []) if message["role"] == "user" else ([], left)
        messages.append({**message, "content": [*pictures, text]})
    return messages


def model_inputs(processor: Any, rows: Sequence[Mapping[str, Any]], accepts: frozenset[str]) -> Any:
    """Model inputs, padded on the left; only those in `accepts`."""
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
    """Number of tokens of each prompt with its pictures. The tokens of a picture are counted once per picture size."""
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
    """Removes rows that are longer than `data.max_prompt_tokens` with their pictures.

    Raises `DataError` if none remains, and `ModelError` or `ConfigError` if the model does not support pictures.
    """
    if IMAGES not in data.train.column_names:
        return data
    if files.processor is None:
        column = data.info["mapping"]["images"]
        if files.family is not None and files.family.multimodal:
            raise ModelError(
                f"{config.model.name}: the rows have pictures (column '{column}'), but the model has no processor "
                "(processor_config.json or preprocessor_config.json). Copy it from the original model, or set "
                "data.image_column: none to train on text only."
            )
        raise ConfigError(
            f"The rows have pictures (column '{column}'), but {config.model.name} reads text only. Choose a model that reads "
            "both (a '...ForConditionalGeneration' architecture, e.g. Qwen2.5-VL), or set data.image_column: none."
        )
    if config.data.max_prompt_tokens is None:
        return data
    from kit.data import filter_by_length

    return filter_by_length(
        data, partial(count_tokens_with_images, files.processor), config.data.max_prompt_tokens, with_pictures=True
    )


def without_pictures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with text only, as for rewards."""
    return [{name: value for name, value in row.items() if name != IMAGES} for row in rows]


def text_of(prompt: Any) -> Any:
    """A prompt whose messages have parts, converted to text messages; other prompts unchanged."""
    if not isinstance(prompt, list) or all(not isinstance(message.get("content"), list) for message in prompt):
        return prompt
    return [{**message, "content": _text(message.get("content"))} for message in prompt]


def _text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
