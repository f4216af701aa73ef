"""What the model is given of a row: its prompt rendered, tokenised and counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kit.data.columns import IDS

if TYPE_CHECKING:
    from rewards import Preset


@dataclasses.dataclass(frozen=True)
class Asked:
    """A row whose prompt is rendered when it is asked, with the tools that may be called."""

    row: dict[str, Any]

    def __len__(self) -> int:
        return len(str(self.row["prompt"]))


def render(tokenizer: Any, prompt: str | list[dict[str, Any]], tools: Sequence[Any] = ()) -> str:
    """The text that the model is given; `tools` are described in it."""
    if isinstance(prompt, str):
        return prompt
    described = {"tools": list(tools)} if tools else {}
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **described))


def tell_of_thinking(preset: Preset, tokenizer: Any, prompts: Sequence[Any]) -> None:
    """Tells a preset whether the chat template opens a `<think>` before the model writes, as those of some reasoning
    models do: rewards see messages only, and would take what follows for an answer."""
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
    """Tokens of the prompt of each row, as the model is given it: of its ids where it has them. rows: a dataset."""
    counted = count_tokens(tokenizer, list(rows["prompt"]), tools) if len(rows) else []
    given = rows[IDS] if IDS in rows.column_names else [None] * len(counted)
    return [length if ids is None else len(ids) for length, ids in zip(counted, given, strict=True)]


def question(prompt: str | list[dict[str, Any]]) -> str:
    """What was asked, for people: the last message's text, or the text itself."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
