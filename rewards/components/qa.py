"""Is the short answer one of the accepted ones?"""

import contextlib
import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rewards.components.final_text import check_style, find_answer
from rewards.errors import PresetError
from rewards.numeric import is_bare_number, parse_number
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["ShortAnswer", "exact_match", "gold_answers", "is_hedged", "normalise", "token_f1"]

_ARTICLES = frozenset({"a", "an", "the"})
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”‘’«»„…。、，；：！？「」")
_NEGATIVE = re.compile(r"[-−][$€£]?\.?\d")
_SHARP = re.compile(r"[^\W\d_]([+#]{1,2})$")
_HEDGES = frozenset(
    (
        "or",
        "maybe",
        "perhaps",
        "possibly",
        "probably",
        "either",
        "alternatively",
        "and/or",
        "versus",
        "vs",
        "oder",
        "ou",
    )
)
_SEPARATORS = ("/", ";", "|", "\n", ",", "=", " and ", "&")


@dataclass(frozen=True, kw_only=True)
class ShortAnswer(ItemComponent):
    """SQuAD's exact match (0 or 1) or F1 (0 to 1), the best over the accepted answers.

    Where an accepted answer is a number, only the same number matches it. A hedged answer (several alternatives, or
    far longer than any accepted one) scores 0. Rows with an empty list of answers expect `no_answer`, if that is set.
    """

    metric: Literal["exact", "f1"] = "exact"
    name: str = "accuracy"
    style: str = "answer"
    no_answer: str | None = None

    def __post_init__(self) -> None:
        check_style(self.style)
        if self.metric not in ("exact", "f1"):
            raise PresetError(f"metric is {self.metric!r}. Use exact or f1.")

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        golds = gold_answers(sample.reference, self.no_answer)
        if not golds:
            reason = f"no accepted answer in the reference: {sample.reference!r}"[:200]
            return Score(None, "error", {"reason": f"{reason}; give text or a list of texts in `reference`"})
        found = find_answer(sample, self.style)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        info = {"extracted": found.value[:200]}
        if any(exact_match(found.value, gold) for gold in golds):
            return Score(self.high, "ok", info)
        if is_hedged(found.value, golds):
            return Score(None, "wrong", {**info, "reason": "hedged"})
        value = 0.0 if self.metric == "exact" else max(token_f1(found.value, gold) for gold in golds)
        return Score(min(value, 0.99), "wrong", info)  # the same words in another order are not the answer


def gold_answers(reference: Any, no_answer: str | None = None) -> list[str]:
    """Accepted answers: text, a number, a list of them (JSON text too), SQuAD's {"text": [...]} or TriviaQA's
    {"value", "aliases"}. Blank ones are dropped; nothing usable is an empty list."""
    if isinstance(reference, str) and reference.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            reference = json.loads(reference)
    if isinstance(reference, dict):
        parts = [reference.get(key) for key in ("text", "value", "aliases", "answers")]
        texts = [text for part in parts if part is not None for text in _texts(part)]
        known = any(part is not None for part in parts)
    else:
        texts, known = list(_texts(reference)), isinstance(reference, list | tuple)
    if known and not texts and no_answer:
        return [no_answer]
    return list(dict.fromkeys(texts))


def exact_match(answer: str, gold: str) -> bool:
    """Equal after SQuAD's normalisation; equal numbers where `gold` is one; equal text where nothing is left of it."""
    if is_bare_number(gold):
        return parse_number(answer) == parse_number(gold)
    wanted = normalise(gold)
    if not wanted:
        return answer.strip().casefold() == gold.strip().casefold()
    return normalise(answer) == wanted


def token_f1(answer: str, gold: str) -> float:
    """SQuAD's F1 over bags of normalised words: 2 x shared / (words in answer + words in gold); 0 for other numbers."""
    if is_bare_number(gold):
        return float(exact_match(answer, gold))
    given, wanted = Counter(normalise(answer).split()), Counter(normalise(gold).split())
    shared = (given & wanted).total()
    return 2 * shared / (given.total() + wanted.total()) if shared else 0.0


def normalise(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no English articles, single spaces. Signs that make another
    answer stay: the minus of -5, the pluses and sharps of C++ and C#."""
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
