"""Short answers: a number, a letter, a label, a few words."""

import contextlib
import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from rewards.components.final_text import AnswerComponent, column, unboxed_answer, verdict
from rewards.components.math_text import is_bare_number, parse_number, parse_reference
from rewards.errors import PresetError
from rewards.extract import Extracted, final_text
from rewards.protocol import Sample, Score, shown


@dataclass(frozen=True, kw_only=True)
class NumericAccuracy(AnswerComponent):
    """1 if the answer equals the reference as an exact rational number, else 0."""

    def expected(self, sample: Sample) -> Fraction:
        expected = parse_reference(sample.reference)
        if expected is None:
            reason = f"reference is not a number: {shown(sample.reference, 150)}"
            raise ValueError(f"{reason}; give a number in a column such as `reference`")
        return expected

    def judge(self, answer: str, expected: Fraction, sample: Sample) -> Score:
        return verdict(parse_number(answer) == expected, answer)


# Matches a letter, bare or in brackets or emphasis, at the start of at most `_MAX_CHARS` characters.
_LETTER = re.compile(
    r"(?:(?:option|choice)\s{1,3})?[*_$\s]{0,4}[(\[]?([A-Za-z])(?:[)\].:]{1,2}|(?![\w]))[*_$\s]{0,4}", re.I
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_SECOND_LETTER = re.compile(
    r"(?<![\w'’])(?:[(\[][A-Za-z][)\]]|[B-HJ-Z](?![\w'’])|(?:or|and)\s{1,3}[A-Za-z](?![\w'’])|[A-Za-z]\))"
)
_AFTER_LETTER = re.compile(r"(?:[-–—]\s|is (?:the )?(?:correct|right|best)(?: (?:answer|choice|option))?[.!]?$)", re.I)
_MAX_CHARS = 500


def chosen_letter(answer: str, letters: str, options: Sequence[Any] = ()) -> str | None:
    """Return the letter that `answer` chooses (`C`, `(c)`, `**C**`, `C. Paris`, `Option C`) in upper case, or None.

    Another letter after it is a second choice, unless the text after it equals the chosen one of `options`.

    >>> [chosen_letter(text, "ABCD") for text in ("C", "(c)", "C. Paris", "C or D", "A B C D", "E", "Cat")]
    ['C', 'C', 'C', None, None, None, None]
    """
    if len(answer) > _MAX_CHARS:
        return None
    text = _TEXT_COMMAND.sub(r"\1", answer).strip().removeprefix("\\(").removesuffix("\\)").strip()
    match = _LETTER.match(text)
    if match is None or match[1].upper() not in letters:
        return None
    letter, rest = match[1].upper(), text[match.end() :].strip()
    if rest and text[match.end(1) : match.end(1) + 1] not in (")", "]", ".", ":"):
        if (separator := _AFTER_LETTER.match(rest)) is None:
            return None  # the letter is not separated from the next word, as in `A cat` and `C, D`
        rest = rest[separator.end() :].strip()
    position = letters.index(letter)
    if position < len(options) and _words_of(rest) == _words_of(str(options[position])):
        return letter
    return letter if _SECOND_LETTER.search(rest) is None else None


def _words_of(text: str) -> str:
    return " ".join(text.casefold().strip(" .*_").split())


@dataclass(frozen=True, kw_only=True)
class ChoiceAccuracy(AnswerComponent):
    """1 if the completion chooses the reference's letter and no other, else 0.

    The reference is a letter (`C`, `(C)`, `C. Paris`) or the index of the right choice, starting at `first_index`.
    An answer that is not a single letter is `wrong`; a reference that is not one of `letters` is an `error`.
    """

    answer_in: str = "any"
    letters: str = "ABCD"
    first_index: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.letters)) < max(2, len(self.letters)) or not (
            self.letters.isascii() and self.letters.isupper()
        ):
            raise PresetError(f"letters is {self.letters!r}. Pass two or more different capital letters, as 'ABCD'.")

    def expected(self, sample: Sample) -> str:
        reference = sample.reference
        if isinstance(reference, str) and reference.strip().isdecimal() and len(reference) < 5:
            reference = int(reference)
        expected = chosen_letter(reference, self.letters) if isinstance(reference, str) else None
        if isinstance(reference, int | float) and not isinstance(reference, bool):
            position = reference - self.first_index
            expected = self.letters[int(position)] if position in range(len(self.letters)) else None
        if expected is None:
            reason = f"reference is none of the choices {self.letters}: {shown(sample.reference, 150)}"
            raise ValueError(f"{reason}; give the letter in a column such as `reference`")
        return expected

    def find(self, sample: Sample, place: str, strict: bool) -> Extracted:
        answer = unboxed_answer(sample, place, strict)
        if place == "any" and answer.reason == "missing":
            final = sample.once(final_text)  # a text that is only a letter needs no box, tag or line
            if final.value is not None and chosen_letter(final.value, self.letters, _options(sample)):
                return final
        return answer

    def judge(self, answer: str, expected: str, sample: Sample) -> Score:
        return verdict(chosen_letter(answer, self.letters, _options(sample)) == expected, answer)


