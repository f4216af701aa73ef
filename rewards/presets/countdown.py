"""The countdown game: reach a number with the numbers that are given."""

from rewards.components.countdown import CountdownAccuracy
from rewards.components.tags import ThinkAnswerFormat
from rewards.preset import Preset, Weighted

__all__ = ["countdown"]


def countdown(*, format_weight: float = 0.1, use_all: bool = True, strict: bool = True) -> Preset:
    """The countdown game, answered with an expression as `<think>…</think><answer>(44 + 19) * 2</answer>`.

    Formula: accuracy + 0.1 format. accuracy is 1 when the expression has exactly the target's value and takes each
    given number exactly once; format is 1 for one think block and one answer block, both filled, and nothing else.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `nums` or `numbers`, the given whole numbers, a list or its JSON; `target`, else the reference.
    Source: TinyZero's countdown task; its 0.1 for the layout.
    Hacks: code as an answer: expressions are read as a syntax tree of `+ - * /` and whole numbers, and computed as exact
    fractions; there is no `eval`, no power, no `//`. The target itself, or numbers twice or glued together: each given
    number has to be there once. `70 = 72`: the right side has to be the target, and the left side has to reach it.

    Args:
        format_weight: weight of the layout; 0 leaves it out.
        use_all: every given number has to be used; False lets some be left out.
        strict: refuse a second answer tag, and text after `</answer>`, as no answer at all.

    >>> from rewards import build_samples, load
    >>> texts = ["<think>?</think><answer>(19 - 1) * 4 = 72</answer>", "<think>?</think><answer>72</answer>"]
    >>> load("countdown").score(build_samples(["?"] * 2, texts, nums=[[19, 1, 4]] * 2, target=[72] * 2)).totals
    [1.1, 0.1]
    """
    components = [Weighted(CountdownAccuracy(use_all=use_all, strict=strict), 1.0)]
    if format_weight:
        components.append(Weighted(ThinkAnswerFormat(), format_weight))
    return Preset(components, name="countdown", checker="accuracy")
