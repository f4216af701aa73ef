"""The verifiers of the reasoning-gym package, called in this process or in a worker with the same result."""

import functools
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

from rewards.errors import nearest
from rewards.protocol import failure_reason

__all__ = ["judge", "parsed_entry", "warm_up"]

# What Python reads as a number and no comparison refuses: `nan` is at no distance from anything.
_NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf)", re.IGNORECASE)
_LETTERS = re.compile(r"(?<![A-Za-z\d.])[A-Za-z]{2}")
ScoreAnswer: TypeAlias = Callable[[str, dict[str, Any]], float]


def judge(task: str, answer: str, entry: str) -> dict[str, Any]:
    """`value`, the task's score; or `unreadable`, the reason why this answer cannot be read though the entry can.

    Raises:
        ValueError: no such task, or an entry that is no JSON object.
        Exception: whatever the verifier raises for a row whose own reference it does not take either.
    """
    score_answer = _score_answer(task)
    if _NO_NUMBER.search(answer) and not _LETTERS.search(str(parsed_entry(entry).get("answer"))):
        return {"value": 0.0}
    try:
        value = float(score_answer(answer, parsed_entry(entry)))
    except Exception as failure:
        if not _accepts_reference(score_answer, parsed_entry(entry)):
            raise
        return {"unreadable": failure_reason(failure)}
    # JSON has no NaN, and a worker's answer is JSON.
    return {"value": value} if math.isfinite(value) else {"value": None, "shown": str(value)}


def warm_up() -> None:
    """Imports the package, and SymPy with it: in a worker, before the first deadline begins."""
    import reasoning_gym  # noqa: F401


def parsed_entry(entry: str | bytes) -> dict[str, Any]:
    """The entry, afresh for each call because tasks are free to change it."""
    parsed = json.loads(entry)
    if not isinstance(parsed, dict):
        raise ValueError("column entry must be a JSON object with question, answer and metadata")
    return parsed


def _accepts_reference(score_answer: ScoreAnswer, entry: dict[str, Any]) -> bool:
    """Whether the verifier works on this row at all: it takes the row's own reference for right."""
    try:
        return float(score_answer(str(entry["answer"]), entry)) == 1.0
    except Exception:
        return False


def _grid_scorer(score: ScoreAnswer) -> ScoreAnswer:
    """ARC verifiers compare tuples of rows, which JSON turned into lists: without this the right answer is wrong."""

    def with_tuples(answer: str, entry: dict[str, Any]) -> float:
        entry["metadata"]["output"] = tuple(tuple(row) for row in entry["metadata"]["output"])
        return score(answer, entry)

    return with_tuples


def _word_scorer(score: ScoreAnswer) -> ScoreAnswer:
    """The halting task compares truth values of strings, by which every answer is right: compare the words."""

    def same_word(answer: str, entry: dict[str, Any]) -> float:
        return float(answer.strip().casefold() == str(entry["answer"]).strip().casefold())

    return same_word


def _probability_scorer(score: ScoreAnswer) -> ScoreAnswer:
    """The coin task gives full marks to what a probability begins with (`0`, `0.3` for 0.375), and to all within 0.0001."""

    def whole_number(answer: str, entry: dict[str, Any]) -> float:
        value = score(answer, entry)
        if value < 1.0:
            return value
        given, expected = (Fraction(text.replace(",", "")) for text in (answer, str(entry["answer"])))
        return float(abs(given - expected) <= abs(expected) / 10_000)

    return whole_number


# Tasks of reasoning-gym 0.1.25 whose own verifier misjudges answers: to rows that went through JSON and text, or constants.
_CORRECTED = {
    "arc_agi": _grid_scorer,
    "coin_flip": _probability_scorer,
    "game_of_life_halting": _word_scorer,
    "rearc": _grid_scorer,
}


@functools.cache
def _score_answer(task: str) -> ScoreAnswer:
    """The task's own verifier; building one instantiates the task with its default configuration."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}. {nearest(task, DATASETS)}"[:300])
    scorer: ScoreAnswer = reasoning_gym.get_score_answer_fn(task)
    return _CORRECTED[task](scorer) if task in _CORRECTED else scorer
