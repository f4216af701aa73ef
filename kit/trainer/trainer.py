"""TRL's `GRPOTrainer` with an objective made of hooks.

Overridden, and nothing else:

    compute_loss, _compute_loss                      our loss
    training_step, _prepare_inputs, _generate,
    _calculate_rewards                               what each takes by the clock (kit.trainer.step_phases)
    training_step, _prepare_inputs                   a step in parts (kit.trainer.loss_in_parts), smaller ones after running out
                                                     of memory (kit.trainer.oom_retry); completions of a prompt in one
                                                     micro-batch (kit.trainer.grouped_batches)
    _generate_single_turn                            likewise; in parts whose rewards are computed while the next is generated
                                                     (kit.trainer.scoring_ahead)
    _get_per_token_logps_and_entropies               entropy gradient only when a hook wants it; hidden states, too; under
                                                     Unsloth the padding goes behind (kit.scoring.right_packing)
    _tokenize_prompts, _generate                     rows that carry `prompt_ids`; what tools wrote (kit.trainer.prompts)
    _calculate_rewards                               keeps the gathered rewards of every component; shows them all ids
    _generate_and_score_completions                  our advantages in place of TRL's; a checkpoint when the engine fails; which
                                                     completions are trained on (kit.trainer.selection)
    create_optimizer                                 a parameter group for the value head of `gae`
    _save_checkpoint, _get_output_dir                state of hooks and value head; whole checkpoints or none
    _load_optimizer_and_scheduler                    state of hooks and value head; where the saved run stood
    _get_train_sampler                               is kept, to draw the orders of earlier epochs again
    log                                              the objective's means, exact over micro-batches and processes

With `objective=None` every one of them is TRL's own. The class is built on first use, after the backend is chosen: a
backend may replace `trl.GRPOTrainer` when it is imported.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.errors import ObjectiveError
from kit.models.backend import begun
from kit.models.libraries import check_trl
from kit.trainer.trl_compat import check_arguments, check_backend, check_base_class, check_on_policy, check_state

if TYPE_CHECKING:
    import torch

    from kit.config import SelectionConfig
    from kit.models.failures import EngineSettings, Memory
    from kit.objective import LossOutput, Mean, Objective
    from kit.trainer.progress import Stateful
    from kit.trainer.rollout import Rollout

REFERENCE_NEEDS = {"ref_logps", "full_kl"}


@functools.cache
def make_trainer_class() -> type:
    """The trainer class, a subclass of whatever `trl.GRPOTrainer` is by now. Raises `EnvironmentUnsupported`."""
    check_trl()
    import torch
    from accelerate.utils import gather_object
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from kit.generation.vllm import making_engine
    from kit.models.lora import lora_weight_norm
    from kit.objective import Mean, Objective
    from kit.objective.metrics import QUANTILES, Sums
    from kit.scoring.chunked_logprob import entropy_gradient
    from kit.scoring.hidden_states import ScoringPass, capturing
    from kit.scoring.right_packing import RightPacking
    from kit.scoring.scorer import PackedScoring
    from kit.scoring.trl_kernel import install_torch_logprob_kernel
    from kit.trainer.checkpoint import CheckpointSide
    from kit.trainer.engine import EngineSide, SamplerAlarm
    from kit.trainer.family import FamilySide
    from kit.trainer.greedy import check_greedy
    from kit.trainer.grouped_batches import GroupedBatches
    from kit.trainer.loss import HIDDEN_NEEDS, LossSide
    from kit.trainer.loss_in_parts import PartsSide
    from kit.trainer.old_logps import OldLogpsSide
    from kit.trainer.oom_retry import HalvingSide
    from kit.trainer.prompts import PromptSide
    from kit.trainer.rollout import RolloutSide
    from kit.trainer.sanity_checks import FirstSteps
    from kit.trainer.savings import SavingsSide
    from kit.trainer.scoring_ahead import ScoringAheadSide
    from kit.trainer.selection.side import SelectionSide
    from kit.trainer.step_phases import StepPhases
    from kit.trainer.value_head import Critic

    check_base_class(GRPOTrainer)
    check_backend(GRPOTrainer, begun())
    install_torch_logprob_kernel()

    class HookedGRPOTrainer(
        CheckpointSide,
        ScoringAheadSide,
        SavingsSide,
        HalvingSide,
        PartsSide,
        GroupedBatches,
        LossSide,
        EngineSide,
        OldLogpsSide,
        SelectionSide,
        RolloutSide,
        PromptSide,
        RightPacking,
        PackedScoring,
        FamilySide,
        GRPOTrainer,  # type: ignore[misc]
    ):
        """Drop-in for `trl.GRPOTrainer` whose loss is an `Objective`.

        Accepts whatever `trl.GRPOTrainer` accepts, and:

        objective: an `Objective`, the name of a recipe, a mapping (see `Objective.from_spec`), or None for TRL's own loss.
        rollout_sinks: functions called with every scored `Rollout`. One that has a `flush()` may write beside the training:
            it is called before a checkpoint, and returns once everything is on disk.
        stateful: by name, further parts that checkpoints keep: `state_dict()` and `load_state_dict(state)` of plain values.
        first_step_checks: prove at the first steps that the hooks reach the weights (see `kit.trainer.sanity_checks`).
        engine: a `kit.models.failures.EngineSettings`: watch vLLM, seed it, and compare its log-probabilities. None:
            TRL's own handling.
        memory: a `kit.models.failures.Memory`: go on with smaller parts after running out of memory. None: fail.
        token_budget, skip_flat_groups, reuse_old_logps: as under `optimisation:`; `savings_report` says of each whether it is
            on, or why not.
        packing, share_prompts: as under `optimisation:`; `packing_report` says which way scoring takes, and why.
        selection: a `kit.config.SelectionConfig`: choose prompts and completions (`kit.trainer.selection`), and count what
            was spent. None: neither.

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
            stateful: Mapping[str, Stateful] | None = None,
            first_step_checks: bool = True,
            memory: Memory | None = None,
            engine: EngineSettings | None = None,
            token_budget: int | None = None,
            skip_flat_groups: bool = True,
            reuse_old_logps: bool = True,
            selection: SelectionConfig | None = None,
            **keywords: Any,
        ) -> None:
            if objective is not None and not isinstance(objective, Objective):
                objective = Objective.from_spec(objective)
            self.objective: Objective | None = objective
            self.needs = objective.needs if objective is not None else frozenset()
            self.rollout_sinks = tuple(rollout_sinks)
            self.memory, self.engine, self.selection = memory, engine, selection
            self.token_budget: int | None = token_budget
            self.savings_report: dict[str, str] = {}
            self.stateful = dict(stateful or {})
            self._objective_means = {"train": Sums(), "eval": Sums()}
            self._samples: dict[str, dict[str, list[torch.Tensor]]] = {"train": {}, "eval": {}}
            self._observed: dict[str, Mean] = {}  # by controllers, in this optimiser step
            self.phases = StepPhases()
            if objective is not None and args is None and self.needs & REFERENCE_NEEDS:
                raise ObjectiveError("This objective needs a reference policy: pass args=GRPOConfig(...) as well.")
            if objective is not None and args is not None:
                check_arguments(args)
                # TRL computes reference log-probabilities, and keeps a reference model, if and only if beta is not 0.
                args = copy.copy(args)
                args.beta = 1.0 if self.needs & REFERENCE_NEEDS else 0.0
            with making_engine(GRPOTrainer, engine):
                super().__init__(model, reward_funcs, args, *rest, **keywords)
            self._make_selector()
            if engine is not None and engine.max_logp_difference is not None:
                self.add_callback(SamplerAlarm(engine.max_logp_difference, engine.tell))
            if objective is not None:
                check_on_policy(objective, self.args)
                check_state(objective)
            if "greedy_rewards" in self.needs:
                check_greedy(self)
            if "weight_norm" in self.needs and lora_weight_norm(self.model) is None:
                raise ObjectiveError(
                    "A regularizer needs the norm of LoRA weights, but the model has none: set peft_config."
                )
            settings = objective.value_settings if objective is not None else None
            self._critic = Critic(self.accelerator.unwrap_model(self.model), settings) if settings is not None else None
            self._first_steps = FirstSteps(self) if objective is not None and first_step_checks else None
            if self._first_steps is not None:
                self.add_callback(self._first_steps)
            if objective is not None:
                self.add_callback(_StepEnd(self))
            self._settle_savings(skip_flat_groups=skip_flat_groups, reuse_old_logps=reuse_old_logps)

        # --- loss -----------------------------------------------------------------------------------------------------

        _in_parts_too = True  # a subclass with a loss of its own is not

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
            if self._first_steps is not None and self.model.training and self.is_in_train:
                self._first_steps.before_scoring(model, inputs)
            division = self._division(inputs, self._rows_at_once(inputs)) if self._stepping else None
            if division is not None:
                return self._loss_in_parts(model, inputs, division)
            terms, scored, aux_loss = self._terms(model, inputs)
            norm = lora_weight_norm(self.model) if "weight_norm" in self.needs else None
            loss, scale = self._objective_loss(inputs, dataclasses.replace(terms, weight_norm=norm))
            beside = self._beside(inputs, scored, aux_loss, scale)
            return loss if beside is None else loss + beside

        def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
            memory = self._halving() if self._passes is not None and not torch.is_grad_enabled() else None
            if memory is None:
                return self._scores(*args, **keywords)
            whole = keywords.pop("batch_size", None) or args[1].size(0)
            return memory.attempt("scoring", whole, lambda size: self._scores(*args, batch_size=size, **keywords))

        def _scores(self, *args: Any, **keywords: Any) -> Any:
            if self._passes is not None and not torch.is_grad_enabled():  # of the rollout, not of an update
                with self.phases.measured("scoring"):
                    return self._scored_once(*args, **keywords)
            return self._scored_once(*args, **keywords)

        def _scored_once(self, *args: Any, **keywords: Any) -> Any:
            wanted = self.objective is None or self.objective.needs_entropy_gradient
            keep = bool(self.needs & HIDDEN_NEEDS) and not torch.is_grad_enabled()
            with entropy_gradient(wanted), capturing(keep) as projections:
                result = super()._get_per_token_logps_and_entropies(*args, **keywords)
            if keep and self._passes is not None:
                self._passes.append(ScoringPass(result[0], projections))
            return result

        # --- phases of a step, by the clock -------------------------------------------------------------------------

        def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
            with self.phases.measured("update"):
                loss: torch.Tensor = super().training_step(*args, **keywords)
                return loss

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            with self.phases.measured("other"):
                return super()._prepare_inputs(generation_batch)

        def _generate(self, prompts: list[Any]) -> Any:
            with self.phases.measured("generation"):
                return super()._generate(prompts)

        def _calculate_rewards(self, *args: Any, **keywords: Any) -> torch.Tensor:
            with self.phases.measured("rewards"):
                rewards: torch.Tensor = super()._calculate_rewards(*args, **keywords)
                return rewards

        # --- logs and state -------------------------------------------------------------------------------------------

        def _mode(self) -> str:
            return "train" if self.model.training else "eval"

        def _take_in(self, result: LossOutput) -> None:
            """Keeps what is logged of a micro-batch, and in training what controllers observe."""
            self._add_means(result.metrics)
            for name, sample in result.samples.items():
                self._samples[self._mode()].setdefault(name, []).append(sample)
            if self.model.training:
                for part, mean in result.observed.items():
                    self._observed[part] = self._observed[part] + mean if part in self._observed else mean

        def _add_means(self, means: Mapping[str, Any]) -> None:
            self._objective_means[self._mode()].add(means)

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            """Adds the objective's means, exact over micro-batches and processes, to what TRL logs."""
            mode = self._mode()
            totals = self._objective_means[mode].take()
            # A process that had nothing to score may lack a name; every tensor below must be as long as with the others.
            names = sorted(set(gather_object(list(totals))) if self.accelerator.num_processes > 1 else totals)
            if names:
                nothing = torch.zeros(2, dtype=torch.float64)
                stacked = torch.stack([totals.get(name, nothing).to(self.accelerator.device) for name in names])
                summed = self.accelerator.reduce(stacked, reduction="sum")
                for name, (total, count) in zip(names, summed.tolist(), strict=True):
                    if count:
                        self._metrics[mode][name].append(total / count)
            self._log_quantiles(mode)
            super().log(logs, start_time)

        def _log_quantiles(self, mode: str) -> None:
            """Quantiles of the ratio, from the sampled tokens of all micro-batches and processes since the last log."""
            parts = self._samples[mode].pop("log_ratio", [])
            if not parts:
                return
            padded = self.accelerator.pad_across_processes(torch.cat(parts).float(), pad_index=torch.nan)
            sample = self.accelerator.gather(padded)
            sample = sample[~torch.isnan(sample)]
            if sample.numel():
                values = torch.quantile(sample, sample.new_tensor(QUANTILES)).exp().tolist()
                for level, value in zip(QUANTILES, values, strict=True):
                    self._metrics[mode][f"ratio/p{100 * level:02.0f}"].append(value)

        def observe_step(self) -> None:
            """Tells the objective's controllers of the step that has just been made."""
            if self.objective is not None and self._observed:
                parts, seen = zip(*sorted(self._observed.items()), strict=True)
                sums = torch.stack([torch.stack([mean.total.double(), mean.count.double()]) for mean in seen])
                sums = self.accelerator.reduce(sums, reduction="sum")
                means = {part: Mean(total, count) for part, (total, count) in zip(parts, sums, strict=True)}
                completions = self.args.per_device_train_batch_size * self.current_gradient_accumulation_steps
                self.objective.observe(means, completions * self.accelerator.num_processes)
                self._observed = {}

        def create_optimizer(self, model: Any = None) -> Any:
            optimizer = super().create_optimizer(model)
            if self._critic is not None:
                self._critic.join(optimizer)
            return optimizer

    class _StepEnd(TrainerCallback):  # type: ignore[misc]
        """After every optimiser step: controllers observe, and the value head starts from no gradient.

        The trainer clears the gradients of its model only.
        """

        def __init__(self, trainer: HookedGRPOTrainer) -> None:
            self.trainer = trainer

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.trainer.objective is not None and not state.global_step:  # it may have been used before
                self.trainer.objective.reset_controllers()
            if self.trainer.memory is not None:
                self.trainer.memory.finished(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.trainer.phases.taken()  # what an evaluation between two steps took is no step's

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.trainer._critic is not None and self.trainer.accelerator.num_processes > 1:
                for weight in self.trainer._critic.head.parameters():
                    weight.grad = self.trainer.accelerator.reduce(weight.grad, reduction="mean")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.trainer._critic is not None:
                self.trainer._critic.head.zero_grad()
            self.trainer.observe_step()
            for phase, seconds in self.trainer.phases.taken().items():
                self.trainer._metrics["train"][f"seconds/{phase}"].append(seconds)
            if self.trainer.memory is not None:
                self.trainer.memory.finished(state.global_step)

    return HookedGRPOTrainer
