"""Checks that need a tokenizer: prompts that are too long, and prompts given as token ids (`prompt_ids`).

A row with ids reaches the model as those ids, whatever the chat template would make of its text. Where it has a text or
messages, too, rewards and people see them; where it has none they see the decoded ids.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.data.prompts import dress, stand_in
from kit.data.rows import IDS, SHOWN_IN_ERROR, SHOWN_IN_INFO, Fault
from kit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from kit.data.load import DataSplit

# --- length -----------------------------------------------------------------------------------------------------------


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
    rows = rows.select_columns([name for name in ("prompt", IDS) if name in rows.column_names])
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        prompts = list(batch["prompt"])
        counted = list(count_tokens(prompts))
        if len(counted) != len(prompts):
            raise ValueError(f"count_tokens gave {len(counted)} lengths for {len(prompts)} prompts")
        given = batch.get(IDS) or [None] * len(prompts)  # ids are what the model gets, whatever the text
        counted = [length if ids is None else len(ids) for length, ids in zip(counted, given, strict=True)]
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


# --- ids --------------------------------------------------------------------------------------------------------------


def has_ids(rows: Dataset) -> bool:
    """Whether some row may carry ids."""
    return IDS in rows.column_names


def drop_unknown_ids(split: DataSplit, vocabulary: int, *, skip: bool) -> DataSplit:
    """The split, whose ids are all below `vocabulary`. Raises `DataError` with the numbers of other rows, unless `skip`."""
    if not has_ids(split.train):
        return split
    sides = {"train": split.train, "heldout": split.heldout}
    info, faults = deepcopy(split.info), list[Fault]()
    for side, rows in sides.items():
        known = []
        for index, ids in enumerate(rows[IDS]):
            if ids is None or max(ids) < vocabulary:
                known.append(index)
                continue
            number, file = split.places[side][index] if split.places else (index + 1, None)
            faults.append(Fault(number, f"'{IDS}' holds {max(ids)}, beyond the vocabulary of {vocabulary}", file))
        sides[side] = rows if len(known) == len(rows) else rows.select(known)
    if faults:
        _refuse(faults, split, vocabulary, skip)
        info["rows"]["skipped"] += len(faults)
        info["rows"]["used"] -= len(faults)
        info["bad_rows"] = (info["bad_rows"] + [fault.as_dict() for fault in faults])[:SHOWN_IN_INFO]
    info["rows"] |= {side: len(rows) for side, rows in sides.items()}
    return type(split)(sides["train"], sides["heldout"], info)


def decode_id_prompts(
    split: DataSplit,
    decode: Callable[[list[int]], str],
    encode: Callable[[list[Any]], list[list[int]]],
    *,
    chat: bool,
) -> DataSplit:
    """The split with the decoded text as the prompt of rows with ids alone (with `chat` as one user message).

    Training rows whose ids are those of a held-out prompt, which no hash of their text could tell, are left out and counted
    as duplicates. decode: ids -> text, special tokens included; encode: prompts -> the ids that the model would be given.
    Raises `DataError` where no row is left to train on.
    """
    if not has_ids(split.train):
        return split
    info = deepcopy(split.info)
    sides = {"train": _told(split.train, decode, chat), "heldout": _told(split.heldout, decode, chat)}
    held = {tuple(ids) for ids in _given(sides["heldout"], encode)}
    fresh = [index for index, ids in enumerate(_given(sides["train"], encode)) if tuple(ids) not in held]
    info["rows"]["heldout_duplicates"] += len(sides["train"]) - len(fresh)
    if len(fresh) < len(sides["train"]):
        sides["train"] = sides["train"].select(fresh)
    info["rows"] |= {side: len(rows) for side, rows in sides.items()}
    if not sides["train"]:
        raise DataError(
            f"{info['source']}: no row is left to train on: the held-out prompts have the ids of all of them."
        )
    return type(split)(sides["train"], sides["heldout"], info)


def _refuse(faults: list[Fault], split: DataSplit, vocabulary: int, skip: bool) -> None:
    if skip and len(faults) < len(split.train) + len(split.heldout):
        return
    lines = [str(fault) for fault in faults[:SHOWN_IN_ERROR]]
    if len(faults) > SHOWN_IN_ERROR:
        lines.append(f"and {len(faults) - SHOWN_IN_ERROR} more")
    raise DataError(
        f"{split.info['source']}: {len(faults)} rows hold token ids that the model does not know; its vocabulary is 0 to "
        f"{vocabulary - 1}:\n  "
        + "\n  ".join(lines)
        + "\nThey were made with the tokenizer of another model. Make them "
        "with this one's, or leave the rows out with --skip-bad-rows (data.skip_bad_rows: true)."
    )


def _told(rows: Dataset, decode: Callable[[list[int]], str], chat: bool) -> Dataset:
    """Rows with ids alone, whose prompt stands in for them until now, with the decoded text."""
    prompts = [
        dress(decode(row[IDS]), chat=chat, system_prompt=None)
        if row[IDS] is not None and row["prompt"] == stand_in(row[IDS], chat=chat)
        else row["prompt"]
        for row in rows.select_columns(["prompt", IDS])
    ]
    feature, names = rows.features["prompt"], rows.column_names
    changed = rows.remove_columns("prompt").add_column("prompt", prompts, feature=feature)
    return changed.select_columns(names)


def _given(rows: Dataset, encode: Callable[[list[Any]], list[list[int]]]) -> list[list[int]]:
    """The ids that the model is given for each row."""
    ids: list[list[int]] = list(rows[IDS])
    others = [index for index, given in enumerate(ids) if given is None]
    prompts = rows.select(others)["prompt"]
    for index, made in zip(others, encode(list(prompts)) if others else [], strict=True):
        ids[index] = made
    return ids
