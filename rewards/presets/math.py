"""Presets for mathematics, without and with a penalty on length."""

from dataclasses import dataclass

from rewards.components.lengths import SoftOverlong
from rewards.components.math_verify import MathVerify
from rewards.components.tags import Format
from rewards.extract import boxed_answer
from rewards.parameters import with_options
from rewards.preset import Preset, weighted


@dataclass(frozen=True, kw_only=True)
class MathOptions:
    """Options of presets that compare by math-verify.

    Args:
        answer_in: place of the answer: `boxed`, `tag` (`<answer>`), `hash` (`####`), `line` (`Answer:`) or `any`.
        lenient: use the last of several answers, allow text after it, and accept answers that are not worked out.
        deadline: time limit of one comparison in seconds.
    """

    answer_in: str = "boxed"
    lenient: bool = False
    deadline: float = 2.0


@with_options(MathOptions)
def math_verify(*, format_weight: float = 0.0, options: MathOptions) -> Preset:
    r"""Mathematics by meaning: math-verify in a worker process, with stricter rules against known attacks.

    Formula: accuracy (+ format_weight format). accuracy is 1 if the answer equals the reference, else 0; format is 1 if the
    last `\boxed{…}` after the reasoning is closed and not blank. Equal answers are the same number, expression, equation, set
    (in any order), tuple or interval (with order and brackets), matrix (entry by entry) or word, with or without units, `$`,
    `x =` and thousands separators; `50\%` equals 50 and 0.5; a decimal must agree to six places and four digits.
    Repeating decimals, powers of ten (`1.5e3`) and mixed numbers are exact. After `\approx`, a decimal is accepted if it rounds
    an exact side. Case, primes, subscripts and bases count, and so does the order of letters that are not a product
    (`cat`, `AB`). `a = 1, b = 2` is compared by name or in order. Adjacent boxes (`\boxed{1} and \boxed{-2}`) are one list, in
    answers and references. A letter after a number is a unit only if the reference is a number.
    The answer must be worked out: unless `lenient` is set, it has no more arithmetic than the reference (`6 \cdot 12` is not
    72, `\cos 60^\circ` not `\frac12`, `2x > 6` not `(3, \infty)`), and an answer that occurs in the prompt must be spelled
    like the reference. Expanded and factored forms are equal; so are fractions that are not reduced.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: the answer, or a solution that ends in `#### 72` or
    has the answer in its last `\boxed{…}`.
    Source: math-verify 0.9 and SymPy; accuracy reward of DeepSeek-R1 (2501.12948, 2.2.2).
    Attacks: boxing the question (`2^{10}`, a polynomial to factor), which SymPy would solve: not worked out, or copied from
    the prompt; without a prompt, expanding and factoring remain possible. One constant for all rows: `2 - 2 = 0` equals 0
    and no equation. `8 = 7` for 7: every side must be equal. Tiny numbers (1/2^98 for 1/2^99): compared relative to their
    size. Answers that hang the parser: `timeout` after the deadline, without effect on other completions. Several
    answers, a box before an unclosed one, boxes in the reasoning: no answer. Notation that the parser drops or adds up
    (`72_{13}`, `72'`, `72\ldots`, `70 2`): not mathematics. Another unit (`3 hours` for `3 minutes`): another answer; a
    unit on one side only is ignored.

    Args:
        format_weight: weight of a box that is not blank; 0 removes the component.
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
    *, max_length: int = 20_480, cache: int = 4_096, overlong_weight: float = 1.0, options: MathOptions
) -> Preset:
    r"""Plus or minus one for the answer, and a soft penalty on lengths near the maximum.

    Formula: accuracy + overlong; accuracy is 1 for a right answer, else -1; overlong is 0 for n <= L - c,
    (L - c - n) / c for n <= L, else -1, with L = `max_length`, c = `cache` and n in tokens if token ids are known
    (including the end-of-sequence token, as TRL passes it), else a quarter of the characters.
    Range: [-2, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`, as for `math-verify`.
    Source: DAPO (2503.14476), equation 13; L = 20480 and c = 4096 are the paper's.
    Attacks: `Answer: 3 = 7` for 7, which the original string comparison accepts: every side must be equal. The answer may be
    on the line below `Answer:`, and lines with the same answer in other words (`So the answer is 6.`) are one answer.
    A wrong answer scores at most -1 at any length, and a right answer scores more than a wrong one of equal length.
    Otherwise as for `math-verify`.

    Args:
        max_length: length in tokens with the complete penalty; the trainer's maximum completion length.
        cache: tokens before `max_length` over which the penalty grows.
        overlong_weight: factor of the penalty, at most 2.
        options: see `MathOptions`.

    Raises:
        PresetError: math-verify is not installed, or the lengths do not satisfy 0 < cache <= max_length.

    >>> from rewards import build_samples, load
    >>> samples = build_samples(["?"] * 3, ["Answer: 72", "Answer: 72", "Answer: 70"], answer=["72"] * 3,
    ...     completion_ids=[[1] * 80, [1] * 90, [1] * 101])
    >>> load("math-dapo", max_length=100, cache=20).score(samples).totals
    [1.0, 0.5, -2.0]
    """
    accuracy = MathVerify(**vars(options), low=-1.0, floor=-1.0)
    overlong = SoftOverlong(max_length=max_length, cache=cache)
    return Preset([(accuracy, 1.0), (overlong, overlong_weight)], checker="accuracy")
