"""The engine half of the trainer: what it says beside completions, and what is kept when it fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy
import torch
from transformers import TrainerCallback

from kit.errors import EngineError
from kit.models.failures import EngineSettings, rng_state, set_rng_state
from kit.objective import Mean
from kit.runs.store import PREFIX, is_whole

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.objective import TokenBatch

log = logging.getLogger("kit")
DIFFERENCE = "sampler/logp_difference"
"""Metric, nats: mean |trainer's - engine's| log-probability of the completion tokens of a step."""
_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is


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
