"""A completion closely: its turns with tool calls and answers, and its tokens coloured by one of their values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from kit.ui import markup as m

NO_COLOUR = "nothing"
LONGEST_CALL = 2000
"""Letters of a call that are shown."""
COLOURS = {
    "advantage": ("advantage", 2.0, "green: made likelier; orange: made less likely"),
    "log ratio": ("log_ratio", 0.1, "green: likelier than when it was sampled; orange: less likely"),
    "entropy": ("entropy", 1.5, "the stronger, the less certain the policy was (nats)"),
}
"""By name: the column, the value at which the colour is full (0 has none), and what the colour means."""
VALUES = ("logp", "entropy", "log_ratio", "advantage", "reference_logp", "teacher_logp")


def _value(kept: Mapping[str, Any], column: str, at: int) -> float | None:
    numbers = kept.get(column)
    return None if numbers is None or at >= len(numbers) else numbers[at]


def show(kept: Mapping[str, Any], colour: str) -> Markup:
    """The tokens of a completion, coloured; those that do not train are struck out. Pointing at a token shows its values."""
    column, full, meaning = COLOURS[colour]
    pieces, known = [], list[float]()
    for at, text in enumerate(kept.get("text") or []):
        value = _value(kept, column, at)
        if not (_value(kept, "trains", at) or 0.0) > 0:
            pieces.append(m.tag("i", text, class_="off", title="does not train: a tool's, or left out"))
            continue
        title = " · ".join(f"{name} {number:.3g}" for name in VALUES if (number := _value(kept, name, at)) is not None)
        style = ""
        if value is not None:
            known.append(value)
            style = f"--s:{min(1.0, abs(value) / full):.2f}"
        pieces.append(m.tag("i", text, class_="u" if (value or 0.0) >= 0 else "d", style=style, title=title))
    words = f"This run has no {colour} of single tokens."
    if known:
        words = f"{colour}: {min(known):.3g} to {max(known):.3g}, mean {sum(known) / len(known):.3g}; {meaning}."
    return m.tag("div", m.join(pieces), class_="said tokens", tabindex="0") + m.tag("small", words)


def turns(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages of a completion of several turns; [] where it has only one, or they cannot be read."""
    try:
        messages = json.loads(row.get("turns") or "[]")
    except (TypeError, ValueError):
        return []
    messages = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    return messages if len(messages) > 1 or any(message.get("tool_calls") for message in messages) else []


def conversation(messages: list[Mapping[str, Any]], text: Callable[[str], Markup]) -> Markup:
    """Turns one below the other: what the model wrote, which trains, and what tools answered, which does not."""
    return m.tag("div", m.join(_turn(number, one, text) for number, one in enumerate(messages, 1)), class_="turns")


def _turn(number: int, message: Mapping[str, Any], text: Callable[[str], Markup]) -> Markup:
    role = str(message.get("role") or "assistant")
    own = role == "assistant"
    name = f"{message.get('name') or 'tool'} answers" if role == "tool" else "model" if own else role
    head = m.tag("b", f"{number}. {name}") + m.badge("trains" if own else "does not train", "ok" if own else "")
    content = message.get("content")
    words = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    parts = [m.tag("div", head, class_="row")]
    if words:
        parts.append(m.tag("div", text(words), class_="said", tabindex="0"))
    parts += [_call(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    return m.tag("div", m.join(parts), class_=f"turn {'own' if own else 'other'}")


def _call(call: Mapping[str, Any]) -> Markup:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    code = m.tag("code", f"{function.get('name')}({arguments})"[:LONGEST_CALL])
    return m.tag("div", m.join([m.tag("small", "calls "), code]), class_="call")
