"""Arrow batches to records, without decoding images or audio."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kit.data.rows import Record, Source

if TYPE_CHECKING:
    from datasets import Dataset

BATCH = 1000


def source_from_dataset(dataset: Dataset, files: list[str]) -> Source:
    """A `datasets.Dataset` as a stream of records. Class labels arrive as their names."""
    features = dict(dataset.features)
    batches = dataset.with_format("arrow").iter(BATCH)
    return Source(
        records=records(batches, features),
        columns=list(dataset.column_names),
        total=len(dataset),
        features=storable(features),
        files=files,
    )


def records(batches: Iterable[Any], features: dict[str, Any], file: str | None = None) -> Iterator[Record]:
    """One record a row, numbered from 1. batches: `pyarrow` tables or record batches."""
    decoders = {name: decoder for name, feature in features.items() if (decoder := _decoder(feature))}
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            for name, decoder in decoders.items():
                values[name] = decoder(values[name])
            yield Record(number, values, file)


def storable(features: dict[str, Any]) -> dict[str, Any]:
    """The feature types that hold for the values of `records`: all but the decoded ones."""
    return {name: feature for name, feature in features.items() if _decoder(feature) is None}


def _decoder(feature: Any) -> Callable[[Any], Any] | None:
    from datasets import ClassLabel, Features

    if isinstance(feature, ClassLabel):
        return lambda value: None if value is None or value < 0 else feature.int2str(value)
    # `datasets` stores objects of mixed shape as JSON text, possibly below a list; only its own decoder knows where.
    if "Json(" in repr(feature):
        column = Features({"column": feature})
        return lambda value: None if value is None else column.decode_example({"column": value})["column"]
    return None
