"""The base of components that score the answer of a completion, and checks of texts before a model scores them.

Models that score text give arbitrary scores to fragments, loops and echoes, which policies learn to produce. The checks take
linear time and reject such texts before a judge or classifier reads them.

>>> readable("<think>hm</think> The film was a joy to watch.", min_words=5).value
'The film was a joy to watch.'
>>> readable("good " * 30, min_words=5).reason
'repeated'
>>> readable("72 or 70", min_words=5).reason
'fewer than 5 words'
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from rewards.errors import PresetError, nearest
from rewards.extract import (
    Extracted,
    any_answer,
    boxed_answer,
    final_text,
    hash_answer,
    line_answer,
    plain_answer,
    tagged_answer,
)
from rewards.protocol import Context, ItemComponent, Sample, Score
from rewards.samples import prompt_text

PLACES: Mapping[str, Callable[[str, bool], Extracted]] = MappingProxyType(
    {
        "answer": tagged_answer,
        "any": any_answer,
        "boxed": boxed_answer,
        "hash": hash_answer,
        "line": line_answer,
        "tag": tagged_answer,
        "text": plain_answer,
    }
)
"""Places of an answer in a completion: tags (`answer`, `tag`), a box, a line, any of these, or the complete final text."""


def check_place(place: str) -> None:
    """Raise PresetError if `place` is not one of `PLACES`."""
    if place not in PLACES:
        raise PresetError(f"There is no place {place!r} for an answer. {nearest(place, PLACES)}")


def find_answer(sample: Sample, place: str, strict: bool = True) -> Extracted:
    """Return the completion's answer at one of `PLACES`, scanned once for all components."""
    return sample.once(PLACES[place], strict)


def unboxed_answer(sample: Sample, place: str, strict: bool = True) -> Extracted:
    """Return the answer like `find_answer`; if a tag or line contains a box, the content of the box."""
    answer = find_answer(sample, place, strict)
    inner = boxed_answer(answer.value or "", strict)
    return answer if place in ("any", "boxed") or inner.reason == "missing" else inner


@dataclass(frozen=True, kw_only=True)
class AnswerComponent(ItemComponent):
    """Scores the answer at one place of a completion: `format` without an answer, `error` if the row is not usable.

    Args:
        answer_in: place of the answer, one of `PLACES`.
        strict: treat several answers, and text after a tag or line, as no answer.
    """

    find: ClassVar[Callable[..., Extracted]] = staticmethod(find_answer)

    name: str = "accuracy"
    answer_in: str = "answer"
    strict: bool = True

    def __post_init__(self) -> None:
        check_place(self.answer_in)

    def expected(self, sample: Sample) -> Any:
        """Return the expected answer of the row, for `judge`.

        Raises:
            ValueError: the row has none that is usable; the message becomes the reason of an `error`.
        """
        return None

    @abstractmethod
    def judge(self, answer: str, expected: Any, sample: Sample) -> Score:
        """Score an answer. A ValueError means that the row is not usable, too."""

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        try:
            expected = self.expected(sample)
            answer = self.find(sample, self.answer_in, self.strict)
            if answer.value is None:
                return Score(None, "format", {"reason": answer.reason})
            return self.judge(answer.value, expected, sample)
        except ValueError as failure:
            return Score(None, "error", {"reason": str(failure)[:300]})


def verdict(is_right: bool, answer: str, value: float | None = None, **info: Any) -> Score:
    """Return 1 with status `ok`, or `value` as partial credit with `wrong`; `info` has the first 500 characters of the answer."""
    return Score(1.0 if is_right else value, "ok" if is_right else "wrong", {"extracted": answer[:500], **info})


def column(sample: Sample, *names: str) -> Any:
    """Return the value of the first of these dataset columns that is not None, or None."""
    return next((value for name in names if (value := sample.columns.get(name)) is not None), None)


