"""A completion closely: its turns with calls and answers and what of them trains, and single tokens coloured by their values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from kit.ui import markup as m

NO_COLOUR = "nothing"
LONGEST_CALL = 2000
"""Letters of a call or of a message that is no text."""
Value = Callable[[Mapping[str, Any], int], float | None]


def _column(name: str) -> Value:
    def value(kept: Mapping[str, Any], at: int) -> float | None:
        numbers = kept.get(name)
        return None if numbers is None or at >= len(numbers) else numbers[at]

    return value


def _ratio(kept: Mapping[str, Any], at: int) -> float | None:
    found = _column("log_ratio")(kept, at)
    return None if found is None else math.exp(min(found, 20.0))


def _teacher(kept: Mapping[str, Any], at: int) -> float | None:
    teacher, policy = _column("teacher_logp")(kept, at), _column("logp")(kept, at)
    return None if teacher is None or policy is None else teacher - policy


COLOURS: dict[str, tuple[Value, float, float, str]] = {
    "advantage": (_column("advantage"), 0.0, 2.0, "green: made likelier; orange: made less likely"),
    "ratio": (_ratio, 1.0, 0.1, "green: likelier than when it was sampled; orange: less likely; plain: unchanged"),
    "entropy": (_column("entropy"), 0.0, 1.5, "the stronger, the less certain the policy was there (nats)"),
    "surprise": (lambda kept, at: None if (found := _column("logp")(kept, at)) is None else -found, 0.0, 4.0,
                 "the stronger, the less likely the token was to the policy (-log p, nats)"),
    "teacher less policy": (_teacher, 0.0, 2.0, "green: the teacher finds it likelier; orange: less likely (nats)"),
}  # fmt: skip
"""By name: a token's value, where nothing is coloured, the distance from there at which the colour is full, and what it says."""
SAID = (("log p", "logp"), ("entropy", "entropy"), ("log ratio", "log_ratio"), ("advantage", "advantage"),
        ("reference log p", "reference_logp"), ("teacher log p", "teacher_logp"))  # fmt: skip


def show(kept: Mapping[str, Any], colour: str) -> Markup:
    """The tokens of a completion, coloured; those that do not train are struck out in grey. Pointing at one says its values."""
    value, plain, full, meaning = COLOURS[colour]
    pieces, known = [], list[float]()
    for at, text in enumerate(kept.get("text") or []):
        found, trains = value(kept, at), (_column("trains")(kept, at) or 0.0) > 0
        title = " · ".join(
            f"{name} {number:.3g}" for name, key in SAID if (number := _column(key)(kept, at)) is not None
        )
        title = title if trains else "does not train: a tool's, or left out"
        if found is not None and trains:
            known.append(found)
            share = max(-1.0, min(1.0, (found - plain) / full))
            kind = "u" if share >= 0 else "d"
            style = f"--s:{abs(share):.2f}"
            pieces.append(m.tag("i", text, class_=kind, style=style, title=title))
        else:
            pieces.append(m.tag("i", text, class_="" if trains else "off", title=title))
    if not known:
        words = f"This run has no {colour} of single tokens."
        words += " It had no teacher." if colour.startswith("teacher") else ""
        return m.tag("div", m.join(pieces), class_="said tokens", tabindex="0") + m.tag("small", words)
    reach = f"{min(known):.3g} to {max(known):.3g}"
    legend = f"{colour}: {reach}, mean {sum(known) / len(known):.3g}; {meaning}. Step {kept.get('step')}'s pass."
    return m.tag("div", m.join(pieces), class_="said tokens", tabindex="0") + m.tag("small", legend)


def turns(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages of a completion of several turns; [] where it has but one, or they cannot be read."""
    try:
        found = json.loads(row.get("turns") or "null")
    except (TypeError, ValueError):
        return []
    messages: list[Mapping[str, Any]] = (
        [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    )
    return messages if len(messages) > 1 or any(one.get("tool_calls") for one in messages) else []


def conversation(messages: list[Mapping[str, Any]], text: Callable[[str], Markup]) -> Markup:
    """Turns one below the other: what the model wrote, which trains, and what tools answered, which does not."""
    return m.tag("div", m.join(_turn(number, one, text) for number, one in enumerate(messages, 1)), class_="turns")


def _turn(number: int, message: Mapping[str, Any], text: Callable[[str], Markup]) -> Markup:
    role = str(message.get("role") or "assistant")
    own = role == "assistant"
    name = f"{message.get('name') or 'tool'} answers" if role == "tool" else "model" if own else role
    head = m.tag("b", f"{number}. {name}") + m.badge("trains" if own else "masked: does not train", "ok" if own else "")
    content = message.get("content")
    words = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    parts = [m.tag("div", head, class_="row")]
    if words:
        parts.append(m.tag("div", text(words), class_="said", tabindex="0"))
    parts += [_call(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    return m.tag("div", m.join(parts), class_=f"turn {'own' if own else 'other'}")


def _call(call: Mapping[str, Any]) -> Markup:
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    assert isinstance(function, Mapping)
    given = function.get("arguments") or {}
    if isinstance(given, Mapping):
        shown = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
    else:
        shown = str(given)
    code = m.tag("code", f"{function.get('name')}({shown})"[:LONGEST_CALL])
    return m.tag("div", m.join([m.tag("small", "calls "), code]), class_="call")
