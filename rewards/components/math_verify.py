"""Compare an answer with the reference by mathematical meaning."""

import re
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import check_place, unboxed_answer
from rewards.components.math_expressions import is_copied
from rewards.components.math_text import (
    MAX_MATH_CHARS,
    is_number,
    number,
    plain,
    reference_text,
    same_number,
    units_differ,
)
from rewards.extract import Extracted
from rewards.isolation import IsolatedComponent, Task
from rewards.protocol import Context, Sample, Score, shown
from rewards.samples import prompt_text

_GRACE = 0.5  # seconds; the comparison can be interrupted, and loading SymPy anew would cost more
# Such a text is no number by itself, but may be right.
_COMPARED_AS_TEXT = re.compile(r"[=%(:]|\\(?:approx|simeq)")
_REASONS = {
    "different": "not equal to the reference",
    "unread": "the answer is no mathematics that can be read",
    "too_large": "the answer is a number too large to evaluate",
    "unevaluated": "not equal to the reference, or not worked out as far as it",
    "copied": "the answer stands in the prompt, and the reference is written otherwise",
}


@dataclass(frozen=True, kw_only=True)
class MathVerify(IsolatedComponent):
    r"""`high` when the answer equals the reference by math-verify's rules and some stricter ones, else the floor.

    Equal: the same number, expression, equation, set (any order), tuple or interval (order and brackets), matrix or
    word; written with or without units, `$`, `\text`, `x =`, thousands separators; `50\%` is 50 and 0.5.
    Every side of an equation has to be equal, so `8 = 7` is not 7; tiny numbers are compared by their size. An
    approximation counts beside the exact value only; case, primes, subscripts, bases and ellipses count.

    An answer has to be worked out: where it stands in the prompt it has to be the reference to the letter, and unless
    `lenient` it holds no more arithmetic than the reference (`6 \\cdot 12` is not 72), see `worked_out`.

    Args:
        answer_in: `boxed`, `tag` (`<answer>`, with or without a box within), `hash` (`####`), `line` (`Answer:`), or
            `any` of these, so long as they agree.
        lenient: the last answer counts of several, text may follow a tag or line, and sums, products, powers and functions
            of numbers, like terms and unsolved inequalities are accepted. A box, tag or think block that is opened and not
            closed is no answer in either case.
        budget: seconds for a batch of up to 1,000 different comparisons, in proportion beyond; None for no limit. Slow ones
            are tried last; one for which no time was left is `infra`: no score, and no word on the answer.
    """

    name: str = "accuracy"
    version: str = "4"
    answer_in: str = "boxed"
    lenient: bool = False
    budget: float | None = 30.0

    def __post_init__(self) -> None:
        check_place(self.answer_in)

    def batch_seconds(self, tasks: int) -> float | None:
        return None if self.budget is None else self.budget * max(1.0, tasks / 1000)

    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        expected = reference_text(sample.reference)
        if expected is None:
            return _no_reference(sample)
        answer = self._answer(sample)
        if answer.value is None:
            return Score(None, "format", {"reason": answer.reason})
        info = {"extracted": answer.value}
        if len(answer.value) > MAX_MATH_CHARS:
            return Score(None, "format", {"reason": "too_long"})
        reference = plain(expected)
        written = plain(answer.value, letters=is_number(reference))
        if units_differ(expected, answer.value):
            return self._settled("different", sample, answer.value)
        if reference == written and reference:
            return Score(self.high, "ok", info)
        if (equal := same_number(reference, written)) is not None and "," not in expected:
            return self._settled("equal" if equal else "different", sample, answer.value)
        if not (self.lenient or number(reference) is None or "," in expected or _COMPARED_AS_TEXT.search(written)):
            return self._settled("unevaluated", sample, answer.value)
        arguments = (answer.value, expected, not self.lenient)
        return Task("rewards.components.math_judge:judge", arguments, info, grace=_GRACE)

    def verdict(self, sample: Sample, result: Any) -> Score:
        if result == "reference":
            return _no_reference(sample)
        return self._settled(str(result), sample, self._answer(sample).value or "")

    def _answer(self, sample: Sample) -> Extracted:
        return unboxed_answer(sample, self.answer_in, not self.lenient)

    def _settled(self, result: str, sample: Sample, answer: str) -> Score:
        if result == "equal" and is_copied(answer, reference_text(sample.reference) or "", prompt_text(sample.prompt)):
            result = "copied"
        if result == "equal":
            return Score(self.high, "ok", {"extracted": answer})
        return Score(None, "wrong", {"extracted": answer, "reason": _REASONS.get(result, result)})


def _no_reference(sample: Sample) -> Score:
    reason = f"reference cannot be read: {shown(sample.reference, 150)}"
    return Score(None, "error", {"reason": f"{reason}; give the answer in a column such as `reference`"})
