"""Check that a completion is in the language of the row, and in one script throughout."""

import functools
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import AnswerComponent, column
from rewards.errors import PresetError, nearest
from rewards.extract import MAX_CHARS
from rewards.protocol import Context, ItemComponent, Sample, Score

UNKNOWN = "und"
_READ_CHARS = 4_000  # enough to tell; a longer text is read at its beginning, middle and end

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
    """The ISO 639-1 code of a language: `en` for `en`, `EN`, `en-US`, `en_XX`, `eng_Latn`, `English`."""
    plain = name.strip().casefold()
    first = plain.replace("_", "-").partition("-")[0]
    return _ALIASES.get(first, first)


@dataclass(frozen=True, kw_only=True)
class TargetLanguage(AnswerComponent):
    """1 when the answer is in the language that the row asks for, else 0.

    The code or name stands in column `target_language`, `target_lang` or `tgt_lang`, else in `language`. The language
    counts as met when it is the most likely one, or at least as probable as `at_least`. Where the reference itself is
    not recognised (names, numbers, two words), the whole prompt is `not_applicable`.
    """

    name: str = "language"
    answer_in: str = "text"
    language: str | None = None
    at_least: float = 0.1

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        reference = sample.reference[0] if isinstance(sample.reference, list) and sample.reference else sample.reference
        score = super().score_one(sample, ctx)
        if score.status != "error" and isinstance(reference, str) and not self._is_in(reference, self.expected(sample)):
            return Score(None, "not_applicable", {"reason": "the reference is too short to tell its language"})
        return score

    def expected(self, sample: Sample) -> str:
        language = column(sample, "target_language", "target_lang", "tgt_lang") or self.language
        if not isinstance(language, str) or language_code(language) not in _labels():
            raise ValueError(f"unknown language {language!r}: give a code such as en or de in column `target_language`")
        return language_code(language)

    def judge(self, answer: str, expected: str, sample: Sample) -> Score:
        if self._is_in(answer, expected):
            return Score(self.high)
        return Score(None, "wrong", {"reason": f"{language_of(answer)[0]} instead of {expected}"})

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
    """At most `_READ_CHARS` characters, of which a run in another language cannot fill all three parts."""
    if len(text) > _READ_CHARS:
        part = _READ_CHARS // 3
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


# The scripts of languages, by the beginnings of the names that Unicode gives to their letters.
_SCRIPTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ["cs", "da", "de", "en", "es", "fi", "fr", "hu", "id", "it", "nl", "no", "pl", "pt", "ro", "sv", "tr", "vi"],
        ("LATIN",),
    ),
    **dict.fromkeys(["bg", "ru", "uk"], ("CYRILLIC",)),
    **dict.fromkeys(["ar", "fa", "ur"], ("ARABIC",)),
    "el": ("GREEK",),
    "he": ("HEBREW",),
    "hi": ("DEVANAGARI",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK"),
    "ko": ("HANGUL",),
    "th": ("THAI",),
    "zh": ("CJK",),
}
# Not prose in any language: LaTeX commands, tags, and one or two Latin letters on their own, as in formulas.
_NOT_PROSE = re.compile(r"\\[A-Za-z]+|</?[a-z]+>|(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])")
_ASCII_PROSE = re.compile(r"(?<![\\A-Za-z</])[A-Za-z]{3,}")
_LETTER = re.compile(r"[^\W\d_]+")


def script_share(text: str, language: str) -> float | None:
    """The share of letters of `text` that are of the script of `language`; None where there are no letters.

    LaTeX commands, tags, and Latin letters that stand alone or in pairs count for nothing.

    >>> script_share("Привет, world", "ru")  # 6 of 11 letters
    0.5454545454545454
    """
    if text.isascii() and _SCRIPTS[language] == ("LATIN",):
        return 1.0 if _ASCII_PROSE.search(text) else None
    letters = Counter("".join(_LETTER.findall(_NOT_PROSE.sub(" ", text))))
    of_script = (
        count for letter, count in letters.items() if unicodedata.name(letter, "").startswith(_SCRIPTS[language])
    )
    return sum(of_script) / letters.total() if letters else None


@dataclass(frozen=True, kw_only=True)
class LanguageConsistency(ItemComponent):
    """The share of the completion's letters that are of the script of `language`, see `script_share`.

    Mixed scripts are what it finds (Chinese within English reasoning); languages of one script are not told apart.
    `ok` for a share of 1; without letters, or of more than `MAX_CHARS` characters, `format`.

    Source: language consistency of DeepSeek-R1 (2501.12948, 2.3.2): the share of words of the target language.
    """

    name: str = "language"
    language: str = "en"

    def __post_init__(self) -> None:
        if self.language not in _SCRIPTS:
            raise PresetError(f"No script is known for language {self.language!r}. {nearest(self.language, _SCRIPTS)}")

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        if len(sample.text) > MAX_CHARS:
            return Score(None, "format", {"reason": "too_long"})
        share = sample.once(script_share, self.language)
        if share is None:
            return Score(None, "format", {"reason": "no letters"})
        return Score(share, "ok" if share == 1.0 else "wrong", {"share": round(share, 4)})
