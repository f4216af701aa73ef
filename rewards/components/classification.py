"""Is the answer the right one of a fixed set of labels?"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import check_style, column, find_answer
from rewards.errors import PresetError
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["LabelAccuracy", "LabelFormat", "label_name", "normalise_label"]

_NEGATIVE = re.compile(r"-\s*\.?\d")
_WRAPPERS = " \t\r\n\"'`*_“”‘’.:!()[]"


@dataclass(frozen=True, kw_only=True)
class _Labels(ItemComponent):
    """`labels` serve rows without a `labels` column."""

    style: str = "answer"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_style(self.style)
        names = [normalise_label(label) for label in self.labels]
        if "" in names or len(set(names)) < len(names):
            raise PresetError(
                f"labels are {list(self.labels)}. Give different names; case and punctuation do not count."
            )

    def known(self, sample: Sample) -> tuple[str, ...]:
        given = column(sample, "labels", "choices")
        if isinstance(given, str):
            given = json.loads(given)
        return tuple(str(label) for label in given) if isinstance(given, list | tuple) else self.labels


@dataclass(frozen=True, kw_only=True)
class LabelAccuracy(_Labels):
    """1 when the whole answer is the reference's label, else 0; text that merely contains a label is no label.

    Case, white space and quotes around do not count. An answer that is none of the labels is `format`. A reference that
    is an integer is an index into the labels, as in ClassLabel columns.
    """

    name: str = "accuracy"

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        labels = self.known(sample)
        try:
            wanted = label_name(sample.reference, labels)
        except ValueError as failure:
            return Score(None, "error", {"reason": str(failure)[:300]})
        found = find_answer(sample, self.style)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        answer, info = normalise_label(found.value), {"extracted": found.value[:200]}
        if answer == wanted:
            return Score(self.high, "ok", info)
        if labels and answer not in map(normalise_label, labels):
            return Score(None, "format", {**info, "reason": "not one of the labels"})
        return Score(None, "wrong", info)


@dataclass(frozen=True, kw_only=True)
class LabelFormat(_Labels):
    """1 when the answer is one of the labels, whichever, else 0; without known labels, 1 for any answer."""

    name: str = "format"

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        found = find_answer(sample, self.style)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        labels = self.known(sample)
        if labels and normalise_label(found.value) not in map(normalise_label, labels):
            return Score(None, "format", {"reason": "not one of the labels"})
        return Score(self.high)


def label_name(reference: Any, labels: Sequence[str] = ()) -> str:
    """The reference's label, normalised.

    Raises:
        ValueError: blank, not among the labels, or an index without labels or outside of them.
    """
    if isinstance(reference, int) and not isinstance(reference, bool):
        if labels and 0 <= reference < len(labels):
            return normalise_label(labels[reference])
        if labels and str(reference) not in labels:
            raise ValueError(f"reference {reference} is no index into {len(labels)} labels")
    if isinstance(reference, bool) or not isinstance(reference, str | int) or not normalise_label(str(reference)):
        raise ValueError(f"reference is no label: {reference!r}; give its name, or its index into the labels")
    name = normalise_label(str(reference))
    if labels and name not in map(normalise_label, labels):
        raise ValueError(f"reference {reference!r} is not one of the labels {list(labels)}")
    return name


def normalise_label(text: str) -> str:
    """Case folded, one space between words (`_` and `-` count as spaces), quotes, stars and full stops around taken off.
    The minus of a number stays: -1 is not 1."""
    bare = text.strip(_WRAPPERS).casefold().replace("−", "-")
    sign = "-" if _NEGATIVE.match(bare) else ""
    return sign + " ".join(bare.replace("_", " ").replace("-", " ").split())
