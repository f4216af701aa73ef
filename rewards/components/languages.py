"""Recognise the language of a text, and check that a completion is in one script throughout."""

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
_READ_CHARS = 4_000  # enough to tell; a longer text is read at its beginning, middle and end


def language_of(text: str) -> str:
    """ISO 639-1 code of the text's main language; `und` where no letter is.

    A naive Bayes model over byte n-grams (py3langid), held to its two-letter languages; the same text always gives the same
    answer. Below some 20 letters, close relatives are confused.
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
