"""A penalty that grows over the last tokens before the maximum length."""

from dataclasses import dataclass

from rewards.components.length import length_in_tokens
from rewards.errors import PresetError
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["SoftOverlong", "overlong_penalty"]


def overlong_penalty(length: float, max_length: float, cache: float) -> float:
    """0 up to `max_length` − `cache`, −1 beyond `max_length`, a straight line between.

    >>> [overlong_penalty(n, 100, 20) for n in (80, 85, 100, 101)]
    [0.0, -0.25, -1.0, -1.0]
    """
    if length <= max_length - cache:
        return 0.0
    return -1.0 if length > max_length else (max_length - cache - length) / cache


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
        value = overlong_penalty(length, self.max_length, self.cache)
        return Score(value, "ok" if value == 0 else "wrong", {"length": length, "counted": unit})
