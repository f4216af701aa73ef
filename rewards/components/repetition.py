"""How much of a completion says again what it said already."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

from rewards.errors import PresetError
from rewards.extract import MAX_CHARS
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["MAX_ITEMS", "RepetitionPenalty", "items_of", "repeated_share"]

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
    found = text.split()
    if len(found) * 20 < len(text.strip()):
        return text.strip()[-MAX_ITEMS:], "characters"
    return found[-MAX_ITEMS:], "words"


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
