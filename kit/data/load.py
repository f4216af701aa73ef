"""Loads data: read, map columns, check rows, split. Start with `load_data`."""

from __future__ import annotations

import hashlib
import json
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.config import DataConfig
from kit.data.images import IMAGES
from kit.data.rows import SHOWN_IN_INFO
from kit.data.sources import TASK_PREFIX, read_valid_rows
from kit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

SIDES = ("train", "heldout")


@dataclass(frozen=True)
class DataSplit:
    """Training rows, held-out rows, and their description (the content of data.json).

    Columns: `prompt` (a list of {"role", "content"}, or a text with `chat` off), `reference` (text or None), the other columns
    of the source, and the reference under its column's name. `train` is in source order, `heldout` in that of a salted hash.

    `info["rows"]`: `read` (looked at) = `used` + `skipped`, and `used` = `train` + `heldout` + `heldout_duplicates` +
    `too_long`; `without_reference` counts used rows whose reference is None. `info["sha256"]` is over the used rows, in
    order, as they are before `filter_by_length`.
    """

    train: Dataset
    heldout: Dataset
    info: dict[str, Any]


def load_data(config: DataConfig) -> DataSplit:
    """Rows of `config.source`, checked and split; `config.seed` decides generated rows and which rows are held out.

    Raises `DataError` if the source cannot be read, a column is missing, rows are invalid (unless `config.skip_bad_rows`), or
    there are too few prompts for held-out rows. `filter_by_length` applies `max_prompt_tokens`, because it needs a
    tokenizer.
    """
    source, mapping, result = read_valid_rows(config)
    if source.heldout is None:
        sides = split_rows(result.keys, result.contents, config.heldout, config.seed)
    else:
        first = len(result.rows) - source.heldout
        sides = Sides(list(range(first)), list(range(first, len(result.rows))), [])
    features = {name: source.features[old] for old, name in mapping.extras.items() if old in source.features}
    dataset, changed = build_dataset(result.rows, features, chat=config.chat)
    without = sum(row["reference"] is None for row in result.rows)
    last = mapping.reference is None and without < len(result.rows)
    from_prompt = f"The reference is the last message of '{mapping.prompt}', which is the assistant's."
    unused = ["data.task_params has no effect, because only reasoning-gym tasks have parameters."]
    unused *= bool(config.task_params) and not config.source.startswith(TASK_PREFIX)
    roles = {"prompt": mapping.prompt, "reference": mapping.reference}
    roles |= {"images": mapping.images} if mapping.images is not None else {}
    info = {
        "source": config.source,
        "subset": config.subset,
        "split": config.split,
        "revision": config.revision,
        "files": source.files,
        **source.details,
        "rows": {
            "read": len(result.rows) + len(result.faults),
            "used": len(result.rows),
            "train": len(sides.train),
            "heldout": len(sides.heldout),
            "heldout_duplicates": len(sides.doubles),
            "skipped": len(result.faults),
            "too_long": 0,
            "without_reference": without,
        },
        "bad_rows": [{"row": fault.number, "reason": fault.reason} for fault in result.faults[:SHOWN_IN_INFO]],
        "sha256": result.sha256(),
        "mapping": roles | {"rename": {old: name for old, name in mapping.extras.items() if old != name}},
        "seed": config.seed,
        "notes": [*source.notes, *mapping.notes, *sides.notes, *([from_prompt] if last else []), *changed, *unused],
        "columns": dataset.column_names,
    }
    return DataSplit(dataset.select(sides.train), dataset.select(sides.heldout), info)


def preview(split: DataSplit, n: int) -> list[dict[str, Any]]:
    """The first `n` rows of each side as dictionaries, with the key `side` ("train" or "heldout") first."""

    def rows(side: str, dataset: Dataset) -> Iterator[dict[str, Any]]:
        for index in range(min(n, len(dataset))):
            yield {"side": side} | dataset[index]

    return [*rows("train", split.train), *rows("heldout", split.heldout)]


# --- train and held-out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sides:
    """The split as row indices: `train` in source order, `heldout` by hash, one per prompt, and their duplicates `doubles`."""

    train: list[int]
    heldout: list[int]
    doubles: list[int]
    notes: list[str] = field(default_factory=list)


