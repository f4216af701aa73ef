"""The kit's objective in verl: its loss and its advantages as functions of verl's registries (`grpo-kit scale --to verl`).

The files that `scale` writes call `register` in every process of verl. The loss is `Objective.loss` on verl's tensors, with
the denominators of verl's whole mini-batch, so that the result does not depend on how verl splits it. verl adds the KL to a
reference and the entropy bonus itself, by its own keys (`carried_by_verl`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from kit.errors import ConfigError
from kit.objective.batch import RewardBatch, TokenBatch
from kit.objective.hook import Hook
from kit.objective.objective import Objective
from kit.objective.reduction import LossScale
from kit.objective.schedules import Schedule

NAME = "grpo_kit"
"""The name of the loss and of the advantages in verl's registries, and of the objective's section in verl's YAML."""
AGGREGATIONS = {
    "sequence_mean": "seq-mean-token-mean",
    "global_token_mean": "token-mean",
    "token_mean": "token-mean",
    "fixed_length": "seq-mean-token-sum-norm",
    "sequence_sum": "seq-mean-token-sum",
}
"""verl's `loss_agg_mode` for each reduction. verl averages its own terms by it."""
KL_ESTIMATORS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs"}
LOSS_INPUTS = frozenset({"sampler_logps"})
ADVANTAGE_INPUTS = frozenset({"lengths", "token_rewards"})
UNBOUNDED = {"name": "sampler_correction", "mode": "token_truncate", "min": None, "max": None}
"""The weight without bounds: verl has bounded the ratio of old policy to sampler already."""


