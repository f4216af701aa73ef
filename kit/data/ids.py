"""Prompts given as token ids (`prompt_ids`): reading them, without a tokenizer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kit.data.prompts import Prompt, dress


def read_ids(value: Any, column: str) -> list[int] | None:
    """The ids of a row, checked; None where it has none. Raises `ValueError` with the reason."""
    if value is None:
        return None
    if not isinstance(value, list):
        hint = "; CSV has no lists, use JSONL or Parquet" if isinstance(value, str) else ""
        raise ValueError(f"'{column}' is of type {type(value).__name__}; expected a list of token ids{hint}")
    if not value:
        raise ValueError(f"'{column}' is empty; a prompt needs a token at least, null says that the row has no ids")
    for place, item in enumerate(value, start=1):
        if isinstance(item, bool) or not isinstance(item, int):
            raise ValueError(f"'{column}' has {item!r} at place {place}; token ids are whole numbers")
        if not 0 <= item < 2**31:
            raise ValueError(f"'{column}' has {item} at place {place}; token ids run from 0 to the vocabulary's size")
    return value


def stand_in(ids: list[int], *, chat: bool) -> Prompt:
    """What stands in the place of a prompt's text until a tokenizer is at hand: the ids as they are written."""
    return dress(json.dumps(ids), chat=chat, system_prompt=None)


def ids_key(ids: list[int]) -> str:
    """Hex digest by which two prompts of ids alone count as the same."""
    return hashlib.sha256(f"ids {json.dumps(ids)}".encode()).hexdigest()