def split_rows(keys: Sequence[str], contents: Sequence[str], heldout: int, seed: int) -> Sides:
    """Holds out the `heldout` rows whose prompts have the smallest hashes, salted with `seed`.

    keys: identify the prompt of each row; contents: identify the row. A prompt that occurs several times is on one side: all
    its rows are trained on, or one (with the smallest hash of its content) is held out and the others are removed. At most
    half of the different prompts are held out. Raises `DataError` if no prompt would remain for training.
    """
    by_key: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        by_key.setdefault(key, []).append(index)
    if heldout and len(by_key) < 2:
        raise DataError(
            f"data.heldout: {heldout} rows cannot be held out: there is only {len(by_key)} different prompt, and none "
            "would remain for training. Add more prompts (for a generated task: other data.task_params), or set "
            "data.heldout: 0 and evaluation.before and evaluation.after: false."
        )
    count = min(heldout, len(by_key) // 2)
    chosen = sorted(by_key, key=lambda key: _salted(key, seed))[:count]
    heldout_rows = [min(by_key[key], key=lambda index: (_salted(contents[index], seed), index)) for key in chosen]
    doubles = sorted({index for key in chosen for index in by_key[key]} - set(heldout_rows))
    away = {*heldout_rows, *doubles}
    notes = []
    if count < heldout:
        notes.append(
            f"data.heldout is {heldout}, but there are only {len(by_key)} different prompts. Half of them, "
            f"{count}, are held out."
        )
    if doubles:
        notes.append(f"{len(doubles)} rows repeat the prompt of a held-out row and are not used.")
    return Sides([index for index in range(len(keys)) if index not in away], heldout_rows, doubles, notes)


def _salted(text: str, seed: int) -> str:
    return hashlib.sha256(f"heldout {seed} {text}".encode()).hexdigest()


# --- rows to a dataset ------------------------------------------------------------------------------------------------


def build_dataset(rows: list[dict[str, Any]], known: dict[str, Any], *, chat: bool) -> tuple[Dataset, list[str]]:
    """The rows as a dataset in memory, and notes about converted columns.

    known: `datasets` feature types by column name (images, class labels); the types of other columns are inferred. A
    column whose values have no common type becomes JSON text.
    """
    import pyarrow as pa
    from datasets import Dataset, DatasetInfo, Features, Image, List, Value

    message = {"role": Value("string"), "content": Value("string")}
    fixed = {"prompt": List(message) if chat else Value("string"), "reference": Value("string")}
    fixed[IMAGES] = List(Image(mode="RGB"))
    arrays, features, notes = {}, Features(), []
    for name in rows[0]:
        values = [row[name] for row in rows]
        feature = fixed.get(name, known.get(name))
        kind = None if feature is None else Features({"column": feature}).arrow_schema.field("column").type
        array = _array(values, kind) if feature is not None else None
        if array is None:
            array = _array(values)
            if array is None:
                texts = [None if each is None else json.dumps(each, ensure_ascii=False, default=str) for each in values]
                array = pa.array(texts, type=pa.string())
                first = bisect_left(range(len(values)), True, key=lambda last: _array(values[: last + 1]) is None)
                notes.append(
                    f"Column '{name}' has values without a common type (first: {json.dumps(values[first], default=str)[:40]} in "
                    f"row {first + 1}), so the reward gets the values of all rows as JSON text. Write all values as one type."
                )
            feature = Features.from_arrow_schema(pa.schema([(name, array.type)]))[name]
        arrays[name], features[name] = array, feature
    table = pa.table(arrays).cast(features.arrow_schema)
    return Dataset(table, info=DatasetInfo(features=features)), notes


def _array(values: list[Any], kind: Any = None) -> Any | None:
    """An Arrow array of this type or the inferred one; None if the values do not fit."""
    import pyarrow as pa

    try:
        return pa.array(values, type=kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


# --- prompts that are too long ----------------------------------------------------------------------------------------


BATCH, ROWS = 1000, 16
"""Number of prompts, and of rows with pictures, that are counted at once."""


def filter_by_length(
    split: DataSplit,
    count_tokens: Callable[[list[Any]], list[int]],
    max_prompt_tokens: int | None,
    *,
    with_pictures: bool = False,
) -> DataSplit:
    """The split without prompts of more than `max_prompt_tokens` tokens, with updated `info`.

    count_tokens: up to 1000 prompts -> their lengths in tokens, chat template included; with `with_pictures`, 16 rows with
    encoded pictures. None: no filter. Raises `DataError` with the median length if no row of a side remains.
    """
    if max_prompt_tokens is None:
        return split
    sides: list[Dataset] = []
    for name, rows in (("train", split.train), ("held-out", split.heldout)):
        lengths: list[int] = []
        size = ROWS if with_pictures else BATCH
        for start in range(0, len(rows), size):
            batch = rows.select(range(start, min(start + size, len(rows))))
            lengths += count_tokens(batch.to_list() if with_pictures else list(batch["prompt"]))
        short = [index for index, length in enumerate(lengths) if length <= max_prompt_tokens]
        if lengths and not short:
            raise DataError(
                f"Every {name} prompt is longer than data.max_prompt_tokens: {max_prompt_tokens}. The median of {len(lengths)} "
                f"prompts is {statistics.median_low(lengths)} tokens, the shortest {min(lengths)}, the longest {max(lengths)}. "
                "Set data.max_prompt_tokens above the median, or to null."
            )
        sides.append(rows if len(short) == len(rows) else rows.select(short))
    info, (train, heldout) = deepcopy(split.info), sides
    removed = len(split.train) + len(split.heldout) - len(train) - len(heldout)
    info["max_prompt_tokens"] = max_prompt_tokens
    info["rows"] |= {"train": len(train), "heldout": len(heldout), "too_long": info["rows"]["too_long"] + removed}
    return type(split)(train, heldout, info)
