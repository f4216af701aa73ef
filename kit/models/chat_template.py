"""What a chat template can do, found by rendering it: roles, tools, generation prompt, thinking, the end of a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ASKED, ANSWERED, TOLD = "kitquestion", "kitanswer", "kitsystem"
USER, REPLY, SYSTEM = (
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": ANSWERED},
    {"role": "system", "content": TOLD},
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
    """What one chat template does with messages."""

    system: bool
    """A system message reaches the model (some templates refuse one, or leave it out)."""
    tools: bool
    """Tools that are declared reach the model."""
    generation_prompt: bool
    """It can open the assistant's turn."""
    opens_thinking: bool
    """The opened turn begins inside `<think>`."""
    thinking_switch: bool
    """It reads `enable_thinking`."""
    turn_end: str | None
    """The special token that follows an assistant's message."""


def read_template(processing_class: Any) -> ChatTemplate | None:
    """Renders the template of a tokenizer or processor a few times. None where it has none, or where it renders nothing."""
    source = getattr(processing_class, "chat_template", None)
    if not source:
        return None
    plain, opened = _render(processing_class, [USER]), _render(processing_class, [USER], add_generation_prompt=True)
    if plain is None or opened is None:
        return None
    text = str(source)
    return ChatTemplate(
        system=TOLD in (_render(processing_class, [SYSTEM, USER]) or ""),
        tools="kittool" in (_render(processing_class, [USER], tools=[TOOL], add_generation_prompt=True) or ""),
        generation_prompt=len(opened) > len(plain),
        opens_thinking=opened.rstrip().endswith("<think>"),
        thinking_switch="enable_thinking" in text,
        turn_end=_turn_end(processing_class),
    )


def _render(processing_class: Any, messages: list[dict[str, Any]], **keywords: Any) -> str | None:
    """The text, or None where the template refuses; processors may want the content in parts."""
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for form in (messages, parts):
        try:
            text = str(processing_class.apply_chat_template(form, tokenize=False, **keywords))
        except Exception:  # templates raise what they like, of jinja's or of Python's
            continue
        if ASKED in text:
            return text
    return None


def _turn_end(processing_class: Any) -> str | None:
    """The first special token behind an assistant's message, looked for in the ids of what the template writes there."""
    rendered = _render(processing_class, [USER, REPLY])
    if rendered is None or ANSWERED not in rendered:
        return None
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tail = rendered.rpartition(ANSWERED)[2]
    if not tail.strip():
        return None
    special = {*tokenizer.all_special_ids, *_added(tokenizer)}
    for token in tokenizer(tail, add_special_tokens=False)["input_ids"]:
        if token in special:
            return str(tokenizer.convert_ids_to_tokens(token))
        if str(tokenizer.decode([token])).strip():
            return None  # words come first: this template closes turns with text
    return None


def _added(tokenizer: Any) -> set[int]:
    """Ids of added tokens that are special: some tokenizers do not list them among their special ids."""
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    return {index for index, token in decoder.items() if getattr(token, "special", False)}


def end_ids(generation_config: Any, tokenizer: Any, template: ChatTemplate | None) -> tuple[int, ...]:
    """Every id that ends a completion, the tokenizer's first."""
    declared = getattr(generation_config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *([declared] if isinstance(declared, int) else list(declared or []))]
    if template is not None and template.turn_end is not None:
        ids.append(tokenizer.convert_tokens_to_ids(template.turn_end))
    return tuple(dict.fromkeys(int(one) for one in ids if one is not None))
