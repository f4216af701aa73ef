"""Completions of several turns: how they ended, and how they read."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def finish_reason(ids: Sequence[int], ends: Collection[int], completion: Any = None) -> str:
    """`stop`: the model ended; `length`: its tokens were cut; `tool_calls`: its last call was not answered any more.

    The last happens where no call is left (generation.max_tool_calling_iterations) or the answer does not fit into the
    completion.
    """
    if unanswered(completion):
        return "tool_calls"
    return "stop" if ids and ids[-1] in ends else "length"


def unanswered(completion: Any) -> bool:
    """Whether a completion ends with a call that nothing answered."""
    last = completion[-1] if isinstance(completion, list) and completion else {}
    return isinstance(last, Mapping) and bool(last.get("tool_calls"))


def readable(completion: Any) -> str:
    """A completion as text for people: of messages the contents, what was called, and what the tools answered."""
    if isinstance(completion, str):
        return completion
    if len(completion) == 1 and not completion[0].get("tool_calls"):
        return str(completion[0].get("content") or "")
    return "\n".join(line for message in completion for line in _lines(message))


def _lines(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content") or ""
    content = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    if message.get("role") == "tool":
        return [f"[{message.get('name', 'tool')}] {content}"]
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    spoken = [content] if content else []
    return spoken + [
        f"{call.get('name')}({', '.join(f'{key}={value!r}' for key, value in (call.get('arguments') or {}).items())})"
        for call in calls
    ]
