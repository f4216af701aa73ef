"""The whole way of the data: read, map, check, split. One function, read from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.config import DataConfig
from kit.data.columns import Mapping, map_columns
from kit.data.rows import SHOWN_IN_INFO, Fault, Record, Rows, Source, collect_rows, refuse_bad_rows
from kit.data.sources import read_source
from kit.data.split import Sides, split_rows
from kit.data.table import build_dataset
from kit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


SIDES = ("train", "heldout")


@dataclass(frozen=True)
class DataSplit:
    """Rows to train on, rows set apart, and the record of where they came from (what data.json holds).

    Columns: `prompt` (a list of {"role", "content"}, or a text with `chat` off), `reference` (text or None), `prompt_ids`
    (a list of ids or None; only where the source has such a column), then the other columns of the source. `train` is in
    source order, `heldout` in the order of a salted hash.

    `info["rows"]`: `read` (looked at) = `used` + `skipped`, and `used` = `train` + `heldout` + `heldout_duplicates` +
    `too_long`; `without_reference` counts used rows whose reference is None. `info["sha256"]` is over the used rows, in
    order, as they are before `filter_by_length`.
    """

    train: Dataset
    heldout: Dataset
    info: dict[str, Any]
    places: dict[str, list[tuple[int, str | None]]] = field(default_factory=dict)
    """By side, number and file of the rows where they are known: for errors that are found later."""


def load_data(config: DataConfig) -> DataSplit:
    """Rows of `config.source`, checked and split; `config.seed` decides generated rows and which rows are held out.

    Raises `DataError` for a source that cannot be read, a column that is missing, rows that cannot be used (unless
    `config.skip_bad_rows`), or too few prompts to set some apart. `max_prompt_tokens` is left to `filter_by_length`,
    which needs a tokenizer.
    """
    source = read_source(config)
    if not source.total:
        raise DataError(f"{config.source} has no rows. A run needs at least one.")
    if not source.columns:  # not one row could be read: there is nothing to map
        refuse_bad_rows(Rows(faults=list(_faults(source))), Mapping("prompt", None, {}), config)
    mapping = map_columns(source.columns, config)
    result = collect_rows(source, mapping, config)
    refuse_bad_rows(result, mapping, config)
    sides = split_rows(result.keys, result.contents, config.heldout, config.seed)
    known = {ours: source.features[theirs] for theirs, ours in mapping.extras.items() if theirs in source.features}
    dataset, notes = build_dataset(result.rows, known, chat=config.chat)
    info = _info(config, source, mapping, result, sides)
    info["columns"] = dataset.column_names
    info["notes"] += notes
    places = {side: [result.places[row] for row in rows] for side, rows in vars(sides).items() if side in SIDES}
    return DataSplit(dataset.select(sides.train), dataset.select(sides.heldout), info, places)


def preview(split: DataSplit, n: int) -> list[dict[str, Any]]:
    """The first `n` rows of each side as plain dictionaries, with `side` ("train" or "heldout") in front."""

    def rows(side: str, dataset: Dataset) -> Iterator[dict[str, Any]]:
        for index in range(min(n, len(dataset))):
            yield {"side": side} | dataset[index]

    return [*rows("train", split.train), *rows("heldout", split.heldout)]


def _faults(source: Source) -> Iterator[Fault]:
    for record in source.records:
        if isinstance(record, Record):
            yield Fault(record.number, "the row has no columns", record.file)
        else:
            yield record


def _info(config: DataConfig, source: Source, mapping: Mapping, result: Rows, sides: Sides) -> dict[str, Any]:
    without = sum(row["reference"] is None for row in result.rows)
    notes = [*source.notes, *mapping.notes, *sides.notes]
    if mapping.reference is None and without < len(result.rows):
        notes.append(f"The reference is the last message of '{mapping.prompt}', which is the assistant's.")
    return {
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
        "bad_rows": [fault.as_dict() for fault in result.faults[:SHOWN_IN_INFO]],
        "sha256": result.sha256(),
        "mapping": mapping.as_dict(),
        "seed": config.seed,
        "notes": notes,
    }
