"""Does the answer mean the same as the reference, mathematically?"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rewards.components.math_numbers import number
from rewards.components.math_text import MAX_MATH_CHARS, plain, reference_text
from rewards.components.tags import opens_thinking
from rewards.errors import PresetError
from rewards.extract import Extracted, any_answer, boxed_answer, hash_answer, line_answer, tagged_answer
from rewards.isolation import IsolatedComponent, Task
from rewards.protocol import Context, Sample, Score, shown

__all__ = ["ANSWER_PLACES", "MathVerify", "find_answer"]

_SCANNERS: dict[str, Callable[..., Extracted]] = {
    "boxed": boxed_answer,
    "hash": hash_answer,
    "line": line_answer,
    "tag": tagged_answer,
}
MAX_NESTED = 3
_GRACE = 0.5  # seconds; the comparison stops itself at the deadline, and loading SymPy anew would cost more
_BRACE = re.compile(r"[{}]|\\.", re.DOTALL)
ANSWER_PLACES = ("any", *_SCANNERS)
_REASONS = {
    "different": "not equal to the reference",
    "unread": "the answer is no mathematics that can be read",
    "too_large": "the answer is a number too large to evaluate",
}


@dataclass(frozen=True, kw_only=True)
class MathVerify(IsolatedComponent):
    r"""`high` when the answer equals the reference by math-verify's rules and some stricter ones, else the floor.

    Equal: the same number, expression, equation, set (any order), tuple or interval (order and brackets), matrix, time
    of day or word; written with or without units, `$`, `\text`, `x =`, thousands separators; `50\%` is 50 and 0.5.
    Every side of an equation has to be equal, so `8 = 7` is not 7; tiny numbers are compared by their size. Rational
    numbers have no approximation; case, primes, subscripts, bases and ellipses count.

    Args:
        answer_in: `boxed`, `tag` (`<answer>`, with or without a box within), `hash` (`####`), `line` (`Answer:`), or
            `any` of these, so long as they agree.
        strict: refuse answers given more than once and differently, and text after a tag or line. A box, tag or think
            block that is opened and not closed is no answer in either case.
        budget: seconds for a batch of up to 1,000 different comparisons, in proportion beyond; None for no limit.
    """

    name: str = "accuracy"
    version: str = "2"
    answer_in: str = "boxed"
    strict: bool = True
    budget: float | None = 30.0

    def __post_init__(self) -> None:
        if self.answer_in not in ANSWER_PLACES:
            raise PresetError(f"answer_in is {self.answer_in!r}. Use one of: {', '.join(ANSWER_PLACES)}.")

    def batch_seconds(self, tasks: int) -> float | None:
        return None if self.budget is None else self.budget * max(1.0, tasks / 1000)

    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        expected = reference_text(sample.reference)
        if expected is None:
            return _no_reference(sample)
        found = find_answer(sample, self.answer_in, self.strict)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        info = {"extracted": found.value}
        if len(found.value) > MAX_MATH_CHARS:
            return Score(None, "format", {"reason": "too_long"})
        one, other = plain(expected), plain(found.value)
        if one == other and one:
            return Score(self.high, "ok", info)
        if one.isdigit() and number(other) is not None and "." not in other:
            equal = number(one) == number(other)
            return Score(self.high, "ok", info) if equal else self._wrong("different", info)
        return Task("rewards.components.math_judge:judge", (found.value, expected, self.deadline), info, grace=_GRACE)

    def verdict(self, sample: Sample, result: Any) -> Score:
        found = find_answer(sample, self.answer_in, self.strict)
        info = {"extracted": found.value}
        if result == "equal":
            return Score(self.high, "ok", info)
        if result == "reference":
            return _no_reference(sample)
        return self._wrong(str(result), info)

    def _wrong(self, result: str, info: dict[str, Any]) -> Score:
        return Score(None, "wrong", {**info, "reason": _REASONS.get(result, result)})


def find_answer(sample: Sample, answer_in: str, strict: bool) -> Extracted:
    """The answer's text; a tag or line that holds a box holds the box's content, a box that holds but a box that one's.

    Where the prompt opened a `<think>` that the completion does not close, there is none.
    """
    if opens_thinking(sample.prompt) and "</think>" not in sample.text:
        return Extracted(None, "unterminated_think")
    found = sample.once(any_answer) if answer_in == "any" else sample.once(_SCANNERS[answer_in], strict)
    if found.reason == "duplicated_box" and (text := _unnested(sample.text)) != sample.text:
        found = any_answer(text) if answer_in == "any" else _SCANNERS[answer_in](text, strict)
    if answer_in in ("any", "boxed") or found.value is None:
        return found
    inner = boxed_answer(found.value, strict)
    return found if inner.reason == "missing" else inner


def _unnested(text: str) -> str:
    r"""`text` with a last box that is all that its outer boxes hold, `\boxed{\boxed{7}}`, as one box."""
    for _ in range(MAX_NESTED):
        inner = text.rfind("\\boxed{")
        outer = text[:inner].rstrip() if inner > 0 else ""
        end = _closing_brace(text, inner + len("\\boxed"))
        rest = text[end + 1 :].lstrip() if end > 0 else ""
        if not outer.endswith("\\boxed{") or not rest.startswith("}"):
            break
        text = outer.removesuffix("\\boxed{") + text[inner : end + 1] + rest[1:]
    return text


def _closing_brace(text: str, opened: int) -> int:
    """Where the brace at `opened` is closed, or -1; escaped braces are skipped."""
    depth = 0
    for match in _BRACE.finditer(text, opened, opened + MAX_MATH_CHARS):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return -1


def _no_reference(sample: Sample) -> Score:
    reason = f"reference cannot be read: {shown(sample.reference, 150)}"
    return Score(None, "error", {"reason": f"{reason}; give the answer in a column such as `reference`"})
