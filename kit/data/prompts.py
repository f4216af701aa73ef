"""Prompts: texts and conversations, checked one by one. Every reason for refusing one is a `ValueError`."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from typing import Any

Message = dict[str, str]
Prompt = str | list[Message]

TEXT, MESSAGES = "text", "a list of messages"
ROLES = ("system", "user", "assistant", "tool")


def kind_of(value: Any, column: str) -> str:
    """`TEXT` or `MESSAGES`. Raises `ValueError` for anything else."""
    if value is None:
        raise ValueError(f"'{column}' is missing")
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return MESSAGES
    raise ValueError(f"'{column}' is of type {type(value).__name__}; expected text or a list of messages")


def read_prompt(value: Any, column: str) -> tuple[Prompt, str | None]:
    """The prompt, checked, and the content of a trailing assistant message, which is taken off (None if there is none).

    Messages are reduced to `{"role", "content"}`. Raises `ValueError` with the reason.
    """
    if kind_of(value, column) == TEXT:
        if not value.strip():
            raise ValueError(f"'{column}' is empty")
        check_text(value, column)
        return value, None
    if not value:
        raise ValueError(f"'{column}' has no messages")
    messages: list[Message] = []
    for place, message in enumerate(value, start=1):
        where = f"message {place} of '{column}'"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is of type {type(message).__name__}; expected an object with role and content")
        for key in ("role", "content"):
            if message.get(key) is None:
                raise ValueError(f"{where} has no {key}")
            if not isinstance(message[key], str):
                raise ValueError(f"{where} has {key} of type {type(message[key]).__name__}; expected text")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"{where} has the role '{role}'; known: {', '.join(ROLES)}")
        if role == "system" and place > 1:
            raise ValueError(f"{where} is a system message; only the first message may be one")
        if role == "user" and not content.strip():
            raise ValueError(f"{where} is empty")
        check_text(content, column)
        messages.append({"role": role, "content": content})
    answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"'{column}' has no user message")
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"'{column}' ends with two assistant messages"
            if answer is not None
            else f"'{column}' ends with a {messages[-1]['role']} message; a user message should come last"
        )
    return messages, answer


def dress(prompt: Prompt, *, chat: bool, system_prompt: str | None) -> Prompt:
    """The prompt as the model gets it.

    A text becomes one user message, with `chat` off it stays a text. The system prompt stands in front: as a message,
    or followed by a blank line. A conversation keeps its own system message unless `system_prompt` is set: then that
    one replaces it. Raises `ValueError` for a conversation with `chat` off.
    """
    if not chat:
        if not isinstance(prompt, str):
            raise ValueError("the prompt is a conversation, and data.chat: false sends plain text; set data.chat: true")
        return f"{system_prompt}\n\n{prompt}" if system_prompt else prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not system_prompt:
        return messages
    return [{"role": "system", "content": system_prompt}, *_without_system(messages)]


def prompt_key(prompt: Prompt, *, ignore_system: bool) -> str:
    """Hex digest by which two prompts count as the same.

    Texts equal their user message, space around a message and the Unicode normal form do not count. `ignore_system`:
    system messages do not count, because the configured one replaces them.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if ignore_system:
        messages = _without_system(messages)
    plain = [[message["role"], unicodedata.normalize("NFC", message["content"]).strip()] for message in messages]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def reference_text(value: Any) -> str | None:
    """A reference as text: numbers as written in Python, true/false, lists and objects as JSON, None stays None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def check_text(text: str, column: str) -> None:
    """Raises `ValueError` for characters that tokenizers and Arrow do not take: NUL and lone surrogates."""
    if "\0" in text:
        raise ValueError(f"'{column}' holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"'{column}' holds a lone surrogate; it is not valid Unicode") from None


def _without_system(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message["role"] != "system"]
