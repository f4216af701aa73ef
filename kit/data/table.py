"""Rows to `datasets.Dataset`, column by column, so that one odd column does not stop the others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kit.data.columns import IDS
from kit.data.images import IMAGES

if TYPE_CHECKING:
    from datasets import Dataset


def build_dataset(rows: list[dict[str, Any]], known: dict[str, Any], *, chat: bool) -> tuple[Dataset, list[str]]:
    """The rows as a dataset in memory, and notes on columns that were changed.

    known: `datasets` feature types by column name (images, class labels); the types of other columns are inferred. A
    column whose values have no common type becomes JSON text.
    """
    import pyarrow as pa
    from datasets import Dataset, DatasetInfo, Features, Image, List, Value

    message = {"role": Value("string"), "content": Value("string")}
    fixed = {
        "prompt": List(message) if chat else Value("string"),
        "reference": Value("string"),
        IDS: List(Value("int64")),
    }
    fixed[IMAGES] = List(Image(mode="RGB"))
    arrays, features, notes = {}, Features(), []
    for name in rows[0]:
        values = [row[name] for row in rows]
        feature = fixed.get(name, known.get(name))
        array = _typed(values, feature) if feature is not None else None
        if array is None:
            array, changed = _inferred(values)
            feature = Features.from_arrow_schema(pa.schema([(name, array.type)]))[name]
            if changed:
                notes.append(f"Column '{name}' has values without a common type; it reaches the reward as JSON text.")
        arrays[name], features[name] = array, feature
    table = pa.table(arrays).cast(features.arrow_schema)
    return Dataset(table, info=DatasetInfo(features=features)), notes


def _typed(values: list[Any], feature: Any) -> Any | None:
    """An Arrow array of the feature's storage type, or None where the values do not fit."""
    import pyarrow as pa
    from datasets import Features

    try:
        return pa.array(values, type=Features({"column": feature}).arrow_schema.field("column").type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def _inferred(values: list[Any]) -> tuple[Any, bool]:
    """An Arrow array, and whether the values had to be turned into JSON text."""
    import pyarrow as pa

    try:
        return pa.array(values), False
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        texts = [None if value is None else json.dumps(value, ensure_ascii=False, default=str) for value in values]
        return pa.array(texts, type=pa.string()), True
