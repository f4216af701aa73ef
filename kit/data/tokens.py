"""The filter of prompts that are too long, which needs a tokenizer."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from kit.data.load import DataSplit

BATCH = 1000
ROWS = 16


def filter_by_length(
    split: DataSplit,
    count_tokens: Callable[[list[Any]], list[int]],
    max_prompt_tokens: int | None,
    *,
    whole: bool = False,
) -> DataSplit:
    """The split without prompts of more than `max_prompt_tokens` tokens, with `info` brought up to date.

    count_tokens: up to 1000 prompts -> their lengths in tokens, chat template included; with `whole` it is given 16 rows
    with their pictures, not decoded. None filters nothing. Raises `DataError` if a side that had rows is left with none;
    the message names the median length.
    """
    if max_prompt_tokens is None:
        return split
    measure = _of_rows if whole else _of_prompts
    train, train_out = _keep_short(split.train, partial(measure, count_tokens), max_prompt_tokens, "train")
    heldout, heldout_out = _keep_short(split.heldout, partial(measure, count_tokens), max_prompt_tokens, "held-out")
    info = deepcopy(split.info)
    info["max_prompt_tokens"] = max_prompt_tokens
    info["rows"] |= {
        "train": len(train),
        "heldout": len(heldout),
        "too_long": info["rows"]["too_long"] + train_out + heldout_out,
    }
    return type(split)(train, heldout, info)


def _of_rows(count_tokens: Callable[[list[Any]], list[int]], rows: Dataset) -> list[int]:
    lengths: list[int] = []
    for start in range(0, len(rows), ROWS):
        lengths += count_tokens(rows.select(range(start, min(start + ROWS, len(rows)))).to_list())
    return lengths


def _of_prompts(count_tokens: Callable[[list[Any]], list[int]], rows: Dataset) -> list[int]:
    lengths: list[int] = []
    for start in range(0, len(rows), BATCH):
        prompts = list(rows[start : start + BATCH]["prompt"])
        counted = list(count_tokens(prompts))
        if len(counted) != len(prompts):
            raise ValueError(f"count_tokens gave {len(counted)} lengths for {len(prompts)} prompts")
        lengths += counted
    return lengths


def _keep_short(rows: Dataset, measure: Callable[[Dataset], list[int]], limit: int, side: str) -> tuple[Dataset, int]:
    """Rows within the limit, and how many were beyond it."""
    lengths = measure(rows)
    short = [index for index, length in enumerate(lengths) if length <= limit]
    if lengths and not short:
        raise DataError(
            f"Every {side} prompt is longer than data.max_prompt_tokens: {limit}. The median of {len(lengths)} prompts "
            f"is {statistics.median_low(lengths)} tokens, the shortest {min(lengths)}, the longest {max(lengths)}. Set "
            "data.max_prompt_tokens above the median, or to null for no filter."
        )
    return (rows if len(short) == len(lengths) else rows.select(short)), len(lengths) - len(short)
