"""Presets for reasoning and an answer: grade-school maths, R1-Zero, reasoning-gym, the countdown game, multiple choice."""

from rewards.components.answers import ChoiceAccuracy, NumericAccuracy
from rewards.components.countdown import CountdownAccuracy
from rewards.components.languages import LanguageConsistency
from rewards.components.math_verify import MathVerify
from rewards.components.reasoning_gym import ReasoningGymAccuracy
from rewards.components.tags import Format, IntegerAnswer, TagCount, TagsFormat
from rewards.extract import hash_answer
from rewards.parameters import with_options
from rewards.preset import Preset, weighted
from rewards.presets.math import MathOptions


def gsm8k_reasoning(*, format_weight: float = 0.2, tag_weight: float = 0.1, strict: bool = True) -> Preset:
    """Grade-school maths answered as `<think>…</think><answer>…</answer>`.

    Formula: accuracy + 0.2 format + 0.1 tags.
    accuracy is 1 if the last `<answer>` after `</think>` is one number that equals the reference exactly;
    format is 1 for one think block and one answer block, both not blank, and no other text;
    tags is 0.25 for each of the four tags that occurs exactly once.
    Range: [0, 1.3].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a number, or a GSM8K solution that ends in `#### 72`.
    Source: accuracy and format rewards of DeepSeek-R1 (2501.12948, 2.2.2); data of GSM8K (2110.14168).
    Attacks: hedges, lists and equations (`70 or 72`, `8 = 7`): wrong, because they are not one number. Answers in the
    reasoning, in an unclosed tag or given twice: no answer. The format alone: 0.3, less than a right answer without format.

    Args:
        format_weight: weight of the format; 0 removes the component.
        tag_weight: weight of the tag count; 0 removes the component.
        strict: treat a second answer tag, and text after `</answer>`, as no answer.

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
    return Preset(
        weighted((NumericAccuracy(strict=strict), 1.0), (TagsFormat(), format_weight), (TagCount(), tag_weight)),
        checker="accuracy",
    )


def gsm8k_hash(*, format_weight: float = 0.1, strict: bool = True) -> Preset:
    """Grade-school maths answered like the solutions of the dataset: free text, then a last line `#### 72`.

    Formula: accuracy + 0.1 format.
    accuracy is 1 if the number on the last `####` line equals the reference exactly;
    format is 1 if there is one such line, not blank, at the end.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a number, or a GSM8K solution that ends in `#### 72`.
    Source: answer format of GSM8K (2110.14168).
    Attacks: two such lines and text after the line: no answer. Hedges, lists and equations: wrong.

    Args:
        format_weight: weight of the format; 0 removes the component.
        strict: treat a second `####` line, and text after it, as no answer.

    >>> from rewards import build_samples, load
    >>> samples = build_samples(["6 x 12?"] * 2, ["6 x 12 = 72\\n#### 72", "It is 72."], answer=["72", "72"])
    >>> load("gsm8k-hash").score(samples).totals
    [1.1, 0.0]
    """
    return Preset(
        weighted((NumericAccuracy(answer_in="hash", strict=strict), 1.0), (Format(scan=hash_answer), format_weight)),
        checker="accuracy",
    )


def gsm8k_xml(*, strict: bool = True) -> Preset:
    """The five rewards of the popular GSM8K notebooks, for `<reasoning>…</reasoning><answer>…</answer>`, with bugs fixed.

    Formula: 2 correctness + 0.5 integer + 0.5 strict_format + 0.5 soft_format + 0.5 tags.
    correctness is 1 if the last `<answer>` is one number that equals the reference exactly; integer is 1 if the answer is
    a whole number; strict_format is 1 for both blocks, not blank, with each tag on a separate line; soft_format is the same
    without the condition on lines; tags is 0.25 for each of the four tags that occurs exactly once.
    Range: [0, 4].
    Checker: correctness.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a number, or a GSM8K solution that ends in `#### 72`.
    Source: the rewards of W. Brown's and Unsloth's notebooks. Differences: correctness compares numbers instead of strings
    (`72.00`, `$72`) and requires a closed tag, while the originals took a text without tags as the answer; integer accepts
    signs and separators; both formats may span lines, unlike the originals, and the strict one requires no newline at the
    end; the soft one rejects text around the blocks; tags subtracts nothing for characters after `</answer>`, for which the
    original gave a perfect long answer without a final newline -1.55 instead of 0.5.
    Attacks: the format alone: 2, as much as correctness alone, so that a wrong whole number in the format equals a right
    fraction without it. Lists, hedges, blank or repeated tags: no correctness.

    Args:
        strict: treat a second answer tag, and text after `</answer>`, as no answer.

    >>> from rewards import build_samples, load
    >>> good = "<reasoning>\\n6 x 12\\n</reasoning>\\n<answer>\\n72\\n</answer>"
    >>> samples = build_samples(["6 x 12?"] * 3, [good, good.replace("72", "70"), "72"], answer=["72"] * 3)
    >>> load("gsm8k-xml").score(samples).totals
    [4.0, 2.0, 0.0]
    """
    components = [
        (NumericAccuracy(name="correctness", strict=strict), 2.0),
        (IntegerAnswer(strict=strict), 0.5),
        (TagsFormat(name="strict_format", first="reasoning", lines=True), 0.5),
        (TagsFormat(name="soft_format", first="reasoning"), 0.5),
        (TagCount(first="reasoning"), 0.5),
    ]
    return Preset(components, checker="correctness")


@with_options(MathOptions, answer_in="tag")
def r1_zero(
    *, format_weight: float = 0.2, language_weight: float = 0.1, language: str = "en", options: MathOptions
) -> Preset:
    r"""Accuracy, format and language of completions `<think>…</think><answer>…</answer>`, for training from a base model.

    Formula: accuracy + 0.2 format + 0.1 language. accuracy is that of `math-verify`, on the last `<answer>` after
    `</think>`, or on a box in it; format is 1 for one think block and one answer block, both not blank, and no other
    text; language is the share of letters in the script of `language`.
    Range: [0, 1.3].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`, as for `math-verify`.
    Source: DeepSeek-R1 (2501.12948), 2.2.2 and 2.3.2. The paper adds the terms without weights; R1-Zero has no language
    term.
    Attacks: blank tags, repeated blocks, text after `</answer>`: no format, and no answer. Long prose in the right script:
    at most 0.1. Another language of the same script: not detected. Otherwise as for `math-verify`.

    Args:
        format_weight: weight of the format; 0 removes the component.
        language_weight: weight of the language; 0 removes the component, as in R1-Zero.
        language: ISO 639-1 code of the language of the reasoning.
        options: see `MathOptions`.

    Raises:
        PresetError: math-verify is not installed, the script of the language is unknown, or shaping could outweigh accuracy.

    >>> from rewards import build_samples, load
    >>> texts = ["<think>six times twelve</think><answer>72</answer>", "<think>шесть на двенадцать</think><answer>70</answer>"]
    >>> evaluation = load("r1-zero").score(build_samples(["?"] * 2, texts, answer=["72"] * 2))
    >>> [round(total, 6) for total in evaluation.totals]
    [1.3, 0.2]
    """
    return Preset(
        weighted(
            (MathVerify(**vars(options)), 1.0),
            (TagsFormat(), format_weight),
            (LanguageConsistency(language=language), language_weight),
        ),
        checker="accuracy",
    )


def reasoning_gym(*, format_weight: float = 0.2, tag_weight: float = 0.0, strict: bool = True) -> Preset:
    """Procedurally generated tasks of reasoning-gym, answered as `<think>…</think><answer>…</answer>`.

    Formula: accuracy + 0.2 format (+ tag_weight tags).
    accuracy is the task's `score_answer` on the content of the last `<answer>` after `</think>`;
    format is 1 for one think block and one answer block, both not blank, and no other text;
    tags is 0.25 for each of the four tags that occurs exactly once.
    Range: [0, 1.2].
    Checker: accuracy, `ok` only for a score of 1.
    Columns: `task`, the dataset's name in reasoning-gym; `entry`, the generated entry {question, answer, metadata} as a
    JSON string.
    Source: reasoning-gym (2505.24760).
    Attacks: text that contains the answer, to which most tasks give partial credit: 0 with `strict`. Code as an answer,
    which some verifiers evaluate: they get plain arithmetic, algebra and literals only; other answers are wrong. Verifiers
    that accept every answer (game_of_life_halting), a prefix (coin_flip) or `nan` (complex_arithmetic): corrected here; a
    test screens all tasks for constants that are accepted.

    Args:
        format_weight: weight of the format; 0 removes the component.
        tag_weight: weight of the tag count; 0 removes the component.
        strict: whether a task's partial credit for a wrong answer becomes 0.

    >>> import json
    >>> from rewards import build_samples, load
    >>> entry = json.dumps({"question": "60 + 12 =", "answer": "72", "metadata": {}})
    >>> samples = build_samples(
    ...     ["60 + 12 ="] * 2,
    ...     ["<think>72</think><answer>72</answer>", "<think>72</think><answer>It is 72</answer>"],
    ...     task=["chain_sum"] * 2,
    ...     entry=[entry] * 2,
    ... )
    >>> load("reasoning-gym").score(samples).totals
    [1.2, 0.2]
    >>> load("reasoning-gym", strict=False).score(samples).values["accuracy"]
    [1.0, 0.25]
    """
    return Preset(
        weighted((ReasoningGymAccuracy(strict=strict), 1.0), (TagsFormat(), format_weight), (TagCount(), tag_weight)),
        checker="accuracy",
    )


def countdown(*, format_weight: float = 0.1, use_all: bool = True, strict: bool = True) -> Preset:
    """The countdown game, answered with an expression as `<think>…</think><answer>(44 + 19) * 2</answer>`.

    Formula: accuracy + 0.1 format. accuracy is 1 if the expression has exactly the target's value and uses each given
    number exactly once; format is 1 for one think block and one answer block, both not blank, and no other text.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `nums` or `numbers`, the given whole numbers, a list or its JSON; `target`, else the reference.
    Source: TinyZero's countdown task, with its 0.1 for the format.
    Attacks: code as an answer: expressions are parsed as a syntax tree of `+ - * /` and whole numbers, and computed as exact
    fractions, without `eval`, powers and `//`. The target itself, repeated or joined numbers: each given number must occur
    once. `70 = 72`: the right side must be the target, and the left side must have its value.

    Args:
        format_weight: weight of the format; 0 removes the component.
        use_all: whether every given number must be used.
        strict: treat a second answer tag, and text after `</answer>`, as no answer.

    >>> from rewards import build_samples, load
    >>> texts = ["<think>?</think><answer>(19 - 1) * 4 = 72</answer>", "<think>?</think><answer>72</answer>"]
    >>> load("countdown").score(build_samples(["?"] * 2, texts, nums=[[19, 1, 4]] * 2, target=[72] * 2)).totals
    [1.1, 0.1]
    """
    return Preset(
        weighted(
            (CountdownAccuracy(answer_in="tag", use_all=use_all, strict=strict), 1.0), (TagsFormat(), format_weight)
        ),
        checker="accuracy",
    )


def mcq_letter(*, letters: str = "ABCD", answer_in: str = "any", strict: bool = True, first_index: int = 0) -> Preset:
    r"""Multiple choice questions, answered with one letter.

    Formula: 1 if the answer chooses the reference's letter and no other, else 0. A choice is a letter, bare, in brackets
    or emphasis, or separated from the option's text: `C`, `(c)`, `**C**`, `C. Paris`, `C - Paris`, `Option C`, `C is
    correct`. With `any`, a completion that is only a choice needs no tag, box or line.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: the letter, or the index of the right choice.
    `choices` or `options`, optional: the texts of the choices; a letter in the text of the chosen one is not a second choice.
    Source: the protocol of MMLU (2009.03300).
    Attacks: hedging (`B or C`, `A B C D`, two tags or boxes): wrong, because it is not a single letter. A letter in a text
    (`A cat`) or in the reasoning: ignored. The same letter for every row: earns the share of that letter, so shuffle the
    options.

    Args:
        letters: the letters of the choices, in order.
        answer_in: place of the answer: `boxed`, `tag` (`<answer>`), `hash` (`####`), `line` (`Answer:`) or `any`.
        strict: treat several different answers, and text after a tag or line, as no answer.
        first_index: index of the first choice, for references that are numbers.

    Raises:
        PresetError: the letters are not different capitals, or `answer_in` is unknown.

    >>> from rewards import build_samples, load
    >>> completions = ["<answer>(C)</answer>", "Answer: C. Paris", "Answer: B or C", "Paris"]
    >>> load("mcq-letter").score(build_samples(["?"] * 4, completions, answer=["C"] * 4)).totals
    [1.0, 1.0, 0.0, 0.0]
    """
    accuracy = ChoiceAccuracy(letters=letters, answer_in=answer_in, strict=strict, first_index=first_index)
    return Preset([(accuracy, 1.0)], checker="accuracy")
