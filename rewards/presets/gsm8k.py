"""Word problems with one number as the answer, in two layouts."""

from rewards.components.numeric_accuracy import NumericAccuracy
from rewards.components.tags import HashFormat, TagCount, ThinkAnswerFormat
from rewards.preset import Preset, Weighted

__all__ = ["gsm8k_hash", "gsm8k_reasoning"]


def gsm8k_reasoning(*, format_weight: float = 0.2, tag_weight: float = 0.1, strict: bool = True) -> Preset:
    """Grade-school maths answered as `<think>…</think><answer>…</answer>`.

    Formula: accuracy + 0.2 format + 0.1 tags. Range: [0, 1.3].
    accuracy is 1 when the one number in the last `<answer>` after `</think>` equals the reference exactly;
    format is 1 for one think block and one answer block, both filled, and nothing else;
    tags is a quarter for each of the four tags that appears exactly once.
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a number, or a GSM8K solution that ends in `#### 72`.
    Source: accuracy and format rewards of DeepSeek-R1 (2501.12948, 2.2.2); data of GSM8K (2110.14168).

    Args:
        format_weight: weight of the layout; 0 leaves it out.
        tag_weight: weight of the tag count; 0 leaves it out.
        strict: refuse a second answer tag, and text after `</answer>`, as no answer at all.

    >>> from rewards import build_samples, load
    >>> samples = build_samples(
    ...     ["6 x 12?"] * 3,
    ...     ["<think>6 x 12</think><answer>$72.00</answer>", "<think>?</think><answer>70 or 72</answer>", "72"],
    ...     reference=["6 x 12 = 72\\n#### 72"] * 3,
    ... )
    >>> evaluation = load("gsm8k-reasoning").score(samples)
    >>> [round(total, 6) for total in evaluation.totals]
    [1.3, 0.3, 0.0]
    >>> evaluation.statuses["accuracy"]
    ['ok', 'wrong', 'format']
    """
    components = [Weighted(NumericAccuracy(strict=strict), 1.0)]
    if format_weight:
        components.append(Weighted(ThinkAnswerFormat(), format_weight))
    if tag_weight:
        components.append(Weighted(TagCount(), tag_weight))
    return Preset(components, name="gsm8k-reasoning", checker="accuracy")


def gsm8k_hash(*, format_weight: float = 0.1, strict: bool = True) -> Preset:
    """Grade-school maths answered like the data set itself: free text, then a last line `#### 72`.

    Formula: accuracy + 0.1 format. Range: [0, 1.1].
    accuracy is 1 when the number on the last `####` line equals the reference exactly;
    format is 1 when there is one such line, filled, at the end.
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a number, or a GSM8K solution that ends in `#### 72`.
    Source: answer format of GSM8K (2110.14168).

    Args:
        format_weight: weight of the layout; 0 leaves it out.
        strict: refuse a second `####` line, and text after it, as no answer at all.

    >>> from rewards import build_samples, load
    >>> samples = build_samples(["6 x 12?"] * 2, ["6 x 12 = 72\\n#### 72", "It is 72."], answer=["72", "72"])
    >>> load("gsm8k-hash").score(samples).totals
    [1.1, 0.0]
    """
    components = [Weighted(NumericAccuracy(style="hash", strict=strict), 1.0)]
    if format_weight:
        components.append(Weighted(HashFormat(), format_weight))
    return Preset(components, name="gsm8k-hash", checker="accuracy")
