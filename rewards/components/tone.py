"""Is the text courteous, and tidy prose?"""

import re
from dataclasses import dataclass

from rewards.components.readable import readable, words
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["COURTESIES", "Courtesy", "TidyProse"]

COURTESIES = (
    "please", "thank you", "thanks", "welcome", "glad", "happy to", "sorry", "apologies", "i understand", "of course",
    "you could", "would you", "could you", "feel free", "i hope", "appreciate", "i suggest", "you may want",
)  # fmt: skip
MAX_SHOUTED = 0.3  # share of words of three letters and more that are all capitals
_LONG_WORD = re.compile(r"[^\W\d_]{3,}")
_TEMPLATE_MARKS = ("<|", "|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<<SYS>>")
_ENDS = (".", "!", "?", "…", "。", "！", "？", ")", '"', "”", "»", "```")


@dataclass(frozen=True, kw_only=True)
class Courtesy(ItemComponent):
    """Half for a courteous phrase, half for not shouting.

    One of `phrases` is enough, more earn nothing. Shouting is two exclamation or question marks in a row, or more than
    30 % of the longer words in capitals.
    """

    name: str = "courtesy"
    phrases: tuple[str, ...] = COURTESIES
    min_words: int = 5

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        found = readable(sample.whole, min_words=self.min_words, prompt=sample.prompt)
        if found.text is None:
            return Score(None, "format", {"reason": found.reason})
        said = f" {' '.join(words(found.text))} "
        courteous = any(f" {phrase} " in said for phrase in self.phrases)
        calm = not _shouts(found.text)
        value = 0.5 * courteous + 0.5 * calm
        return Score(value, "ok" if value == self.high else "wrong", {"courteous": courteous, "calm": calm})


@dataclass(frozen=True, kw_only=True)
class TidyProse(ItemComponent):
    """1 for a text that is finished (ends a sentence, a bracket, a quote or a code block) and free of chat markup."""

    name: str = "format"
    min_words: int = 5

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        found = readable(sample.whole, min_words=self.min_words, prompt=sample.prompt)
        if found.text is None:
            return Score(None, "format", {"reason": found.reason})
        mark = next((mark for mark in _TEMPLATE_MARKS if mark in found.text), None)
        if mark is not None:
            return Score(None, "format", {"reason": f"chat markup: {mark}"})
        if not found.text.endswith(_ENDS):
            return Score(None, "format", {"reason": "unfinished"})
        return Score(self.high)


def _shouts(text: str) -> bool:
    long_words = _LONG_WORD.findall(text)
    shouted = sum(word.isupper() for word in long_words)
    return "!!" in text or "??" in text or shouted > MAX_SHOUTED * len(long_words)
