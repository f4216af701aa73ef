"""Which language is this text in?

>>> language_of("Der Hund liegt im Garten und schläft.")[0]
'de'
"""

import functools
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import check_style, column, find_answer
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["UNKNOWN", "TargetLanguage", "language_code", "language_of", "language_probability"]

UNKNOWN = "und"
MAX_CHARS = 4_000  # enough to tell; a longer text is read at its beginning, middle and end

# What datasets call the same languages: English names, ISO 639-2/3 (FLORES), retired and narrower codes.
_ALIASES = {
    "english": "en", "eng": "en", "chinese": "zh", "zho": "zh", "chi": "zh", "cmn": "zh", "french": "fr", "fra": "fr",
    "fre": "fr", "german": "de", "deu": "de", "ger": "de", "spanish": "es", "spa": "es", "portuguese": "pt",
    "por": "pt", "italian": "it", "ita": "it", "dutch": "nl", "nld": "nl", "russian": "ru", "rus": "ru",
    "japanese": "ja", "jpn": "ja", "korean": "ko", "kor": "ko", "arabic": "ar", "ara": "ar", "arb": "ar",
    "hindi": "hi", "hin": "hi", "turkish": "tr", "tur": "tr", "vietnamese": "vi", "vie": "vi", "polish": "pl",
    "pol": "pl", "swedish": "sv", "swe": "sv", "danish": "da", "dan": "da", "norwegian": "no", "nor": "no",
    "nob": "no", "nno": "no", "nb": "no", "nn": "no", "finnish": "fi", "fin": "fi", "czech": "cs", "ces": "cs",
    "greek": "el", "ell": "el", "hebrew": "he", "heb": "he", "iw": "he", "thai": "th", "tha": "th", "indonesian": "id",
    "ind": "id", "in": "id", "ukrainian": "uk", "ukr": "uk", "romanian": "ro", "ron": "ro", "hungarian": "hu",
    "hun": "hu", "bengali": "bn", "ben": "bn", "tamil": "ta", "tam": "ta", "telugu": "te", "tel": "te", "urdu": "ur",
    "urd": "ur", "persian": "fa", "farsi": "fa", "fas": "fa", "pes": "fa", "swahili": "sw", "swh": "sw", "fil": "tl",
    "marathi": "mr", "gujarati": "gu", "punjabi": "pa", "kannada": "kn", "malayalam": "ml", "nepali": "ne",
    "bulgarian": "bg", "bul": "bg", "catalan": "ca", "cat": "ca", "croatian": "hr", "serbian": "sr", "slovak": "sk",
}  # fmt: skip


def language_of(text: str) -> tuple[str, float]:
    """ISO 639-1 code and confidence (0 to 1) of the text's main language; (`und`, 0.0) where no letter is.

    A naive Bayes model over byte n-grams (py3langid), held to its two-letter languages; the same text always gives the same
    answer. Norwegian is `no`, Chinese is `zh` in both scripts. Below some 20 letters, close relatives are confused.
    """
    ranked = _ranked(_excerpt(text))
    return next(iter(ranked.items())) if ranked else (UNKNOWN, 0.0)


def language_probability(text: str, code: str) -> float:
    """Probability (0 to 1) that the text's main language is `code`."""
    return _ranked(_excerpt(text)).get(language_code(code), 0.0)


def language_code(name: str) -> str:
    """`en` for `en`, `EN`, `en-US`, `en_XX`, `eng_Latn`, `English`."""
    plain = name.strip().casefold()
    first = plain.replace("_", "-").partition("-")[0]
    return _ALIASES.get(first, first)


@dataclass(frozen=True, kw_only=True)
class TargetLanguage(ItemComponent):
    """1 when the answer is in the language that the row asks for, else 0.

    The code or name stands in column `target_language`, `target_lang` or `tgt_lang`, else in `language`. The language
    counts as met when it is the most likely one, or at least as probable as `at_least`. Where the reference itself is
    not recognised (names, numbers, two words), the whole prompt is `not_applicable`.
    """

    name: str = "language"
    language: str | None = None
    style: str = "text"
    at_least: float = 0.1

    def __post_init__(self) -> None:
        check_style(self.style)

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        wanted = column(sample, "target_language", "target_lang", "tgt_lang") or self.language
        if not isinstance(wanted, str) or not wanted.strip():
            return Score(None, "error", {"reason": "no language: give a code in column `target_language`"})
        code = language_code(wanted)
        if code not in _labels():
            return Score(None, "error", {"reason": f"unknown language {wanted!r}: give a code such as en or de"[:200]})
        reference = sample.reference[0] if isinstance(sample.reference, list) and sample.reference else sample.reference
        if isinstance(reference, str) and not self._is_in(reference, code):
            return Score(None, "not_applicable", {"reason": "the reference is too short to tell its language"})
        found = find_answer(sample, self.style)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        if self._is_in(found.value, code):
            return Score(self.high)
        return Score(None, "wrong", {"reason": f"{language_of(found.value)[0]} instead of {code}"})

    def _is_in(self, text: str, code: str) -> bool:
        return language_of(text)[0] == code or language_probability(text, code) >= self.at_least


@functools.lru_cache(maxsize=1024)
def _ranked(text: str) -> dict[str, float]:
    """Probabilities by code, most likely first; empty for text without letters."""
    if not any(character.isalpha() for character in text):
        return {}
    probabilities: dict[str, float] = {}
    for label, probability in _identifier().rank(text):
        code = language_code(str(label))
        probabilities[code] = probabilities.get(code, 0.0) + float(probability)
    return dict(sorted(probabilities.items(), key=lambda pair: -pair[1]))


def _excerpt(text: str) -> str:
    """At most `MAX_CHARS` characters, of which a run in another language cannot fill all three parts."""
    if len(text) > MAX_CHARS:
        part = MAX_CHARS // 3
        middle = len(text) // 2
        text = f"{text[:part]} {text[middle : middle + part]} {text[-part:]}"
    return text.encode("utf-8", "ignore").decode("utf-8")


@functools.cache
def _labels() -> frozenset[str]:
    return frozenset(language_code(label) for label in _identifier().labels)


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages([label for label in identifier.labels if len(label) == 2])
    return identifier
