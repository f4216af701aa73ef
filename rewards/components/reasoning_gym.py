"""Call the verifiers of the reasoning-gym package in this process or in a worker, with the same result.

Some verifiers pass the answer to `eval`, or to SymPy's parser, which also uses `eval`, so that an answer such as
`__import__("os").system(...)` would run. This module passes on only answers that cannot call anything, and leaves the verifiers
as they are. It does not limit the time of an algebraic answer; the worker's deadline does.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import json
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from rewards.errors import nearest
from rewards.extract import tagged_answer
from rewards.isolation import IsolatedComponent, Task
from rewards.protocol import Context, Sample, Score, failure_reason

# Tasks of reasoning-gym 0.1.25 by the kind of text that they evaluate.
_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_ARITHMETIC = frozenset({"countdown", "puzzle24"})
_ALGEBRA = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})

_ALGEBRA_TEXT = re.compile(r"(?:[A-Za-z*/^() +-]|[0-9]+(?:\.[0-9]*)?)*+")
# A power of at most two digits, a fraction in parentheses, or one plain symbol, and no power of that.
_POWER = re.compile(r"(?:\*\*|\^)[( -]{0,4}(?:\d{1,2}(?![\d.])|[A-Za-z](?![A-Za-z]))(?! *(?:\*\*|\^))")
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
    | {"exp", "log", "ln", "sqrt", "pi"}
)
_MAX_POWER = 99


def may_be_evaluated(task: str, answer: str) -> bool:
    """Whether the verifier of `task` can evaluate `answer` safely; True for tasks that evaluate nothing.

    Board and list tasks accept Python literals and text that is not Python; arithmetic accepts digits and `+ - * / ( ) .`;
    algebra accepts single letters, common functions and literal powers up to 99.
    """
    if task in _LITERALS:
        return _is_literal_or_no_python(answer)
    if task in _ARITHMETIC:
        return set(answer) <= set("0123456789+-*/(). \n") and "**" not in answer and "//" not in answer
    return task not in _ALGEBRA or _is_plain_algebra(answer)


def _is_literal_or_no_python(answer: str) -> bool:
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except SyntaxError:
        return True  # the verifier's eval cannot read it either, and nothing runs
    except (ValueError, RecursionError, MemoryError):
        return False
    try:
        ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return False
    return True


def _is_plain_algebra(answer: str) -> bool:
    if not _ALGEBRA_TEXT.fullmatch(answer) or not set(re.findall(r"[A-Za-z]{2,}", answer)) <= _FUNCTIONS:
        return False
    powers = re.findall(r"\*\*|\^", answer)
    # Powers of parentheses multiply, as in ((2**99)**99)**99.
    stacked = math.prod(int(power) for power in re.findall(r"\) *(?:\*\*|\^)[( -]{0,4}(\d{1,2})", answer))
    return len(powers) == len(_POWER.findall(answer)) and stacked <= _MAX_POWER


_PACKAGE = "reasoning_gym"
_ONE_AT_A_TIME = threading.Lock()

# Python reads these as numbers, and `nan` passes comparisons of distances.
_NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf)", re.IGNORECASE)
# A Fraction of `1e999999999` would take hours and all memory.
_HUGE_EXPONENT = re.compile(r"[\d.]e[+-]?[\d_]{4,}", re.IGNORECASE)
_LETTERS = re.compile(r"(?<![A-Za-z\d.])[A-Za-z]{2}")
# The possessive pattern reads a run of digits once: a completion may have a hundred thousand.
_COMMAS = re.compile(r"(?<!\d)\d++(?:,\d++)+")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
ScoreAnswer: TypeAlias = Callable[[str, dict[str, Any]], float]


def judge(task: str, answer: str, entry: str) -> dict[str, Any]:
    """Return {`value`: the task's score}, or {`unreadable`: reason} if the verifier reads the row's reference only.

    Raises:
        ValueError: there is no such task, or the entry is not a JSON object.
        Exception: the verifier raises it, and does not accept the row's own reference either.
    """
    score_answer = _score_answer(task)
    expected = str(parsed_entry(entry).get("answer"))
    if _HUGE_EXPONENT.search(answer) and not _HUGE_EXPONENT.search(expected):
        return {"value": 0.0}
    if _NO_NUMBER.search(answer) and not _LETTERS.search(expected):
        return {"value": 0.0}
    if "," not in expected:
        # Change `1,2` to `1, 2`, because many tasks remove commas and would read 12. `1,234` stays.
        answer = _COMMAS.sub(lambda run: run[0] if _THOUSANDS.fullmatch(run[0]) else run[0].replace(",", ", "), answer)
    try:
        value = float(score_answer(answer, parsed_entry(entry)))
    except Exception as failure:
        with contextlib.suppress(Exception):  # does the verifier accept the row's own reference?
            if float(score_answer(str(parsed_entry(entry)["answer"]), parsed_entry(entry))) == 1.0:
                return {"unreadable": failure_reason(failure)}
        raise
    # JSON has no NaN, and a worker's answer is JSON.
    return {"value": value} if math.isfinite(value) else {"value": None, "shown": str(value)}


def warm_up() -> None:
    """Import the package and SymPy in a worker before the first deadline begins."""
    import reasoning_gym  # noqa: F401


def parsed_entry(entry: str | bytes) -> dict[str, Any]:
    """Parse the entry; each call needs a new copy because tasks may change it."""
    parsed = json.loads(entry)
    if not isinstance(parsed, dict):
        raise ValueError("column entry must be a JSON object with question, answer and metadata")
    return parsed


def _grid_score(score: ScoreAnswer, answer: str, entry: dict[str, Any]) -> float:
    """Score an ARC task after converting rows back to tuples, which its verifier compares and JSON turned into lists."""
    entry["metadata"]["output"] = tuple(tuple(row) for row in entry["metadata"]["output"])
    return score(answer, entry)


def _word_score(score: ScoreAnswer, answer: str, entry: dict[str, Any]) -> float:
    """Compare words in the halting task, whose verifier compares truth values of strings and accepts every answer."""
    return float(answer.strip().casefold() == str(entry["answer"]).strip().casefold())


def _probability_score(score: ScoreAnswer, answer: str, entry: dict[str, Any]) -> float:
    """Compare probabilities in the coin task, whose verifier accepts prefixes (`0.3` for 0.375) and errors up to 0.0001."""
    if (value := score(answer, entry)) < 1.0:
        return value
    probability, expected = (Fraction(text.replace(",", "")) for text in (answer, str(entry["answer"])))
    return float(abs(probability - expected) <= abs(expected) / 10_000)


# Tasks of reasoning-gym 0.1.25 whose verifier misjudges rows that went through JSON, or accepts constants.
_CORRECTED = {
    "arc_agi": _grid_score,
    "coin_flip": _probability_score,
    "game_of_life_halting": _word_score,
    "rearc": _grid_score,
}


@functools.cache
def _score_answer(task: str) -> ScoreAnswer:
    """Return the task's verifier, corrected if needed, from the task with its default configuration."""
    tasks = factory(task)
    if task not in tasks.DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}. {nearest(task, tasks.DATASETS)}"[:300])
    scorer: ScoreAnswer = tasks.get_score_answer_fn(task)
    return functools.partial(_CORRECTED[task], scorer) if task in _CORRECTED else scorer


