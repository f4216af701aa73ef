"""What a chat session and its process say to each other: one JSON object a line.

To the process (`do`):
    ask      id, prompt (text or messages) or heldout (from 1), reference?, sides, sampling {seed, temperature, top_p,
             top_k, min_p, max_tokens}
    heldout  id, start (from 1), count, search?     held-out prompts, for a picker
    cancel   id                                     the answer under way ends; what was said so far is kept
    close

From the process (`event`):
    ready    run, step, model, device, heldout (how many), sampling (the run's), note?
    began    id, side            token  id, side, text
    answer   id, side, text, tokens, finish (stop, length, tool_calls, cancelled), seconds, reward
             {total, components} or null
    done     id, prompt, reference, cancelled
    rows     id, rows [{number, prompt, reference}], total
    error    id or null, kind, message
    closed   reason
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SIDES = ("base", "tuned")
IDLE = 900.0
"""Seconds without a question after which the process ends and gives the memory back."""


def encode(message: Mapping[str, Any]) -> str:
    """One line, its end included."""
    return json.dumps(dict(message), ensure_ascii=True, allow_nan=False, default=str) + "\n"


def decode(line: str) -> dict[str, Any] | None:
    """The object of a line; None for what is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
