"""TRL's `GRPOTrainer` with an objective made of hooks.

Overridden, and nothing else:

    compute_loss, _compute_loss                      our loss
    _get_per_token_logps_and_entropies               entropy gradient only when a hook wants it
    _calculate_rewards                               keeps the gathered rewards of every component
    _generate_and_score_completions                  our advantages in place of TRL's
    _save_checkpoint, _load_optimizer_and_scheduler  state of hooks
    log                                              the objective's means, exact over micro-batches and processes

With `objective=None` every one of them is TRL's own. The class is built on first use, after the backend is chosen: a
backend may replace `trl.GRPOTrainer` when it is imported.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ObjectiveError
from kit.training.guards import check_arguments, check_base_class, check_trl

if TYPE_CHECKING:
    import torch

    from kit.objective import Objective

STATE_FILE = "objective_state.json"
PATIENCE = 3
"""Steps without any gradient after which a run is taken for dead."""
MODEL_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


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


@dataclass(frozen=True)
class _Scored:
    """What the last scoring saw and gave: rewards of all processes, the rest of this one."""

    rewards: torch.Tensor  # (N, K)
    completions: list[Any]
    completion_ids: list[list[int]]  # whole, also where `mask_truncated_completions` keeps them from training
    extra: dict[str, list[Any]]


@functools.cache
def make_trainer_class() -> type:
    """The trainer class, a subclass of whatever `trl.GRPOTrainer` is by now. Raises `EnvironmentUnsupported`."""
    check_trl()
    import torch
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from kit.objective import LossScale, Objective, RewardBatch, TokenBatch
    from kit.training.logps import entropy_gradient
    from kit.training.trl_kernel import install_torch_logprob_kernel

    check_base_class(GRPOTrainer)
    install_torch_logprob_kernel()

    class HookedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
        """Drop-in for `trl.GRPOTrainer` whose loss is an `Objective`.

        Accepts whatever `trl.GRPOTrainer` accepts, and:

        objective: an `Objective`, the name of a recipe, a mapping (see `Objective.from_spec`), or None for TRL's own loss.
        rollout_sinks: functions called with every scored `Rollout`.

        Raises `ObjectiveError` when arguments of TRL's own loss are set beside an objective, or when the objective needs
        something that this run does not have; `EnvironmentUnsupported` for another TRL.
        """

        def __init__(
            self,
            model: Any,
            reward_funcs: Any = None,
            args: Any = None,
            *rest: Any,
            objective: Objective | str | Mapping[str, Any] | None = None,
            rollout_sinks: Sequence[Callable[[Rollout], None]] = (),
            **keywords: Any,
        ) -> None:
            if objective is not None and not isinstance(objective, Objective):
                objective = Objective.from_spec(objective)
            self.objective: Objective | None = objective
            self.rollout_sinks = tuple(rollout_sinks)
            self._objective_means: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}
            self._losses_computed = 0
            self._had_advantage, self._had_gradient = False, False
            self._scored: _Scored | None = None
            if objective is not None and args is None and "ref_logps" in objective.needs:
                raise ObjectiveError("This objective needs a reference policy: pass args=GRPOConfig(...) as well.")
            if objective is not None and args is not None:
                check_arguments(args)
                # TRL computes reference log-probabilities, and keeps a reference model, if and only if beta is not 0.
                args = copy.copy(args)
                args.beta = 1.0 if "ref_logps" in objective.needs else 0.0
            super().__init__(model, reward_funcs, args, *rest, **keywords)
            if objective is not None:
                self.add_callback(_FirstSteps(self))

        # --- loss -----------------------------------------------------------------------------------------------------

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> torch.Tensor:
            if self.objective is None:
                stock: torch.Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
                return stock
            if return_outputs:
                raise ValueError("The loss is made of log-probabilities; there are no model outputs to return.")
            return self._compute_loss(model, inputs)

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            if self.objective is None:
                stock: torch.Tensor = super()._compute_loss(model, inputs)
                return stock
            batch, aux_loss = self._token_batch(model, inputs)
            result = self.objective.loss(batch, self._loss_scale(inputs))
            self._losses_computed += 1
            if not self._had_gradient:
                self._had_advantage = self._had_advantage or bool((batch.advantages * batch.mask).any())
            if self.model.training and not batch.logps.requires_grad:
                raise ObjectiveError(
                    "The log-probabilities carry no gradient, so no hook could change the model. Something between the "
                    "model and the scorer detaches them (a backend's own scorer, or torch.no_grad around training)."
                )
            self._add_means(result.metrics)
            loss: torch.Tensor = result.loss
            if aux_loss is not None:
                self._metrics[self._mode()]["aux_loss"].append(aux_loss.item())
                loss = loss + self.router_aux_loss_coef * aux_loss / self._accumulation()
            return loss

        def _token_batch(self, model: Any, inputs: dict[str, Any]) -> tuple[TokenBatch, torch.Tensor | None]:
            """Scores the completions (B, T) and gathers what hooks read."""
            completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"]
            logps, entropy, aux_loss = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
                torch.cat([inputs["prompt_mask"], mask], dim=1),
                completion_ids.size(1),
                compute_entropy=True,
                compute_aux_loss=self.aux_loss_enabled,
                **{name: inputs.get(name) for name in MODEL_INPUTS},
            )
            if "tool_mask" in inputs:
                mask = mask * inputs["tool_mask"]
            old_logps, advantages = inputs.get("old_per_token_logps"), inputs["advantages"]
            batch = TokenBatch(
                logps=logps,
                old_logps=logps.detach() if old_logps is None else old_logps,
                advantages=advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
                mask=mask.bool(),
                ref_logps=inputs.get("ref_per_token_logps"),
                sampler_logps=inputs.get("sampling_per_token_logps"),
                entropy=entropy,
                step=self.state.global_step,
            )
            return batch, aux_loss

        def _loss_scale(self, inputs: dict[str, Any]) -> LossScale:
            """How this micro-batch counts. TRL turns HF's own loss scaling off, so accumulation is divided out here."""
            accumulation = self._accumulation()
            # `num_items_in_batch` counts the tokens of the whole generation batch over all processes; one accumulation
            # window is accumulation / steps_per_generation of it.
            window = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if self.model.training:
                window = window * accumulation / self.args.steps_per_generation
            return LossScale(
                accumulation=accumulation, window_tokens=window, max_completion_length=self.max_completion_length
            )

        def _accumulation(self) -> float:
            return float(self.current_gradient_accumulation_steps) if self.model.training else 1.0

        def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
            wanted = self.objective is None or self.objective.needs_entropy_gradient
            with entropy_gradient(wanted):
                return super()._get_per_token_logps_and_entropies(*args, **keywords)

        # --- rewards and advantages -----------------------------------------------------------------------------------

        def _calculate_rewards(
            self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
        ) -> torch.Tensor:
            rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            extra = {key: list(value) for key, value in self._pending_extra_logs.items()}
            self._scored = _Scored(rewards, completions, [list(ids) for ids in completion_ids_list], extra)
            return rewards

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            assert self._scored is not None  # set by _calculate_rewards, which super() has just called
            if self.objective is not None:
                output["advantages"] = self._advantages(self._scored.rewards, output)
            if self.rollout_sinks:
                rollout = self._rollout(inputs, self._scored, output["advantages"])
                for sink in self.rollout_sinks:
                    sink(rollout)
            return output

        def _advantages(self, rewards: torch.Tensor, output: dict[str, Any]) -> torch.Tensor:
            """Our estimator's advantages for the completions of this process: (B,) or (B, T)."""
            assert self.objective is not None
            weights = self.reward_weights.to(rewards.device)
            total = (rewards * weights).nansum(dim=1)
            # Where no component applied there is no signal, and no part in the baseline.
            total[torch.isnan(rewards).all(dim=1)] = torch.nan
            size = self.num_generations if self.model.training else self.num_generations_eval
            trained = output["completion_mask"] * output.get("tool_mask", 1)
            everyone = RewardBatch(
                rewards=total,
                group=torch.arange(len(total), device=total.device) // size,
                components=rewards,
                component_weights=weights,
                lengths=self.accelerator.gather(trained.sum(dim=1)),
                step=self.state.global_step,
            )
            advantages = self.objective.compute_advantages(everyone)
            per_completion = advantages if advantages.dim() == 1 else advantages.mean(dim=1)
            logged = self._logs["advantages"]
            for _ in range(min(len(per_completion), len(logged))):
                logged.pop()
            logged.extend(per_completion.tolist())
            mine = len(output["completion_ids"])
            start = self.accelerator.process_index * mine
            return advantages[start : start + mine]

        def _rollout(self, rows: Any, scored: _Scored, advantages: torch.Tensor) -> Rollout:
            mine = len(rows)
            start = self.accelerator.process_index * mine
            return Rollout(
                step=self.state.global_step,
                mode=self._mode(),
                rows=rows,
                completions=scored.completions,
                completion_ids=scored.completion_ids,
                truncated=[not row or row[-1] not in self.eos_token_ids for row in scored.completion_ids],
                rewards=scored.rewards[start : start + mine],
                reward_names=list(self.reward_func_names),
                advantages=advantages,
                extra=scored.extra,
            )

        # --- logs and state -------------------------------------------------------------------------------------------

        def _mode(self) -> str:
            return "train" if self.model.training else "eval"

        def _add_means(self, means: Mapping[str, Any]) -> None:
            totals = self._objective_means[self._mode()]
            for name, mean in means.items():
                pair = torch.stack([mean.total.detach().double(), mean.count.detach().double()])
                totals[name] = totals[name] + pair if name in totals else pair

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            """Adds the objective's means, exact over micro-batches and processes, to what TRL logs."""
            mode = self._mode()
            totals = self._objective_means[mode]
            if totals:
                names = sorted(totals)
                summed = self.accelerator.reduce(torch.stack([totals[name] for name in names]), reduction="sum")
                for name, (total, count) in zip(names, summed.tolist(), strict=True):
                    if count:
                        self._metrics[mode][name].append(total / count)
                totals.clear()
            super().log(logs, start_time)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            state = self.objective.state_dict() if self.objective is not None else {}
            if state and self.args.should_save:
                folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
                (folder / STATE_FILE).write_text(json.dumps(state))

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if self.objective is not None and checkpoint is not None:
                path = Path(checkpoint) / STATE_FILE  # not written by an objective without state
                self.objective.load_state_dict(json.loads(path.read_text()) if path.is_file() else {})

    class _FirstSteps(TrainerCallback):  # type: ignore[misc]
        """Stops a run whose hooks do not reach the weights: an ignored hook is the worst defect there is.

        A step that did not call our loss stops it at once. So do three steps in a row, from the first, in which some
        completion had an advantage and no weight got a gradient; after the first gradient nothing is looked at.
        """

        def __init__(self, trainer: HookedGRPOTrainer) -> None:
            self.trainer, self.without = trainer, 0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if self.trainer._had_gradient or not self.trainer._had_advantage:
                return
            gradients = (weight.grad for weight in model.parameters() if weight.requires_grad)
            self.trainer._had_gradient = any(grad is not None and bool(grad.any()) for grad in gradients)
            self.without += not self.trainer._had_gradient
            if self.without >= PATIENCE:
                raise ObjectiveError(
                    f"In {PATIENCE} steps no weight got a gradient, although completions had advantages. Either nothing is "
                    "trainable (look at model.lora.targets), or a hook cuts the graph or multiplies everything by zero."
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not self.trainer._losses_computed:
                raise ObjectiveError(
                    "A step was made without calling the objective: something replaced compute_loss or _compute_loss "
                    "after the trainer was built. The run stops, because its hooks would be ignored."
                )
            self.trainer._had_advantage = False

    return HookedGRPOTrainer