def factory(task: str | None = None) -> ModuleType:
    """Return the module `reasoning_gym.factory` with `task` registered if it exists; with None, all tasks.

    Importing the package imports all tasks, SymPy and matplotlib, which takes seconds. If the package is not imported yet, only
    the tasks in the folder of `task` are imported, and removed from `sys.modules`.
    """
    with _ONE_AT_A_TIME:
        if task is not None and _PACKAGE not in sys.modules and (module := _some_tasks(task)) is not None:
            return module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies compares text with `is`
            importlib.import_module(_PACKAGE)
            return importlib.import_module(f"{_PACKAGE}.factory")


@functools.cache
def _some_tasks(task: str) -> ModuleType | None:
    """Return the factory with the tasks in the folder of `task`; None if no folder has a file of that name.

    An empty package replaces the real one during the import, so that its `__init__` does not run.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    paths = list(spec.submodule_search_locations or ()) if spec is not None else []
    folders = sorted({file.parent.name for path in paths for file in Path(path).glob("*/*.py") if file.stem == task})
    if spec is None or len(folders) != 1:
        return None
    stand_in = ModuleType(_PACKAGE)
    stand_in.__path__, stand_in.__spec__ = paths, spec
    sys.modules[_PACKAGE] = stand_in
    try:
        importlib.import_module(f"{_PACKAGE}.{folders[0]}")
        module = sys.modules[f"{_PACKAGE}.factory"]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
    return module if task in module.DATASETS else None


SLOW_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "propositional_logic", "simple_integration"}
)
"""Tasks of reasoning-gym 0.1.25 whose verifier parses the answer or does algebra on it, without a limit on time."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymAccuracy(IsolatedComponent):
    """`score_answer` of the row's task on the content of `<answer>`, in [0, 1].

    Columns: `task`, the dataset's name in reasoning-gym, and `entry`, the generated entry as a JSON string of
    {question, answer, metadata}. Status is `ok` for 1.0 only. Tasks give partial credit to some wrong answers (most
    tasks to any text that contains the right answer); `strict` sets it to 0.
    An answer that the verifier cannot read is `wrong` if the verifier can read the row's reference. Otherwise, and for
    unknown tasks and scores outside [0, 1], the status is `error`.
    Verifiers of the tasks in `isolated` run in worker processes with a deadline, with the same scores.
    """

    name: str = "accuracy"
    strict: bool = True
    strict_tags: bool = True
    isolated: frozenset[str] = SLOW_TASKS

    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        answer = sample.once(tagged_answer, self.strict_tags)
        if answer.value is None:
            return Score(None, "format", {"reason": answer.reason})
        info = {"extracted": answer.value}
        entry = _entry(sample)
        task = str(sample.columns["task"])
        if answer.value != parsed_entry(entry).get("answer") and not may_be_evaluated(task, answer.value):
            return Score(None, "wrong", {**info, "reason": "not evaluated: the task would run this answer as code"})
        if task in self.isolated:
            return Task("rewards.components.reasoning_gym:judge", (task, answer.value, entry), info)
        try:
            return self.verdict(sample, judge(task, answer.value, entry))
        except Exception as failure:  # as a worker would report it
            return Score(None, "error", {**info, "reason": failure_reason(failure)})

    def verdict(self, sample: Sample, result: Any) -> Score:
        info = {"extracted": sample.once(tagged_answer, self.strict_tags).value}
        if "unreadable" in result:
            return Score(None, "wrong", {**info, "reason": f"not an answer of this task: {result['unreadable']}"})
        value = result["value"]
        if value is None or not 0.0 <= value <= 1.0:
            return Score(None, "error", {**info, "reason": f"score_answer returned {result.get('shown', value)}"})
        if value == 1.0:
            return Score(value, "ok", info)
        return Score(None if self.strict else value, "wrong", info)


def _entry(sample: Sample) -> str:
    """Return the row's entry as JSON text."""
    missing = [column for column in ("task", "entry") if sample.columns.get(column) is None]
    if missing:
        raise ValueError(f"the reasoning-gym preset needs column(s) {', '.join(missing)} in the dataset")
    entry = sample.columns["entry"]
    if isinstance(entry, bytes):
        return entry.decode()
    return entry if isinstance(entry, str) else json.dumps(entry)