MAX_TEXT = 100_000  # characters, about 25k tokens of English: above the limit of common models
MIN_DISTINCT = 0.5  # share of word trigrams that must be distinct; running English is above 0.95
_MIN_TRIGRAMS = 3
_MIN_ECHO = 20  # characters; an honest answer may quote a shorter prompt

# Each is a run of one class, which cannot backtrack. In scripts without spaces, two characters count as a word.
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,2}|[^\W\d_]+")
_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# A text with two of these addresses the grader.
_TO_THE_GRADER = (
    "ignore the rubric", "ignore all", "ignore the instructions", "ignore previous", "previous instructions",
    "instructions above", "this answer is correct", "full score", "full marks", "maximum score", "highest score",
)  # fmt: skip


def readable(text: str, *, min_words: int = 1, prompt: Any = None) -> Extracted:
    """Return the answer text, or the reason why it is rejected.

    Rejected are: no final text (see `answer_text`), lone surrogates and control characters, fewer than `min_words` words of
    letters, loops (less than `MIN_DISTINCT` of the word trigrams are distinct), instructions to the grader, and a copy of
    the prompt with fewer than `min_words` other words.
    """
    answer = answer_text(text)
    if answer.value is None:
        return answer
    if _SURROGATES.search(answer.value):  # tokenizers do not accept them
        return Extracted(None, "lone surrogates")
    if _CONTROL.search(answer.value):
        return Extracted(None, "control characters")
    text_words = words(answer.value)
    if len(text_words) < min_words:
        return Extracted(None, f"fewer than {min_words} words")
    trigrams = list(zip(text_words, text_words[1:], text_words[2:], strict=False))
    if len(trigrams) >= _MIN_TRIGRAMS and len(set(trigrams)) < MIN_DISTINCT * len(trigrams):
        return Extracted(None, "repeated")
    if sum(phrase in answer.value.casefold() for phrase in _TO_THE_GRADER) > 1:
        return Extracted(None, "talks to the grader")
    if _is_echo(answer.value, question_text(prompt).strip(), min_words):
        return Extracted(None, "prompt echo")
    return answer


def answer_text(text: str) -> Extracted:
    """Return the text after the last `</think>`, or the content of the answer tags in it.

    An unclosed `<think>`, answer tags that are not one filled pair at the end, blank text and more than `MAX_TEXT`
    characters are rejected.
    """
    if len(text) > MAX_TEXT:
        return Extracted(None, "too_long")
    final = final_text(text)
    return tagged_answer(text) if final.value and ("<answer>" in final.value or "</answer>" in final.value) else final


def question_text(prompt: Any) -> str:
    """Return the question of a prompt: the string, or the text of the last user message of a conversation."""
    if isinstance(prompt, list):
        turns = [m for m in prompt if isinstance(m, Mapping) and m.get("role") == "user"]
        return prompt_text(turns[-1:])
    return prompt if isinstance(prompt, str) else ""


def words(text: str) -> list[str]:
    """Return the words of a text, with their case folded."""
    return _WORD.findall(text.casefold())


def reference_texts(value: Any) -> list[str] | None:
    """Return the accepted texts of a reference (a string, a number, or a list of those); None if there is no reference.

    Raises:
        ValueError: the reference has another type or is blank, or a text has lone surrogates.
    """
    if value is None:
        return None
    items = list(value) if isinstance(value, list | tuple) else [value]
    texts = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ValueError(f"reference is not text: {item!r}"[:200])
        texts.append(str(item).strip())
    if not texts or not all(texts):
        raise ValueError(f"reference is blank: {value!r}"[:200])
    for text in texts:
        text.encode()  # raises UnicodeEncodeError, a ValueError, for lone surrogates
    return texts


def _is_echo(text: str, prompt: str, min_words: int) -> bool:
    if not prompt or prompt not in text:
        return False
    added = len(words(text.replace(prompt, " ")))
    return added == 0 or (len(prompt) >= _MIN_ECHO and added < min_words)
