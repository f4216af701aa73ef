"""Mathematics, without and with a price on length."""

from dataclasses import dataclass

from rewards.components.lengths import KimiLength, SoftOverlong
from rewards.components.math_verify import MathVerify
from rewards.components.tags import Format
from rewards.extract import boxed_answer
from rewards.parameters import with_options
from rewards.preset import Preset, weighted


@dataclass(frozen=True, kw_only=True)
class MathOptions:
    """Options of presets that compare by math-verify.

    Args:
        answer_in: where the answer stands: `boxed`, `tag` (`<answer>`), `hash` (`####`), `line` (`Answer:`) or `any`.
        lenient: the last answer counts of several, text may follow it, and it need not be worked out.
        deadline: seconds that one comparison may take.
    """

    answer_in: str = "boxed"
    lenient: bool = False
    deadline: float = 2.0


@with_options(MathOptions)
def math_verify(
    *,
    format_weight: float = 0.0,
    options: MathOptions,
) -> Preset:
    r"""Mathematics by meaning: math-verify in a worker process, made stricter where it is fooled.

    Formula: accuracy (+ format_weight format). accuracy is 1 when the answer equals the reference, else 0; format is 1 when
    the last `\boxed{…}` after the reasoning is closed and not blank. Equal are the same number, expression, equation, set (in
    any order), tuple or interval (order and brackets), matrix (entry by entry) or word, with or without units, `$`,
    `x =` and thousands separators; `50\%` is 50 and 0.5; a decimal has to agree to six places and four digits.
    Repeating decimals, powers of ten (`1.5e3`) and mixed numbers are exact. After `\approx`, a decimal is accepted if it rounds
    an exact side. Upper and lower case, primes, subscripts and bases count, as does the order of letters that are no product
    (`cat`, `AB`). `a = 1, b = 2` is compared by name or in order. Adjacent boxes (`\boxed{1} and \boxed{-2}`) are one list, in
    answers and references. A letter after a number is a unit only if the reference is a number.
    The answer has to be worked out: unless `lenient` is set, it has no more arithmetic than the reference (`6 \cdot 12` is not
    72, `\cos 60^\circ` not `\frac12`, `2x > 6` not `(3, \infty)`), and an answer that occurs in the prompt has to be spelled
    like the reference. Expanded and factored forms are equal; so are fractions that are not reduced.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: the answer, or a solution that ends in `#### 72` or
    holds the answer in its last `\boxed{…}`.
    Source: math-verify 0.9 and SymPy; accuracy reward of DeepSeek-R1 (2501.12948, 2.2.2).
    Hacks: boxing the question (`2^{10}`, a polynomial to factor), which the algebra system then answers: not worked out, or
    copied from the prompt; where no prompt is given, expanding and factoring remain. One constant for all rows: `2 - 2 = 0`
    is no equation's answer but 0's. `8 = 7` for 7: every side has to be equal. Tiny numbers (1/2^98 for 1/2^99): compared
    by their size. Answers that hang the parser: `timeout` after the deadline, the others keep their scores. Several
    answers, an earlier box before an unclosed one, boxes in the reasoning: no answer. What the parser would drop or add up
    (`72_{13}`, `72'`, `72\ldots`, `70 2`): no mathematics. Another unit (`3 hours` for `3 minutes`) is another answer; a
    unit on one side only counts for nothing.

    Args:
        format_weight: weight of a box with anything in it; 0 leaves it out.
        options: see `MathOptions`.

    Raises:
        PresetError: math-verify is not installed.

    >>> from rewards import build_samples, load
    >>> completions = [r"so \boxed{1\,234}", r"so \boxed{1235}", r"\boxed{1234} or \boxed{1235"]
    >>> evaluation = load("math-verify").score(build_samples(["?"] * 3, completions, answer=["1,234"] * 3))
    >>> evaluation.totals, evaluation.statuses["accuracy"]
    ([1.0, 0.0, 0.0], ['ok', 'wrong', 'format'])
    """
    accuracy = MathVerify(**vars(options))
    layout = Format(scan=boxed_answer, strict=not options.lenient)
    return Preset(weighted((accuracy, 1.0), (layout, format_weight)), checker="accuracy")


