"""The bridge to the verifiers of the reasoning-gym package."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rewards.components.evaluated_answers import may_be_evaluated
from rewards.errors import nearest
from rewards.extract import tagged_answer
from rewards.protocol import Context, ItemComponent, Sample, Score, failure_reason

__all__ = ["ReasoningGymAccuracy"]

ScoreAnswer: TypeAlias = Callable[[str, dict[str, Any]], float]


@dataclass(frozen=True, kw_only=True)
class ReasoningGymAccuracy(ItemComponent):
    """`score_answer` of the row's task on the content of `<answer>`, in [0, 1].

    Columns: `task`, the dataset's name in reasoning-gym, and `entry`, the generated entry as a JSON string of
    {question, answer, metadata}. Status is `ok` for 1.0 only. Tasks give partial credit to some wrong answers (most
    to any text that contains the right one): `strict` turns it into 0, else it is kept.
    An answer that the verifier cannot read is `wrong` if it can read the row's own reference; otherwise, as for a task
    that is not known or scores outside [0, 1], the row is at fault: `error`.
    """

    name: str = "accuracy"
    strict: bool = True
    strict_tags: bool = True

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        found = sample.once(tagged_answer, self.strict_tags)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        info = {"extracted": found.value}
        entry = _entry(sample)
        task = str(sample.columns["task"])
        score_answer = _score_answer(task)
        if found.value != entry.get("answer") and not may_be_evaluated(task, found.value):
            return Score(None, "wrong", {**info, "reason": "not evaluated: the task would run this answer as code"})
        try:
            value = float(score_answer(found.value, entry))
        except Exception as failure:
            if not _accepts_reference(score_answer, _entry(sample)):
                raise
            return Score(None, "wrong", {**info, "reason": f"not an answer of this task: {failure_reason(failure)}"})
        if math.isnan(value) or not 0.0 <= value <= 1.0:
            return Score(None, "error", {**info, "reason": f"score_answer returned {value}"})
        if value == 1.0:
            return Score(value, "ok", info)
        return Score(None if self.strict else value, "wrong", info)


def _accepts_reference(score_answer: ScoreAnswer, entry: dict[str, Any]) -> bool:
    """Whether the verifier works on this row at all: it takes the row's own reference for right."""
    try:
        return float(score_answer(str(entry["answer"]), entry)) == 1.0
    except Exception:
        return False


def _entry(sample: Sample) -> dict[str, Any]:
    """The row's entry, parsed afresh for each completion because tasks are free to change it."""
    missing = [column for column in ("task", "entry") if sample.columns.get(column) is None]
    if missing:
        raise ValueError(f"the reasoning-gym preset needs column(s) {', '.join(missing)} in the dataset")
    entry = sample.columns["entry"]
    parsed = json.loads(entry if isinstance(entry, str | bytes) else json.dumps(entry))
    if not isinstance(parsed, dict):
        raise ValueError("column entry must be a JSON object with question, answer and metadata")
    return parsed


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


# Tasks of reasoning-gym 0.1.25 whose own verifier misjudges answers to rows that went through JSON and text.
_CORRECTED = {"arc_agi": _grid_scorer, "rearc": _grid_scorer, "game_of_life_halting": _word_scorer}


@functools.cache
def _score_answer(task: str) -> ScoreAnswer:
    """The task's own verifier; building one instantiates the task with its default configuration."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}. {nearest(task, DATASETS)}"[:300])
    scorer: ScoreAnswer = reasoning_gym.get_score_answer_fn(task)
    return _CORRECTED[task](scorer) if task in _CORRECTED else scorer
