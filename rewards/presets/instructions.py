"""Instructions whose following can be verified."""

from typing import Literal

from rewards.components.ifeval import InstructionFollowing
from rewards.components.packages import require
from rewards.preset import Preset, Weighted

__all__ = ["ifeval"]


def ifeval(*, loose: bool = False, credit: Literal["all", "share"] = "all", style: str = "text") -> Preset:
    """Verifiable instructions: lengths, keywords, layouts, letter case, languages, beginnings and ends.

    Formula: accuracy is 1 when all instructions of the row are followed, else 0; with `credit="share"`, the share of
    those that are.
    Range: [0, 1].
    Checker: accuracy, `ok` only when all are followed.
    Columns: `instruction_id_list`: names such as `punctuation:no_comma`, and `kwargs`: one object of arguments each,
    as in the data set google/IFEval; lists, or JSON text of them.
    Source: IFEval (2311.07911), all of its 25 kinds of instructions, and 24 more of the training data of IFBench's authors
    (2507.02833); as a training reward in Tulu 3 (2411.15124).
    Hacks: the instructions say nothing of the question, so that text which is no answer can follow them: combine with a
    judge or a reward model. Blank responses, blank sections, titles, bullets and placeholders, all of the fixed
    answers at once, the prompt alone where it was to be repeated: follow nothing. Think and answer tags in the
    response: no answer, with `style="text"`.

    Args:
        loose: forgive a line before and behind the response and Markdown emphasis, as the paper's loose accuracy does.
        credit: `all`, or `share` for partial credit.
        style: where the response stands: `text`, all that follows the thinking, or `answer` for tags.

    Raises:
        PresetError: py3langid, which tells the language of a response, is not installed.

    >>> from rewards import build_samples, load
    >>> row = {
    ...     "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
    ...     "kwargs": [{}, {"keywords": ["apple", "pear"]}],
    ... }
    >>> texts = ["An apple and a pear.", "An apple, a pear.", "<think>apple pear</think>Fruit."]
    >>> samples = build_samples(["Name fruit."] * 3, texts, **{name: [value] * 3 for name, value in row.items()})
    >>> load("ifeval").score(samples).totals, load("ifeval", credit="share").score(samples).totals
    ([1.0, 0.0, 0.0], [1.0, 0.5, 0.5])
    """
    require("ifeval", "py3langid", "py3langid")
    return Preset(
        [Weighted(InstructionFollowing(loose=loose, credit=credit, style=style), 1.0)],
        name="ifeval",
        checker="accuracy",
    )
