"""From rewards to advantages, and the other values of a generation batch that the objective needs."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor

from kit.errors import ObjectiveError, RewardError
from kit.generation.multi_turn import finish_reason
from kit.objective import Mean, RewardBatch
from kit.objective.advantage import explained_variance
from kit.scoring.scorer import Scores, scatter_to_tokens
from kit.trainer.policy_loss import MicroBatch, Services
from kit.trainer.rollout import RewardResult, RolloutState
from kit.trainer.sanity_checks import SanityChecks
from kit.trainer.teacher import TEACHER_NEEDS, Teacher

TOKEN_REWARDS = "token_rewards"
"""Column of the process rewards that a reward function may log: `log_extra("token_rewards", [[...], ...])`."""
Output = dict[str, Any]


class AdvantageComputer:
    """Replaces TRL's advantages with those of the objective.

    score: scores a batch with the policy, for a rollout without such a pass; `hidden=False`: without hidden states. eos_ids:
    tokens that end a completion. logged: TRL's list of advantages for its table of completions.
    """

    def __init__(
        self,
        services: Services,
        *,
        score: Callable[..., Scores],
        eos_ids: Sequence[int],
        logged: MutableSequence[float],
        teacher: Teacher | None = None,
        checks: SanityChecks | None = None,
    ) -> None:
        self.objective, self.accelerator, self.critic = services.objective, services.accelerator, services.critic
        self.metrics, self.memory = services.metrics, services.memory
        self.score, self.eos_ids, self.logged = score, eos_ids, logged
        self.teacher, self.checks = teacher, checks

    def fill(self, output: Output, state: RolloutState, *, reward_weights: Tensor, group_size: int, step: int) -> None:
        """Adds the objective's advantages, (B,) or (B, T), and its further needs to TRL's batch of a rollout.

        reward_weights: (K,), of the components. group_size: completions of a prompt. step: optimiser steps made so far.
        Raises `ObjectiveError` for rewards that the objective would ignore, `RewardError` for malformed token rewards.
        """
        result, needs, batch = state.rewards, self.objective.needs, MicroBatch(output)
        if "full_kl" in needs:
            reference = state.pass_of(output["ref_per_token_logps"]).projection
            output["ref_hidden"] = scatter_to_tokens(reference.hidden, output["completion_mask"])
            self.memory.reference_head = reference.bare()  # without the hidden states of the rollout
        if self.critic is not None:
            old_logps = batch.get("old_per_token_logps")
            with torch.no_grad():  # from TRL's scoring pass, if there is one
                scores = self.score(batch) if old_logps is None else state.pass_of(old_logps)
                values = self.critic.head(scores.projection.hidden)
                output["old_values"] = scatter_to_tokens(values, batch.completion_mask)
        local = local_slice(self.accelerator, len(batch))
        if self.teacher is not None and needs & TEACHER_NEEDS:
            output |= self.teacher.teach(batch, state, group_size, hidden="teacher_kl" in needs)
            self.memory.teacher_head = self.teacher.head
            known = output["teacher_logps"].isfinite() & batch.loss_mask
            self.metrics.append("teacher/share", float(known.any(1).float().mean()))
        if "rewards" in needs:
            output["rewards"] = result.total[local]
        if "truncated" in needs:
            output["truncated"] = torch.tensor(truncated(result, self.eos_ids), device=batch.completion_ids.device)
        rewards = self._reward_batch(batch, state, reward_weights, group_size, step)
        width = batch.completion_ids.shape[1]
        advantages = self._advantages(rewards)[local]
        output["advantages"] = advantages[:, :width] if advantages.dim() == 2 else advantages
        if self.critic is not None:
            assert rewards.mask is not None
            assert rewards.values is not None
            targets = self.objective.value_targets(rewards)
            output["value_targets"] = targets[local][:, :width]
            variance = explained_variance(targets, rewards.values, rewards.mask)
            self.metrics.append("value/explained_variance", float(variance))
            live = rewards.values[rewards.mask]
            self.metrics.add({"value/mean": Mean(live.sum(), live.new_full((), live.numel()))})

    def _reward_batch(
        self, batch: MicroBatch, state: RolloutState, weights: Tensor, group_size: int, step: int
    ) -> RewardBatch:
        """Builds the input of advantage hooks from the completions of all processes."""
        result, needs, trained = state.rewards, self.objective.needs, batch.loss_mask
        device = result.total.device
        reported = result.extra.get(TOKEN_REWARDS)
        if reported is not None and TOKEN_REWARDS not in needs:
            raise ObjectiveError(
                f"A reward function reports {TOKEN_REWARDS}, but {self.objective.advantage.title} reads one reward per "
                "completion and would ignore them. Choose token_returns, reinforce_pp or gae, or do not report them."
            )
        mask = self._gathered(trained)
        token_rewards = values = None
        if TOKEN_REWARDS in needs:
            local = result.total[local_slice(self.accelerator, len(batch))]
            token_rewards = self._gathered(lay_out(local, trained, result.completion_ids, reported))
        if "values" in needs:
            values = self._gathered(batch["old_values"])
        old_logps = teacher_logps = None
        if "old_logps" in needs:
            logps = batch.get("old_per_token_logps")
            if logps is None:  # TRL did not compute them
                with torch.no_grad():
                    logps = self.score(batch, hidden=False).logps
            old_logps = self._gathered(logps)
        if "teacher_logps" in needs and "teacher_logps" in batch.inputs:
            teacher_logps = self._gathered(batch["teacher_logps"])
        return RewardBatch(
            rewards=result.total,
            group=torch.arange(len(result.total), device=device) // group_size,
            components=result.rewards,
            component_weights=weights.to(device),
            lengths=self.accelerator.gather(trained.sum(dim=1)),
            mask=mask,
            token_rewards=token_rewards,
            values=values,
            old_logps=old_logps,
            teacher_logps=teacher_logps,
            step=step,
        )

    def _advantages(self, batch: RewardBatch) -> Tensor:
        """Computes the advantages of all processes, (N,) or (N, T), and logs their spread."""
        advantages = self.objective.compute_advantages(batch)
        per_completion = advantages
        if advantages.dim() == 2:
            live = torch.ones_like(advantages) if batch.mask is None else batch.mask
            per_completion = (advantages * live).sum(dim=1) / live.sum(dim=1).clamp(min=1)
        for _ in range(min(len(per_completion), len(self.logged))):
            self.logged.pop()
        self.logged.extend(per_completion.tolist())
        self.metrics.append("advantage/std", float(per_completion.std(correction=0)))
        is_flat = batch.zero_spread()
        self.metrics.append("groups/zero_spread", float(is_flat.float().mean()))
        if self.checks is not None and self.metrics.mode() == "train" and not bool(is_flat.all()):
            self.checks.after_advantages(self.objective.advantage, advantages)
        return advantages

    def _gathered(self, values: Tensor) -> Tensor:
        """Gathers (B, T) of every process to (N, widest T)."""
        # Padding turns bool into int on some processes.
        numbers = values.int() if values.dtype == torch.bool else values
        gathered: Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(numbers, dim=1))
        return gathered.to(values.dtype)


def local_slice(accelerator: Any, size: int) -> slice:
    """Slice of this process's `size` completions among those of all processes."""
    return slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)


