"""Failures of what lies below, told as what a person can do about them; and the one that is answered, out of memory.

A run that is out of memory goes on with half as many rows at once. Each kind of work (`training`, `generation`, `scoring`,
`evaluation`) has a size of its own, which starts as large as was asked for and stays as small as it has become.
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
"""A library that gets no memory for its handle says this; it says the same where the driver is broken."""
HANDLE_BYTES = 512 * 1024**2
"""Free bytes of a GPU below which a handle of cuBLAS or cuDNN may not be had."""
MEMORY_ADVICE = (
    "In this order: lower optimisation.micro_batch_size (same result, less memory), set "
    "optimisation.gradient_checkpointing: true, lower generation.max_completion_tokens, set model.load_in_4bit: true, or "
    "optimisation.optimizer: adamw_8bit; `grpo-kit plan` says how much each of them saves."
)
DISK_FULL = ("no space left on device", "disk quota exceeded", "pytorchstreamwriter failed")


@contextmanager
def explained() -> Iterator[None]:
    """Turns out-of-memory and full-disk failures into `ModelError` and `RunError` with advice; others pass."""
    try:
        yield
    except KitError:
        raise  # explained already
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
    """Whether an allocator gave up, on the host or on the GPU; torch says so by a RuntimeError or a subclass of it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        if any(sign in text for sign in NOT_INITIALIZED):
            try:
                return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < HANDLE_BYTES
            except RuntimeError:  # a dead context answers nothing
                return False
        return any(sign in text for sign in OUT_OF_MEMORY)
    return False


def raise_fatal(error: BaseException) -> None:
    """Raises `error` again if it is about memory or a dead GPU, and not about what was tried. For `except Exception`."""
    if is_out_of_memory(error) or is_lost(error):
        raise error


@contextmanager
def converting_weights() -> Iterator[None]:
    """Raises what `raise_fatal` does while weights are loaded; transformers would report files that it cannot convert."""
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
    """The first line of a message, or the error's name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- vLLM's engine ----------------------------------------------------------------------------------------------------


log = logging.getLogger("kit")
NO_ROOM = ("no available memory for the cache", "free memory on device", "kv cache is needed", "insufficient memory")


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a watched vLLM engine in addition to TRL's arguments. `dtype` None: that of the model's weights."""

    seed: int = 0
    timeout: float = 1800.0  # seconds
    dtype: torch.dtype | None = None
    eager: bool | None = None
    adapter_alone: bool = False  # LoRA is handed over as it is, and not merged into the weights
    revision: str | None = None
    gpu_memory_utilization: float = 0.3
    compared: bool = True  # log-probabilities of the trainer and the engine, as both are of one distribution
    tell: Callable[[str], None] = log.warning


def engine_failure(error: Exception, doing: str, settings: EngineSettings) -> EngineError:
    """Explains a failure of the engine while it was `doing` something, with what to do."""
    reason = first_line(error)
    if isinstance(error, Hung):
        return EngineError(
            f"vLLM's engine hangs: {reason} ({doing}). Resume the run; if a generation batch rightly takes longer, raise "
            f"generation.vllm.timeout (seconds), and if it hangs again, set generation.engine: hf."
        )
    if "error in memory profiling" in str(error).lower():
        return EngineError(
            f"vLLM's engine measured the memory of the GPU while another process gave some back ({doing}: {reason}). Nothing is "
            "wrong with the run: start it again, once no chat, evaluation or other program on this GPU is about to end."
        )
    if is_out_of_memory(error) or any(sign in str(error).lower() for sign in NO_ROOM):
        return EngineError(
            f"vLLM's engine is out of memory ({doing}: {reason}). Its share is generation.vllm.gpu_memory_utilization "
            f"{settings.gpu_memory_utilization:g} of the GPU (on the CPU VLLM_CPU_KVCACHE_SPACE GiB of cache): raise it if the "
            "engine found no room for its cache, lower it if the trainer left too little. Besides: generation.vllm.standby: "
            "true frees it while weights are updated, lower generation.max_completion_tokens, or set generation.engine: hf. "
            "Smaller micro-batches do not help: the engine divides its work by itself."
        )
    merged = settings.adapter_alone and "lora" in str(error).lower()
    instead = "generation.vllm.hand_over: merged, as it takes no adapter here, or generation.engine: hf"
    return EngineError(
        f"vLLM's engine died {doing}: {type(error).__name__}: {reason}. The log has the engine's own words. Resume the run; if "
        f"it dies again, set {instead if merged else 'generation.engine: hf'}."
    )


