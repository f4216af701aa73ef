"""Reward lengths: near a target, within a limit, shorter than siblings; and penalise repetition.

Some scale another component's verdict by length. Lengths are in tokens where token ids are given.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rewards.errors import PresetError
from rewards.evaluation import run_component
from rewards.extract import MAX_CHARS
from rewards.protocol import Component, Context, ItemComponent, Sample, Score, shown


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A component whose scores are kept with the samples, so that shaping may ask again at no cost.

    For checkers whose verdict does not depend on the context or on the other samples.
    """

    component: Component

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "component":  # what copies and pickles ask for before there is one
            raise AttributeError(name)
        return getattr(self.component, name)

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        """Score the samples that were not scored before; the others took no time."""
        key = ("verdict", self.component)
        known = {sample.index: replace(sample._memo[key], seconds=0.0) for sample in samples if key in sample._memo}
        missing = [sample for sample in samples if sample.index not in known]
        for sample, score in zip(missing, run_component(self.component, missing, ctx), strict=True):
            known[sample.index] = sample._memo[key] = score
        return [known[sample.index] for sample in samples]


CHARACTERS_A_TOKEN = 4  # of English, by common tokenizers


def length_in_tokens(sample: Sample) -> tuple[int, str]:
    """(length, what was counted): `tokens` when token ids are given, else `characters`, four to a token, rounded up."""
    if sample.n_tokens is not None:
        return sample.n_tokens, "tokens"
    return -(-len(sample.text) // CHARACTERS_A_TOKEN), "characters"


@dataclass(frozen=True, kw_only=True)
class LengthTarget(ItemComponent):
    """max(0, 1 − |n − target| / tolerance), n in tokens when token ids are given, else in words.

    `ok` while the value is above 0; a blank completion is `format`.
    """

    name: str = "length"
    target: int
    tolerance: int

    def __post_init__(self) -> None:
        if not 0 < self.tolerance <= self.target:
            raise PresetError(
                f"length-target needs 0 < tolerance <= target, got tolerance {self.tolerance}, target {self.target}. "
                "Lower tolerance, so that an empty completion earns nothing."
            )

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        if not sample.text.strip():
            return Score(None, "format", {"reason": "blank"})
        unit, length = "tokens", sample.n_tokens
        if length is None:
            unit, length = "words", len(sample.text.split())
        value = max(0.0, 1.0 - abs(length - self.target) / self.tolerance)
        return Score(value, "ok" if value > 0 else "wrong", {unit: length})


@dataclass(frozen=True, kw_only=True)
class SoftOverlong(ItemComponent):
    """0 while n <= L − c, (L − c − n) / c up to L, −1 beyond; L is `max_length`, c is `cache`, all in tokens.

    n as in `length_in_tokens`. `ok` while nothing is taken off.

    Source: DAPO, 2503.14476, equation 13.
    """

    name: str = "overlong"
    floor: float = -1.0
    low: float = -1.0
    high: float = 0.0
    max_length: int
    cache: int

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_length:
            raise PresetError(f"Needs 0 < cache <= max_length, got cache {self.cache}, max_length {self.max_length}.")

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        length, unit = length_in_tokens(sample)
        value = max(-1.0, min(0.0, (self.max_length - self.cache - length) / self.cache))
        return Score(value, "ok" if value == 0 else "wrong", {"length": length, "counted": unit})


@dataclass(frozen=True, kw_only=True)
class ShapedByLength(ABC):
    """The verdict of `checker`, shaped by the length n in tokens (see `length_in_tokens`); its status is the checker's.

    Where the checker fails, so does this.
    """

    checker: Component
    name: str = "length"
    version: str = "1"

    @abstractmethod
    def value(self, sample: Sample, is_correct: bool, length: int, group: Sequence[int]) -> float:
        """The value of a right or wrong answer of this length, among the lengths of its group in the batch.

        Raises:
            ValueError: the row has no usable number; the message is the reason of an `error`.
        """

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        lengths = [length_in_tokens(sample) for sample in samples]
        groups: dict[int, list[int]] = {}
        for sample, (length, _) in zip(samples, lengths, strict=True):
            groups.setdefault(sample.group_id, []).append(length)
        scores = []
        for sample, (length, unit), verdict in zip(
            samples, lengths, run_component(self.checker, samples, ctx), strict=True
        ):
            score = verdict
            if verdict.status in ("ok", "wrong", "format"):
                info = {**verdict.info, "length": length, "counted": unit}
                try:
                    value = self.value(sample, verdict.status == "ok", length, groups[sample.group_id])
                    score = Score(value, verdict.status, info, verdict.seconds)
                except ValueError as failure:
                    score = Score(None, "error", {"reason": str(failure)})
            scores.append(score)
        return scores


@dataclass(frozen=True, kw_only=True)
class LengthBudget(ShapedByLength):
    """c · clip(slope (N − n) + offset, 0, 1): the verdict of `checker` c (1 or 0), with n tokens against a budget of N.

    A right answer within the budget earns at least `offset` and one far over it nothing. N is the row's column `column` if
    there is one, else `budget`. A row without a usable budget is an `error`.

    Source: LCPO-Max of L1, 2503.04697, equation 2; slope 0.0003, offset 0.5.
    """

    name: str = "budget"
    floor: float = 0.0
    low: float = 0.0
    high: float = 1.0
    budget: int | None = None
    column: str = "budget"
    slope: float = 0.0003
    offset: float = 0.5

    def __post_init__(self) -> None:
        if self.slope <= 0 or not 0 < self.offset <= 1:
            raise PresetError(f"Needs slope > 0 and 0 < offset <= 1, got slope {self.slope}, offset {self.offset}.")
        if self.budget is not None and self.budget <= 0:
            raise PresetError(f"budget is {self.budget}. Give a number of tokens, or None to take it from each row.")

    def value(self, sample: Sample, is_correct: bool, length: int, group: Sequence[int]) -> float:
        cell = sample.columns.get(self.column, self.budget)
        cell = self.budget if cell is None else cell
        try:
            budget = 0.0 if cell is None or isinstance(cell, bool) else float(cell)
        except (TypeError, ValueError, OverflowError):
            budget = 0.0
        if not (math.isfinite(budget) and budget > 0):
            reason = f"no budget: column {self.column!r} holds {shown(cell, 100)}"
            raise ValueError(f"{reason}; give a positive number there, or budget=")
        return is_correct * min(1.0, max(0.0, self.slope * (budget - length) + self.offset))


def length_share(length: float, shortest: float, longest: float) -> float:
    """0.5 for the shortest of a group, −0.5 for the longest, 0 where all are equally long.

    >>> [length_share(n, 100, 300) for n in (100, 150, 300)]
    [0.5, 0.25, -0.5]
    """
    return 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0


@dataclass(frozen=True, kw_only=True)
class KimiLength(ShapedByLength):
    """λ = 0.5 − (n − n_min) / (n_max − n_min) within the group; λ for a right answer, min(0, λ) for a wrong one.

    n_min and n_max are taken over the samples of one `group_id` in the batch; 0 for all when they are equally long, as in a
    group of one.

    Source: Kimi k1.5, 2501.12599, section 2.3.3.
    """

    floor: float = -0.5
    low: float = -0.5
    high: float = 0.5

    def value(self, sample: Sample, is_correct: bool, length: int, group: Sequence[int]) -> float:
        share = length_share(length, min(group), max(group))
        return share if is_correct else min(0.0, share)


@dataclass(frozen=True, kw_only=True)
class CosineLength(ShapedByLength):
    """The verdict of `checker`, scaled: right answers fall with length, wrong ones rise.

    right: η = correct_short at length 0, correct_long at max_length; wrong: wrong_short, wrong_long;
    η(n) = η_long + ½(η_short − η_long)(1 + cos(π n / max_length)), n clamped to [0, max_length]. Beyond max_length the value
    is `exceeded` when that is given, whatever the answer.

    Source: the cosine reward of 2502.03373, which gives `exceeded` for a completion that reaches the maximum. Without
    the clamp the cosine turns back beyond it, and twice the maximum earns what nothing at all does.
    """

    name: str = "cosine"
    max_length: int
    correct_short: float = 1.0
    correct_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    exceeded: float | None = None

    def __post_init__(self) -> None:
        if self.max_length <= 0:
            raise PresetError(f"max_length is {self.max_length}. Give the number of tokens a completion may have.")
        if min(self.correct_short, self.correct_long) <= max(self.wrong_short, self.wrong_long):
            raise PresetError(
                "A wrong answer could earn as much as a right one: "
                f"correct {self.correct_short} to {self.correct_long}, wrong {self.wrong_short} to {self.wrong_long}. "
                "Set both correct values above both wrong ones."
            )

    @property
    def low(self) -> float:
        return min(self.wrong_short, self.wrong_long, *([] if self.exceeded is None else [self.exceeded]))

    @property
    def high(self) -> float:
        return max(self.correct_short, self.correct_long)

    @property
    def floor(self) -> float:
        return self.low

    def value(self, sample: Sample, is_correct: bool, length: int, group: Sequence[int]) -> float:
        if self.exceeded is not None and length > self.max_length:
            return self.exceeded
        short, long = (self.correct_short, self.correct_long) if is_correct else (self.wrong_short, self.wrong_long)
        return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * min(length / self.max_length, 1.0)))