@with_options(MathOptions, answer_in="any")
def math_dapo(
    *,
    max_length: int = 20_480,
    cache: int = 4_096,
    overlong_weight: float = 1.0,
    options: MathOptions,
) -> Preset:
    r"""Plus or minus one for the answer, and a soft punishment for coming near the maximum length.

    Formula: accuracy + overlong; accuracy is 1 for a right answer, else -1; overlong is 0 for n <= L - c,
    (L - c - n) / c up to L and -1 beyond, with L = `max_length`, c = `cache` and n in tokens when token ids are given
    (the end-of-sequence token included, as TRL passes it), else a quarter of the characters.
    Range: [-2, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`, as for `math-verify`.
    Source: DAPO (2503.14476), equation 13; L = 20480 and c = 4096 are the paper's.
    Hacks: `Answer: 3 = 7` for 7, which the original string comparison takes for right: every side has to be equal. The answer
    may stand on the line below `Answer:`, and lines that say the same in other words (`So the answer is 6.`) are one answer.
    A wrong answer earns no more for being short than -1, and a right one is never worth less than a wrong one of its
    length. Otherwise as for `math-verify`.

    Args:
        max_length: tokens from which on the whole punishment is given; the trainer's maximum completion length.
        cache: tokens before that over which it grows.
        overlong_weight: factor on the punishment, at most 2.
        options: see `MathOptions`.

    Raises:
        PresetError: math-verify is not installed, or the lengths make no interval.

    >>> from rewards import build_samples, load
    >>> samples = build_samples(["?"] * 3, ["Answer: 72", "Answer: 72", "Answer: 70"], answer=["72"] * 3,
    ...     completion_ids=[[1] * 80, [1] * 90, [1] * 101])
    >>> load("math-dapo", max_length=100, cache=20).score(samples).totals
    [1.0, 0.5, -2.0]
    """
    accuracy = MathVerify(
        **vars(options),
        low=-1.0,
        floor=-1.0,
    )
    overlong = SoftOverlong(max_length=max_length, cache=cache)
    return Preset([(accuracy, 1.0), (overlong, overlong_weight)], checker="accuracy")


@with_options(MathOptions)
def math_kimi_length(
    *,
    length_weight: float = 1.0,
    options: MathOptions,
) -> Preset:
    r"""The answer, and within each group of completions to one prompt a reward for being shorter than the others.

    Formula: accuracy + length. With n_min and n_max the shortest and longest of the group (right or wrong),
    lambda = 0.5 - (n - n_min) / (n_max - n_min); length is lambda for a right answer, min(0, lambda) for a wrong one, 0
    where all are equally long. n in tokens when token ids are given, else a quarter of the characters.
    Range: [-0.5, 1.5].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`, as for `math-verify`. Needs whole groups in a batch:
    consecutive equal prompts.
    Source: Kimi k1.5 (2501.12599), 2.3.3; the paper turns it on only after a while.
    Hacks: empty completions are the shortest: a wrong answer earns at most 0 for its length. A long wrong sibling makes
    the others' share larger, which no single completion controls. Otherwise as for `math-verify`.

    Args:
        length_weight: factor on the length reward, at most 1.
        options: see `MathOptions`.

    Raises:
        PresetError: math-verify is not installed, or length could outweigh the answer.

    >>> from rewards import build_samples, load
    >>> texts = [r"\boxed{72}", r"\boxed{72}", r"\boxed{72}", r"\boxed{70}"]
    >>> samples = build_samples(["?"] * 4, texts, answer=["72"] * 4,
    ...     completion_ids=[[1] * 100, [1] * 200, [1] * 300, [1] * 100])
    >>> load("math-kimi-length").score(samples).totals
    [1.5, 1.0, 0.5, 0.0]
    """
    accuracy = MathVerify(**vars(options))
    return Preset(
        [(accuracy, 1.0), (KimiLength(checker=accuracy), length_weight)],
        checker="accuracy",
    )
