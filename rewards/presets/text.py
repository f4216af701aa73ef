"""Texts judged by a reference text: summaries and translations."""

from rewards.components.languages import TargetLanguage
from rewards.components.overlap import Chrf, LengthBand, RougeL
from rewards.components.packages import require
from rewards.preset import Preset, Weighted, gate

__all__ = ["summarize", "translate"]


def summarize(
    *,
    correct_at: float = 0.4,
    max_ratio: float = 1.6,
    length_weight: float = 0.2,
    min_words: int | None = None,
    max_words: int | None = None,
    stem: bool = True,
    style: str = "text",
) -> Preset:
    """A summary that shares words with a reference summary and has about its length.

    Formula: rouge + 0.2 length. rouge is ROUGE-L, the F1 of the longest
    common subsequence of words, the best over the references, and 0 for more than 1.6 times the reference's words;
    length is 1 between 0.6 and 1.3 times the reference's words, and falls in proportion outside.
    Range: [0, 1.2].
    Checker: rouge, `ok` from 0.4 upwards.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a summary, or a list of them.
    Source: ROUGE (Lin 2004, aclanthology W04-1013), by the rouge-score library, with words of any script; as a reward
    for summaries in Paulus et al. (1705.04304).
    Hacks: keywords and copied sentences raise ROUGE without making a summary: add a reward model or a judge, and
    mind that a copy of the beginning is a strong baseline for news. Long answers, several summaries in one, the
    document itself: 0 over 1.6 times the reference's words. One word, or none: F1 keeps it low. Other scripts, empty to
    the library's own tokenizer, are read.

    Args:
        correct_at: ROUGE-L from which a summary counts as correct in evaluation.
        max_ratio: words, as a multiple of the longest reference, over which rouge is 0.
        length_weight: weight of the length; 0 leaves it out.
        min_words: least words wanted, in place of 0.6 times the reference's.
        max_words: most words wanted, in place of 1.3 times the reference's.
        stem: strip English endings before comparing.
        style: where the summary stands: `text`, all that follows the thinking, or `answer` for tags.

    Raises:
        PresetError: rouge-score is not installed, or an empty length band.

    >>> from rewards import build_samples, load
    >>> reference = "The council closed the old bridge after the flood."
    >>> texts = [reference, "The old bridge is closed after the flood.", "A flood."]
    >>> evaluation = load("summarize").score(build_samples(["Summarise: ..."] * 3, texts, reference=[reference] * 3))
    >>> [round(total, 3) for total in evaluation.totals], evaluation.statuses["rouge"]
    ([1.2, 0.906, 0.256], ['ok', 'ok', 'wrong'])
    """
    require("summarize", "rouge_score", "rouge-score")
    components = [Weighted(RougeL(correct_at=correct_at, max_ratio=max_ratio, stem=stem, style=style), 1.0)]
    if length_weight:
        components.append(Weighted(LengthBand(min_words=min_words, max_words=max_words, style=style), length_weight))
    return Preset(components, name="summarize", checker="rouge")


def translate(
    *,
    language: str | None = None,
    correct_at: float = 0.5,
    max_ratio: float = 1.6,
    language_weight: float = 0.1,
    word_order: int = 0,
    style: str = "text",
) -> Preset:
    """A translation into the asked language that is close to a reference.

    Formula: chrf + 0.1 language, chrf only where the language is right. chrf is chrF / 100, the best over the
    references, and 0 for more than 1.6 times the reference's characters; language is 1 when the answer is in the target
    language.
    Range: [0, 1.1].
    Checker: chrf, `ok` from 0.5 upwards.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a translation, or a list of them; `target_language`,
    `target_lang` or `tgt_lang`: a code or name, if not given as a parameter.
    Source: chrF (Popović 2015, aclanthology W15-3049), by the sacrebleu library (1804.08771).
    Hacks: the source text copied, which shares names and numbers with the translation: the language is wrong, and chrf
    is 0. Several translations in one, which chrF's stress on recall would pay for: 0 over 1.6 times the reference's
    characters. Letters stuffed at random share few n-grams of six. Explanations around the translation: lower
    precision. Where even the reference is too short to tell its language, the language does not count.

    Args:
        language: target language for rows that do not name one; None needs the column.
        correct_at: chrF / 100 from which a translation counts as correct in evaluation.
        max_ratio: characters, as a multiple of the longest reference, over which chrf is 0.
        language_weight: weight of the language; 0 leaves language and gate out.
        word_order: 2 for chrF++.
        style: where the translation stands: `text`, all that follows the thinking, or `answer` for tags.

    Raises:
        PresetError: sacrebleu or py3langid is not installed.

    >>> from rewards import build_samples, load
    >>> reference = "Der Hund schläft heute den ganzen Tag im Garten."
    >>> texts = [reference, "The dog sleeps in the garden all day today."]
    >>> samples = build_samples(["Translate: ..."] * 2, texts, reference=[reference] * 2, target_language=["de"] * 2)
    >>> evaluation = load("translate").score(samples)
    >>> evaluation.totals, evaluation.statuses["language"]
    ([1.1, 0.0], ['ok', 'wrong'])
    """
    require("translate", "sacrebleu", "sacrebleu")
    components = [Weighted(Chrf(correct_at=correct_at, max_ratio=max_ratio, word_order=word_order, style=style), 1.0)]
    if not language_weight:
        return Preset(components, name="translate", checker="chrf")
    require("translate", "py3langid", "py3langid")
    components.append(Weighted(TargetLanguage(language=language, style=style), language_weight))
    return Preset(components, name="translate", checker="chrf", gates=[gate("language", "chrf")])
