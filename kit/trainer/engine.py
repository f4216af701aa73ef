"""The engine half of the trainer: what it says beside completions, and what is kept when it fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from transformers import TrainerCallback

from kit.errors import EngineError
from kit.generation.engine import further_arguments, hands_adapter
from kit.models.backend import UNSLOTH, choose_backend
from kit.models.failures import EngineSettings, rng_state, set_rng_state
from kit.runs.store import PREFIX, is_whole
from kit.trainer.mismatch import SAMPLER_DIFFERENCE, advice

if TYPE_CHECKING:
    from kit.config import RunConfig

log = logging.getLogger("kit")


def engine_settings(config: RunConfig, args: Any, tell: Callable[[str], None]) -> EngineSettings | None:
    """Of a run whose completions come from vLLM; None for another. `args`: its `GRPOConfig`."""
    if not args.use_vllm:
        return None
    generation, vllm = config.generation, config.generation.vllm
    # Truncated or constrained sampling renormalises: unless the trainer's log-probabilities follow, they are of another
    # distribution than the engine's.
    whole = (generation.replay_support or not generation.truncates) and vllm.regex is None
    adapter_alone = hands_adapter(config) and choose_backend(config.model).name != UNSLOTH
    return EngineSettings(
        seed=config.run.seed,
        timeout=vllm.timeout,
        mode=vllm.mode,
        dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        eager=vllm.eager,
        support_of=generation.top_k if generation.replay_support else 0,
        adapter_alone=adapter_alone,
        revision=config.model.revision,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        further=further_arguments(vllm),
        compared=whole,
        tell=tell,
    )


@contextmanager
def checkpoint_on_failure(trainer: Any) -> Iterator[None]:
    """Around a rollout: when the engine fails, what was learned is kept, and the failure goes on."""
    before = _random_state()
    try:
        yield
    except EngineError as error:
        _keep_what_was_learned(trainer, before, error)
        raise


def _keep_what_was_learned(trainer: Any, before: tuple[Any, ...], error: EngineError) -> None:
    """A checkpoint as it would have been written after the last step: the run is resumed from there.

    Where steps were already made on the completions before, and of several processes, the regular checkpoint stands.
    """
    step, every = trainer.state.global_step, trainer.args.steps_per_generation * trainer.num_iterations
    if step == 0 or not trainer.is_in_train or trainer.accelerator.num_processes > 1 or trainer._step % every:
        return
    if is_whole(Path(trainer.args.output_dir) / f"{PREFIX}{step}"):
        return
    _set_random_state(before)
    try:
        trainer._save_checkpoint(trainer.model, None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        log.info("saved a checkpoint after step %d, because generation failed: %s", step, error)
    except Exception as second:  # the engine's failure is what has to be told
        log.warning("no checkpoint after step %d, an earlier one stands (%s: %s)", step, type(second).__name__, second)


def computed_in(args: Any) -> str:
    """The precision of a run's passes."""
    return "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else "float32"


LOGP_LIMIT = 0.01
"""Nats: mean difference of the log-probabilities of trainer and engine in a step, above which the run says so."""


class SamplerAlarm(TrainerCallback):  # type: ignore[misc]
    """Says once that trainer and engine disagree by more than `LOGP_LIMIT` nats on average."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell, self.told = tell, False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        found = (logs or {}).get(SAMPLER_DIFFERENCE)
        said = advice(logs or {}, LOGP_LIMIT, half=computed_in(args))
        if self.told or found is None or not said:
            return
        self.told = True
        self.tell(
            f"Step {state.global_step}: the engine's log-probabilities are {found:.2g} nats off the trainer's on average "
            f"(more than {LOGP_LIMIT:g}). Rollouts are that far off-policy. {said}"
        )


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), rng_state()


def _set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    set_rng_state(state[2])
