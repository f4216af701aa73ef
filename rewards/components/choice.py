"""Is the chosen letter the right one?"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import column, final_text
from rewards.components.math_verify import ANSWER_PLACES, find_answer
from rewards.errors import PresetError
from rewards.extract import Extracted
from rewards.protocol import Context, ItemComponent, Sample, Score, shown

__all__ = ["ChoiceAccuracy", "chosen_letter"]

# On at most `_MAX_CHARS` characters: a letter, bare or in brackets or emphasis, then nothing or its option's text.
_LETTER = re.compile(
    r"(?:(?:option|choice)\s{1,3})?[*_$\s]{0,4}[(\[]?([A-Za-z])(?:[)\].:]{1,2}|(?![\w]))[*_$\s]{0,4}", re.I
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_SECOND = re.compile(
    r"(?<![\w'’])(?:[(\[][A-Za-z][)\]]|[B-HJ-Z](?![\w'’])|(?:or|and)\s{1,3}[A-Za-z](?![\w'’])|[A-Za-z]\))"
)
_SAID = re.compile(r"(?:[-–—]\s|is (?:the )?(?:correct|right|best)(?: (?:answer|choice|option))?[.!]?$)", re.I)
_MAX_CHARS = 500


def chosen_letter(answer: str, letters: str, options: Sequence[Any] = ()) -> str | None:
    """The one letter that `answer` chooses, in upper case: `C`, `(c)`, `**C**`, `C. Paris`, `Option C`; else None.

    Other letters behind it are a second choice, unless they stand in the text of the chosen one of `options`.

    >>> [chosen_letter(text, "ABCD") for text in ("C", "(c)", "C. Paris", "C or D", "A B C D", "E", "Cat")]
    ['C', 'C', 'C', None, None, None, None]
    """
    if len(answer) > _MAX_CHARS:
        return None
    text = _TEXT.sub(r"\1", answer).strip().removeprefix("\\(").removesuffix("\\)").strip()
    match = _LETTER.match(text)
    if match is None or match[1].upper() not in letters:
        return None
    letter, rest = match[1].upper(), text[match.end() :].strip()
    if rest and text[match.end(1) : match.end(1) + 1] not in (")", "]", ".", ":"):
        if (said := _SAID.match(rest)) is None:
            return None  # `A cat` and `C, D`: the letter has to be set off from what follows
        rest = rest[said.end() :].strip()
    position = letters.index(letter)
    if position < len(options) and _words(rest) == _words(str(options[position])):
        return letter
    return letter if _SECOND.search(rest) is None else None


def _words(text: str) -> str:
    return " ".join(text.casefold().strip(" .*_").split())


@dataclass(frozen=True, kw_only=True)
class ChoiceAccuracy(ItemComponent):
    """1 when the completion chooses the reference's letter, and no other, else 0.

    The reference is a letter (`C`, `(C)`, `C. Paris`) or the position of the right choice, counted from `first_index`.
    An answer that is no single letter is `wrong`; a reference that is none of `letters` is an `error`.
    """

    name: str = "accuracy"
    letters: str = "ABCD"
    answer_in: str = "any"
    strict: bool = True
    first_index: int = 0

    def __post_init__(self) -> None:
        if self.answer_in not in ANSWER_PLACES:
            raise PresetError(f"answer_in is {self.answer_in!r}. Use one of: {', '.join(ANSWER_PLACES)}.")
        if len(set(self.letters)) < max(2, len(self.letters)) or not (
            self.letters.isascii() and self.letters.isupper()
        ):
            raise PresetError(f"letters is {self.letters!r}. Give at least two different capital letters, as 'ABCD'.")

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        expected = self._expected(sample.reference)
        if expected is None:
            reason = f"reference is none of the choices {self.letters}: {shown(sample.reference, 150)}"
            return Score(None, "error", {"reason": f"{reason}; give the letter in a column such as `reference`"})
        options = column(sample, "choices", "options")
        options = options if isinstance(options, list) else []
        found = find_answer(sample, self.answer_in, self.strict)
        if self.answer_in == "any" and found.reason == "missing":
            whole = sample.once(final_text)  # nothing but a letter needs no place of its own
            if whole.value is not None and chosen_letter(whole.value, self.letters, options):
                found = Extracted(whole.value)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        info = {"extracted": found.value[:_MAX_CHARS]}
        if chosen_letter(found.value, self.letters, options) == expected:
            return Score(self.high, "ok", info)
        return Score(None, "wrong", info)

    def _expected(self, reference: object) -> str | None:
        if isinstance(reference, str) and reference.strip().isdecimal() and len(reference) < 5:
            reference = int(reference)
        if isinstance(reference, float) and reference.is_integer():
            reference = int(reference)
        if isinstance(reference, int) and not isinstance(reference, bool):
            position = reference - self.first_index
            return self.letters[position] if 0 <= position < len(self.letters) else None
        return chosen_letter(reference, self.letters) if isinstance(reference, str) else None