def _options(sample: Sample) -> list[Any]:
    options = column(sample, "choices", "options")
    return options if isinstance(options, list) else []


_NEGATIVE_NUMBER = re.compile(r"-\s*\.?\d")
_WRAPPERS = " \t\r\n\"'`*_“”‘’.:!()[]"


@dataclass(frozen=True, kw_only=True)
class LabelFormat(AnswerComponent):
    """1 if the answer is any of the labels, else 0; without known labels, 1 for every answer.

    `labels` applies to rows without a `labels` column.
    """

    name: str = "format"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [normalise_label(label) for label in self.labels]
        if "" in names or len(set(names)) < len(names):
            raise PresetError(
                f"labels are {list(self.labels)}. Pass different names; case and punctuation are ignored."
            )

    def judge(self, answer: str, expected: str | None, sample: Sample) -> Score:
        labels = self.known(sample)
        if labels and normalise_label(answer) not in map(normalise_label, labels):
            return Score(None, "format", {"extracted": answer[:200], "reason": "not one of the labels"})
        return Score(self.high)

    def known(self, sample: Sample) -> tuple[str, ...]:
        labels = column(sample, "labels", "choices")
        if isinstance(labels, str):
            labels = json.loads(labels)
        return tuple(str(label) for label in labels) if isinstance(labels, list | tuple) else self.labels


@dataclass(frozen=True, kw_only=True)
class LabelAccuracy(LabelFormat):
    """1 if the complete answer is the reference's label, else 0; a text that only contains the label scores 0.

    Case and surrounding white space and quotes are ignored. An answer that is not one of the labels is `format`. An integer
    reference is an index into the labels, as in ClassLabel columns.
    """

    name: str = "accuracy"

    def expected(self, sample: Sample) -> str:
        return label_name(sample.reference, self.known(sample))

    def judge(self, answer: str, expected: str | None, sample: Sample) -> Score:
        score = super().judge(answer, expected, sample)
        return verdict(normalise_label(answer) == expected, answer) if score.status == "ok" else score


def label_name(reference: Any, labels: Sequence[str] = ()) -> str:
    """Return the reference's label, normalised.

    Raises:
        ValueError: the reference is blank, not one of the labels, or an index without a label.
    """
    if isinstance(reference, int) and not isinstance(reference, bool):
        if labels and 0 <= reference < len(labels):
            return normalise_label(labels[reference])
        if labels and str(reference) not in labels:
            raise ValueError(f"reference {reference} is not an index into {len(labels)} labels")
    if isinstance(reference, bool) or not isinstance(reference, str | int) or not normalise_label(str(reference)):
        raise ValueError(f"reference is not a label: {reference!r}; give its name, or its index into the labels")
    name = normalise_label(str(reference))
    if labels and name not in map(normalise_label, labels):
        raise ValueError(f"reference {reference!r} is not one of the labels {list(labels)}")
    return name


def normalise_label(text: str) -> str:
    """Return the label with its case folded and one space between words (`_` and `-` count as spaces).

    Removes surrounding quotes, stars and full stops. Keeps the minus of a number: -1 is not 1.
    """
    bare = text.strip(_WRAPPERS).casefold().replace("−", "-")
    sign = "-" if _NEGATIVE_NUMBER.match(bare) else ""
    return sign + " ".join(bare.replace("_", " ").replace("-", " ").split())


_ARTICLES = frozenset({"a", "an", "the"})
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”‘’«»„…。、，；：！？「」")
_NEGATIVE = re.compile(r"[-−][$€£]?\.?\d")
_SHARP = re.compile(r"[^\W\d_]([+#]{1,2})$")
_HEDGES = frozenset({
    "or", "maybe", "perhaps", "possibly", "probably", "either", "alternatively", "and/or", "versus", "vs", "oder", "ou",
})  # fmt: skip
_SEPARATORS = ("/", ";", "|", "\n", ",", "=", " and ", "&")