# --- out of memory: halving the rows ----------------------------------------------------------------------------------


LIMIT = 3
"""Times in a row, without a finished step in between, after which a run ends."""
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
    """A halved batch size: kind of work, rows at once from now on, and the message of the allocator."""

    work: str
    rows: int
    reason: str
    step: int  # optimiser steps made so far
    micro_batch_size: int  # rows of a training pass from now on


class BatchSizeBackoff:
    """The sizes of one run, and how often in a row they were too large.

    `micro_batch_size` is that of a training pass at the start; `tell` hears of every halving.
    """

    def __init__(self, tell: Callable[[BackoffEvent], None] | None = None, micro_batch_size: int = 0) -> None:
        self.tell = tell or (lambda event: log.warning("%s (%s)", backoff_message(event), event.reason))
        self.micro_batch_size = micro_batch_size
        self.sizes: dict[str, int] = {}
        self.in_a_row = 0
        self.step = 0

    def rows(self, work: str, total: int) -> int:
        """Rows of this kind of work that go through the model at once, of `total`."""
        return max(1, min(total, self.sizes.get(work, total)))

    def attempt(self, work: str, total: int, do: Callable[[int], Result]) -> Result:
        """Calls `do(rows at once)`, and again with half as many rows and the same random numbers when memory runs out.

        Raises `ModelError` when that does not help.
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
        """Takes in a failure. Raises it again if it is another one, and `ModelError` when halving helps no more."""
        if not is_out_of_memory(error):
            raise error
        self.in_a_row += 1
        size, reason = self.rows(work, total), first_line(error)
        if self.in_a_row >= LIMIT or size == 1:
            often = f"{self.in_a_row} times in a row, at last " if self.in_a_row > 1 else ""
            first = f"Lower {FIRST_ADVICE[work]}, to {size // 2} for example. " if size > 1 else ""
            raise ModelError(
                f"The run is out of memory: {often}in {work}, with {size} completion{'s' * (size > 1)} at once "
                f"({reason}). {first}{MEMORY_ADVICE}"
            ) from error
        self.sizes[work] = (size + 1) // 2
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the attempt
        self.tell(
            BackoffEvent(work, self.sizes[work], reason, self.step, self.sizes.get("training", self.micro_batch_size))
        )

    def finished(self, step: int | None = None) -> None:
        """An optimiser step, or a batch of an evaluation, came through: what happens next is not in a row with it."""
        self.in_a_row = 0
        self.step = self.step if step is None else step

    def state_dict(self) -> dict[str, int]:
        """The sizes that are smaller than configured."""
        return dict(self.sizes)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on with the sizes of `state_dict()`."""
        self.sizes = {work: int(state[work]) for work in KINDS if work in state}


def report_backoff(run: RunDir, say: Callable[[str], None], event: BackoffEvent) -> None:
    """Files the event, and says what changes and what does not."""
    run.append_event("out_of_memory", **vars(event))
    say(backoff_message(event))


def backoff_message(event: BackoffEvent) -> str:
    """Says what changes after running out of memory, and what does not."""
    same = "the same step in smaller parts" if event.work == "training" else "the same number of completions"
    return f"Out of memory in {event.work} after step {event.step}: from here on {event.rows} completions at once ({same})."


def release() -> None:
    """Gives back what an attempt left, to the allocator and from it to the device."""
    gc.collect()
    if _on_gpu():
        torch.cuda.empty_cache()


def _on_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def rng_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of torch's generators, on the CPU and on the GPU that is used."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if _on_gpu() else None


def set_rng_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Goes back to a `rng_state()`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
