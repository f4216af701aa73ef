"""Mathematics with one final answer, checked by spelling or by meaning."""

from rewards.components.math_verify import MathMatch, MathVerify
from rewards.components.packages import require
from rewards.components.tags import BoxFormat
from rewards.preset import Preset, Weighted

__all__ = ["math_boxed", "math_match", "math_verify"]


def math_match(*, answer_in: str = "boxed", boxes: str = "one", lenient: bool = False) -> Preset:
    r"""Mathematics by normalised spelling: quick, nothing is computed, right answers in another form are missed.

    Formula: 1 when answer and reference have one spelling once spaces (not those between digits or words), `$`, colour,
    `\text`, units, `%`, digit grouping, `\dfrac`, `\frac12`, repeating decimals and `x =` are normalised, or when both
    are the same number, `1.5e3` and `3 1/2` included; else 0.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: the answer, or a solution that ends in `#### 72` or
    holds the answer in its last `\boxed{…}`.
    Source: the string comparison that came with MATH (2103.03874).
    Hacks: several answers: boxes that differ, or hedges (`7 or 8`), are no match. An answer before an unclosed box or
    within the reasoning: not looked at. Units are ignored, so a wrong unit goes unnoticed.

    Args:
        answer_in: where the answer stands: `boxed`, `tag`, `hash`, `line` or `any`.
        boxes: `one` refuses boxes that hold different answers, `last` takes the last one.
        lenient: the last answer counts of several, and text may follow it.

    >>> from rewards import build_samples, load
    >>> completions = [r"so \boxed{\dfrac12}", r"so \boxed{0.5}", r"so \boxed{1/2 or 1}"]
    >>> load("math-match").score(build_samples(["?"] * 3, completions, answer=[r"\frac{1}{2}"] * 3)).totals
    [1.0, 1.0, 0.0]
    """
    accuracy = MathMatch(answer_in=answer_in, boxes=boxes, lenient=lenient)
    return Preset([Weighted(accuracy, 1.0)], name="math-match", checker="accuracy")


def math_verify(
    *,
    answer_in: str = "boxed",
    final_form: bool | None = None,
    boxes: str = "one",
    lenient: bool = False,
    deadline: float = 2.0,
    budget: float | None = 30.0,
) -> Preset:
    r"""Mathematics by meaning: math-verify in a worker process, made stricter where it is fooled.

    Formula: 1 when the answer equals the reference, else 0. Equal are the same number, expression, equation, set (in
    any order), tuple or interval (order and brackets), matrix (entry by entry), time of day or word, with or without units, `$`,
    `x =` and thousands separators; `50\%` is 50 and 0.5; a decimal has to agree to six places and four digits.
    Repeating decimals, powers of ten (`1.5e3`) and mixed numbers are exact. Behind `\approx`, a decimal counts where it
    is the rounding of an irrational reference to three digits or more, or stands beside a side that is exact. Upper and
    lower case, primes, subscripts and bases count, as does the order of letters that are no product (`cat`, `AB`,
    `\angle ABC`; not in `\overline{AB}` and `\triangle ABC`); `a = 1, b = 2` is compared by name or in order. Boxes side by
    side (`\boxed{1} and \boxed{-2}`) are one list, in answers and references. A letter behind a number is a unit only where the
    reference is a number.
    The answer has to be worked out: with `final_form` it holds no more arithmetic than the reference (`6 \cdot 12` is not 72,
    `\cos 60^\circ` not `\frac12`, `2x > 6` not `(3, \infty)`), and one that stands in the prompt has to be the reference to the
    letter. Expanded and factored forms are equal; so are fractions that are not reduced.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: the answer, or a solution that ends in `#### 72` or
    holds the answer in its last `\boxed{…}`.
    Source: math-verify 0.9 and SymPy; accuracy reward of DeepSeek-R1 (2501.12948, 2.2.2).
    Hacks: boxing the question (`2^{10}`, a polynomial to factor), which the algebra system then answers: not worked out, or
    copied from the prompt; where no prompt is given, expanding and factoring remain. One constant for all rows: `2 - 2 = 0` is no
    equation's answer but 0's. `8 = 7` for 7: every side has to be equal. Tiny numbers (1/2^98 for 1/2^99): compared by
    their size. Answers
    that hang the parser: `timeout` after the deadline, the others keep their scores. Several answers, an earlier box
    before an unclosed one, boxes in the reasoning: no answer. What the parser would drop or add up (`72_{13}`, `72'`,
    `72\ldots`, `70 2`): no mathematics. Wrong units go unnoticed, am, pm, months and directions aside.

    Args:
        answer_in: where the answer stands: `boxed`, `tag` (`<answer>`), `hash` (`####`), `line` (`Answer:`) or `any`.
        final_form: refuse an answer that is not worked out as far as the reference; None for True unless `lenient`.
        boxes: `one` refuses boxes that hold different answers, `last` takes the last one.
        lenient: the last answer counts of several, text may follow it, and where none stands in its place it is looked for as
            Math-Verify does.
        deadline: seconds that one comparison may take.
        budget: seconds for a batch of up to 1,000 different comparisons, in proportion beyond; None for no limit. Slow ones
            come last, and without a score (`infra`) where no time is left for them.

    Raises:
        PresetError: math-verify is not installed.

    >>> from rewards import build_samples, load
    >>> completions = [r"so \boxed{1\,234}", r"so \boxed{1235}", r"\boxed{1234} or \boxed{1235"]
    >>> evaluation = load("math-verify").score(build_samples(["?"] * 3, completions, answer=["1,234"] * 3))
    >>> evaluation.totals, evaluation.statuses["accuracy"]
    ([1.0, 0.0, 0.0], ['ok', 'wrong', 'format'])
    """
    require("math-verify", "math_verify", "math-verify")
    accuracy = MathVerify(
        answer_in=answer_in, final_form=final_form, boxes=boxes, lenient=lenient, deadline=deadline, budget=budget
    )
    return Preset([Weighted(accuracy, 1.0)], name="math-verify", checker="accuracy")


