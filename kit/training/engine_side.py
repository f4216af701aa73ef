"""The engine half of the trainer: what it says beside completions, and what is kept when it fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from transformers import TrainerCallback

from kit.errors import EngineError
from kit.objective import Mean
from kit.runs.checkpoints import PREFIX, is_whole
from kit.training.failures import first_line, is_out_of_memory
from kit.training.out_of_memory import rng_state, set_rng_state
from kit.training.watchdog import Hung

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.objective import TokenBatch

log = logging.getLogger("kit")
DIFFERENCE = "sampler/logp_difference"
"""Metric, nats: mean |trainer's - engine's| log-probability of the completion tokens of a step."""
NO_ROOM = ("no available memory for the cache", "free memory on device", "kv cache is needed", "insufficient memory")
_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is


@dataclass(frozen=True)
class EngineSettings:
    """What a watched vLLM engine is told beside TRL's arguments. `dtype` None: that of the model's weights."""

    seed: int = 0
    timeout: float = 1800.0  # seconds
    mode: str = "colocate"
    dtype: torch.dtype | None = None
    eager: bool | None = None
    float8_kv_cache: bool = False
    revision: str | None = None
    gpu_memory_utilization: float = 0.3
    max_logp_difference: float | None = 0.01  # nats; None: nobody is told
    tell: Callable[[str], None] = log.warning


def engine_settings(config: RunConfig, args: Any, tell: Callable[[str], None]) -> EngineSettings | None:
    """Of a run whose completions come from vLLM; None for another. `args`: its `GRPOConfig`."""
    if not args.use_vllm:
        return None
    generation, vllm = config.generation, config.generation.vllm
    # Truncated or constrained sampling renormalises: the engine's log-probabilities are then of another distribution.
    whole = generation.top_p == 1.0 and not generation.top_k and not generation.min_p and vllm.regex is None
    return EngineSettings(
        seed=config.run.seed if vllm.seed is None else vllm.seed,
        timeout=vllm.timeout,
        mode=vllm.mode,
        dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        eager=vllm.eager,
        float8_kv_cache=vllm.float8_kv_cache,
        revision=config.model.revision,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        max_logp_difference=vllm.max_logp_difference if whole and generation.repetition_penalty == 1.0 else None,
        tell=tell,
    )


def explained(error: Exception, doing: str, settings: EngineSettings) -> EngineError:
    """What befell the engine while it was `doing` something, told as what a person can do about it."""
    reason = first_line(error)
    where = "vLLM's engine" if settings.mode == "colocate" else "The vLLM server"
    if isinstance(error, Hung):
        return EngineError(
            f"{where} hangs: {reason} ({doing}). Resume the run; if a generation batch rightly takes longer, raise "
            f"generation.vllm.timeout (seconds), and if it hangs again, set generation.engine: hf."
        )
    if is_out_of_memory(error) or any(sign in str(error).lower() for sign in NO_ROOM):
        return EngineError(
            f"{where} is out of memory ({doing}: {reason}). Its share is generation.vllm.gpu_memory_utilization "
            f"{settings.gpu_memory_utilization:g} of the GPU (on the CPU VLLM_CPU_KVCACHE_SPACE GiB of cache): raise it if the "
            "engine found no room for its cache, lower it if the trainer left too little. Besides: generation.vllm.standby: "
            "true frees it while weights are updated, lower generation.max_completion_tokens, or set generation.engine: hf. "
            "Smaller micro-batches do not help: the engine divides its work by itself."
        )
    return EngineError(
        f"{where} died {doing}: {type(error).__name__}: {reason}. The log has the engine's own words. Resume the run; if it "
        "dies again, set generation.engine: hf."
    )


@contextmanager
def making_engine(trainer_class: type, settings: EngineSettings | None) -> Iterator[None]:
    """Inside, a trainer of this class is constructed with its engine watched. None: TRL's own, or none at all."""
    if settings is None:
        yield
        return
    from kit.training.vllm_engine import driven_by

    with driven_by(trainer_class, settings):
        yield


class EngineSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before TRL's class."""

    engine: EngineSettings | None
    control: Any

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        before = _random_state()
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        except EngineError as error:
            self._keep_what_was_learned(before, error)
            raise
        return output

    def _keep_what_was_learned(self, before: tuple[Any, ...], error: EngineError) -> None:
        """A checkpoint as it would have been written after the last step: the run is resumed from there.

        Where steps were already made on the completions before, and of several processes, the regular checkpoint stands.
        """
        step, every = self.state.global_step, self.args.steps_per_generation * self.num_iterations
        if step == 0 or not self.is_in_train or self.accelerator.num_processes > 1 or self._step % every:
            return
        if self._has_checkpoint(step):
            return
        _set_random_state(before)
        with suppress(
            Exception
        ):  # the engine's failure is what has to be told; without this one an earlier checkpoint stands
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
            log.info("saved a checkpoint after step %d, because the engine failed: %s", step, error)

    def _has_checkpoint(self, step: int) -> bool:
        from pathlib import Path

        return is_whole(Path(self.args.output_dir) / f"{PREFIX}{step}")

    def _compare_with_sampler(self, batch: TokenBatch) -> None:
        """Logs how far the engine's log-probabilities are from the trainer's, where there are any."""
        if batch.sampler_logps is None:
            return
        gap = (batch.old_logps - batch.sampler_logps).abs()
        known = batch.mask & ~torch.isnan(gap)
        self._add_means({DIFFERENCE: Mean(gap[known].sum(), known.sum().to(gap.dtype))})


class SamplerAlarm(TrainerCallback):  # type: ignore[misc]
    """Says once that trainer and engine disagree by more than `limit` nats on average."""

    def __init__(self, limit: float, tell: Callable[[str], None]) -> None:
        self.limit, self.tell, self.told = limit, tell, False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        found = (logs or {}).get(DIFFERENCE)
        if self.told or found is None or found <= self.limit:
            return
        self.told = True
        self.tell(
            f"Step {state.global_step}: the engine's log-probabilities are {found:.2g} nats off the trainer's on average "
            f"(generation.vllm.max_logp_difference {self.limit:g}). Rollouts are that far off-policy; add the weight "
            "sampler_correction (objective.weights), or set model.dtype to what the engine computes in."
        )


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), rng_state()


def _set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    set_rng_state(state[2])
