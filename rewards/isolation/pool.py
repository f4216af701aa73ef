"""A pool of warm worker processes."""

import atexit
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rewards.isolation.batch import Batch, Outcome, Task
from rewards.isolation.process import WorkerProcess
from rewards.protocol import failure_reason

_MAX_WORKERS = 16


class Pool:
    """Worker processes, started when first needed, kept between batches, replaced when they overrun or die.

    Threads may share a pool. A forked child starts with no workers of its own; the parent's are left alone.

    Args:
        workers: at most this many; by default the number of cores this process may use, at least 2, at most 16.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}. Give at least 1, or None for one a core.")
        self.size = workers or min(_MAX_WORKERS, max(2, len(os.sched_getaffinity(0))))
        self._fresh()
        _POOLS.add(self)

    def _fresh(self) -> None:
        self._free = threading.Condition()
        self._idle: list[WorkerProcess] = []
        self._alive: set[WorkerProcess] = set()
        self._reserved = 0  # workers that are running, or being started

    def run(
        self, tasks: Sequence[Task], *, deadline: float = 2.0, memory_mb: int = 2048, budget: float | None = None
    ) -> list[Outcome]:
        """Outcomes in order. Blocks the calling thread. Whatever a task does becomes its outcome.

        Args:
            tasks: calls to make, shared out among the workers.
            deadline: seconds a task may take; then, or after its `grace`, its worker is killed, and the others go on.
            memory_mb: address space a task may take beside the code that was loaded for it, MiB.
            budget: seconds for all tasks together; what had not had its whole deadline by then is `infra`.

        Raises:
            ValueError: a deadline or memory limit that leaves nothing to work with.
        """
        if deadline <= 0 or memory_mb <= 0:
            raise ValueError(f"deadline is {deadline} s and memory_mb {memory_mb}. Give more than 0 of both.")
        batch = Batch(tasks, deadline, memory_mb << 20, budget)
        if not batch.pending:
            return batch.finished()
        with self._borrowed(batch) as workers:
            if workers:
                batch.work(workers, self._replace, self._give_back)
        return batch.finished()

    def close(self) -> None:
        """Ends the workers that have nothing to do; the next batch starts new ones."""
        with self._free:
            idle, self._idle = self._idle, []
            self._reserved -= len(idle)
            self._free.notify_all()
        for worker in idle:
            self._alive.discard(worker)
            worker.end()

    def _kill(self) -> None:
        for worker in list(self._alive):
            worker.end()

    @contextmanager
    def _borrowed(self, batch: Batch) -> Iterator[list[WorkerProcess]]:
        """Workers for this batch alone: all idle ones, and new ones up to the pool's size. Waits for at least one."""
        with self._free:
            while not self._idle and self._reserved >= self.size:
                if not self._free.wait(batch.left()):
                    break
            dead = [worker for worker in self._idle if not worker.is_alive()]
            self._idle = [worker for worker in self._idle if worker not in dead]
            self._reserved -= len(dead)
            wanted = min(len(batch.pending), self.size)
            mine = [self._idle.pop() for _ in range(min(wanted, len(self._idle)))]
            new = min(wanted - len(mine), self.size - self._reserved)
            self._reserved += new
        for worker in dead:
            self._alive.discard(worker)
            worker.end()
        for _ in range(new):
            self._start(mine, batch)
        try:
            yield mine
        finally:  # also when the keyboard interrupts: what is still working is not to be waited for
            for worker in list(mine):
                self._give_back(mine, worker)

    def _start(self, mine: list[WorkerProcess], batch: Batch) -> None:
        """One more worker for a place that is reserved."""
        try:
            worker = WorkerProcess(batch.functions)
        except OSError as failure:
            batch.no_worker = failure_reason(failure)
            with self._free:
                self._reserved -= 1
                self._free.notify()
            return
        self._alive.add(worker)
        mine.append(worker)

    def _replace(self, mine: list[WorkerProcess], dead: WorkerProcess, batch: Batch) -> None:
        """At once, even with nothing left to do: the new one loads what it needs before the next batch asks for it."""
        mine.remove(dead)
        self._alive.discard(dead)
        dead.end()
        self._start(mine, batch)

    def _give_back(self, mine: list[WorkerProcess], worker: WorkerProcess) -> None:
        mine.remove(worker)
        usable = not worker.dead and not worker.waiting
        if not usable:
            self._alive.discard(worker)
            worker.end()
        with self._free:
            if usable:
                self._idle.append(worker)
            else:
                self._reserved -= 1
            self._free.notify()

    def _forget(self) -> None:
        """In a forked child: the workers are the parent's, and this end of their pipes must not keep them alive."""
        for worker in self._alive:
            worker.close()
        self._fresh()


_POOLS: "weakref.WeakSet[Pool]" = weakref.WeakSet()
_SHARED: list[Pool] = []
_SHARED_LOCK = threading.Lock()


def shared_pool() -> Pool:
    """The pool that all components of this process use."""
    with _SHARED_LOCK:
        if not _SHARED:
            _SHARED.append(Pool())
        return _SHARED[0]


def _close_all() -> None:
    for pool in list(_POOLS):
        pool._kill()


def _forget_all() -> None:
    global _SHARED_LOCK
    _SHARED_LOCK = threading.Lock()  # another thread of the parent may have held it
    for pool in list(_POOLS):
        pool._forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