def math_boxed(
    *,
    format_weight: float = 0.1,
    final_form: bool | None = None,
    boxes: str = "one",
    lenient: bool = False,
    deadline: float = 2.0,
    budget: float | None = 30.0,
) -> Preset:
    r"""Mathematics with the answer in a box: nine tenths for the answer, one for the box.

    Formula: (1 - w) accuracy + w format, w = 0.1. accuracy is that of `math-verify`; format is 1 when the last
    `\boxed{…}` after the reasoning is closed and not blank.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`, as for `math-verify`.
    Source: the weights of EasyR1's maths reward; its pattern for the layout takes time quadratic in the completion and
    does not span lines in every version, here it is a scan.
    Hacks: a box with anything in it earns the format, at most 0.1. Otherwise as for `math-verify`.

    Args:
        format_weight: share of the box, below 0.5.
        final_form: refuse an answer that is not worked out as far as the reference; None for True unless `lenient`.
        boxes: `one` refuses boxes that hold different answers, `last` takes the last one.
        lenient: the last answer counts of several, text may follow it, and where none stands in its place it is looked for as
            Math-Verify does.
        deadline: seconds that one comparison may take.
        budget: seconds for a batch of up to 1,000 different comparisons, in proportion beyond; None for no limit. Slow ones
            come last, and without a score (`infra`) where no time is left for them.

    Raises:
        PresetError: math-verify is not installed, or the box could outweigh the answer.

    >>> from rewards import build_samples, load
    >>> completions = [r"so \boxed{$12$ cm}", r"so \boxed{13}", "so 12"]
    >>> load("math-boxed").score(build_samples(["?"] * 3, completions, answer=["12"] * 3)).totals
    [1.0, 0.1, 0.0]
    """
    require("math-boxed", "math_verify", "math-verify")
    accuracy = MathVerify(final_form=final_form, boxes=boxes, lenient=lenient, deadline=deadline, budget=budget)
    layout = BoxFormat(strict=boxes == "one" and not lenient)
    parts = [Weighted(accuracy, 1.0 - format_weight), Weighted(layout, format_weight)]
    return Preset(parts, name="math-boxed", checker="accuracy")
