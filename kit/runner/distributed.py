"""Data-parallel runs: the processes that `accelerate launch` or `torchrun` has started, each with its share of a batch.

All processes make the same optimiser steps. Rank 0 also writes the run directory, evaluates and prints. Python objects are
exchanged over a separate gloo group, whose timeout is long enough for an evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import kit.errors
from kit.config import RunConfig
from kit.errors import ConfigError, EnvironmentUnsupported, KitError, RunError
from kit.runs.files import write_atomic
from kit.runs.store import RunDir

if TYPE_CHECKING:
    from kit.trainer.rollout import Rollout

PATIENCE = timedelta(days=2)
"""Timeout of the gloo group. A process that has died is noticed at once."""
GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused", "socket timeout")
Result = TypeVar("Result")


class DistributedContext:
    """The `size` processes of this run; `rank` is this one's number. Every method is a collective: all processes call it."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    @property
    def is_first(self) -> bool:
        """True in rank 0, which writes the run directory."""
        return self.rank == 0

    def note(self) -> str:
        """A suffix for the first line that is printed; empty for one process."""
        return "" if self.size == 1 else f" on {self.size} processes"

    def wait(self) -> None:
        """Barrier: returns once every process has called it."""
        self.all_gather_object(None)

    def all_gather_object(self, value: Result) -> list[Result]:
        """The value of every process, by rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: Result) -> Result:
        """The value of rank 0."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box: list[Any] = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[no-any-return]

    def main_process_first(self, work: Callable[[], Result]) -> Result:
        """Calls `work` in rank 0 first and then in the others, which find the files that it has made (caches, downloads).

        An error in one process ends all: it is raised there, and the others exit without a message.
        """
        result, error = self._tried(work) if self.is_first else (None, None)
        self._all_well(error)
        if not self.is_first:
            result, error = self._tried(work)
        self._all_well(error)
        return result  # type: ignore[return-value]

    @staticmethod
    def _tried(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        try:
            return work(), None
        except Exception as error:
            return None, error

    def _all_well(self, error: Exception | None) -> None:
        failed = any(self.all_gather_object(error is not None))
        if error is not None:
            raise error
        if failed:
            raise SystemExit(KitError.exit_code)

    def leave(self) -> None:
        """Waits for all processes before the group is destroyed: a launcher takes a first exit code that is not 0 for a crash."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier(group=self.group)
            dist.destroy_process_group()


def join() -> DistributedContext:
    """Connects the processes that a launcher has started; without a launcher, a context of one process.

    Raises `EnvironmentUnsupported` for a launcher that names no rank.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return DistributedContext()
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise EnvironmentUnsupported(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but RANK or MASTER_ADDR is not set. Start several processes with "
            "torchrun --nproc-per-node N -m kit.train RUN.yaml (or accelerate launch), or unset WORLD_SIZE."
        )
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    # Chooses the GPU and the engine (NCCL or gloo) as the trainer will.
    PartialState(cpu=not torch.cuda.is_available())
    return DistributedContext(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=PATIENCE))


def check_division(config: RunConfig, processes: int) -> None:
    """Raises `ConfigError` for a batch that the processes cannot share evenly, with the nearest sizes that they can."""
    batch, micro = config.optimisation.batch_size, config.optimisation.micro_batch_size
    unit = processes * (micro or 1)
    if batch % unit == 0:
        return
    group = config.generation.num_generations
    fitting = [size for size in range(group, 2 * batch + unit * group + 1, group) if size % unit == 0]
    near = sorted(fitting, key=lambda size: (abs(size - batch), size))[:2]
    each = f" with {micro} completions each at once (optimisation.micro_batch_size)" if micro else ""
    raise ConfigError(
        f"optimisation.batch_size: {batch} completions a step, over all processes, cannot be shared by {processes} "
        f"processes{each}. Use {' or '.join(map(str, sorted(near)))}"
        + (f", or a micro_batch_size that divides {batch // processes}." if micro and batch % processes == 0 else ".")
    )


class FirstProcess:
    """Lets the other processes wait where the first one works alone."""

    def __init__(self, processes: DistributedContext) -> None:
        self.processes = processes

    @contextmanager
    def last_work(self) -> Iterator[None]:
        """Around what the first process does after training: once it is done, or stopped, the others go on.

        After an error they end with this process: they may stand inside of a collective, and would not answer.
        """
        try:
            yield
        except KeyboardInterrupt:
            self.processes.wait()
            raise
        self.processes.wait()


