"""Find the answer of a free-text preset: in tags, in a box, behind hashes, or as all that follows the thinking.

>>> final_text("<think>hm</think> Paris. ")
FinalText(value='Paris.', reason=None)
>>> plain_answer("<answer>Paris</answer>").reason
'stray_tag'

And whether it is text worth showing to a model: linear checks that run before any judge or classifier sees a completion. Models
that score text are arbitrary on fragments, loops and echoes, and policies find that out first. What is refused here costs nothing
and is never scored.

>>> readable("<think>hm</think> The film was a joy to watch.", min_words=5)
FinalText(value='The film was a joy to watch.', reason=None)
>>> readable("good " * 30, min_words=5).reason
'repeated'
>>> readable("72 or 70", min_words=5).reason
'fewer than 5 words'
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rewards.errors import PresetError, nearest
from rewards.extract import MAX_CHARS, Extracted, boxed_answer, hash_answer, tagged_answer
from rewards.protocol import Sample
from rewards.samples import prompt_text

_INVISIBLE = "\x00\u200b\u200c\u200d\u2060\ufeff"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class FinalText(NamedTuple):
    """The text, stripped and not blank, or None with the reason why there is none."""

    value: str | None
    reason: str | None = None


def final_text(text: str, max_chars: int = MAX_CHARS) -> FinalText:
    """All that follows the last `</think>`, stripped; not blank, and no thinking block left open."""
    if len(text) > max_chars:
        return FinalText(None, "too_long")
    closed = text.rfind("</think>")
    if text.rfind("<think>") > closed:
        return FinalText(None, "unterminated_think")
    rest = text[closed + len("</think>") if closed >= 0 else 0 :].strip().strip(_INVISIBLE).strip()
    return FinalText(rest) if rest else FinalText(None, "blank")


def plain_answer(text: str, max_chars: int = MAX_CHARS) -> FinalText:
    """`final_text` that holds no think or answer tag: a model that writes tags where none were asked has not answered."""
    final = final_text(text, max_chars)
    if final.value is not None and any(tag in final.value for tag in _TAGS):
        return FinalText(None, "stray_tag")
    return final


STYLES: Mapping[str, Callable[..., Extracted | FinalText]] = MappingProxyType(
    {"answer": tagged_answer, "boxed": boxed_answer, "hash": hash_answer, "text": plain_answer}
)


def check_style(style: str) -> None:
    """
    Raises:
        PresetError: no such style.
    """
    if style not in STYLES:
        raise PresetError(f"style is {style!r}. {nearest(style, STYLES)}")


def find_answer(sample: Sample, style: str) -> Extracted | FinalText:
    """The completion's answer in one of `STYLES`, scanned once however many components ask."""
    return sample.once(STYLES[style])


def column(sample: Sample, *names: str) -> Any:
    """The first of these dataset columns that holds something, or None."""
    return next((value for name in names if (value := sample.columns.get(name)) is not None), None)


MAX_TEXT = 100_000  # characters, about 25k tokens of English: more than any model here reads
MIN_DISTINCT = 0.5  # share of word trigrams that must be distinct; running English is above 0.95
_MIN_TRIGRAMS = 3
_MIN_ECHO = 20  # characters; shorter prompts may well be quoted by an honest answer

# One class each, nothing to backtrack over. Scripts without spaces count every two characters as a word.
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,2}|[^\W\d_]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# Two of these in one text are meant for whoever grades it.
_TO_THE_GRADER = (
    "ignore the rubric", "ignore all", "ignore the instructions", "ignore previous", "previous instructions",
    "instructions above", "this answer is correct", "full score", "full marks", "maximum score", "highest score",
)  # fmt: skip


def readable(text: str, *, min_words: int = 1, prompt: Any = None, max_chars: int = MAX_TEXT) -> FinalText:
    """The text that a reader would take for the answer, or the reason why there is none.

    Refused: no final text (see `answer_text`), lone surrogates and control characters, fewer than `min_words` words
    made of letters, loops (fewer than half of the word trigrams distinct), pleas to the grader, and
    the prompt said again with fewer than `min_words` words of its own.
    """
    answer = answer_text(text, max_chars)
    if answer.value is None:
        return answer
    if not is_encodable(answer.value):
        return FinalText(None, "lone surrogates")
    if _CONTROL.search(answer.value):
        return FinalText(None, "control characters")
    text_words = words(answer.value)
    if len(text_words) < min_words:
        return FinalText(None, f"fewer than {min_words} words")
    trigrams = list(zip(text_words, text_words[1:], text_words[2:], strict=False))
    if len(trigrams) >= _MIN_TRIGRAMS and len(set(trigrams)) < MIN_DISTINCT * len(trigrams):
        return FinalText(None, "repeated")
    if sum(phrase in answer.value.casefold() for phrase in _TO_THE_GRADER) > 1:
        return FinalText(None, "talks to the grader")
    if _is_echo(answer.value, question_text(prompt).strip(), min_words):
        return FinalText(None, "prompt echo")
    return answer


def answer_text(text: str, max_chars: int = MAX_TEXT) -> FinalText:
    """Everything after the last `</think>`; the content of the answer tags when there are any there.

    An unclosed `<think>`, answer tags that are not one filled pair at the end, blank text and more than `max_chars`
    characters are refused.
    """
    final = final_text(text, max_chars)
    if final.value is not None and ("<answer>" in final.value or "</answer>" in final.value):
        tagged = tagged_answer(text, True, max_chars)
        return FinalText(tagged.value, tagged.reason)
    return final


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


def is_encodable(text: str) -> bool:
    """Whether the text is free of lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