def weighted_total(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the components, (N, K) -> (N,); NaN if no component applied: baselines leave out NaN."""
    total: Tensor = (rewards * weights.to(rewards.device)).nansum(dim=1)
    total[torch.isnan(rewards).all(dim=1)] = torch.nan
    return total


def truncated(result: RewardResult, eos_ids: Sequence[int]) -> list[bool]:
    """Whether each completion was cut, at the limit of tokens, or at that of tool calls with a call left unanswered."""
    pairs = zip(result.completion_ids, result.completions, strict=True)
    return [finish_reason(ids, eos_ids, completion) != "stop" for ids, completion in pairs]


def lay_out(
    totals: Tensor, mask: Tensor, completion_ids: Sequence[Sequence[int]], reported: Sequence[Sequence[float]] | None
) -> Tensor:
    """Rewards per token (B, T): each completion's reward at its last live token, plus the reported token rewards.

    Args:
        totals: (B,) weighted reward of each completion; NaN counts as 0.
        mask: (B, T) bool, live tokens.
        completion_ids: the completions, unpadded.
        reported: a number for each token of each completion, from `log_extra("token_rewards", ...)`; or None.

    Raises `RewardError` unless `reported` has one finite number for each token of each completion.
    """
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if reported is not None and len(reported) != len(completion_ids):
        raise RewardError(
            f"token_rewards holds {len(reported)} lists for {len(completion_ids)} completions. Report one list for each "
            "completion, from one reward function only: lists of several functions are not summed."
        )
    for row, values in enumerate(reported or ()):
        length = len(completion_ids[row])
        if not isinstance(values, Sequence) or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            raise RewardError(
                f"token_rewards of completion {row} is {values!r:.80}, expected a list of finite numbers, one for each of "
                "its completion_ids."
            )
        if len(values) != length:
            raise RewardError(
                f"token_rewards of completion {row} holds {len(values)} numbers, but the completion has {length} tokens. "
                "Report one number for each of completion_ids, 0.0 for a token without a reward."
            )
        rewards[row, :length] = torch.tensor(values, dtype=torch.float32, device=mask.device)
    rewards = rewards * mask
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(dim=1)  # (B,)
    ends = mask.any(dim=1).nonzero().squeeze(1)
    rewards[ends, last[ends]] += totals[ends].nan_to_num(nan=0.0).float()
    return rewards
