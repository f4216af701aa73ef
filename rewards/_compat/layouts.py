"""Functions of `rewards.compat` that look at the layout."""

import re
from dataclasses import dataclass
from typing import Any

from rewards._compat.shared import Completions, within
from rewards.extract import MAX_CHARS, has_text, think_answer_problem
from rewards.samples import completion_text

__all__ = [
    "CodeFormatReward",
    "format_reward",
    "get_code_format_reward",
    "reasoning_steps_reward",
    "tag_count_reward",
    "think_format_reward",
]

_STEPS = re.compile(r"Step \d++:|^\d++\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)


@within(0.0, 1.0)
def format_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""1.0 for `<think>\n…\n</think>\n<answer>\n…\n</answer>`, else 0.0 (open-r1).

    Different from open-r1: text after `</answer>`, a second tag of a kind, and blank blocks score 0.0.

    >>> good = "<think>\n6 x 12\n</think>\n<answer>\n72\n</answer>"
    >>> format_reward([good, good + "\nor 73", good.replace("72", "")])
    [1.0, 0.0, 0.0]
    """
    return [float(_has_layout(completion_text(completion))) for completion in completions]


@within(0.0, 1.0)
def tag_count_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""A quarter for each of `<think>\n`, `\n</think>\n`, `\n<answer>\n` and `\n</answer>` that is there once (open-r1).

    Equal to open-r1. Tags without anything in them earn it, so give it little weight beside correctness.

    >>> tag_count_reward(["<think>\n6 x 12\n</think>\n<answer>\n72\n</answer>", "<think>\n6 x 12\n</think>\n", "72"])
    [1.0, 0.5, 0.0]
    """
    marks = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return [sum(text.count(mark) == 1 for mark in marks) / len(marks) for text in map(completion_text, completions)]


@within(0.0, 1.0)
def reasoning_steps_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""A third for each sign of a step, at most 1.0 (open-r1).

    Signs are `Step 1:`, `1.` at the start of a line, lines that begin with `-` or `*`, and the words `First,`,
    `Second,`, `Next,` and `Finally,`.

    Different from open-r1: numbers count at the start of every line, not of the first one only.

    >>> reasoning_steps_reward(["1. Six dozens.\n2. That is 72.", "Step 1: add\nStep 2: stop\nFinally, 72", "72"])
    [0.6666666666666666, 1.0, 0.0]
    """
    return [min(1.0, sum(1 for _ in _STEPS.finditer(completion_text(each)[:MAX_CHARS])) / 3) for each in completions]


@within(0.0, 1.0)
def think_format_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""1.0 for `<think>…</think>…`, with nothing before and no second `<think>`, else 0.0 (TRL).

    Different from TRL: blank reasoning, or nothing but white space after it, scores 0.0.

    >>> think_format_reward(["<think>\n6 x 12\n</think>\n72", "<think>\n6 x 12\n72", "<think></think>72"])
    [1.0, 0.0, 0.0]
    """
    return [float(_thinks(completion_text(completion))) for completion in completions]


def get_code_format_reward(language: str = "python") -> "CodeFormatReward":
    r"""A function that gives 1.0 to `format_reward`'s layout with a fenced block of code in the answer, else 0.0 (open-r1).

    A column `language` says for each row which language the fence must name.

    Different from open-r1: as for `format_reward`; and the fence must stand at the start of a line and be closed.

    >>> reward = get_code_format_reward()
    >>> answer = "<think>\nwork\n</think>\n<answer>\n```python\nprint(72)\n```\n</answer>"
    >>> reward([answer, answer.replace("python", "rust")]), reward([answer], language=["rust"])
    ([1.0, 0.0], [0.0])
    """
    return CodeFormatReward(language)


@dataclass(frozen=True)
class CodeFormatReward:
    """See `get_code_format_reward`."""

    language: str
    low = 0.0
    high = 1.0
    __name__ = "code_format_reward"

    def __call__(self, completions: Completions, **kwargs: Any) -> list[float]:
        """1.0 or 0.0 for each completion."""
        languages = kwargs.get("language") or [self.language] * len(completions)
        texts = map(completion_text, completions)
        return [float(_has_code(text, str(language))) for text, language in zip(texts, languages, strict=True)]


def _has_layout(text: str) -> bool:
    """open-r1's layout, each tag once, both blocks filled."""
    return (
        text.startswith("<think>\n")
        and think_answer_problem(text) is None
        and "\n</think>\n<answer>\n" in text
        and "\n</answer>" in text
    )


def _has_code(text: str, language: str) -> bool:
    if not _has_layout(text):
        return False
    opened = text.find(f"\n```{language}", text.find("<answer>"))
    return opened >= 0 and text.find("\n```", opened + 4) >= 0


def _thinks(text: str) -> bool:
    start, closed = len("<think>"), text.find("</think>")
    return (
        text.startswith("<think>")
        and closed >= 0
        and text.find("<think>", start) < 0
        and has_text(text, start, closed)
        and has_text(text, closed + len("</think>"))
    )
