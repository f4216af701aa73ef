"""Is the answer written like the reference, spelling aside?"""

from dataclasses import dataclass

from rewards.components.math_numbers import number
from rewards.components.math_text import MAX_MATH_CHARS, is_number, match_form, reference_text
from rewards.components.math_verify import check_places, find_answer
from rewards.protocol import Context, ItemComponent, Sample, Score, shown

__all__ = ["MathMatch"]


@dataclass(frozen=True, kw_only=True)
class MathMatch(ItemComponent):
    r"""1 when answer and reference have one normalised spelling, or are the same number, else 0. Computes nothing else.

    Normalised away: spaces but between digits or words, `$`, `\left`, `\text`, units, `%`, digit grouping, `\dfrac`,
    `\frac12`, `x =`.
    """

    name: str = "accuracy"
    answer_in: str = "boxed"
    boxes: str = "one"
    lenient: bool = False

    def __post_init__(self) -> None:
        check_places(self.answer_in, self.boxes)

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        reference = reference_text(sample.reference)
        if reference is None:
            reason = f"reference cannot be read: {shown(sample.reference, 150)}"
            return Score(None, "error", {"reason": f"{reason}; give the answer in a column such as `reference`"})
        found = find_answer(sample, self.answer_in, not self.lenient, self.boxes)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        info = {"extracted": found.value}
        if len(found.value) > MAX_MATH_CHARS:
            return Score(None, "format", {"reason": "too_long"})
        expected = match_form(reference)
        given = match_form(found.value, letters=is_number(expected))
        value = number(expected)
        if (expected and expected == given) or (value is not None and value == number(given)):
            return Score(self.high, "ok", info)
        return Score(None, "wrong", info)
