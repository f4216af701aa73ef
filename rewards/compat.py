r"""The reward functions that people copy between projects, under their own names: open-r1's, and TRL's own.

They take the arguments of the originals and return what those return: `list[float | None]`, one per completion, None where
the row cannot be judged. The names that TRL has, such as `accuracy_reward` and `get_cosine_scaled_reward`, are TRL's own
objects and need TRL. To train on, the presets are better: they refuse what these pay for (`8=7` for 7, an answer copied
from the prompt).

Of the functions that are written here each docstring names the differences from its original; for all of them:

- completions may be strings, lists of messages or None; of several messages the last of the assistant counts;
- nothing that a completion or a reference holds raises or hangs: what cannot be judged scores the lowest value, and a
  comparison that takes over five seconds counts as wrong;
- format checks scan the text once; the originals backtrack for seconds on some texts of a few kilobytes;
- factories return objects that can be pickled, with the `__name__` under which trainers log.

Not here: `ioi_code_reward` and `cf_code_reward` of open-r1. Both need a Piston server with the problem packages of
their contests on it. For problems with inputs and expected outputs there is the preset `code-contest`. Those of the GSM8K
notebooks are the preset `gsm8k-xml`.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rewards.components.lengths import length_share, repeated_share
from rewards.errors import RewardsError
from rewards.evaluation import run_component
from rewards.extract import MAX_CHARS, think_answer_problem
from rewards.isolation import Task, shared_pool
from rewards.protocol import Context, Score
from rewards.samples import build_samples, completion_text

__all__ = [
    "accuracy_reward",
    "binary_code_reward",
    "code_reward",
    "format_reward",
    "get_code_format_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "len_reward",
    "reasoning_accuracy_reward",
    "reasoning_steps_reward",
    "tag_count_reward",
    "think_format_reward",
]

Completions: TypeAlias = Sequence[Any]
F = TypeVar("F", bound=Callable[..., Any])

_SECONDS, _GRACE = 5.0, 0.5  # for one comparison, in a worker process
_STEPS = re.compile(r"Step \d++:|^\d++\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)
_PYTHON = frozenset({"python", "python3", "py"})

# TRL's, see __getattr__.
accuracy_reward: Callable[..., list[float | None]]
reasoning_accuracy_reward: Callable[..., list[float | None]]
think_format_reward: Callable[..., list[float]]
get_cosine_scaled_reward: Callable[..., Any]
get_soft_overlong_punishment: Callable[..., Any]


def __getattr__(name: str) -> Any:
    """TRL's own functions, looked up when they are first asked for: importing this module imports neither TRL nor SymPy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from trl import rewards
    except ImportError:
        raise ImportError(f"rewards.compat.{name} is TRL's own function. Run: pip install trl") from None
    return getattr(rewards, name)


def _within(low: float, high: float) -> Callable[[F], F]:
    """Declares the range, which presets made of functions check their weights against."""

    def declare(function: F) -> F:
        function.low, function.high = low, high  # type: ignore[attr-defined]
        return function

    return declare


# --- layouts -----------------------------------------------------------------------------------------------------------


@_within(0.0, 1.0)
def format_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""1.0 for `<think>\n…\n</think>\n<answer>\n…\n</answer>`, else 0.0 (open-r1).

    Different from open-r1: text after `</answer>`, a second tag of a kind, and blank blocks score 0.0.

    >>> good = "<think>\n6 x 12\n</think>\n<answer>\n72\n</answer>"
    >>> format_reward([good, good + "\nor 73", good.replace("72", "")])
    [1.0, 0.0, 0.0]
    """
    return [float(_has_layout(completion_text(completion))) for completion in completions]


@_within(0.0, 1.0)
def tag_count_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""A quarter for each of `<think>\n`, `\n</think>\n`, `\n<answer>\n` and `\n</answer>` that is there once (open-r1).

    Equal to open-r1. Tags without anything in them earn it, so give it little weight beside correctness.

    >>> tag_count_reward(["<think>\n6 x 12\n</think>\n<answer>\n72\n</answer>", "<think>\n6 x 12\n</think>\n", "72"])
    [1.0, 0.5, 0.0]
    """
    marks = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return [sum(text.count(mark) == 1 for mark in marks) / len(marks) for text in map(completion_text, completions)]


