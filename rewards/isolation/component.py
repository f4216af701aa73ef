"""Components that do their work in worker processes."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewards.isolation.cache import component_key, recall, remember
from rewards.isolation.pool import Outcome, Task, shared_pool
from rewards.protocol import Context, ItemComponent, Sample, Score, guarded

# Fields that do not affect the result.
_NOT_CONTENT = frozenset({"deadline", "memory_mb", "budget"})


@dataclass(frozen=True, kw_only=True)
class IsolatedComponent(ItemComponent):
    """Base of components that score completions in warm worker processes.

    `task` and `verdict` run in this process and must be cheap; the function of the task runs in a worker. A completion over
    the deadline is `timeout`. One whose function raises, crashes or runs out of memory is `error`. Both score the floor, and
    do not affect other completions. Results are cached by content.

    Args:
        deadline: time limit for a completion in seconds.
        memory_mb: limit of the address space for a completion in MiB.
        budget: seconds for a batch, or None; a completion that has not had its complete deadline by then is `infra`.
    """

    deadline: float = 2.0
    memory_mb: int = 2048
    budget: float | None = None

    @abstractmethod
    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        """Return the task for one completion, or its score if no task is needed."""

    @abstractmethod
    def verdict(self, sample: Sample, result: Any) -> Score:
        """Return the score from the result of the function, which was converted to JSON and back: tuples are lists."""

    def batch_seconds(self, tasks: int) -> float | None:
        """Return the budget in seconds of a batch with `tasks` different tasks; None for no limit."""
        return self.budget

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        return self.score([sample], ctx)[0]

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        scores: list[Score] = []
        tasks: dict[int, Task] = {}
        for position, sample in enumerate(samples):
            start = time.perf_counter()
            score = guarded(self.task, sample, ctx)
            if isinstance(score, Task):
                tasks[position] = score
                score = Score(None, "error")  # replaced by the outcome below
            scores.append(replace(score, seconds=time.perf_counter() - start) if isinstance(score, Score) else score)
        # Equal tasks of a batch run once, and cached results are reused.
        keys = {
            position: component_key(self, _NOT_CONTENT, task.function, task.arguments) or f"only:{position}"
            for position, task in tasks.items()
        }
        outcomes = {key: Outcome("ok", value) for key, value in recall(keys.values()).items()}
        todo = {key: tasks[position] for position, key in keys.items() if key not in outcomes}
        finished = shared_pool().run(
            list(todo.values()), deadline=self.deadline, memory_mb=self.memory_mb, budget=self.batch_seconds(len(todo))
        )
        fresh = dict(zip(todo, finished, strict=True))
        remember({k: o.value for k, o in fresh.items() if o.status == "ok" and not k.startswith("only:")})
        outcomes |= fresh
        for position, key in keys.items():
            outcome = outcomes[key]
            start, task_seconds = time.perf_counter(), scores[position].seconds or 0.0
            if outcome.status == "ok":
                score = guarded(self.verdict, samples[position], outcome.value)
            else:
                score = Score(None, outcome.status, {**tasks[position].info, "reason": outcome.reason})
            seconds = task_seconds + outcome.seconds + time.perf_counter() - start
            scores[position] = replace(score, seconds=seconds) if isinstance(score, Score) else score
        return scores
