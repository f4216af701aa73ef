"""Functions of `rewards.compat` that the GSM8K notebooks carry, for `<reasoning>…</reasoning><answer>…</answer>`."""

from collections.abc import Sequence
from typing import Any

from rewards._compat.shared import Completions, within
from rewards.components.layouts import IntegerAnswer, XmlFormat, XmlTagCount
from rewards.components.numeric_accuracy import NumericAccuracy
from rewards.evaluation import run_component
from rewards.protocol import Component, Context
from rewards.samples import build_samples

__all__ = [
    "correctness_reward_func",
    "int_reward_func",
    "soft_format_reward_func",
    "strict_format_reward_func",
    "xmlcount_reward_func",
]


@within(0.0, 2.0)
def correctness_reward_func(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **kwargs: Any
) -> list[float | None]:
    r"""2.0 where `<answer>` holds the number in the column `answer`, else 0.0 (W. Brown's GSM8K notebook, Unsloth's).

    Different from the notebooks: numbers are compared, not strings (`72.00`, `$72`); the tag has to be there, once and
    closed; nothing is printed. Rows whose `answer` is no number are None.

    >>> correctness_reward_func(["6 x 12?"] * 3, ["<answer>\n72.0\n</answer>", "<answer>70</answer>", "72"], ["72"] * 3)
    [2.0, 0.0, 0.0]
    """
    return _times(2.0, NumericAccuracy(), completions, answer=list(answer))


@within(0.0, 0.5)
def int_reward_func(completions: Completions, **kwargs: Any) -> list[float | None]:
    r"""0.5 where `<answer>` holds a whole number, else 0.0 (the same notebooks).

    Different from the notebooks: signs and thousands separators are known; the tag has to be there, once and closed.

    >>> int_reward_func(["<answer>\n-1,072\n</answer>", "<answer>7.5</answer>", "72"])
    [0.5, 0.0, 0.0]
    """
    return _times(0.5, IntegerAnswer(), completions)


@within(0.0, 0.5)
def strict_format_reward_func(completions: Completions, **kwargs: Any) -> list[float | None]:
    r"""0.5 for both blocks with each tag on a line of its own, else 0.0 (the same notebooks).

    Different from the notebooks: blocks may span lines, which never matched there; a newline at the very end is not
    asked for; blank blocks, second tags and text behind score 0.0.

    >>> good = "<reasoning>\n6 x 12\nis 72\n</reasoning>\n<answer>\n72\n</answer>"
    >>> strict_format_reward_func([good, good + "\n", good.replace("\n", " ")])
    [0.5, 0.5, 0.0]
    """
    return _times(0.5, XmlFormat(lines=True), completions)


@within(0.0, 0.5)
def soft_format_reward_func(completions: Completions, **kwargs: Any) -> list[float | None]:
    r"""0.5 for both blocks, wherever the lines break, else 0.0 (the same notebooks).

    Different from the notebooks: blocks may span lines; blank blocks, second tags and text around score 0.0.

    >>> soft_format_reward_func(["<reasoning>6 x\n12</reasoning> <answer>72</answer>", "<answer>72</answer>"])
    [0.5, 0.0]
    """
    return _times(0.5, XmlFormat(), completions)


@within(0.0, 0.5)
def xmlcount_reward_func(completions: Completions, **kwargs: Any) -> list[float | None]:
    r"""0.125 for each of the four tags that appears exactly once (the same notebooks).

    Different from the notebooks: nothing is taken off for each character behind `</answer>`, where a perfect long answer
    without a newline at its end scored -1.55; tags count wherever their lines break.

    >>> xmlcount_reward_func(["<reasoning>\n6 x 12\n</reasoning>\n<answer>\n72\n</answer>", "<answer>72</answer>"])
    [0.5, 0.25]
    """
    return _times(0.5, XmlTagCount(), completions)


def _times(factor: float, component: Component, completions: Completions, **columns: Any) -> list[float | None]:
    """The component's values times `factor`; None where the row cannot be judged."""
    samples = build_samples([""] * len(completions), completions, **columns)
    scores = run_component(component, samples, Context())
    return [None if s.status in ("error", "infra") or s.value is None else factor * s.value for s in scores]
