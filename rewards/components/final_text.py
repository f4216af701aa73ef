"""Components that judge the answer of a completion, where it stands, and whether it is text worth showing to a model.

The checks of text are linear and run before any judge or classifier sees a completion. Models that score text are arbitrary on
fragments, loops and echoes, and policies find that out first. What is refused here costs nothing and is never scored.

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
"""Where an answer may stand in a completion: tags (`answer`, `tag`), a box, a line, any of these, or all of the final text."""


def check_place(place: str) -> None:
    """Raise PresetError for a place that is none of `PLACES`."""
    if place not in PLACES:
        raise PresetError(f"No answer stands at {place!r}. {nearest(place, PLACES)}")


def find_answer(sample: Sample, place: str, strict: bool = True) -> Extracted:
    """The completion's answer at one of `PLACES`, scanned once however many components ask."""
    return sample.once(PLACES[place], strict)


def unboxed_answer(sample: Sample, place: str, strict: bool = True) -> Extracted:
    """`find_answer`; of a tag or line that holds a box, the box's content."""
    answer = find_answer(sample, place, strict)
    inner = boxed_answer(answer.value or "", strict)
    return answer if place in ("any", "boxed") or inner.reason == "missing" else inner


@dataclass(frozen=True, kw_only=True)
class AnswerComponent(ItemComponent):
    """Judges the answer at one place of a completion. No answer is `format`, a row that cannot be judged `error`.

    Args:
        answer_in: where the answer stands, one of `PLACES`.
        strict: refuse several answers, and text behind a tag or line, as no answer at all.
    """

    find: ClassVar[Callable[..., Extracted]] = staticmethod(find_answer)

    name: str = "accuracy"
    answer_in: str = "answer"
    strict: bool = True

    def __post_init__(self) -> None:
        check_place(self.answer_in)

    def expected(self, sample: Sample) -> Any:
        """What the row asks for.

        Raises:
            ValueError: nothing that can be judged; the message is the reason of an `error`.
        """
        return None

    @abstractmethod
    def judge(self, answer: str, expected: Any, sample: Sample) -> Score:
        """Score an answer; a ValueError here is the row's fault, too."""

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
    """`ok` with 1, or `wrong` with `value` as partial credit, and the answer, cut to 500 characters."""
    return Score(1.0 if is_right else value, "ok" if is_right else "wrong", {"extracted": answer[:500], **info})


def column(sample: Sample, *names: str) -> Any:
    """The first of these dataset columns that holds something, or None."""
    return next((value for name in names if (value := sample.columns.get(name)) is not None), None)


MAX_TEXT = 100_000  # characters, about 25k tokens of English: more than any model here reads
MIN_DISTINCT = 0.5  # share of word trigrams that must be distinct; running English is above 0.95
_MIN_TRIGRAMS = 3
_MIN_ECHO = 20  # characters; shorter prompts may well be quoted by an honest answer

# One class each, nothing to backtrack over. Scripts without spaces count every two characters as a word.
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,2}|[^\W\d_]+")
_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# Two of these in one text are meant for whoever grades it.
_TO_THE_GRADER = (
    "ignore the rubric", "ignore all", "ignore the instructions", "ignore previous", "previous instructions",
    "instructions above", "this answer is correct", "full score", "full marks", "maximum score", "highest score",
)  # fmt: skip


def readable(text: str, *, min_words: int = 1, prompt: Any = None) -> Extracted:
    """The text that a reader would take for the answer, or the reason why there is none.

    Refused: no final text (see `answer_text`), lone surrogates and control characters, fewer than `min_words` words
    made of letters, loops (fewer than half of the word trigrams distinct), pleas to the grader, and
    the prompt said again with fewer than `min_words` words of its own.
    """
    answer = answer_text(text)
    if answer.value is None:
        return answer
    if _SURROGATES.search(answer.value):  # which no tokenizer takes
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
    """Everything after the last `</think>`; the content of the answer tags when there are any there.

    An unclosed `<think>`, answer tags that are not one filled pair at the end, blank text and more than `MAX_TEXT`
    characters are refused.
    """
    if len(text) > MAX_TEXT:
        return Extracted(None, "too_long")
    final = final_text(text)
    return tagged_answer(text) if final.value and ("<answer>" in final.value or "</answer>" in final.value) else final


def question_text(prompt: Any) -> str:
    """The question of a prompt: the string, or the text of the last user message of a conversation."""
    if isinstance(prompt, list):
        turns = [m for m in prompt if isinstance(m, Mapping) and m.get("role") == "user"]
        return prompt_text(turns[-1:])
    return prompt if isinstance(prompt, str) else ""


def words(text: str) -> list[str]:
    """Runs of letters, folded to one case."""
    return _WORD.findall(text.casefold())


def reference_texts(value: Any) -> list[str] | None:
    """The accepted texts in a reference: a string, a number, or a list of those. None when there is no reference.

    Raises:
        ValueError: anything else, or nothing in it that can be read.
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
        text.encode()  # lone surrogates: a UnicodeEncodeError, which is a ValueError
    return texts


def _is_echo(text: str, prompt: str, min_words: int) -> bool:
    if not prompt or prompt not in text:
        return False
    added = len(words(text.replace(prompt, " ")))
    return added == 0 or (len(prompt) >= _MIN_ECHO and added < min_words)
