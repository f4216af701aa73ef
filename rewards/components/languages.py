"""Identify the language of a text, and check that a completion is written in one script."""

import functools
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rewards.errors import PresetError, nearest
from rewards.extract import MAX_CHARS
from rewards.protocol import Context, ItemComponent, Sample, Score

UNKNOWN = "und"
_READ_CHARS = 4_000  # of a longer text, the beginning, middle and end are read


def language_of(text: str) -> str:
    """Return the ISO 639-1 code of the text's main language; `und` for a text without letters.

    Uses py3langid, a naive Bayes model over byte n-grams, restricted to its two-letter languages. The result is deterministic.
    Below about 20 letters, related languages are confused.
    """
    if len(text) > _READ_CHARS:
        part, middle = _READ_CHARS // 3, len(text) // 2
        text = f"{text[:part]} {text[middle : middle + part]} {text[-part:]}"
    if not any(character.isalpha() for character in text):
        return UNKNOWN
    return str(_identifier().classify(text.encode("utf-8", "ignore").decode())[0])


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages([label for label in identifier.labels if len(label) == 2])
    return identifier


# The scripts of languages, as prefixes of the Unicode names of their letters.
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
# LaTeX commands, tags, and runs of one or two Latin letters, as in formulas, are not prose.
_NOT_PROSE = re.compile(r"\\[A-Za-z]+|</?[a-z]+>|(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])")
_ASCII_PROSE = re.compile(r"(?<![\\A-Za-z</])[A-Za-z]{3,}")
_LETTER = re.compile(r"[^\W\d_]+")


def script_share(text: str, language: str) -> float | None:
    """Return the share of letters of `text` in the script of `language`; None for a text without letters.

    LaTeX commands, tags, and runs of one or two Latin letters are ignored.

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
    """Share of the completion's letters in the script of `language`, see `script_share`.

    It detects mixed scripts (Chinese within English reasoning), but does not distinguish languages of one script. The status
    is `ok` for a share of 1, and `format` without letters or above `MAX_CHARS` characters.

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
