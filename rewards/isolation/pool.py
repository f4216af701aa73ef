"""A pool of warm worker processes, which are killed if a call exceeds its deadline."""

import atexit
import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from rewards.isolation.worker import MAX_RESULT
from rewards.parallel import cores, slow_last
from rewards.protocol import failure_reason

LOADING_SECONDS = 120.0  # to start a worker and import a function's module; not part of a task's deadline
_MAX_WORKERS = 16
_WORKER = Path(__file__).with_name("worker.py")
_LIBRARY = str(Path(__file__).parents[2])  # the entry of sys.path that contains `rewards`
_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Task:
    """A call to make in a worker.

    A positive `grace` means that the function can be interrupted: at the deadline, an alarm raises `Overrun`, a BaseException,
    in it. The task is then `timeout`, and the worker stays. In a batch with a budget, such a function first gets an eighth of
    the deadline, and the complete deadline after all other tasks. A function may also stop by itself, with an exception whose
    attribute `overrun` is true.

    Args:
        function: `package.module:function`. The worker imports the module before the deadline begins, and calls its function
            `warm_up()`, if there is one, once after the import.
        arguments: plain picklable values.
        info: further entries of `Score.info` if the call fails, for example the extracted answer.
        grace: seconds after the deadline before the worker is killed, for a function that can be interrupted: on a busy
            machine, or in C code, the alarm may be delayed. 0 kills the worker at the deadline.
    """

    function: str
    arguments: tuple[Any, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    grace: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task: its result after conversion to JSON and back (tuples are lists), or the reason why there is none.

    `status` is `ok`; `timeout` if the task exceeded the deadline; `error` if the function raised, crashed or ran out of
    memory; `infra`, which says nothing about the task, if no worker could be started, or the batch's budget ended before
    the task had its complete deadline.
    """

    status: Literal["ok", "timeout", "error", "infra"]
    value: Any = None
    reason: str | None = None
    seconds: float = 0.0


class Worker:
    """One worker process and the pipe to it."""

    def __init__(self) -> None:
        parent_end, worker_end = socket.socketpair()
        lifeline_end, self._lifeline = os.pipe()
        # The working folder comes last, so that a file there cannot shadow a package. The folder of this library keeps its
        # position: in a checkout it is the working folder, and a user's `rewards.py` elsewhere would come first.
        path = sorted(sys.path, key=lambda entry: entry != _LIBRARY and entry in ("", os.getcwd()))
        setup = json.dumps([path, worker_end.fileno(), lifeline_end])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", str(_WORKER), setup],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno(), lifeline_end],
                env=os.environ | _SINGLE_THREADED,
                start_new_session=True,  # Ctrl-C does not reach it, and its children are killed with it
            )
        except BaseException:
            parent_end.close()
            os.close(self._lifeline)
            raise
        finally:
            worker_end.close()
            os.close(lifeline_end)
        self._pipe = Connection(parent_end.detach())
        self._loaded: set[str] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, function: str) -> str | None:
        """Import the function's module; return the reason if the import fails.

        Raises:
            OSError, EOFError: the process ends or does not reply.
        """
        if function in self._loaded:
            return None
        kind, reason, _, _ = self.ask(pickle.dumps((function, None, 0, 0.0)), LOADING_SECONDS)
        if kind == "ok":
            self._loaded.add(function)
            return None
        return str(reason)

    def ask(self, request: bytes, seconds: float) -> Any:
        """Send a request and return the reply, see `worker`.

        Raises:
            TimeoutError: there is no reply after `seconds`.
            OSError, EOFError: the process has ended.
            ValueError: the reply cannot be read.
        """
        self._pipe.send_bytes(request)
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no reply within {seconds:g} s")
        return json.loads(self._pipe.recv_bytes(MAX_RESULT + 1000))

    def end(self) -> str:
        """Kill the process and its children; return how the process ended if it had ended before."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5 if self._pipe.poll(0) else 0)  # a readable pipe here means that it is ending
        code = self._process.poll()
        if code is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # if it is not the leader of its session yet
                self._process.kill()
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # only the kernel can delay SIGKILL
            self._process.wait(timeout=5)
        return "it closed its pipe" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Close the pipes in this process without ending the worker, which belongs to the parent of a forked child."""
        self._pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def is_alive(self) -> bool:
        return self._process.poll() is None


class Pool:
    """Worker processes. They start on demand, stay between batches, and end after an overrun or if they use too much memory.

    Threads may share a pool. A forked child starts without workers, and does not affect those of the parent.

    Args:
        workers: the most workers; by default the number of CPUs that this process may use, at least 2 and at most 16.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.size = workers or min(_MAX_WORKERS, max(2, cores()))
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._slots = threading.Semaphore(self.size)
        self._idle: list[Worker] = []
        self._alive: set[Worker] = set()

    def run(
        self, tasks: Sequence[Task], *, deadline: float = 2.0, memory_mb: int = 2048, budget: float | None = None
    ) -> list[Outcome]:
        """Run tasks and return their outcomes in order. Blocks the calling thread. Failures of tasks become outcomes.

        Args:
            tasks: calls to make, distributed over the workers.
            deadline: time limit of a task in seconds; its worker is killed at the deadline plus the task's `grace`.
            memory_mb: limit of the address space of a task in MiB, in addition to the code loaded for it.
            budget: seconds for all tasks together; a task that has not had its complete deadline by then is `infra`.

        Raises:
            ValueError: `deadline` or `memory_mb` is not positive.
        """
        if deadline <= 0 or memory_mb <= 0:
            raise ValueError(f"deadline is {deadline} s and memory_mb {memory_mb}. Pass numbers above 0.")
        end = math.inf if budget is None else time.monotonic() + budget

        def attempt(task: Task, share: float) -> Outcome | None:
            left = end - time.monotonic()
            if left > 0 and self._slots.acquire(timeout=None if budget is None else left):
                try:
                    outcome = self._attempt(task, deadline, memory_mb << 20, share, end)
                finally:
                    self._slots.release()
                if outcome is not None or (share < 1.0 and time.monotonic() < end):
                    return outcome
            return Outcome("infra", None, f"other tasks used the batch's budget of {budget or 0:g} s")

        return [outcome for outcome in slow_last(attempt, tasks, self.size, budget is None) if outcome is not None]

    def close(self) -> None:
        """End the idle workers; the next batch starts new workers."""
        idle, self._idle = self._idle, []
        for worker in idle:
            self._end(worker)

    def _attempt(self, task: Task, deadline: float, memory: int, share: float, end: float) -> Outcome | None:
        """Make a call and return its outcome; None if it did not end within a part of its deadline."""
        module, _, name = task.function.partition(":")
        if not module or not name or module == "__main__":
            return Outcome("error", None, f"{task.function!r} is not of the form package.module:function")
        try:
            worker = self._worker()
        except OSError as failure:
            return Outcome("infra", None, f"no worker process could be started: {failure_reason(failure)}"[:300])
        try:
            problem = worker.load(task.function)
        except (OSError, EOFError, ValueError):
            return Outcome("infra", None, f"no worker process could be started ({self._end(worker)})")
        if problem is not None:
            self._idle.append(worker)
            return Outcome("error", None, problem)
        allowed = min(deadline * share if task.grace else deadline, end - time.monotonic())
        if allowed <= 0:
            self._idle.append(worker)
            return None
        start = time.monotonic()
        try:
            request = pickle.dumps((task.function, task.arguments, memory, allowed if task.grace else 0.0))
        except Exception as failure:
            self._idle.append(worker)
            return Outcome("error", None, f"cannot be sent to a worker: {failure_reason(failure)}")
        try:
            kind, value, seconds, ends = worker.ask(request, allowed + task.grace)
        except TimeoutError:
            self._end(worker)
            kind, value, seconds = "late", None, time.monotonic() - start
        except (OSError, EOFError, ValueError) as failure:
            ending = self._end(worker)
            reason = f"the result cannot be read: {failure}" if isinstance(failure, ValueError) else ending
            return Outcome("error", None, f"the worker process ended ({reason})"[:300], time.monotonic() - start)
        else:
            if ends:
                self._end(worker)
            else:
                self._idle.append(worker)
        if kind == "late" and seconds < deadline and allowed < deadline:
            return None
        if kind == "late":
            return Outcome("timeout", None, f"over the deadline of {deadline:g} s", seconds)
        return Outcome("ok", value, None, seconds) if kind == "ok" else Outcome("error", None, value, seconds)

    def _worker(self) -> Worker:
        """Return an idle worker, or a new one."""
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = Worker()
                self._alive.add(worker)
                return worker
            if worker.is_alive():
                return worker
            self._end(worker)

    def _end(self, worker: Worker) -> str:
        self._alive.discard(worker)
        return worker.end()

    def _abandon_workers(self) -> None:
        """Drop the parent's workers in a forked child and close the pipes, which would keep them alive."""
        for worker in self._alive:
            worker.close()
        self._reset()


_POOLS: "weakref.WeakSet[Pool]" = weakref.WeakSet()
_SHARED = Pool()


def shared_pool() -> Pool:
    """Return the pool of this process, which all components share."""
    return _SHARED


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS):
        for worker in list(pool._alive):
            worker.end()


os.register_at_fork(after_in_child=lambda: list(map(Pool._abandon_workers, list(_POOLS))))
