"""Explains failures of libraries and of the machine, and retries with smaller batches after running out of memory.

A run that is out of memory continues with half as many rows at once. Each kind of work (`training`, `generation`, `scoring`,
`evaluation`) has its own size, which starts at the configured value and never grows again.
"""

from __future__ import annotations

import errno
import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from kit.errors import EngineError, KitError, ModelError, RunError
from kit.runs.worker import Hung, is_lost

if TYPE_CHECKING:
    from kit.runs.store import RunDir

OUT_OF_MEMORY = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc",
    "cublas_status_alloc_failed", "cudnn_status_alloc_failed",
)  # fmt: skip
NOT_INITIALIZED = ("cublas_status_not_initialized", "cudnn_status_not_initialized")
"""Messages of libraries that get no memory for their handle. They are the same for a broken driver."""
HANDLE_BYTES = 512 * 1024**2
"""Free bytes of a GPU below which cuBLAS or cuDNN may fail to create a handle."""
MEMORY_ADVICE = (
    "In this order: lower optimisation.micro_batch_size (same result, less memory), set "
    "optimisation.gradient_checkpointing: offload, lower generation.max_completion_tokens, set model.load_in_4bit: true, or "
    "optimisation.optimizer: adamw_8bit; `grpo-kit plan` shows how much each of them saves."
)
DISK_FULL = ("no space left on device", "disk quota exceeded", "pytorchstreamwriter failed")


@contextmanager
def explained() -> Iterator[None]:
    """Turns out-of-memory and full-disk failures into `ModelError` and `RunError` with advice; others pass."""
    try:
        yield
    except KitError:
        raise  # has an explanation already
    except Exception as error:
        text = str(error).lower()
        if is_out_of_memory(error):
            raise ModelError(f"The run is out of memory ({first_line(error)}). {MEMORY_ADVICE}") from error
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(sign in text for sign in DISK_FULL):
            raise RunError(
                f"The disk is full ({first_line(error)}). Free some space, lower run.keep_checkpoints, set "
                "run.save_completions: false, or set run.root to another disk, and start again."
            ) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or the GPU. torch raises a RuntimeError or a subclass of it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        if any(sign in text for sign in NOT_INITIALIZED):
            try:
                return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < HANDLE_BYTES
            except RuntimeError:  # the CUDA context is lost
                return False
        return any(sign in text for sign in OUT_OF_MEMORY)
    return False


def raise_fatal(error: BaseException) -> None:
    """Re-raises `error` if it is out of memory or a lost GPU. For use in `except Exception`."""
    if is_out_of_memory(error) or is_lost(error):
        raise error


@contextmanager
def converting_weights() -> Iterator[None]:
    """Applies `raise_fatal` while weights are loaded. transformers would report it as an error in the files."""
    from transformers import core_model_loading as loader

    report = loader.log_conversion_errors

    @contextmanager
    def checked(*arguments: object, **keywords: object) -> Iterator[None]:
        try:
            with report(*arguments, **keywords):
                yield
        except loader.SkipParameters as skipped:
            raise_fatal(skipped.__context__ or skipped)
            raise

    loader.log_conversion_errors = checked
    try:
        yield
    finally:
        loader.log_conversion_errors = report


def first_line(error: BaseException) -> str:
    """The first line of a message, or the name of the error class if there is none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- vLLM's engine ----------------------------------------------------------------------------------------------------


log = logging.getLogger("kit")
NO_ROOM = (
    "no available memory for the cache", "free memory on device", "kv cache is needed", "insufficient memory",
    "exceeds available mamba cache blocks",
)  # fmt: skip


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a watched vLLM engine in addition to TRL's arguments. `dtype` None: that of the model's weights."""

    seed: int = 0
    timeout: float = 1800.0  # seconds
    dtype: torch.dtype | None = None
    eager: bool | None = None
    adapter_alone: bool = False  # the engine receives the adapter, and not merged weights
    four_bit: bool = False  # its linear layers have 4-bit weights
    revision: str | None = None
    gpu_memory_utilization: float = 0.3
    at_once: int = 256  # completions; vLLM refuses more than recurrent layers have room for
    compared: bool = True  # whether log-probabilities of trainer and engine are of the same distribution
    tell: Callable[[str], None] = log.warning


def engine_failure(error: Exception, doing: str, settings: EngineSettings) -> EngineError:
    """An error that explains a failure of the engine during `doing`, and what to do."""
    reason = first_line(error)
    if isinstance(error, Hung):
        return EngineError(
            f"vLLM's engine hangs: {reason} ({doing}). Resume the run; if a generation batch needs more time, raise "
            f"generation.vllm.timeout (seconds), and if it hangs again, set generation.engine: hf."
        )
    if "error in memory profiling" in str(error).lower():
        return EngineError(
            f"vLLM's engine measured the memory of the GPU while another process freed some ({doing}: {reason}). The run is "
            "correct. Start it again when no chat, evaluation or other program on this GPU is ending."
        )
    if is_out_of_memory(error) or any(sign in str(error).lower() for sign in NO_ROOM):
        return EngineError(
            f"vLLM's engine is out of memory ({doing}: {reason}). Its share is generation.vllm.gpu_memory_utilization "
            f"{settings.gpu_memory_utilization:g} of the GPU (on the CPU VLLM_CPU_KVCACHE_SPACE GiB of cache): raise it if the "
            "cache does not fit, lower it if the trainer needs more. Also, generation.vllm.standby: true frees it during "
            "updates; or lower generation.max_completion_tokens or data.max_prompt_tokens, or set generation.engine: hf (a "
            "resume needs --force for them). Smaller micro-batches do not help, because the engine splits its work by itself."
        )
    merged = settings.adapter_alone and "lora" in str(error).lower()
    instead = "generation.vllm.hand_over: merged, because it cannot load the adapter, or generation.engine: hf"
    return EngineError(
        f"vLLM's engine died {doing}: {type(error).__name__}: {reason}. See the log. Resume the run; if "
        f"it dies again, set {instead if merged else 'generation.engine: hf'}."
    )


