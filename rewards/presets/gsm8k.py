"""Word problems with one number as the answer, in three layouts."""

from rewards.components.answers import NumericAccuracy
from rewards.components.tags import HashFormat, IntegerAnswer, TagCount, ThinkAnswerFormat, XmlFormat, XmlTagCount
from rewards.preset import Preset, Weighted

__all__ = ["gsm8k_hash", "gsm8k_reasoning", "gsm8k_xml"]


def gsm8k_reasoning(*, format_weight: float = 0.2, tag_weight: float = 0.1, strict: bool = True) -> Preset:
    """Grade-school maths answered as `<think>…</think><answer>…</answer>`.

    Formula: accuracy + 0.2 format + 0.1 tags.
    accuracy is 1 when the one number in the last `<answer>` after `</think>` equals the reference exactly;
    format is 1 for one think block and one answer block, both filled, and nothing else;
    tags is a quarter for each of the four tags that appears exactly once.
    Range: [0, 1.3].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a number, or a GSM8K solution that ends in `#### 72`.
    Source: accuracy and format rewards of DeepSeek-R1 (2501.12948, 2.2.2); data of GSM8K (2110.14168).
    Hacks: hedges, lists and equations (`70 or 72`, `8 = 7`) are not one number: wrong. Answers within the reasoning, in
    an unclosed tag or given twice are no answer. Layout alone earns 0.3, less than a right answer without it.

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

    Formula: accuracy + 0.1 format.
    accuracy is 1 when the number on the last `####` line equals the reference exactly;
    format is 1 when there is one such line, filled, at the end.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a number, or a GSM8K solution that ends in `#### 72`.
    Source: answer format of GSM8K (2110.14168).
    Hacks: two such lines, text behind, hedges, lists and equations are no answer, or wrong.

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


def gsm8k_xml(*, strict: bool = True) -> Preset:
    """The five rewards of the popular GSM8K notebooks, for `<reasoning>…</reasoning><answer>…</answer>`, bugs fixed.

    Formula: 2 correctness + 0.5 integer + 0.5 strict_format + 0.5 soft_format + 0.5 tags.
    correctness is 1 when the one number in the last `<answer>` equals the reference exactly; integer is 1 when the
    answer is a whole number; strict_format is 1 for both blocks, filled, each tag on its own line; soft_format is the
    same without asking for lines; tags is a quarter for each of the four tags that appears exactly once.
    Range: [0, 4].
    Checker: correctness.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a number, or a GSM8K solution that ends in `#### 72`.
    Source: the notebook rewards that W. Brown published and Unsloth's notebooks carry. What differs here:
    correctness compares numbers, not strings (`72.00`, `$72`), and wants a closed tag, where a text without tags was
    its own answer; integer knows signs and separators; both formats span lines, which the originals did not, and the
    strict one asks for no newline at the end; the soft one refuses text around the blocks; tags takes nothing off for
    each character after `</answer>`, by which a perfect long answer without a final newline scored -1.55 of 0.5.
    Hacks: shaping earns 2 without a right answer, as much as correctness alone: a wrong answer in its layout equals a
    right one with no layout and a fraction. Lists, hedges, blank or repeated tags earn no correctness.

    Args:
        strict: refuse a second answer tag, and text after `</answer>`, as no answer at all.

    >>> from rewards import build_samples, load
    >>> good = "<reasoning>\\n6 x 12\\n</reasoning>\\n<answer>\\n72\\n</answer>"
    >>> samples = build_samples(["6 x 12?"] * 3, [good, good.replace("72", "70"), "72"], answer=["72"] * 3)
    >>> load("gsm8k-xml").score(samples).totals
    [4.0, 2.0, 0.0]
    """
    components = [
        Weighted(NumericAccuracy(name="correctness", strict=strict), 2.0),
        Weighted(IntegerAnswer(strict=strict), 0.5),
        Weighted(XmlFormat(name="strict_format", lines=True), 0.5),
        Weighted(XmlFormat(name="soft_format"), 0.5),
        Weighted(XmlTagCount(), 0.5),
    ]
    return Preset(components, name="gsm8k-xml", checker="correctness")
