"""Rewards for lengths: near a target, or below a limit. Lengths are in tokens if token ids are known."""

from dataclasses import dataclass

from rewards.errors import PresetError
from rewards.protocol import Context, ItemComponent, Sample, Score

CHARACTERS_A_TOKEN = 4  # English text in common tokenizers


def length_in_tokens(sample: Sample) -> tuple[int, str]:
    """Return the length in tokens, and `tokens`; without token ids, a quarter of the characters, rounded up, and `characters`."""
    if sample.n_tokens is not None:
        return sample.n_tokens, "tokens"
    return -(-len(sample.text) // CHARACTERS_A_TOKEN), "characters"


@dataclass(frozen=True, kw_only=True)
class LengthTarget(ItemComponent):
    """max(0, 1 − |n − target| / tolerance), n in tokens if token ids are known, else in words.

    The status is `ok` for a value above 0, else `wrong`; a blank completion is `format`.
    """

    name: str = "length"
    target: int
    tolerance: int

    def __post_init__(self) -> None:
        if not 0 < self.tolerance <= self.target:
            raise PresetError(
                f"length-target needs 0 < tolerance <= target, got tolerance {self.tolerance}, target {self.target}. "
                "Lower tolerance, so that an empty completion scores 0."
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
    """0 for n <= L − c, (L − c − n) / c for n <= L, else −1; L is `max_length`, c is `cache`, all in tokens.

    n is `length_in_tokens`. The status is `ok` for a value of 0.

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
