"""The filter of prompts that are too long, which needs a tokenizer."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from copy import deepcopy
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
    sides: list[Dataset] = []
    for name, rows in (("train", split.train), ("held-out", split.heldout)):
        lengths: list[int] = []
        for start in range(0, len(rows), ROWS if whole else BATCH):
            if whole:
                lengths += count_tokens(rows.select(range(start, min(start + ROWS, len(rows)))).to_list())
            else:
                lengths += count_tokens(list(rows[start : start + BATCH]["prompt"]))
        short = [index for index, length in enumerate(lengths) if length <= max_prompt_tokens]
        if lengths and not short:
            raise DataError(
                f"Every {name} prompt is longer than data.max_prompt_tokens: {max_prompt_tokens}. The median of {len(lengths)} "
                f"prompts is {statistics.median_low(lengths)} tokens, the shortest {min(lengths)}, the longest {max(lengths)}. "
                "Set data.max_prompt_tokens above the median, or to null for no filter."
            )
        sides.append(rows if len(short) == len(rows) else rows.select(short))
    info, (train, heldout) = deepcopy(split.info), sides
    removed = len(split.train) + len(split.heldout) - len(train) - len(heldout)
    info["max_prompt_tokens"] = max_prompt_tokens
    counts = {"train": len(train), "heldout": len(heldout), "too_long": info["rows"]["too_long"] + removed}
    info["rows"] |= counts
    return type(split)(train, heldout, info)