def carried_by_verl(objective: Objective) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Translate an objective for verl: a spec for `Objective.from_spec`, verl's dotted keys, and messages.

    The spec is the part that runs in verl's loss, the keys configure the rest, and the messages name what verl does not support.
    Raises `ConfigError` if advantage or clip need a field that verl does not pass, or if two hooks bound the ratio to the engine.
    """
    for hook, known in ((objective.advantage, ADVANTAGE_INPUTS), (objective.clip, LOSS_INPUTS)):
        if missing := sorted(hook.needs - known):
            raise ConfigError(
                f"{hook.title} needs {', '.join(missing)}, which verl does not pass to such a function. Choose another "
                f"objective.{hook.kind} (`grpo-kit objective list`)."
            )
    spec = objective.to_spec()
    keys: dict[str, Any] = {}
    left: list[str] = []
    actor = "actor_rollout_ref.actor"
    spec["weights"], spec["regularizers"] = [], []
    if "sampler_logps" in objective.clip.needs:
        if any(hook.name == "sampler_correction" for hook in objective.weights):
            raise ConfigError(
                f"{objective.clip.title} bounds the ratio to the engine itself, and so does a sampler_correction, but "
                "verl bounds it once. Remove sampler_correction from objective.weights, or sampler_cap from the clip."
            )
        keys |= _correction("token", None, 1e9)
    for hook in objective.weights:
        values = hook.values
        if hook.name == "sampler_correction" and values["mode"] != "geometric":
            level, _, way = values["mode"].partition("_")
            keys |= _correction(level, None if way == "truncate" else values["min"] or 1e-12, values["max"] or 1e9)
            if way == "truncate" and values["min"]:
                left.append(f"objective.weights sampler_correction: min: {values['min']}: verl has no lower bound")
            spec["weights"].append(dict(UNBOUNDED))
        elif hook.needs or hook.name == "sampler_correction":
            left.append(_without(hook))
        else:
            spec["weights"].append(hook.to_spec())
    for hook in objective.regularizers:
        values, coef = hook.values, hook.coef_at(0)
        if hook.name == "kl" and values["estimator"] in KL_ESTIMATORS and not values["bias_corrected"]:
            keys |= {f"{actor}.use_kl_loss": True, f"{actor}.kl_loss_coef": coef}
            keys[f"{actor}.kl_loss_type"] = KL_ESTIMATORS[values["estimator"]]
        elif hook.name == "entropy_bonus" and values["average"] == "objective":
            keys |= {f"{actor}.entropy_coeff": coef, f"{actor}.calculate_entropy": True}
        elif hook.needs:
            left.append(_without(hook))
            continue
        else:
            spec["regularizers"].append({**hook.to_spec(), "coef": coef})
        if isinstance(values["coef"], Schedule):
            left.append(
                f"objective.regularizers {hook.name}: coef stays at {coef:g}: verl does not pass the step to a loss"
            )
    for hook in (objective.advantage, objective.clip, *objective.weights, objective.reduction):
        left += [
            f"objective.{hook.kind} {hook.name}: {name} stays at its first value: verl does not pass the step"
            for name, value in hook.values.items()
            if isinstance(value, Schedule)
        ]
    mode = AGGREGATIONS.get(objective.reduction.name, "token-mean")
    keys |= {f"{actor}.loss_agg_mode": mode, f"{actor}.policy_loss.loss_mode": NAME, "algorithm.adv_estimator": NAME}
    return spec, keys, left


def _correction(level: str, low: float | None, high: float) -> dict[str, Any]:
    where = "algorithm.rollout_correction"
    threshold = high if low is None else f"{low:g}_{high:g}"
    return {f"{where}.rollout_is": level, f"{where}.rollout_is_threshold": threshold}


def _without(hook: Hook) -> str:
    needs = (
        f"needs {', '.join(sorted(hook.needs))}, which verl does not pass to a loss"
        if hook.needs
        else "has no counterpart"
    )
    return f"objective.{hook.kind}s {hook.name}: {needs}; it is left out of the loss"


def policy_loss(objective: Objective, length: int | None = None) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """`Objective.loss` with the arguments of verl's policy losses; `length`: the longest completion, for `fixed_length`.

    The engine's log-probabilities are reconstructed from `rollout_is_weights` (old over sampler, bounded by verl). verl averages
    gradients over processes and passes the counts of the whole mini-batch; without them the counts of this batch are used.
    """

    def grpo_kit_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = response_mask.bool()
        batch_info = getattr(config, "global_batch_info", None) or {}
        processes = batch_info.get("dp_size") or 1
        rows, tokens = batch_info.get("global_batch_size"), batch_info.get("batch_num_tokens")
        weights = torch.ones_like(old_log_prob) if rollout_is_weights is None else rollout_is_weights
        batch = TokenBatch(
            logps=log_prob,
            old_logps=old_log_prob,
            advantages=advantages,
            mask=mask,
            sampler_logps=old_log_prob - weights.log().clamp(min=-1e4),
        )
        scale = LossScale(
            accumulation=rows / (processes * mask.shape[0]) if rows else 1.0,
            window_tokens=mask.sum() if tokens is None else tokens / processes,
            max_completion_length=length,
        )
        out = objective.loss(batch, scale)
        return out.loss, {f"actor/{name}": float(mean.value) for name, mean in out.metrics.items()}

    return grpo_kit_loss


def advantage_estimator(objective: Objective) -> Callable[..., tuple[Tensor, Tensor]]:
    """The objective's advantages with the arguments of verl's estimators. A reward of NaN gives advantage 0."""

    def grpo_kit_advantages(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None, **others: Any
    ) -> tuple[Tensor, Tensor]:
        mask = response_mask.bool()
        ids: dict[Any, int] = {}
        group = torch.tensor([ids.setdefault(prompt, len(ids)) for prompt in index], device=mask.device)
        batch = RewardBatch(
            rewards=token_level_rewards.sum(-1),
            group=group,
            lengths=mask.sum(-1).to(token_level_rewards.dtype),
            mask=mask,
            token_rewards=token_level_rewards,
        )
        out = objective.compute_advantages(batch)
        out = (out if out.dim() == 2 else out[:, None]) * mask
        return out, out

    return grpo_kit_advantages


def register(settings: Path) -> Objective:
    """Add the objective of verl's YAML file `settings` (section `grpo_kit`) to verl's registries. Raises `ConfigError`."""
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    section: Mapping[str, Any] = yaml.safe_load(settings.read_text(encoding="utf-8")).get(NAME) or {}
    if "loss" not in section:
        raise ConfigError(
            f"{settings} has no section {NAME} with a loss. Write it with: grpo-kit scale CONFIG --to verl"
        )
    objective = Objective.from_spec(section["loss"], base=settings.parent)
    register_policy_loss(NAME)(policy_loss(objective, section.get("max_completion_tokens")))
    register_adv_est(NAME)(advantage_estimator(objective))
    return objective