@_within(0.0, 1.0)
def reasoning_steps_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""A third for each sign of a step, at most 1.0 (open-r1).

    Signs are `Step 1:`, `1.` at the start of a line, lines that begin with `-` or `*`, and the words `First,`,
    `Second,`, `Next,` and `Finally,`.

    Different from open-r1: numbers count at the start of every line, not of the first one only.

    >>> reasoning_steps_reward(["1. Six dozens.\n2. That is 72.", "Step 1: add\nStep 2: stop\nFinally, 72", "72"])
    [0.6666666666666666, 1.0, 0.0]
    """
    return [min(1.0, sum(1 for _ in _STEPS.finditer(completion_text(each)[:MAX_CHARS])) / 3) for each in completions]


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


# --- answers and lengths -----------------------------------------------------------------------------------------------


def _compared(texts: Sequence[str], solution: Sequence[Any]) -> list[float | None]:
    """`compare` of each pair in worker processes: an answer that hangs SymPy costs itself, not the trainer."""
    from rewards.errors import require

    require("math-verify", "math_verify", "'math-verify>=0.9,<0.10'")
    golds = [gold if isinstance(gold, str) else "" for gold in solution]
    tasks = [
        Task("rewards.compat:compare", (text[-MAX_CHARS:], gold), grace=_GRACE)
        for text, gold in zip(texts, golds, strict=True)
    ]
    outcomes = shared_pool().run(tasks, deadline=_SECONDS)
    return [outcome.value if outcome.status == "ok" else 0.0 for outcome in outcomes]


def compare(text: str, gold: str) -> float | None:
    """1.0 where math-verify takes the answer for `gold`, with the settings of TRL and open-r1, else 0.0; None where it cannot
    read `gold`. Meant for a worker process."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    expected = parse(gold, parsing_timeout=None)
    if not expected:
        return None
    places = LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(units=True),
        try_extract_without_anchor=False,
    )
    given = parse(text, extraction_config=[places], extraction_mode="first_match", parsing_timeout=None)
    return float(bool(given) and verify(expected, given, timeout_seconds=None))


def warm_up() -> None:
    """Fills math-verify's tables in a worker, outside of any deadline."""
    compare(r"\boxed{\frac{1}{2}}", "1/2")


@_within(-0.5, 0.5)
def len_reward(completions: Completions, solution: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""Kimi k1.5's length reward (2501.12599, 2.3.3), from 0.5 for the shortest to -0.5 for the longest (open-r1).

    λ = 0.5 - (length - shortest) / (longest - shortest) for correct answers, min(0, λ) for wrong ones, 0.0 where all are
    of one length. Where math-verify cannot read the solution the answer counts as correct.

    Different from open-r1: lengths are compared within the completions of one prompt, as in the paper, where `prompts`
    are given (trainers do), not over the whole batch; lengths are tokens where `completion_ids` are given, else
    characters; plain numbers and fractions (`63/400`) are solutions that can be read.

    >>> len_reward([r"\boxed{3}", r"It is \boxed{3}", r"Well, it is \boxed{4}"], ["3", "3", "3"])
    [0.5, 0.0, -0.5]
    """
    correct = [right != 0.0 for right in _compared([completion_text(each) for each in completions], solution)]
    sizes = _lengths(completions, kwargs.get("completion_ids"))
    prompts = kwargs.get("prompts") or [""] * len(completions)
    rewards: list[float] = []
    start = 0
    for end in range(1, len(completions) + 1):
        if end < len(completions) and prompts[end] == prompts[start]:
            continue
        shares = [length_share(size, min(sizes[start:end]), max(sizes[start:end])) for size in sizes[start:end]]
        rewards += [share if correct[at] else min(0.0, share) for at, share in enumerate(shares, start)]
        start = end
    return rewards


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> "RepetitionPenaltyReward":
    r"""max_penalty · (1 - distinct n-grams / n-grams) (2502.03373, C.2); 0.0 where there are fewer than n items.

    The function returned takes token ids, as TRL's does, or completions, as open-r1's: then items are lower-case words.

    Raises:
        RewardsError: a positive penalty.

    >>> reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    >>> reward(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]]), reward(["so it is so it is"])
    ([0.0, -0.75], [-0.4])
    """
    if max_penalty > 0:
        raise RewardsError(f"max_penalty {max_penalty} should not be positive: it would reward repetition.")
    return RepetitionPenaltyReward(ngram_size, max_penalty)


@dataclass(frozen=True)
class RepetitionPenaltyReward:
    """See `get_repetition_penalty_reward`."""

    ngram_size: int
    max_penalty: float
    high = 0.0
    __name__ = "repetition_penalty_reward"

    @property
    def low(self) -> float:
        return float(self.max_penalty)

    def __call__(
        self,
        items: Completions | None = None,
        /,
        completions: Completions | None = None,
        completion_ids: Completions | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """The penalty of each completion, 0 or below; `items` are token ids or completions."""
        rows = next((each for each in (items, completion_ids, completions) if each is not None), ())
        shares = [repeated_share(_items(row), self.ngram_size) for row in rows]
        return [share * self.max_penalty if share else 0.0 for share in shares]


def _items(completion: Any) -> Sequence[Any]:
    """Token ids as they are, the words of anything else."""
    if isinstance(completion, list) and completion and all(isinstance(item, int) for item in completion):
        return completion
    return completion_text(completion)[:MAX_CHARS].lower().split()


def _lengths(completions: Completions, completion_ids: Sequence[Sequence[int]] | None) -> list[int]:
    """Lengths in tokens where they are known, else in characters."""
    return (
        [len(completion_text(each)) for each in completions]
        if completion_ids is None
        else list(map(len, completion_ids))
    )


# --- generated programs: open-r1 -------------------------------------------------------------------------------------


@_within(0.0, 1.0)
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


@_within(0.0, 1.0)
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
