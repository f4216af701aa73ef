"""TRL's `GRPOTrainer` with an objective made of hooks.

Each override of a TRL method delegates to an object that does the work:

    per micro-batch     training_step, compute_loss                     `PolicyLoss`; `StepRetry` after running out of memory
                        _prepare_inputs                                 `grouped_by_prompt`
    per rollout         _generate_and_score_completions                 `DynamicSampling`, then `AdvantageComputer`
                        _get_per_token_logps_and_entropies              `Scorer`
                        _generate, _generate_single_turn                `Generator`
                        _calculate_rewards                              `RolloutState` stores the rewards
    per run             create_optimizer                                `Critic`, the value head of `gae`
                        _save_checkpoint, _get_output_dir,
                        _load_optimizer_and_scheduler,
                        _get_train_sampler                              `CheckpointState`
                        log                                             `MetricLog`

With `objective=None` TRL computes loss and advantages. Import this module after the backend is active
(`kit.models.backend`): a backend may replace `trl.GRPOTrainer`, the base of the class below, when it is imported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from kit.config.sections import SelectionConfig
from kit.errors import ObjectiveError
from kit.generation.prompts import text_of, without_pictures
from kit.generation.vllm import making_engine
from kit.models.backend import active_backend, is_unsloths, overflows_in_float16
from kit.models.failures import BatchSizeBackoff, EngineSettings
from kit.models.family import adapter_of
from kit.models.libraries import check_trl
from kit.objective import LossScale, Objective
from kit.objective.batch import fields_where
from kit.objective.check import require_sound
from kit.objective.hook import remedy
from kit.objective.objective import regrouping_obstacle, skipping_obstacle
from kit.objective.schedules import Controller
from kit.scoring.head import install_torch_logprob_kernel
from kit.scoring.scorer import ExtraOutputs, Report, Rows, Scorer, Scores, has_dropout
from kit.trainer.advantages import TOKEN_REWARDS, AdvantageComputer, local_slice, truncated, weighted_total
from kit.trainer.arguments import balances_experts, check_arguments, check_backend, check_combination
from kit.trainer.checkpoint import CheckpointState, Stateful, checkpoint_on_failure
from kit.trainer.dynamic_sampling import DynamicSampling
from kit.trainer.metric_log import MetricLog, SamplerAlarm
from kit.trainer.policy_loss import (
    EXTRA,
    HIDDEN_NEEDS,
    MODEL_INPUTS,
    Critic,
    MicroBatch,
    PolicyLoss,
    RolloutMemory,
    Services,
    StepContext,
    StepRetry,
    average_gradients,
    grouped_by_prompt,
)
from kit.trainer.rollout import Generator, ReplayedRollout, RewardResult, Rollout, RolloutState
from kit.trainer.sanity_checks import SanityChecks
from kit.trainer.teacher import TEACHER_NEEDS, Prompt, Teacher

REFERENCE_NEEDS = fields_where(model="reference")
ON, OFF = "on", "switched off"
"""Values of `savings_report`; the reason of the trainer is the third possible value."""
log = logging.getLogger("kit")

check_trl()
check_backend(GRPOTrainer, active_backend())
install_torch_logprob_kernel()


class HookedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """Drop-in replacement for `trl.GRPOTrainer` whose loss is an `Objective`.

    Accepts all arguments of `trl.GRPOTrainer`, and:

    objective: an `Objective`, the name of a recipe, a mapping (see `Objective.from_spec`), or None for TRL's own loss.
    rollout_sinks: functions called with every scored `Rollout`.
    stateful: further objects to save in checkpoints, by name: `state_dict()` and `load_state_dict(state)` of plain values.
    first_step_checks: check at the first steps that the hooks reach the weights (see `kit.trainer.sanity_checks`).
    engine: a `kit.models.failures.EngineSettings`: watch vLLM, seed it, compare its log-probabilities. None: TRL's handling.
    memory: a `kit.models.failures.BatchSizeBackoff`: repeat with smaller parts after running out of memory. None: fail.
    token_budget, skip_flat_groups: as under `optimisation:`, but None means no budget. `savings_report` tells why one is off.
    packing, share_prompts: as under `optimisation:`; `packing_report` has the layout that scoring uses, and the reason.
    selection: a `kit.config.SelectionConfig`: replace flat groups (`kit.trainer.dynamic_sampling`) and count the tokens.
    teacher: a `kit.trainer.teacher.Teacher`, for an objective that learns from one.
    offload: keep the activations that gradient checkpointing saves in main memory.
    was_stopped: returns whether a user stopped the run; its checkpoint then records that steps are left.
    check_anew: repeat the first-step checks in a resumed run, because something that matters has changed.
    fast_decoding: generate on a CPU with `kit.generation.decoding`: the distribution of TRL, but other samples for a seed.

    A subclass may add terms to the result of `compute_loss`. Scaling the result has no effect, because `compute_loss` has already
    accumulated the gradient of the objective in `param.grad`. Raises `ObjectiveError` if arguments of TRL's own loss are set
    together with an objective, or if the objective needs something that this run does not have; `EnvironmentUnsupported` for
    another version of TRL.
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
        memory: BatchSizeBackoff | None = None,
        engine: EngineSettings | None = None,
        packing: bool = True,
        share_prompts: bool = True,
        token_budget: int | None = None,
        skip_flat_groups: bool = True,
        selection: SelectionConfig | None = None,
        teacher: Teacher | None = None,
        fast_decoding: bool = False,
        offload: bool = False,
        was_stopped: Callable[[], bool] = lambda: False,
        check_anew: bool = False,
        **keywords: Any,
    ) -> None:
        if objective is not None and not isinstance(objective, Objective):
            objective = Objective.from_spec(objective)
        self._objective: Objective | None = objective
        self.needs = objective.needs if objective is not None else frozenset()
        self.rollout_sinks, self.memory, self.engine, self.teacher = tuple(rollout_sinks), memory, engine, teacher
        self.stateful = dict(stateful or {})
        if objective is not None and args is None and self.needs & REFERENCE_NEEDS:
            raise ObjectiveError("This objective needs a reference policy: pass args=GRPOConfig(...) as well.")
        if objective is not None and args is not None:
            check_arguments(args)
            # TRL computes reference log-probabilities, and keeps a reference model, if and only if beta is not 0.
            args = copy.copy(args)
            args.beta = 1.0 if self.needs & REFERENCE_NEEDS else 0.0
        self._stepping = False  # inside training_step
        self._state: RolloutState | None = None  # of the rollout in progress
        with making_engine(GRPOTrainer, engine):
            super().__init__(model, reward_funcs, args, *rest, **keywords)
        self.aux_loss_enabled = balances_experts(self.model, configured=self.aux_loss_enabled)
        self._build_parts(packing, share_prompts, first_step_checks, fast_decoding)
        self.scorer.offload = offload
        self.set_savings(token_budget=token_budget, skip_flat_groups=skip_flat_groups)
        dynamic = selection.dynamic_sampling if selection is not None else None
        self.selection = (
            DynamicSampling(self, self.objective, self.metric_log, dynamic) if dynamic is not None else None
        )
        if self.selection is not None:
            self.stateful["selection"] = self.selection
        self.checkpoints = CheckpointState(
            self,
            stateful=self.stateful,
            memory=self.rollout_memory,
            services=self.services,
            teacher=self.teacher,
            checks=self.checks,
            was_stopped=was_stopped,
            check_anew=check_anew,
        )
        if engine is not None and engine.compared:
            weights = self.objective.weights if self.objective is not None else ()
            corrected = any("sampler_logps" in hook.needs for hook in weights)
            # Not if all weights train in float32, nor in families whose activations overflow.
            float16 = hasattr(self.model, "peft_config") and not overflows_in_float16(self.model.config)
            self.add_callback(SamplerAlarm(engine.tell, corrected=corrected, four_bit=engine.four_bit, float16=float16))

    def _build_parts(self, packing: bool, share_prompts: bool, checked: bool, fast_decoding: bool) -> None:
        """Builds the objects that the methods below delegate to. Raises `ObjectiveError` for an unmet need of the objective."""
        objective, policy, accelerator = self.objective, self.accelerator.unwrap_model(self.model), self.accelerator
        unsloth = is_unsloths(type(self))
        self.family = adapter_of(policy, self.processing_class)
        self.scorer = Scorer(
            self.family,
            autocast=accelerator.autocast,
            unwrap=accelerator.unwrap_model,
            padding="right" if unsloth and objective is not None else "left",
            packing=packing and objective is not None,
            share_prompts=share_prompts,
            half=accelerator.mixed_precision in ("bf16", "fp16"),
            device=accelerator.device.type,
        )
        if unsloth:  # its trainer sets right padding; generation needs left padding
            for tokenizer in (self.processing_class, getattr(self.processing_class, "tokenizer", None)):
                if tokenizer is not None and hasattr(tokenizer, "padding_side"):
                    tokenizer.padding_side = "left"
        backoff = self.memory if objective is not None else None
        self.generator = Generator(self.family, policy, backoff, fast_decoding=fast_decoding)
        self.generator.half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        self.metric_log = MetricLog(accelerator, self._mode, lambda: self._metrics)
        self.rollout_memory = RolloutMemory()
        self.services: Services | None = None
        self.policy_loss: PolicyLoss | None = None
        self.critic: Critic | None = None
        self.checks: SanityChecks | None = None
        self.retry: StepRetry | None = None
        if objective is None:
            return
        check_combination(self, objective, HookedGRPOTrainer)
        if checked:
            require_sound(objective, ("direction",))
        settings = objective.value_settings
        self.critic = Critic(policy, settings) if settings is not None else None
        scoring = (self.family, self.scorer, self.temperature)
        services = self.services = Services(
            objective, self.model, accelerator, *scoring, self.metric_log, self.rollout_memory, self.critic
        )
        router_coef = self.router_aux_loss_coef if self.aux_loss_enabled else None
        loss = self.policy_loss = PolicyLoss(services, router_coef=router_coef)
        self.checks = SanityChecks(services) if checked else None
        size = self.args.per_device_train_batch_size
        self.advantages = AdvantageComputer(
            services,
            score=lambda batch, hidden=True: self._score(self.model, batch.rows, ExtraOutputs(hidden=hidden), size),
            eos_ids=self.eos_token_ids,
            logged=self._logs["advantages"],
            teacher=self._joined_teacher(policy),
            checks=self.checks,
        )
        if backoff is not None:
            self.retry = StepRetry(loss, backoff, self.checks, self._again)
        if self.checks is not None:
            self.add_callback(self.checks)
        self.add_callback(StepEnd(self))

    def _joined_teacher(self, policy: Any) -> Teacher | None:
        """The teacher, ready to score. Raises `ObjectiveError` if the objective needs a teacher and there is none."""
        if self.teacher is None:
            if needed := sorted(self.needs & TEACHER_NEEDS):
                advice = f"{remedy(needed[0])} (from Python: teacher=Teacher(...))"
                raise ObjectiveError(f"A hook needs {needed[0]}, but {advice}.")
            return None

        def tokenize(prompts: list[Prompt]) -> list[list[int]]:
            ids: list[list[int]] = self._tokenize_prompts(prompts)[0] if prompts else []
            return ids

        size = self.args.per_device_train_batch_size
        self.teacher.join(
            policy,
            temperature=self.temperature,
            score=lambda model, rows, outputs: self._score(model, rows, outputs, size),
            tokenize=tokenize,
            pad=self._tokenizer.pad_token_id,
            process=self.accelerator.process_index,
        )
        return self.teacher

    @property
    def objective(self) -> Objective | None:
        """The objective of the loss. Read-only, because the objects of the trainer hold references to it."""
        return self._objective

    def set_savings(self, *, token_budget: int | None = None, skip_flat_groups: bool = True) -> None:
        """Sets the token budget and whether flat groups are skipped; writes `savings_report`."""
        self.savings_report: dict[str, str] = {}
        if self.objective is None or self.policy_loss is None:
            return
        reasons = (
            None if skip_flat_groups else OFF,
            skipping_obstacle(self.objective),
            "the value head learns from every completion" if self.critic is not None else None,
            "the load-balancing loss of the router covers all completions" if self.aux_loss_enabled else None,
            "the model has dropout, and other completions would get its random numbers"
            if has_dropout(self.model)
            else None,
        )
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason not in (None, OFF):
            log.info("groups with equal rewards are not skipped: %s", reason)
        self.savings_report = {
            "token_budget": ON if token_budget else "no budget is set",
            "skip_flat_groups": reason or ON,
        }
        self.policy_loss.token_budget = self.scorer.token_budget = token_budget or None
        self.policy_loss.skip_flat = reason is None

    @property
    def packing_report(self) -> Report:
        """The layout of scoring: `packing` (None before the first rows), `share_prompts`, and `reason` if not packed."""
        return self.scorer.report

    aux_loss_enabled: bool  # attribute of TRL: the loss balances the load of experts
    _buffered_inputs: list[dict[str, Any]] | None  # attribute of TRL: the micro-batches of a rollout

    # --- a micro-batch ------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with self.metric_log.phases.measured("update"):
            self._stepping = True
            try:
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            finally:
                self._stepping = False
            if self.policy_loss is not None and self.accelerator.sync_gradients:
                average_gradients(self.accelerator, self.model)
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        previous: list[dict[str, Any]] | None = self._buffered_inputs
        with self.metric_log.phases.measured("other"):
            inputs = super()._prepare_inputs(generation_batch)
            micro_batches = self._buffered_inputs
            is_new = micro_batches is not previous
            if self.model.training and micro_batches is not None and is_new and self.shares_prompts:
                self._buffered_inputs = grouped_by_prompt(micro_batches)
                inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts are shared, and completions may move between the micro-batches of a rollout."""
        one_step = self.args.steps_per_generation == self.args.gradient_accumulation_steps
        shared = (
            self.scorer.packing and self.scorer.share_prompts and self.packing_report["packing"] in (None, "packed")
        )
        if self.aux_loss_enabled or self.objective is None:  # the load balance depends on the micro-batch
            return False
        return bool(shared and one_step and regrouping_obstacle(self.objective) is None)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        loss, training = self.policy_loss, self.model.training
        if loss is None:
            trl_loss: Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return trl_loss
        if return_outputs:
            raise ValueError("The loss is computed from log-probabilities; there are no model outputs to return.")
        if self.accelerator.num_processes > 1:
            model = self.model  # without DDP's synchronisation: processes may have different numbers of parts
        # TRL switches off the loss scaling of transformers, so the objective divides by the accumulation steps.
        # `num_items_in_batch` counts the tokens of the generation batch over all processes; the share of one accumulation
        # window is accumulation / steps_per_generation.
        accumulation = float(self.current_gradient_accumulation_steps) if training else 1.0
        window = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if training:
            window = window * accumulation / self.args.steps_per_generation
        scale = LossScale(accumulation, window, self.max_completion_length)
        checks = self.checks if self._stepping and self.is_in_train else None  # custom training loops are not checked
        if checks is not None and checks.done:
            checks = None
        batch, context = MicroBatch(inputs), StepContext(scale, self.state.global_step, checks)
        if not self._stepping:
            return loss.in_one_pass(model, batch, context)
        if self.retry is None:
            return loss.step(model, batch, context)
        return self.retry.step(model, batch, context, last=self.accelerator.sync_gradients)

    def _again(self, inputs: dict[str, Any]) -> None:
        """Repeats an earlier micro-batch of this optimiser step, for `StepRetry`."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self.model, inputs)
        self.accelerator.backward(loss)

    # --- log-probabilities, which TRL requests during a rollout -------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **fields: Any,
    ) -> Any:
        if self.objective is None and is_unsloths(type(self)):
            arguments = (
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
            )
            return super()._get_per_token_logps_and_entropies(*arguments, **fields)
        if self._state is not None:  # model inputs that TRL does not pass on; the update scores with the same ones
            width = input_ids.shape[1] - logits_to_keep
            extra_inputs = self.generator.scored_inputs(self._state, width, logits_to_keep)
            fields = {name: value for name, value in fields.items() if name in MODEL_INPUTS} | extra_inputs
        outputs = ExtraOutputs(
            entropy=compute_entropy,
            entropy_gradient=self.objective is None or self.objective.needs_entropy_gradient,
            aux_loss=compute_aux_loss,
            hidden=bool(self.needs & HIDDEN_NEEDS) and not torch.is_grad_enabled(),
        )
        rows = Rows(input_ids, attention_mask, logits_to_keep, fields)
        scores = self._score(model, rows, outputs, batch_size)
        return scores.logps, scores.entropy, scores.aux_loss

    def _score(self, model: Any, rows: Rows, outputs: ExtraOutputs, batch_size: int | None) -> Scores:
        """Scores rows. During a rollout, logs the time, and repeats in smaller parts after running out of memory."""
        state, backoff = self._state, self.generator.backoff
        if state is None or torch.is_grad_enabled():
            scores = self.scorer.score(model, rows, outputs, batch_size)
        else:
            with self.metric_log.phases.measured("scoring"):
                if backoff is None:
                    scores = self.scorer.score(model, rows, outputs, batch_size)
                else:
                    rows_at_once = batch_size or len(rows.ids)
                    scores = backoff.attempt(
                        "scoring", rows_at_once, lambda size: self.scorer.score(model, rows, outputs, size)
                    )
            if outputs.hidden and scores.head is not None:
                state.passes.append(scores)
        return scores

    # --- a generation batch -------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with checkpoint_on_failure(self):
            if self.selection is not None and self.model.training:
                return self.selection.batch(inputs, self._roll_out)
            return self._roll_out(inputs, None)[0]

    def _roll_out(
        self, rows: list[dict[str, Any]], replayed: ReplayedRollout | None
    ) -> tuple[dict[str, Any], RewardResult]:
        """TRL's batch of these rows, with the objective's advantages and the other inputs of its steps."""
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        with self.rolling_out(rows, replayed) as state:
            output: dict[str, Any] = super()._generate_and_score_completions(rows)
            width, length = output["prompt_ids"].shape[1], output["completion_ids"].shape[1]
            extra_inputs = self.generator.scored_inputs(state, width, length)
            output.update({f"{EXTRA}{name}": value for name, value in extra_inputs.items()})  # TRL ignores these names
            if self.objective is not None:
                settings = {"reward_weights": self.reward_weights, "group_size": group_size}
                self.advantages.fill(output, state, step=self.state.global_step, **settings)
                state.passes.clear()  # frees the hidden states
                if self.model.training:
                    self.metric_log.generated += sum(map(len, state.rewards.completion_ids))
        if self.rollout_sinks:
            result = state.rewards
            rollout = Rollout(
                step=self.state.global_step,
                mode=self._mode(),
                rows=rows,
                completions=result.completions,
                completion_ids=result.completion_ids,
                truncated=truncated(result, self.eos_token_ids),
                rewards=result.rewards[local_slice(self.accelerator, len(rows))],
                reward_names=list(self.reward_func_names),
                advantages=output["advantages"],
                extra=result.extra,
                prompt_ids=state.prompt_ids,
                tool_mask=state.tool_mask,
            )
            for sink in self.rollout_sinks:
                sink(rollout)
        return output, state.rewards

    @contextmanager
    def rolling_out(
        self, rows: Sequence[dict[str, Any]], replayed: ReplayedRollout | None = None
    ) -> Iterator[RolloutState]:
        """Sets the rollout state for these rows, which must be generated and scored in this order. Blocks may be nested."""
        outer, self._state = self._state, RolloutState(rows, replayed)
        try:
            yield self._state
        finally:
            self._state = outer

    def _generate(self, prompts: list[Any]) -> Any:
        with self.metric_log.phases.measured("generation"):
            result = super()._generate(prompts)
        if self._state is not None:
            self._state.prompt_ids, self._state.tool_mask = [list(ids) for ids in result[0]], result[2]
        return result

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *rest: Any, **keywords: Any
    ) -> tuple[Any, Any]:
        turn = super()._generate_single_turn
        if self.family.placeholders and not self.use_vllm:  # a placeholder in a completion has no image to score
            self.generation_config.suppress_tokens = list(self.family.placeholders)
        return self.generator.turn(
            lambda ids, pictures, fields: turn(ids, pictures, fields, num_generations, *rest, **keywords),
            self._state or RolloutState(),
            prompt_ids,
            images,
            multimodal_fields,
            divisible=not self.use_vllm and not self.use_transformers_continuous_batching,
        )

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Calls reward functions with text instead of pictures, and with `prompt_ids`, the model's input ids of each row."""
        state = self._state or RolloutState()
        with self.metric_log.phases.measured("rewards"):
            if state.replayed is not None:
                rewards, replayed = state.replayed.components.clone(), state.replayed
                for pending, logged in (
                    (self._pending_extra_logs, replayed.extra),
                    (self._pending_metrics, replayed.metrics),
                ):
                    for name, values in logged.items():
                        pending[name].extend(values)
            else:
                rows, prompt_ids = without_pictures(inputs), state.prompt_ids
                if prompt_ids is not None and len(prompt_ids) == len(rows):
                    rows = [{**row, "prompt_ids": ids} for row, ids in zip(rows, prompt_ids, strict=True)]
                texts = [text_of(prompt) for prompt in prompts]
                rewards = super()._calculate_rewards(rows, texts, completions, completion_ids_list)
        extra = {key: list(value) for key, value in self._pending_extra_logs.items()}
        self._pending_extra_logs.pop(TOKEN_REWARDS, None)
        ids = [list(row) for row in completion_ids_list]
        state.result = RewardResult(rewards, weighted_total(rewards, self.reward_weights), completions, ids, extra)
        return rewards

    # --- a run --------------------------------------------------------------------------------------------------------

    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the objective's means, exact over micro-batches and processes, to TRL's logs."""
        self.metric_log.publish()
        super().log(logs, start_time)

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        if self.critic is not None:
            self.critic.join(optimizer)
        return optimizer

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.checkpoints.staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        root, write = Path(super()._get_output_dir(trial)), super()._save_checkpoint
        with self.metric_log.saving():
            self.checkpoints.save(root, lambda: write(model, trial))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self.checkpoints.loading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.accelerator.scaler is not None:  # the checkpoint may be of a GPU on which the run computed in float16
            super()._load_scaler(checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.checkpoints.sampler = super()._get_train_sampler(dataset)
        return self.checkpoints.sampler


class StepEnd(TrainerCallback):  # type: ignore[misc]
    """Updates controllers after every optimiser step, and clears the value head's gradient.

    transformers clears the gradients of the model only.
    """

    def __init__(self, trainer: HookedGRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        if trainer.objective is not None and not state.global_step:  # another trainer may have used the objective
            for hook in trainer.objective.regularizers:
                if isinstance(controller := hook.values["coef"], Controller):
                    controller.reset()
        if trainer.retry is not None:
            trainer.retry.reset()
        if trainer.memory is not None:
            trainer.memory.finished(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.metric_log.phases.taken()  # discards the time of an evaluation between two steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.critic is not None and self.trainer.accelerator.num_processes > 1:
            for weight in self.trainer.critic.head.parameters():
                weight.grad = self.trainer.accelerator.reduce(weight.grad, reduction="mean")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        assert trainer.objective is not None
        if trainer.critic is not None:
            trainer.critic.head.zero_grad()
        completions = trainer.args.per_device_train_batch_size * trainer.current_gradient_accumulation_steps
        rollouts_every = trainer.args.steps_per_generation * trainer.num_iterations  # micro-batches
        trainer.metric_log.record_step(
            trainer.objective, completions * trainer.accelerator.num_processes, last=trainer._step % rollouts_every == 0
        )
        if trainer.memory is not None:
            trainer.memory.finished(state.global_step)
