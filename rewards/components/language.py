"""Is the completion written in the language that was asked for?"""

import re
from dataclasses import dataclass
from functools import cache

from rewards.errors import PresetError, nearest
from rewards.extract import MAX_CHARS
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["LanguageConsistency", "script_share"]

_LATIN = r"A-Za-zÀ-ÖØ-öø-ɏḀ-ỿ"
_SCRIPTS = {
    "arabic": r"\u0600-\u06ff\u0750-\u077f",
    "cyrillic": r"\u0400-\u052f",
    "devanagari": r"\u0900-\u097f",
    "greek": r"\u0370-\u03ff\u1f00-\u1fff",
    "han": r"\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ebef",
    "hangul": r"\u1100-\u11ff\uac00-\ud7af",
    "hebrew": r"\u0590-\u05ff",
    "kana": r"\u3040-\u30ff",
    "latin": _LATIN,
    "thai": r"\u0e00-\u0e7f",
}
_LANGUAGES = {
    "ar": "arabic", "bg": "cyrillic", "cs": "latin", "da": "latin", "de": "latin", "el": "greek", "en": "latin",
    "es": "latin", "fa": "arabic", "fi": "latin", "fr": "latin", "he": "hebrew", "hi": "devanagari", "hu": "latin",
    "id": "latin", "it": "latin", "ja": "kana han", "ko": "hangul", "nl": "latin", "no": "latin", "pl": "latin",
    "pt": "latin", "ro": "latin", "ru": "cyrillic", "sv": "latin", "th": "thai", "tr": "latin", "uk": "cyrillic",
    "ur": "arabic", "vi": "latin", "zh": "han",
}  # fmt: skip
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
    if text.isascii() and _LANGUAGES[language] == "latin":
        return 1.0 if _ASCII_PROSE.search(text) else None
    letters = "".join(_LETTER.findall(_NOT_PROSE.sub(" ", text)))
    return len(_pattern(language).findall(letters)) / len(letters) if letters else None


@cache
def _pattern(language: str) -> re.Pattern[str]:
    return re.compile("[" + "".join(_SCRIPTS[script] for script in _LANGUAGES[language].split()) + "]")


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
        if self.language not in _LANGUAGES:
            raise PresetError(
                f"No script is known for language {self.language!r}. {nearest(self.language, _LANGUAGES)}"
            )

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        if len(sample.text) > MAX_CHARS:
            return Score(None, "format", {"reason": "too_long"})
        share = sample.once(script_share, self.language)
        if share is None:
            return Score(None, "format", {"reason": "no letters"})
        return Score(share, "ok" if share == 1.0 else "wrong", {"share": round(share, 4)})