# --- out of memory: halving the rows ----------------------------------------------------------------------------------


LIMIT = 3
"""Number of failures without a finished step in between after which a run ends."""
KINDS = ("training", "generation", "scoring", "evaluation")
FIRST_ADVICE = {
    "training": "optimisation.micro_batch_size",
    "scoring": "optimisation.micro_batch_size",
    "generation": "optimisation.batch_size",
    "evaluation": "evaluation.batch_size",
}
Result = TypeVar("Result")


@dataclass(frozen=True)
class BackoffEvent:
    """A halved batch size: kind of work, the new number of rows at once, and the message of the allocator."""

    work: str
    rows: int
    reason: str
    step: int  # finished optimiser steps
    micro_batch_size: int  # new number of rows of a training pass


class BatchSizeBackoff:
    """The sizes of a run, and the number of failures in a row.

    `micro_batch_size` is the initial number of rows of a training pass; `tell` is called at every halving.
    """

    def __init__(self, tell: Callable[[BackoffEvent], None] | None = None, micro_batch_size: int = 0) -> None:
        self.tell = tell or (lambda event: log.warning("%s (%s)", backoff_message(event), event.reason))
        self.micro_batch_size = micro_batch_size
        self.sizes: dict[str, int] = {}
        self.chosen = frozenset[str]()  # sizes for this machine, which a checkpoint of another one does not replace
        self.in_a_row = 0
        self.step = 0

    def rows(self, work: str, total: int) -> int:
        """Number of rows of `total` that this kind of work computes at once."""
        return max(1, min(total, self.sizes.get(work, total)))

    def attempt(self, work: str, total: int, do: Callable[[int], Result]) -> Result:
        """Calls `do(rows at once)`. Out of memory, it repeats the call with half as many rows and the same random numbers.

        Raises `ModelError` if that does not help.
        """
        state = rng_state()
        while True:
            try:
                return do(self.rows(work, total))
            except Exception as error:
                self.halve(work, total, error)
            release()
            set_rng_state(state)

    def halve(self, work: str, total: int, error: Exception) -> None:
        """Halves the size after a failure. Re-raises other errors, and raises `ModelError` if halving is no longer possible."""
        if not is_out_of_memory(error):
            raise error
        self.in_a_row += 1
        size, reason = self.rows(work, total), first_line(error)
        if self.in_a_row >= LIMIT or size == 1:
            often = f"{self.in_a_row} times in a row, the last time " if self.in_a_row > 1 else ""
            first = f"Lower {FIRST_ADVICE[work]}, e.g. to {size // 2}. " if size > 1 else ""
            raise ModelError(
                f"The run is out of memory: {often}in {work}, with {size} completion{'s' * (size > 1)} at once "
                f"({reason}). {first}{MEMORY_ADVICE}"
            ) from error
        self.sizes[work] = (size + 1) // 2
        traceback.clear_frames(error.__traceback__)  # they reference the tensors of the attempt
        self.tell(
            BackoffEvent(work, self.sizes[work], reason, self.step, self.sizes.get("training", self.micro_batch_size))
        )

    def finished(self, step: int | None = None) -> None:
        """Resets the number of failures in a row after an optimiser step or a batch of an evaluation."""
        self.in_a_row = 0
        self.step = self.step if step is None else step

    def state_dict(self) -> dict[str, int]:
        """Sizes that are smaller than configured."""
        return dict(self.sizes)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores the sizes of `state_dict()`, except those of `chosen`."""
        self.sizes |= {work: int(state[work]) for work in KINDS if work in state and work not in self.chosen}


def report_backoff(run: RunDir, say: Callable[[str], None], event: BackoffEvent) -> None:
    """Records the event and prints `backoff_message`."""
    run.append_event("out_of_memory", **vars(event))
    say(backoff_message(event))


def backoff_message(event: BackoffEvent) -> str:
    """A message about what changes after running out of memory, and what does not."""
    same = "the same step in smaller parts" if event.work == "training" else "the same number of completions"
    return f"Out of memory in {event.work} after step {event.step}: continuing with {event.rows} completions at once ({same})."


def release() -> None:
    """Frees the memory of an attempt, and returns cached memory to the device."""
    gc.collect()
    if _on_gpu():
        torch.cuda.empty_cache()


def _on_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def rng_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of torch's generators on the CPU and the current GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if _on_gpu() else None


def set_rng_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Restores a `rng_state()`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
