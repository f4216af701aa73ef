"""Tasks, what becomes of them, and one batch's way through the workers."""

import pickle
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rewards.isolation.process import LOADING_SECONDS, Call, Reply, WorkerProcess
from rewards.protocol import failure_reason

_CHUNK_SECONDS = 0.02  # work sent ahead of its answer: enough to hide the pipe, too little to keep a worker from others
_MAX_CHUNK = 64
_MAX_CHUNK_BYTES = 1 << 20
_DEATHS = 3  # workers in a row that end before they answer anything
_FIRST_TRY = 1 / 8  # of the deadline: what has not ended by then waits until all others were tried


@dataclass(frozen=True)
class Task:
    """A call to make in a worker.

    A function that can be interrupted says so with a `grace`: at the deadline an alarm raises `Overrun`, a BaseException,
    in it, which is a `timeout` that costs no worker. In a batch with a budget such a function is first given an eighth of
    the deadline, and all of it when every other task was tried; the end of the budget interrupts it, too, and costs no worker
    either. So may any exception with a true attribute `overrun`.

    Args:
        function: `package.module:function`. Its module is imported in the worker, outside the deadline; when the module
            has a function `warm_up()`, that is called once after the import.
        arguments: plain picklable values.
        info: what a score says beside the reason when the call fails, for instance the extracted answer.
        repeatable: the same arguments always give the same result, so that it may come from a cache.
        grace: seconds after the deadline before the worker is killed, for a function that can be interrupted: on a busy
            machine, or inside a library's C code, it may be late to hear of the alarm. 0: it is killed at the deadline.
    """

    function: str
    arguments: tuple[Any, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    grace: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a task: its result as JSON would give it back (tuples as lists), or why there is none.

    `status` is `ok`; `timeout` for an overrun of the deadline; `error` for what the function raised, a crash, or memory
    that ran out; `infra` where no worker could be had at all, or the batch's budget was spent before the task had had its
    whole deadline: that is the neighbours' doing, and says nothing about the task.
    """

    status: Literal["ok", "timeout", "error", "infra"]
    value: Any = None
    reason: str | None = None
    seconds: float = 0.0


class Batch:
    """The tasks of one `run`: which wait, which are out, what came of them."""

    def __init__(self, tasks: Sequence[Task], deadline: float, memory: int, budget: float | None) -> None:
        self.deadline = deadline
        self.memory = memory
        self.budget = budget
        self.end = None if budget is None else time.monotonic() + budget
        self.graces = [task.grace for task in tasks]
        self._tried: set[int] = set()  # given a part of the deadline
        self._slow: deque[Call] = deque()  # ... which was too little
        self.outcomes: list[Outcome | None] = [None] * len(tasks)
        self.pending: deque[Call] = deque()
        self.calls: dict[int, Call] = {}
        self.no_worker = ""
        self._deaths = 0
        self._busy = 0.0  # seconds of work that was answered
        self._answered = 0
        for item, task in enumerate(tasks):
            try:
                call = Call(item, _checked(task.function), pickle.dumps(task.arguments), self._alarm(item, first=True))
            except Exception as failure:
                self.outcomes[item] = Outcome("error", None, f"cannot be sent to a worker: {failure_reason(failure)}")
            else:
                self.calls[item] = call
                self.pending.append(call)
        # What a new worker may load while it boots.
        self.functions = list(dict.fromkeys(call.function for call in self.pending))[:4]

    def left(self) -> float | None:
        return None if self.end is None else max(0.0, self.end - time.monotonic())

    def finished(self) -> list[Outcome]:
        if self.no_worker or self.left() != 0:
            lost = Outcome("infra", None, f"no worker process could be started: {self.no_worker}"[:300])
            return [outcome or lost for outcome in self.outcomes]
        spent = f"the batch's budget of {self.budget or 0:g} s was spent by others"
        reasons = [f"{'tried in part' if item in self._tried else 'not tried'}: {spent}" for item in self.calls]
        for item, reason in zip(self.calls, reasons, strict=True):
            self.outcomes[item] = self.outcomes[item] or Outcome("infra", None, reason)
        return [outcome for outcome in self.outcomes if outcome is not None]

    def _alarm(self, item: int, *, first: bool) -> float:
        """Seconds after which the task is interrupted; 0 for one that cannot be."""
        if not self.graces[item]:
            return 0.0
        return self.deadline * _FIRST_TRY if first and self.budget is not None else self.deadline

    def work(
        self,
        workers: list[WorkerProcess],
        replace: Callable[[list[WorkerProcess], WorkerProcess, "Batch"], None],
        give_back: Callable[[list[WorkerProcess], WorkerProcess], None],
    ) -> None:
        """Feeds the workers until all is answered or the budget is spent. `workers` are this batch's, changed as they
        die; one with nothing left to do is given back."""
        while workers:
            for worker in list(workers):
                if not self.pending and self._slow:
                    self.pending, self._slow = self._slow, deque()
                if not worker.waiting and self.pending and self.left() != 0:
                    worker.send(self.memory, self._chunk(len(workers)), self.end)
                elif not worker.waiting:
                    give_back(workers, worker)
            if not workers or self.left() == 0:
                self._tried.update(worker.running for worker in workers if worker.running is not None)
                self._hear_out(workers, give_back)
                return
            until = min(self._due(worker) for worker in workers)
            self._poll(workers, until if self.end is None else min(until, self.end))
            for worker in [w for w in workers if self._is_over(w)]:
                if self._deaths >= _DEATHS:
                    return
                replace(workers, worker, self)

    def _hear_out(
        self, workers: list[WorkerProcess], give_back: Callable[[list[WorkerProcess], WorkerProcess], None]
    ) -> None:
        """When the budget is spent: what can be interrupted is, by the worker itself, which then need not be killed."""
        while ending := [worker for worker in workers if self._ends_by_itself(worker)]:
            self._poll(ending, min(self._last_word(worker) for worker in ending))
            for worker in ending:
                if not worker.waiting:
                    give_back(workers, worker)

    def _ends_by_itself(self, worker: WorkerProcess) -> bool:
        return bool(worker.waiting) and not worker.dead and time.monotonic() < self._last_word(worker)

    def _last_word(self, worker: WorkerProcess) -> float:
        """When a worker has had the budget and its task's grace."""
        return (self.end or 0.0) + self.graces[worker.waiting[0]]

    def _chunk(self, workers: int) -> list[Call]:
        """As many calls as take about 20 ms by what is known so far, and no more than a fair share."""
        mean = self._busy / self._answered if self._answered else _CHUNK_SECONDS
        share = -(-len(self.pending) // (2 * workers))
        count = min(_MAX_CHUNK, share, int(_CHUNK_SECONDS / max(mean, 1e-6)))
        chunk = [self.pending.popleft()]
        size = len(chunk[0].arguments)
        while len(chunk) < count and (size := size + len(self.pending[0].arguments)) <= _MAX_CHUNK_BYTES:
            chunk.append(self.pending.popleft())
        return chunk

    def _poll(self, workers: list[WorkerProcess], until: float) -> None:
        """Waits for the next answer, room in a pipe, or the time that is given."""
        poller = select.poll()
        by_pipe = {}
        for worker in workers:
            by_pipe[worker.replies] = by_pipe[worker.requests] = worker
            poller.register(worker.replies, select.POLLIN)
            if worker.unsent:
                poller.register(worker.requests, select.POLLOUT)
        for pipe, _ in poller.poll(max(0.0, until - time.monotonic()) * 1000.0 + 1.0):
            worker = by_pipe[pipe]
            if pipe == worker.requests:
                worker.flush()
                continue
            replies = worker.receive()
            if replies is None:
                worker.dead = True
            for reply in replies or ():
                self._settle(reply)

    def _settle(self, reply: Reply) -> None:
        self._deaths = 0
        self._busy += reply.seconds
        self._answered += 1
        call = self.calls[reply.item]
        spent = self.left() == 0 and reply.seconds < self.deadline
        if reply.late and call.alarm and (call.alarm < self.deadline or spent):
            self._tried.add(reply.item)
            self.calls[reply.item] = again = call._replace(alarm=self._alarm(reply.item, first=False))
            self._slow.append(again)
            return
        status: Literal["ok", "timeout", "error"] = "timeout" if reply.late else "error" if reply.failed else "ok"
        value, reason = (None, str(reply.value)) if reply.failed else (reply.value, None)
        if reply.late:
            reason = f"over the deadline of {self.deadline:g} s"
        self.outcomes[reply.item] = Outcome(status, value, reason, reply.seconds)

    def _due(self, worker: WorkerProcess) -> float:
        return worker.deadline(self.deadline + (0.0 if worker.running is None else self.graces[worker.running]))

    def _is_over(self, worker: WorkerProcess) -> bool:
        """Whether the worker has died or overrun; its item is judged, and what it had not begun waits again."""
        late = time.monotonic() > self._due(worker)
        if not (worker.dead or late):
            return False
        why = _meaning(worker.exit_code()) if worker.dead else f"silent for {LOADING_SECONDS:g} s"
        item = worker.running
        if item is not None:
            worker.waiting.popleft()
            self.outcomes[item] = self._verdict(worker, why)
            self._deaths = 0
        elif not worker.answered:  # one that has, and goes between two items, had grown or was killed from outside
            self._deaths += 1
            self.no_worker = f"{_DEATHS} in a row ended before they did anything ({why})"
        self.pending.extendleft(self.calls[i] for i in reversed(worker.waiting))
        worker.waiting.clear()
        worker.dead = True
        return True

    def _verdict(self, worker: WorkerProcess, why: str) -> Outcome:
        seconds = time.monotonic() - worker.since
        if worker.dead:
            return Outcome("error", None, f"the worker process ended ({why})", seconds)
        if worker.loading:
            return Outcome("error", None, f"loading the function took more than {LOADING_SECONDS:g} s", seconds)
        return Outcome("timeout", None, f"over the deadline of {self.deadline:g} s", seconds)


def _checked(function: str) -> str:
    module, _, name = function.partition(":")
    if not module or not name:
        raise ValueError(f"{function!r} is not of the form package.module:function")
    if module == "__main__":
        raise ValueError("a function of the main module cannot be imported in a worker; move it to a module")
    return function


def _meaning(code: int | None) -> str:
    if code is None:
        return "it closed its pipe"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
