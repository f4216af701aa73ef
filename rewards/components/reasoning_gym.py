"""The bridge to the verifiers of the reasoning-gym package."""

import json
from dataclasses import dataclass
from typing import Any

from rewards.components.reasoning_gym_tasks import judge, may_be_evaluated, parsed_entry
from rewards.extract import tagged_answer
from rewards.isolation import IsolatedComponent, Task
from rewards.protocol import Context, Sample, Score, failure_reason

SLOW_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "propositional_logic", "simple_integration"}
)
"""Tasks of reasoning-gym 0.1.25 whose verifier parses the answer or does algebra on it, which may take any time."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymAccuracy(IsolatedComponent):
    """`score_answer` of the row's task on the content of `<answer>`, in [0, 1].

    Columns: `task`, the dataset's name in reasoning-gym, and `entry`, the generated entry as a JSON string of
    {question, answer, metadata}. Status is `ok` for 1.0 only. Tasks give partial credit to some wrong answers (most
    to any text that contains the right one): `strict` turns it into 0, else it is kept.
    An answer that the verifier cannot read is `wrong` if it can read the row's own reference; otherwise, as for a task
    that is not known or scores outside [0, 1], the row is at fault: `error`.
    Verifiers of the tasks in `isolated` run in worker processes with a deadline, with the same scores.
    """

    name: str = "accuracy"
    strict: bool = True
    strict_tags: bool = True
    isolated: frozenset[str] = SLOW_TASKS

    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        found = sample.once(tagged_answer, self.strict_tags)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        info = {"extracted": found.value}
        entry = _entry(sample)
        task = str(sample.columns["task"])
        if found.value != parsed_entry(entry).get("answer") and not may_be_evaluated(task, found.value):
            return Score(None, "wrong", {**info, "reason": "not evaluated: the task would run this answer as code"})
        if task in self.isolated:
            return Task("rewards.components.reasoning_gym_tasks:judge", (task, found.value, entry), info)
        try:
            return self.verdict(sample, judge(task, found.value, entry))
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
    """The row's entry as JSON."""
    missing = [column for column in ("task", "entry") if sample.columns.get(column) is None]
    if missing:
        raise ValueError(f"the reasoning-gym preset needs column(s) {', '.join(missing)} in the dataset")
    entry = sample.columns["entry"]
    if isinstance(entry, bytes):
        return entry.decode()
    return entry if isinstance(entry, str) else json.dumps(entry)