class ReadOnlyRunDir(RunDir):
    """The run directory in the processes other than rank 0: writing does nothing.

    `pending` keeps the events of this process until rank 0 gathers and writes them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.pending: list[dict[str, Any]] = []

    @classmethod
    def of(cls, config: RunConfig) -> ReadOnlyRunDir:
        """The directory of a run, which rank 0 has created."""
        return cls(Path(config.run.root) / str(config.run.id))

    def write_status(self, state: str, **fields: Any) -> None:
        """Nothing."""

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Nothing."""

    def append_event(self, kind: str, **fields: Any) -> None:
        """Keeps the event for rank 0, which writes it at the end of the step."""
        self.pending.append({"kind": kind} | fields)

    def write_json(self, name: str, content: Any) -> Any:
        """Nothing."""
        return self.path / name

    def write_text(self, name: str, text: str) -> Any:
        """Nothing."""
        return self.path / name


class GatheringSink:
    """Gathers the rollouts of all processes and passes them to another sink as one rollout, in rank 0."""

    def __init__(self, sink: Callable[[Rollout], None], processes: DistributedContext) -> None:
        self.sink, self.processes = sink, processes

    def __call__(self, rollout: Rollout) -> None:
        if self.processes.size == 1:
            self.sink(rollout)
            return
        advantages = rollout.advantages if rollout.advantages.dim() == 1 else rollout.advantages.mean(dim=1)
        mine = dataclasses.replace(rollout, rewards=rollout.rewards.cpu(), advantages=advantages.cpu())
        found = self.processes.all_gather_object(mine)
        if self.processes.is_first:
            self.sink(joined(found))

    def flush(self) -> None:
        """Flushes the sink, where it can be flushed."""
        getattr(self.sink, "flush", lambda: None)()


def joined(parts: list[Rollout]) -> Rollout:
    """The rollouts of several processes as one, by rank."""
    import torch

    def chained(name: str) -> list[Any]:
        return [value for part in parts for value in getattr(part, name)]

    def chained_if_known(name: str) -> list[Any] | None:
        return None if any(getattr(part, name) is None for part in parts) else chained(name)

    columns = [name for name in parts[0].extra if all(name in part.extra for part in parts)]
    return dataclasses.replace(
        parts[0],
        rows=chained("rows"),
        completions=chained("completions"),
        completion_ids=chained("completion_ids"),
        truncated=chained("truncated"),
        rewards=torch.cat([part.rewards for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        extra={name: [value for part in parts for value in part.extra[name]] for name in columns},
        prompt_ids=chained_if_known("prompt_ids"),
        tool_mask=chained_if_known("tool_mask"),
    )


# --- a failure in another process is reported by rank 0 ---------------------------------------------------------------


def clear_failures(run: RunDir) -> None:
    """Removes the notes of failures in an earlier start."""
    for note in run.control.glob("failed-*.json"):
        note.unlink(missing_ok=True)


def note_failure(run: RunDir, processes: DistributedContext, error: BaseException) -> None:
    """Writes the failure of this process to a file: rank 0 itself only sees a closed connection."""
    if is_gone(error):
        return
    told = {"kind": type(error).__name__, "message": str(error), "process": processes.rank, "of": processes.size}
    with suppress(RunError):
        write_atomic(run.control / f"failed-{processes.rank}.json", json.dumps(told) + "\n")


@contextmanager
def reraise_peer_failure(run: RunDir) -> Iterator[None]:
    """In rank 0: raises the failure that another process has noted, in place of the connection error that follows from it."""
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and is_gone(error):
            raise told_failure(run, error) from error
        raise


def told_failure(run: RunDir, error: BaseException) -> KitError:
    """The failure that another process has noted, or an error which says that it noted none."""
    for note in sorted(run.control.glob("failed-*.json")):
        with suppress(OSError, ValueError, KeyError):
            told = json.loads(note.read_text(encoding="utf-8"))
            kind = getattr(kit.errors, told["kind"], RunError)
            name = "" if kind is not RunError or told["kind"] == "RunError" else f"{told['kind']}: "
            return kind(f"Process {told['process'] + 1} of {told['of']} failed. {name}{told['message']}")
    return RunError(
        "Another process of this run ended without a word, so that no step can be made any more; killed for want of memory, "
        f"most often. The launcher's output says more. ({error})"
    )


def is_gone(error: BaseException) -> bool:
    """Whether an error says that another process cannot be reached."""
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in GONE)
