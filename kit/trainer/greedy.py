"""A greedy completion for each prompt, made beside the rollout: the baseline of `remax`."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kit.errors import ObjectiveError
from kit.generation.prompts import has_pictures, with_pictures


def check_greedy(trainer: Any) -> None:
    """Refuses what the greedy pass cannot drive. Raises `ObjectiveError`."""
    incompatible = {
        "use_vllm": trainer.use_vllm,
        "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        "a rollout_func": trainer.rollout_func is not None,
        "tools": bool(trainer.tools),
        "an environment_factory": trainer.environment_factories is not None,
        "images": trainer._is_vlm,
        "groups that are spread over processes": trainer.accelerator.num_processes > 1
        and trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation % trainer.num_generations != 0,
    }
    found = [name for name, present in incompatible.items() if present]
    if found:
        raise ObjectiveError(
            f"The advantage needs a greedy completion of every prompt, which this trainer cannot make with {', '.join(found)}. "
            "Generate text with transformers' generate, or choose an estimator without one, e.g. leave_one_out."
        )


def greedy_rewards(trainer: Any, rows: list[dict[str, Any]], group_size: int) -> Tensor:
    """(N,) rewards of the greedy completion of each prompt, scored by the same functions; logs what it cost."""
    prompts_of, started = rows[::group_size], time.perf_counter()
    with muted_metrics(trainer), greedy_config(trainer), trainer.rolling_out(prompts_of) as state:
        prompts = [with_pictures(row) if has_pictures(row) else row["prompt"] for row in prompts_of]
        _, ids, _, completions, *_ = trainer._generate(prompts)
        trainer._calculate_rewards(prompts_of, prompts, completions, ids)
    rewards: Tensor = state.rewards.total
    log = trainer.metric_log
    tokens = rewards.new_tensor(float(sum(len(row) for row in ids)))
    log.append("greedy/reward", float(rewards.nanmean()))
    log.append("greedy/tokens", float(trainer.accelerator.reduce(tokens, reduction="sum")))
    log.append("greedy/seconds", time.perf_counter() - started)
    return rewards.repeat_interleave(group_size)


@contextmanager
def greedy_config(trainer: Any) -> Iterator[None]:
    """Inside, the trainer generates the likeliest token at each place. No random number is drawn."""
    sampling = trainer.generation_config
    greedy = copy.deepcopy(sampling)
    greedy.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
    trainer.generation_config = greedy
    try:
        yield
    finally:
        trainer.generation_config = sampling


@contextmanager
def muted_metrics(trainer: Any) -> Iterator[None]:
    """Inside, nothing that is generated or scored enters the trainer's logs and counts."""
    fresh: dict[str, Any] = {
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_pending_metrics": defaultdict(list),
        "_pending_extra_logs": defaultdict(list),
    }
    kept = {name: getattr(trainer, name) for name in fresh}
    seen = trainer.state.num_input_tokens_seen
    for name, value in fresh.items():
        setattr(trainer, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)
        trainer.state.num_input_tokens_seen = seen
