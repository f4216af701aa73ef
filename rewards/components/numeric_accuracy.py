"""Is the extracted answer the reference number?"""

from collections.abc import Callable
from dataclasses import dataclass

from rewards.errors import PresetError
from rewards.extract import Extracted, boxed_answer, hash_answer, tagged_answer
from rewards.numeric import parse_number, parse_reference
from rewards.protocol import Context, ItemComponent, Sample, Score, shown

__all__ = ["NumericAccuracy"]

_SCANNERS: dict[str, Callable[..., Extracted]] = {
    "answer": tagged_answer,
    "boxed": boxed_answer,
    "hash": hash_answer,
}


@dataclass(frozen=True, kw_only=True)
class NumericAccuracy(ItemComponent):
    """1 when the answer equals the reference as an exact rational, else 0.

    `style` says where the answer stands: `answer` (tags), `boxed` or `hash`. `strict` is passed to the
    scanner. No answer is `format`, another number or no number `wrong`, an unusable reference `error`.
    """

    name: str = "accuracy"
    style: str = "answer"
    strict: bool = True

    def __post_init__(self) -> None:
        if self.style not in _SCANNERS:
            raise PresetError(f"style is {self.style!r}. Use one of: {', '.join(_SCANNERS)}.")

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        expected = parse_reference(sample.reference)
        if expected is None:
            reason = f"reference is not a number: {shown(sample.reference, 150)}"
            return Score(None, "error", {"reason": f"{reason}; give a number in a column such as `reference`"})
        found = sample.once(_SCANNERS[self.style], self.strict)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        if parse_number(found.value) == expected:
            return Score(self.high, "ok", {"extracted": found.value})
        return Score(None, "wrong", {"extracted": found.value})
