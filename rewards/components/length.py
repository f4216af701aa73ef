"""How long is the completion, and is it about as long as asked?"""

from dataclasses import dataclass

from rewards.errors import PresetError
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["CHARACTERS_A_TOKEN", "LengthTarget", "length_in_tokens"]

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