MAX_ITEMS = 32_768  # tokens or words looked at, from the end, where loops are


def repeated_share(items: Sequence[Hashable], ngram: int) -> float:
    """1 − distinct n-grams / all n-grams, in [0, 1); 0 where there is no n-gram.

    >>> repeated_share("the cat the cat the".split(), 2)  # the cat, cat the, the cat, cat the: 2 of 4 distinct
    0.5
    """
    total = len(items) - ngram + 1
    if total <= 0:
        return 0.0
    return 1.0 - len(set(zip(*(islice(items, at, None) for at in range(ngram)), strict=False))) / total


def items_of(sample: Sample) -> tuple[Sequence[Hashable], str]:
    """The last `MAX_ITEMS` (items, kind): tokens when their ids are given, else words, lower-cased.

    Text with hardly any white space, as in Chinese or one endless word, is taken by characters.
    """
    if sample.token_ids is not None:
        return sample.token_ids[-MAX_ITEMS:], "tokens"
    text = sample.text[-MAX_CHARS:].lower()
    words = text.split()
    if len(words) * 20 < len(text.strip()):
        return text.strip()[-MAX_ITEMS:], "characters"
    return words[-MAX_ITEMS:], "words"


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty(ItemComponent):
    """−(share of n-grams that are repeated), in (−1, 0]; 0 for a completion of fewer than `ngram` items.

    Items are tokens, words or characters, see `items_of`. `ok` while nothing is repeated.

    Source: the n-gram repetition penalty of 2502.03373, there a process reward on each repeated token; as one number
    for the whole completion it is what open-r1 uses.
    """

    name: str = "repetition"
    floor: float = -1.0
    low: float = -1.0
    high: float = 0.0
    ngram: int = 20

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise PresetError(f"ngram is {self.ngram}. Give at least 1.")

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        items, kind = items_of(sample)
        share = repeated_share(items, self.ngram)
        return Score(-share, "ok" if share == 0 else "wrong", {"repeated": round(share, 4), "counted": kind})
