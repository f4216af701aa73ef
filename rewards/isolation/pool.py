"""A pool of warm worker processes that are killed when a call overruns."""

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

LOADING_SECONDS = 120.0  # for a worker to boot, and to import a function's module: not on the item's account
_MAX_WORKERS = 16
_WORKER = Path(__file__).with_name("worker.py")
_LIBRARY = str(Path(__file__).parents[2])  # the entry of sys.path that holds `rewards`
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

    A function that can be interrupted says so with a `grace`: at the deadline an alarm raises `Overrun`, a BaseException,
    in it, which is a `timeout` that costs no worker. In a batch with a budget such a function is first given an eighth of
    the deadline, and all of it when every other task was tried. A function may also give up by itself, with any exception
    that has a true attribute `overrun`.

    Args:
        function: `package.module:function`. Its module is imported in the worker, outside the deadline; when the module
            has a function `warm_up()`, that is called once after the import.
        arguments: plain picklable values.
        info: what a score says beside the reason when the call fails, for instance the extracted answer.
        grace: seconds after the deadline before the worker is killed, for a function that can be interrupted: on a busy
            machine, or inside a library's C code, it may be late to hear of the alarm. 0: it is killed at the deadline.
    """

    function: str
    arguments: tuple[Any, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    grace: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task: its result as JSON gives it back (tuples as lists), or the reason why there is none.

    `status` is `ok`; `timeout` for an overrun of the deadline; `error` for what the function raised, a crash, or memory
    that ran out; `infra` where no worker could be had at all, or the batch's budget was spent before the task had had its
    whole deadline, which says nothing about the task.
    """

    status: Literal["ok", "timeout", "error", "infra"]
    value: Any = None
    reason: str | None = None
    seconds: float = 0.0


class Worker:
    """One worker process and the pipe to it."""

    def __init__(self) -> None:
        own_end, worker_end = socket.socketpair()
        lifeline_end, self._lifeline = os.pipe()
        # The folder that this process works in comes last, so that a file there cannot shadow a package. The folder of this
        # library keeps its place: in a checkout it is the working folder, and a user's `rewards.py` would come first.
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
                start_new_session=True,  # Ctrl-C is for us; and its children can be killed with it
            )
        except BaseException:
            own_end.close()
            os.close(self._lifeline)
            raise
        finally:
            worker_end.close()
            os.close(lifeline_end)
        self._pipe = Connection(own_end.detach())
        self._loaded: set[str] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, function: str) -> str | None:
        """Import the function's module; return the reason if that fails.

        Raises:
            OSError, EOFError: the process ends, or does not answer.
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
            TimeoutError: there is none after so many seconds.
            OSError, EOFError: the process has ended.
            ValueError: the reply cannot be read.
        """
        self._pipe.send_bytes(request)
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"silent for {seconds:g} s")
        return json.loads(self._pipe.recv_bytes(MAX_RESULT + 1000))

    def end(self) -> str:
        """Kill the process and its children; return how it had ended if it was dead already."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5 if self._pipe.poll(0) else 0)  # readable and silent: it is ending
        code = self._process.poll()
        if code is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # before it became the leader of its session
                self._process.kill()
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # SIGKILL waits for nothing but the kernel
            self._process.wait(timeout=5)
        return "it closed its pipe" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Close this process's ends only: in a forked child, the worker is the parent's."""
        self._pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def is_alive(self) -> bool:
        return self._process.poll() is None


class Pool:
    """Worker processes, started when needed, kept between batches, ended when they overrun or have grown too much.

    Threads may share a pool. A forked child starts with no workers of its own; the parent's are left alone.

    Args:
        workers: at most this many; by default the number of cores this process may use, at least 2, at most 16.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.size = workers or min(_MAX_WORKERS, max(2, cores()))
        self._fresh()
        _POOLS.add(self)

    def _fresh(self) -> None:
        self._places = threading.Semaphore(self.size)
        self._idle: list[Worker] = []
        self._alive: set[Worker] = set()

    def run(
        self, tasks: Sequence[Task], *, deadline: float = 2.0, memory_mb: int = 2048, budget: float | None = None
    ) -> list[Outcome]:
        """Run tasks and return their outcomes in order. Blocks the calling thread. Whatever a task does becomes its outcome.

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
        end = math.inf if budget is None else time.monotonic() + budget

        def attempt(task: Task, share: float) -> Outcome | None:
            left = end - time.monotonic()
            if left > 0 and self._places.acquire(timeout=None if budget is None else left):
                try:
                    outcome = self._attempt(task, deadline, memory_mb << 20, share, end)
                finally:
                    self._places.release()
                if outcome is not None or (share < 1.0 and time.monotonic() < end):
                    return outcome
            return Outcome("infra", None, f"the batch's budget of {budget or 0:g} s was spent by others")

        return [outcome for outcome in slow_last(attempt, tasks, self.size, budget is None) if outcome is not None]

    def close(self) -> None:
        """End the idle workers; the next batch starts new ones."""
        idle, self._idle = self._idle, []
        for worker in idle:
            self._end(worker)

    def _attempt(self, task: Task, deadline: float, memory: int, share: float, end: float) -> Outcome | None:
        """Make a call and return its outcome; None if it had only a part of its deadline."""
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
            how = self._end(worker)
            why = f"the result cannot be read: {failure}" if isinstance(failure, ValueError) else how
            return Outcome("error", None, f"the worker process ended ({why})"[:300], time.monotonic() - start)
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

    def _forget(self) -> None:
        """Drop the workers in a forked child: they are the parent's, and this end of their pipes must not keep them alive."""
        for worker in self._alive:
            worker.close()
        self._fresh()


_POOLS: "weakref.WeakSet[Pool]" = weakref.WeakSet()
_SHARED = Pool()


def shared_pool() -> Pool:
    """Return the pool that all components of this process use."""
    return _SHARED


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS):
        for worker in list(pool._alive):
            worker.end()


def _forget_all() -> None:
    for pool in list(_POOLS):
        pool._forget()


os.register_at_fork(after_in_child=_forget_all)
