"""The rollout half of the trainer: rewards to advantages, and whatever else the objective needs of a generation batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kit.errors import ObjectiveError
from kit.generation.multi_turn import finish_reason
from kit.generation.prompts import has_pictures, with_pictures
from kit.objective import Mean, Objective, RewardBatch
from kit.objective.advantage import explained_variance
from kit.scoring.hidden_states import ScoringPass, capturing, spread
from kit.trainer.greedy import aside, greedy_config
from kit.trainer.sanity_checks import FirstSteps
from kit.trainer.step_phases import StepPhases
from kit.trainer.token_rewards import lay_out
from kit.trainer.value_head import Critic

TOKEN_REWARDS = "token_rewards"
"""Column under which a reward function may report process rewards: `log_extra("token_rewards", [[...], ...])`."""
MODEL_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is


@dataclass(frozen=True)
class Rollout:
    """One scored generation batch of this process, as handed to `rollout_sinks`. N completions, K reward components."""

    step: int
    mode: str
    rows: list[dict[str, Any]]
    completions: list[Any]
    completion_ids: list[list[int]]
    truncated: list[bool]
    rewards: torch.Tensor  # (N, K), NaN where a component does not apply
    reward_names: list[str]
    advantages: torch.Tensor  # (N,) or (N, T)
    extra: Mapping[str, list[Any]]
    prompt_ids: list[list[int]] | None = None  # as the model was given them
    tool_mask: list[list[int]] | None = None  # 1 for the policy's tokens, 0 for those of a tool; None: no tools


@dataclass(frozen=True)
class _Scored:
    """What the last scoring saw and gave: rewards of all processes, the rest of this one."""

    rewards: torch.Tensor  # (N, K)
    completions: list[Any]
    completion_ids: list[list[int]]  # whole, also where `mask_truncated_completions` keeps them from training
    extra: dict[str, list[Any]]
    total: torch.Tensor  # (N,) weighted sum, NaN where no component applied


class RolloutSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before TRL's class."""

    objective: Objective | None
    needs: frozenset[str]
    rollout_sinks: tuple[Any, ...]
    _critic: Critic | None
    _first_steps: FirstSteps | None
    _scored: _Scored | None = None
    _prompt_ids: list[list[int]] | None  # these two are kept by PromptSide
    _tool_mask: list[list[int]] | None
    _greedy: torch.Tensor | None = None  # (N,) rewards of greedy completions, one for each of the batch
    phases: StepPhases
    _passes: list[ScoringPass] | None = None  # of the rollout in progress
    _all_lengths: torch.Tensor | None = None  # (N,) tokens of every completion of the generation batch
    _reference_head: Any = None  # Projection whose head the reference policy was scored with

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._note_scores(rewards, completions, completion_ids_list)
        return rewards

    def _note_scores(self, rewards: torch.Tensor, completions: Any, completion_ids_list: Any) -> None:
        """Keeps what a scoring gave, and what reward functions logged with it."""
        extra = {key: list(value) for key, value in self._pending_extra_logs.items()}
        self._pending_extra_logs.pop(TOKEN_REWARDS, None)
        ids = [list(row) for row in completion_ids_list]
        self._scored = _Scored(rewards, completions, ids, extra, self._weighted(rewards))

    def _weighted(self, rewards: torch.Tensor) -> torch.Tensor:
        """(N, K) -> (N,), NaN where no component applied: no signal, and no part in a baseline."""
        total: torch.Tensor = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total[torch.isnan(rewards).all(dim=1)] = torch.nan
        return total

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if "greedy_rewards" in self.needs:
            self._greedy = self._greedy_rewards(inputs)
        self._passes = []
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            assert self._scored is not None  # set by _calculate_rewards, which super() has just called
            if self.objective is not None:
                self._complete(output, self._scored)
        finally:
            self._passes = None
        if self.rollout_sinks:
            rollout = self._rollout(inputs, self._scored, output["advantages"])
            for sink in self.rollout_sinks:
                sink(rollout)
        return output

    def _complete(self, output: dict[str, Any], scored: _Scored) -> None:
        """Adds to a rollout what the objective needs, and puts its advantages in the place of TRL's."""
        if "full_kl" in self.needs:
            reference = self._pass_of(output["ref_per_token_logps"])
            output["ref_hidden"] = spread(reference.hidden(), output["completion_mask"])
            self._reference_head = reference.head.bare()  # else those of the whole rollout stay for as long
        if self._critic is not None:
            output["old_values"] = self._values(output)
        mine = self._mine(len(output["completion_ids"]))
        if "rewards" in self.needs:
            output["rewards"] = scored.total[mine]
        if "all_lengths" in self.needs:
            # What tools wrote is not the policy's length.
            own = self._tool_mask or [[1] * len(ids) for ids in scored.completion_ids]
            whole = torch.tensor([float(sum(mask)) for mask in own], device=scored.total.device)
            self._all_lengths = self.accelerator.gather(whole)
        if "truncated" in self.needs:
            output["truncated"] = torch.tensor(self._truncated(scored), device=output["completion_ids"].device)
        batch = self._reward_batch(output, scored)
        output["advantages"] = self._advantages(batch, scored)[mine]
        if output["advantages"].dim() == 2:
            output["advantages"] = output["advantages"][:, : output["completion_ids"].shape[1]]
        if self._critic is not None:
            assert self.objective is not None
            assert batch.mask is not None
            assert batch.values is not None
            targets = self.objective.value_targets(batch)
            variance = explained_variance(targets, batch.values, batch.mask)
            self._metrics[self._mode()]["value/explained_variance"].append(float(variance))
            live = batch.values[batch.mask]
            self._add_means({"value/mean": Mean(live.sum(), live.new_full((), live.numel()))})
            output["value_targets"] = targets[mine][:, : output["completion_ids"].shape[1]]
        self._log_masked(output, scored)

    def _reward_batch(self, output: dict[str, Any], scored: _Scored) -> RewardBatch:
        """What advantage estimators read, of the completions of all processes."""
        size = self.num_generations if self.model.training else self.num_generations_eval
        trained, device = trained_tokens(output), scored.total.device
        token_rewards = values = None
        reported = scored.extra.get(TOKEN_REWARDS)
        if reported is not None and TOKEN_REWARDS not in self.needs:
            assert self.objective is not None
            raise ObjectiveError(
                f"A reward function reports {TOKEN_REWARDS}, but {self.objective.advantage.title} sees one reward a "
                "completion and would ignore them. Choose token_returns, reinforce_pp or gae, or do not report them."
            )
        mask = self._gathered(trained)
        if TOKEN_REWARDS in self.needs:
            mine = scored.total[self._mine(len(trained))]
            token_rewards = self._gathered(lay_out(mine, trained, scored.completion_ids, reported))
        if "values" in self.needs:
            values = self._gathered(output["old_values"])
        return RewardBatch(
            rewards=scored.total,
            group=torch.arange(len(scored.total), device=device) // size,
            components=scored.rewards,
            component_weights=self.reward_weights.to(device),
            lengths=self.accelerator.gather(trained.sum(dim=1)),
            greedy_rewards=self._greedy,
            mask=mask,
            token_rewards=token_rewards,
            values=values,
            step=self.state.global_step,
        )

    def _advantages(self, batch: RewardBatch, scored: _Scored) -> torch.Tensor:
        """Our estimator's advantages for the completions of all processes, (N,) or (N, T); logs their spread."""
        assert self.objective is not None
        advantages = self.objective.compute_advantages(batch)
        per_completion = advantages if advantages.dim() == 1 else _row_means(advantages, batch.mask)
        logged, metrics = self._logs["advantages"], self._metrics[self._mode()]
        for _ in range(min(len(per_completion), len(logged))):
            logged.pop()
        logged.extend(per_completion.tolist())
        metrics["advantage/std"].append(float(per_completion.std(correction=0)))
        spreadless = batch.zero_spread()
        metrics["groups/zero_spread"].append(float(spreadless.float().mean()))
        if self._first_steps is not None and self.model.training and not bool(spreadless.all()):
            self._first_steps.after_advantages(self.objective.advantage, advantages)
        return advantages

    def _values(self, output: dict[str, Any]) -> torch.Tensor:
        """(B, T) values at the rollout: from TRL's scoring pass where it made one, else from one more."""
        assert self._critic is not None
        old_logps = output.get("old_per_token_logps")
        with torch.no_grad():
            if old_logps is None:
                ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
                mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
                size = self.args.per_device_train_batch_size
                given = {name: output[name] for name in MODEL_INPUTS if name in output} | self.further_inputs(output)
                width = output["completion_ids"].size(1)
                old_logps = self._get_per_token_logps_and_entropies(
                    self.model, ids, mask, width, batch_size=size, **given
                )[0]
            return spread(self._critic.head(self._pass_of(old_logps).hidden()), output["completion_mask"])

    def _pass_of(self, logps: torch.Tensor) -> ScoringPass:
        """The scoring pass of this rollout that gave these log-probabilities."""
        found = [scored for scored in self._passes or () if scored.logps is logps]
        if not found or not found[0].projections:
            raise ObjectiveError(
                "The hidden states of the rollout's scoring were not seen, which a hook needs (full KL, or values): the "
                "backend scores in a way of its own."
            )
        return found[0]

    def restore_reference_head(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Scores one completion of a restored rollout with the reference policy: its head is in no checkpoint."""
        row = {name: inputs[name][:1] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
        ids = torch.cat([row["prompt_ids"], row["completion_ids"]], dim=1)
        mask = torch.cat([row["prompt_mask"], row["completion_mask"]], dim=1)
        with torch.no_grad(), capturing() as projections, self._reference() as model:
            given = self.scoring_inputs(inputs, [0])
            self._get_per_token_logps_and_entropies(model, ids, mask, row["completion_ids"].size(1), **given)
        self._reference_head = projections[0].bare()

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """The reference policy as TRL has it: a model of its own, or this one with its adapters off."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        model = self.accelerator.unwrap_model(self.model)
        from trl.trainer.utils import use_adapter

        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            yield self.model

    def _greedy_rewards(self, inputs: list[dict[str, Any]]) -> torch.Tensor:
        """(N,) rewards of the greedy completion of each prompt, scored by the same functions; logs what it cost."""
        size = self.num_generations if self.model.training else self.num_generations_eval
        rows, started = inputs[::size], time.perf_counter()
        with aside(self), greedy_config(self), self._generating_for(rows):
            prompts = [with_pictures(row) if has_pictures(row) else row["prompt"] for row in rows]
            _, ids, _, completions, *_ = self._generate(prompts)
            with self.phases.measured("rewards"):
                rewards = self._weighted(super()._calculate_rewards(rows, prompts, completions, ids))
        tokens, metrics = float(sum(len(row) for row in ids)), self._metrics[self._mode()]
        metrics["greedy/reward"].append(float(rewards.nanmean()))
        metrics["greedy/tokens"].append(float(self.accelerator.reduce(rewards.new_tensor(tokens), reduction="sum")))
        metrics["greedy/seconds"].append(time.perf_counter() - started)
        return rewards.repeat_interleave(size)

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T) of every process -> (N, widest T)."""
        numbers = values.int() if values.dtype == torch.bool else values  # padding would make integers of some only
        whole: torch.Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(numbers, dim=1))
        return whole.to(values.dtype)

    def _mine(self, size: int) -> slice:
        """The completions of this process among those of all."""
        return slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)

    def _truncated(self, scored: _Scored) -> list[bool]:
        """Whether a limit cut a completion: of tokens, or of calls, so that one is left unanswered."""
        pairs = zip(scored.completion_ids, scored.completions, strict=True)
        return [finish_reason(ids, self.eos_token_ids, completion) != "stop" for ids, completion in pairs]

    def _rollout(self, rows: Any, scored: _Scored, advantages: torch.Tensor) -> Rollout:
        return Rollout(
            step=self.state.global_step,
            mode=self._mode(),
            rows=rows,
            completions=scored.completions,
            completion_ids=scored.completion_ids,
            truncated=self._truncated(scored),
            rewards=scored.rewards[self._mine(len(rows))],
            reward_names=list(self.reward_func_names),
            advantages=advantages,
            extra=scored.extra,
            prompt_ids=self._prompt_ids,
            tool_mask=self._tool_mask,
        )

    def _log_masked(self, output: dict[str, Any], scored: _Scored) -> None:
        """Logs the shares of completion tokens that do not train, by reason."""
        total = torch.tensor(float(sum(len(ids) for ids in scored.completion_ids)))
        kept = output["completion_mask"].sum().cpu()
        if self.mask_truncated_completions:
            self._add_means({"masked/truncated": Mean(total - kept, total)})
        if "tool_mask" in output:
            self._add_means({"masked/tools": Mean(kept - trained_tokens(output).sum().cpu(), total)})


def trained_tokens(inputs: Mapping[str, Any]) -> torch.Tensor:
    """(B, T) bool: completion tokens that train; those that tools wrote do not."""
    mask: torch.Tensor = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    return mask.bool()


def _row_means(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(N, T) -> (N,): the mean over live tokens, or over all where no mask tells."""
    if mask is None:
        return values.mean(dim=1)
    return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
