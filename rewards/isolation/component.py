"""Components whose work is done in worker processes."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewards.isolation.cache import component_key, recall, remember
from rewards.isolation.pool import Outcome, Task, shared_pool
from rewards.protocol import Context, ItemComponent, Sample, Score, failure_reason

# Fields that say how a result is got, not what it is.
_NOT_CONTENT = frozenset({"deadline", "memory_mb", "budget"})


@dataclass(frozen=True, kw_only=True)
class IsolatedComponent(ItemComponent):
    """A component that hands each completion's work to a warm worker process.

    `task` and `verdict` run here and must be cheap; the function that `task` names runs in a worker. An item that
    overruns is `timeout`, one whose function raises, crashes or runs out of memory is `error`, both at the floor; the
    other items keep their scores. Results are remembered by content.

    Args:
        deadline: seconds an item may take.
        memory_mb: address space that an item may take, MiB.
        budget: seconds for a whole batch, or None; items that had not had their whole deadline by then are `infra`.
    """

    deadline: float = 2.0
    memory_mb: int = 2048
    budget: float | None = None

    @abstractmethod
    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        """Return the work to do on one completion, or its score if there is none."""

    @abstractmethod
    def verdict(self, sample: Sample, result: Any) -> Score:
        """Return the score for the function's result, which went through JSON: tuples are lists."""

    def batch_seconds(self, tasks: int) -> float | None:
        """Return the budget of a batch of that many different tasks, in seconds."""
        return self.budget

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        return self.score([sample], ctx)[0]

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        scores: list[Score] = []
        tasks: dict[int, Task] = {}
        for position, sample in enumerate(samples):
            start = time.perf_counter()
            made = self._guarded(self.task, sample, ctx)
            if isinstance(made, Task):
                tasks[position] = made
                made = Score(None, "error")  # until its outcome is there
            scores.append(replace(made, seconds=time.perf_counter() - start) if isinstance(made, Score) else made)
        # Known results come from the cache; equal tasks of one batch run once.
        keys = {
            position: component_key(self, _NOT_CONTENT, task.function, task.arguments) or f"only:{position}"
            for position, task in tasks.items()
        }
        outcomes = {key: Outcome("ok", value) for key, value in recall(keys.values()).items()}
        todo = {key: tasks[position] for position, key in keys.items() if key not in outcomes}
        done = shared_pool().run(
            list(todo.values()), deadline=self.deadline, memory_mb=self.memory_mb, budget=self.batch_seconds(len(todo))
        )
        fresh = dict(zip(todo, done, strict=True))
        remember({k: o.value for k, o in fresh.items() if o.status == "ok" and not k.startswith("only:")})
        outcomes |= fresh
        for position, key in keys.items():
            outcome = outcomes[key]
            start, spent = time.perf_counter(), scores[position].seconds or 0.0
            if outcome.status == "ok":
                score = self._guarded(self.verdict, samples[position], outcome.value)
            else:
                score = Score(None, outcome.status, {**tasks[position].info, "reason": outcome.reason})
            seconds = spent + outcome.seconds + time.perf_counter() - start
            scores[position] = replace(score, seconds=seconds) if isinstance(score, Score) else score
        return scores

    def _guarded(self, step: Any, sample: Sample, argument: Any) -> Any:
        try:
            return step(sample, argument)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # SystemExit and timeouts derived from BaseException must not end a run
            return Score(None, "error", {"reason": failure_reason(failure)})
