"""Functions of `rewards.compat` that look at the layout, run programs, or belong to the GSM8K notebooks."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.compat.answers import Completions, within, without_trl
from rewards.components.numeric_accuracy import NumericAccuracy
from rewards.components.tags import IntegerAnswer, XmlFormat, XmlTagCount
from rewards.errors import RewardsError
from rewards.evaluation import run_component
from rewards.extract import MAX_CHARS, think_answer_problem
from rewards.protocol import Component, Context, Score
from rewards.samples import build_samples, completion_text

__all__ = [
    "binary_code_reward",
    "code_reward",
    "correctness_reward_func",
    "format_reward",
    "get_code_format_reward",
    "int_reward_func",
    "reasoning_steps_reward",
    "soft_format_reward_func",
    "strict_format_reward_func",
    "tag_count_reward",
    "xmlcount_reward_func",
]


_STEPS = re.compile(r"Step \d++:|^\d++\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)
_PYTHON = frozenset({"python", "python3", "py"})
# --- layouts: open-r1 and TRL ----------------------------------------------------------------------------------------


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


@without_trl
@within(0.0, 1.0)
def _think_format_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""1.0 for `<think>…</think>…`, with nothing before and no second `<think>`, else 0.0 (TRL).

    >>> _think_format_reward(["<think>\n6 x 12\n</think>\n72", "<think>\n6 x 12\n72", "<think>a<think>b</think>"])
    [1.0, 0.0, 0.0]
    """
    texts = map(completion_text, completions)
    return [float(t.startswith("<think>") and t.count("<think>") == 1 and "</think>" in t) for t in texts]


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


# --- generated programs: open-r1 -------------------------------------------------------------------------------------


@within(0.0, 1.0)
def code_reward(
    completions: Completions,
    num_parallel: int = 2,
    provider_type: str = "local",
    enforce_same_language: bool = False,
    **kwargs: Any,
) -> list[float | None]:
    r"""The share of the row's tests that the last fenced Python program passes (open-r1).

    Column `verification_info`: {"language": "python", "test_cases": [{"input", "output"}, ...]}, as open-r1's data has
    it, or any tests that the preset `code-stdio` takes; `language` may be left out. `num_parallel` programs run at once.

    Different from open-r1: programs run in `rewards.sandbox` on this machine, whatever `provider_type` says; all lines
    must agree, where a prefix of the expected output, or nothing, passed; only Python is run, rows of another language
    are None; where no sandbox can be had the value is None and not 0.0.

    Raises:
        RewardsError: no `verification_info`, or several languages with `enforce_same_language`.

    >>> tests = {"language": "python", "test_cases": [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}]}
    >>> programs = ["print(int(input()) * 2)", "print(4)", "print()"]
    >>> code_reward([f"```python\n{program}\n```" for program in programs], verification_info=[tests] * 3)
    [1.0, 0.5, 0.0]
    """
    scores = _scores("share", completions, num_parallel, enforce_same_language, kwargs.get("verification_info"))
    return [None if score.status in ("error", "infra") else score.value for score in scores]


@within(0.0, 1.0)
def binary_code_reward(
    completions: Completions,
    num_parallel: int = 2,
    provider_type: str = "local",
    enforce_same_language: bool = False,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 where the last fenced Python program passes all of the row's tests, else 0.0 (open-r1).

    Different from open-r1: as for `code_reward`; and all means all, where more than 99 % were enough.

    >>> tests = [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}]
    >>> binary_code_reward(["```python\nprint(4)\n```"], verification_info=[tests])
    [0.0]
    """
    scores = _scores("all", completions, num_parallel, enforce_same_language, kwargs.get("verification_info"))
    return [None if score.status in ("error", "infra") else score.value for score in scores]


def _scores(scoring: str, completions: Completions, parallel: int, same_language: bool, tests: Any) -> list[Score]:
    from rewards.components.code.graders import CodeStdio

    if not isinstance(tests, Sequence) or isinstance(tests, str) or len(tests) != len(completions):
        raise RewardsError("code rewards need the column verification_info: tests for each completion.")
    languages = [_language(row) for row in tests]
    if same_language and len(set(languages)) > 1:
        raise RewardsError(f"Rows are of several languages: {', '.join(sorted(set(languages)))}. Keep them apart.")
    samples = build_samples([""] * len(completions), completions, verification_info=tests)
    known = [sample for sample, language in zip(samples, languages, strict=True) if language in _PYTHON]
    scored = iter(run_component(CodeStdio(scoring=scoring, workers=max(1, parallel)), known, Context()))
    return [next(scored) if language in _PYTHON else Score(None, "infra") for language in languages]


def _language(row: Any) -> str:
    if isinstance(row, str) and row.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(row)
    named = row.get("language") if isinstance(row, Mapping) else None
    return str(named).lower() if named else "python"


# --- the GSM8K notebooks', for `<reasoning>…</reasoning><answer>…</answer>` ------------------------------------------


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