@dataclass(frozen=True, kw_only=True)
class ShortAnswer(AnswerComponent):
    """SQuAD's exact match (0 or 1) or F1 (0 to 1), the best over the accepted answers.

    If an accepted answer is a number, only the same number matches it. A hedged answer (several alternatives, or
    far longer than any accepted one) scores 0. Rows with an empty list of answers expect `no_answer`, if that is set.
    """

    metric: Literal["exact", "f1"] = "exact"
    no_answer: str | None = None

    def expected(self, sample: Sample) -> list[str]:
        golds = gold_answers(sample.reference, self.no_answer)
        if not golds:
            reason = f"no accepted answer in the reference: {sample.reference!r}"[:200]
            raise ValueError(f"{reason}; give text or a list of texts in `reference`")
        return golds

    def judge(self, answer: str, expected: list[str], sample: Sample) -> Score:
        if any(exact_match(answer, gold) for gold in expected):
            return verdict(True, answer)
        if is_hedged(answer, expected):
            return verdict(False, answer, reason="hedged")
        value = 0.0 if self.metric == "exact" else max(token_f1(answer, gold) for gold in expected)
        return verdict(False, answer, min(value, 0.99))  # below 1 for the same words in another order


def gold_answers(reference: Any, no_answer: str | None = None) -> list[str]:
    """Return the accepted answers as texts, without blank ones; an empty list if the reference has no usable answer.

    The reference is a text, a number, a list of them (also as JSON text), SQuAD's {"text": [...]} or TriviaQA's {"value",
    "aliases"}.
    """
    if isinstance(reference, str) and reference.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            reference = json.loads(reference)
    if isinstance(reference, dict):
        parts = [reference.get(key) for key in ("text", "value", "aliases", "answers")]
        texts = [text for part in parts if part is not None for text in _texts(part)]
        has_answers = any(part is not None for part in parts)
    else:
        texts, has_answers = list(_texts(reference)), isinstance(reference, list | tuple)
    if has_answers and not texts and no_answer:
        return [no_answer]
    return list(dict.fromkeys(texts))


def exact_match(answer: str, gold: str) -> bool:
    """Return whether both are equal: as numbers if `gold` is one, else after SQuAD's normalisation, if that leaves any text."""
    if is_bare_number(gold):
        return parse_number(answer) == parse_number(gold)
    if not (expected := normalise(gold)):
        return answer.strip().casefold() == gold.strip().casefold()
    return normalise(answer) == expected


def token_f1(answer: str, gold: str) -> float:
    """Return SQuAD's F1 over bags of normalised words, 2 x shared / (words in both); exact match if `gold` is a number."""
    if is_bare_number(gold):
        return float(exact_match(answer, gold))
    answer_words, gold_words = Counter(normalise(answer).split()), Counter(normalise(gold).split())
    shared = (answer_words & gold_words).total()
    return 2 * shared / (answer_words.total() + gold_words.total()) if shared else 0.0


def normalise(text: str) -> str:
    """Normalise as SQuAD does: lower case, no punctuation, no English articles, single spaces.

    Keeps signs that distinguish answers: the minus of -5, the pluses and sharps of C++ and C#.
    """
    words = (_plain_word(word) for word in text.lower().split())
    return " ".join(word for word in " ".join(words).split() if word not in _ARTICLES)


def _plain_word(word: str) -> str:
    bare = word.strip("\"'`*_“”‘’.,:;!?()[]")
    plain = bare.translate(_NO_PUNCTUATION)
    if _NEGATIVE.match(bare):
        return f"-{plain}"
    tail = _SHARP.search(bare)
    return plain + tail[1] if tail else plain


def is_hedged(answer: str, golds: Sequence[str]) -> bool:
    """Whether the answer names alternatives in a way that no accepted answer does, or is over three times as long."""
    lowered, accepted = answer.casefold(), [gold.casefold() for gold in golds]
    if set(lowered.split()) & _HEDGES - {word for gold in accepted for word in gold.split()}:
        return True
    if any(lowered.count(mark) > max(gold.count(mark) for gold in accepted) for mark in _SEPARATORS):
        return True
    return len(lowered.split()) > 3 * max(len(gold.split()) for gold in accepted) + 3


def _texts(value: Any) -> Iterable[str]:
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, str | int | float) and not isinstance(item, bool) and str(item).strip():
            yield str(item)
