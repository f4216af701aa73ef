"""Multiple choice."""

from rewards.components.answers import ChoiceAccuracy
from rewards.preset import Preset, Weighted

__all__ = ["mcq_letter"]


def mcq_letter(*, letters: str = "ABCD", answer_in: str = "any", strict: bool = True, first_index: int = 0) -> Preset:
    r"""Multiple choice questions, answered with one letter.

    Formula: 1 when the answer chooses the reference's letter and no other, else 0. A choice is a letter, bare, in
    brackets or emphasis, or set off from the option's text: `C`, `(c)`, `**C**`, `C. Paris`, `C - Paris`, `Option C`, `C is
    correct`. Under `any`, a completion that is nothing else needs no tag, box or line.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: the letter, or the position of the right choice.
    `choices` or `options`, the texts, where there are any: a letter within the chosen one's text is no second choice.
    Source: the protocol of MMLU (2009.03300).
    Hacks: hedging (`B or C`, `A B C D`, two tags or boxes): no single letter, wrong. Naming a letter in passing (`A
    cat`), or within the reasoning: not looked at. Always answering one letter earns that letter's share: shuffle the
    options.

    Args:
        letters: the letters there are, in order.
        answer_in: where the answer stands: `boxed`, `tag` (`<answer>`), `hash` (`####`), `line` (`Answer:`) or `any`.
        strict: refuse answers given more than once and differently, and text after a tag or line.
        first_index: position of the first choice, for references that are numbers.

    Raises:
        PresetError: the letters are not different capitals, or `answer_in` is unknown.

    >>> from rewards import build_samples, load
    >>> completions = ["<answer>(C)</answer>", "Answer: C. Paris", "Answer: B or C", "Paris"]
    >>> load("mcq-letter").score(build_samples(["?"] * 4, completions, answer=["C"] * 4)).totals
    [1.0, 1.0, 0.0, 0.0]
    """
    accuracy = ChoiceAccuracy(letters=letters, answer_in=answer_in, strict=strict, first_index=first_index)
    return Preset([Weighted(accuracy, 1.0)], name="mcq-letter", checker="accuracy")
