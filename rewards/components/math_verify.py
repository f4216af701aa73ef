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

_GRACE = 0.5  # seconds that a worker has to stop at its deadline; loading SymPy in a new worker takes longer
# Answers with these signs are not plain numbers, but may equal one.
_COMPARED_AS_TEXT = re.compile(r"[=%(:]|\\(?:approx|simeq)")
_REASONS = {
    "different": "not equal to the reference",
    "unread": "the answer cannot be read as mathematics",
    "too_large": "the answer is a number too large to evaluate",
    "unevaluated": "not equal to the reference, or not worked out as far as the reference",
    "copied": "the answer is copied from the prompt, and the reference is spelled differently",
}


@dataclass(frozen=True, kw_only=True)
class MathVerify(IsolatedComponent):
    r"""`high` if the answer equals the reference by math-verify's rules and some stricter ones, else the floor.

    Equal answers are the same number, expression, equation, set (in any order), tuple or interval (order and brackets
    count), matrix or word. Units, `$`, `\text`, `x =` and thousands separators are optional; `50\%` equals 50 and 0.5.
    Every side of an equation has to be equal, so `8 = 7` is not 7. Tiny numbers are compared relative to their size. An
    approximation is accepted only after the exact value. Case, primes, subscripts, bases and ellipses count.

    An answer has to be worked out. An answer that occurs in the prompt has to be spelled like the reference. Unless
    `lenient` is set, an answer has no more arithmetic than the reference (`6 \\cdot 12` is not 72), see `worked_out`.

    Args:
        answer_in: `boxed`, `tag` (`<answer>`, with or without a box inside), `hash` (`####`), `line` (`Answer:`), or
            `any` of these, if they agree.
        lenient: use the last of several answers, allow text after a tag or line, and accept sums, products, powers and
            functions of numbers, like terms and unsolved inequalities. An unclosed box, tag or think block is no answer
            in either case.
        budget: seconds for a batch of up to 1,000 different comparisons, more in proportion; None for no limit. Slow
            comparisons run last; if no time is left for one, its status is `infra` and it has no score.
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
        plain_answer = plain(answer.value, letters=is_number(reference))
        if units_differ(expected, answer.value):
            return self._score("different", sample, answer.value)
        if reference == plain_answer and reference:
            return Score(self.high, "ok", info)
        if (is_equal := same_number(reference, plain_answer)) is not None and "," not in expected:
            return self._score("equal" if is_equal else "different", sample, answer.value)
        if not (self.lenient or number(reference) is None or "," in expected or _COMPARED_AS_TEXT.search(plain_answer)):
            return self._score("unevaluated", sample, answer.value)
        arguments = (answer.value, expected, not self.lenient)
        return Task("rewards.components.math_judge:judge", arguments, info, grace=_GRACE)

    def verdict(self, sample: Sample, result: Any) -> Score:
        if result == "reference":
            return _no_reference(sample)
        return self._score(str(result), sample, self._answer(sample).value or "")

    def _answer(self, sample: Sample) -> Extracted:
        return unboxed_answer(sample, self.answer_in, not self.lenient)

    def _score(self, result: str, sample: Sample, answer: str) -> Score:
        if result == "equal" and is_copied(answer, reference_text(sample.reference) or "", prompt_text(sample.prompt)):
            result = "copied"
        if result == "equal":
            return Score(self.high, "ok", {"extracted": answer})
        return Score(None, "wrong", {"extracted": answer, "reason": _REASONS.get(result, result)})


def _no_reference(sample: Sample) -> Score:
    reason = f"reference cannot be read: {shown(sample.reference, 150)}"
    return Score(None, "error", {"reason": f"{reason}; give the answer in a column such as `reference`"})
