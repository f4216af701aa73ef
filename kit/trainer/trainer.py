"""TRL's `GRPOTrainer` with an objective made of hooks.

Each of TRL's methods is overridden once, and hands over to an object that does the work:

    a micro-batch       training_step, compute_loss                     `PolicyLoss`, again in `StepRetry` without memory
                        _prepare_inputs                                 completions of a prompt in one micro-batch
    a generation batch  _generate_and_score_completions                 `DynamicSampling`, then `AdvantageComputer`
                        _get_per_token_logps_and_entropies              `Scorer`
                        _generate, _generate_single_turn                `Generator`
                        _calculate_rewards                              `RolloutState` keeps what they gave
    a run               create_optimizer                                the value head of `gae`
                        _save_checkpoint, _get_output_dir,
                        _load_optimizer_and_scheduler,
                        _get_train_sampler                              `CheckpointState`
                        log                                             `MetricLog`

With `objective=None` the loss and the advantages are TRL's own. This module is imported after the backend is active
(`kit.models.backend`): a backend may replace `trl.GRPOTrainer` when it is imported, and the class here is made of what is
there then.
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
from kit.models.backend import active_backend, is_unsloths
from kit.models.failures import BatchSizeBackoff, EngineSettings
from kit.models.family import adapter_of
from kit.models.libraries import check_trl
from kit.objective import LossScale, Objective
from kit.objective.batch import fields_where
from kit.objective.hook import remedy
from kit.objective.objective import to_regrouping, to_skipping
from kit.objective.schedules import Controller
from kit.scoring.head import install_torch_logprob_kernel
from kit.scoring.scorer import Report, Rows, Scorer, Scores, Wanted, has_dropout
from kit.trainer.advantages import (
    TOKEN_REWARDS,
    AdvantageComputer,
    local_slice,
    truncated,
    weighted_total,
)
from kit.trainer.arguments import (
    balances_experts,
    check_arguments,
    check_backend,
    check_combination,
)
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
"""What `savings_report` says of a switch, besides the reason why it is off."""
log = logging.getLogger("kit")

check_trl()
check_backend(GRPOTrainer, active_backend())
install_torch_logprob_kernel()


class HookedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """Drop-in for `trl.GRPOTrainer` whose loss is an `Objective`.

    Accepts whatever `trl.GRPOTrainer` accepts, and:

    objective: an `Objective`, the name of a recipe, a mapping (see `Objective.from_spec`), or None for TRL's own loss.
    rollout_sinks: functions called with every scored `Rollout`.
    stateful: by name, further parts that checkpoints keep: `state_dict()` and `load_state_dict(state)` of plain values.
    first_step_checks: prove at the first steps that the hooks reach the weights (see `kit.trainer.sanity_checks`).
    engine: a `kit.models.failures.EngineSettings`: watch vLLM, seed it, compare its log-probabilities. None: TRL's handling.
    memory: a `kit.models.failures.BatchSizeBackoff`: go on with smaller parts after running out of memory. None: fail.
    token_budget, skip_flat_groups: as under `optimisation:`, but that nothing is chosen for a budget of
        None; `savings_report` says of each whether it is on, or why not.
    packing, share_prompts: as under `optimisation:`; `packing_report` says which way scoring takes, and why.
    selection: a `kit.config.SelectionConfig`: replace flat groups (`kit.trainer.dynamic_sampling`), count what was spent.
    teacher: a `kit.trainer.teacher.Teacher`, for an objective that learns from one.
    offload: what checkpointing keeps waits in main memory.
    was_stopped: whether somebody ended the run: a checkpoint then notes that steps are left to make.
    check_anew: prove the first steps of a resumed run again, because something that matters has changed.
    fast_decoding: generate on a CPU with `kit.generation.decoding`: the same distribution, other draws than TRL's of one seed.

    A subclass may add terms to what `compute_loss` returns; the gradient of the objective is in the weights by then, so that
    a factor would be ignored. Raises `ObjectiveError` when arguments of TRL's own loss are set beside an
    objective, or when the objective needs something that this run does not have; `EnvironmentUnsupported` for another TRL.
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
        self._state: RolloutState | None = None  # of the generation batch that is being made
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
            self.add_callback(SamplerAlarm(engine.tell, corrected=corrected))

    def _build_parts(self, packing: bool, share_prompts: bool, checked: bool, fast_decoding: bool) -> None:
        """Builds the parts that the methods below use. Raises `ObjectiveError` for a need of the objective that is not met."""
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
        if unsloth:  # its trainer turns the tokenizer round; generating needs the padding in front
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
        settings = objective.value_settings
        self.critic = Critic(policy, settings) if settings is not None else None
        services = self.services = Services(
            objective,
            self.model,
            accelerator,
            self.family,
            self.scorer,
            self.temperature,
            self.metric_log,
            self.rollout_memory,
            self.critic,
        )
        router_coef = self.router_aux_loss_coef if self.aux_loss_enabled else None
        loss = self.policy_loss = PolicyLoss(services, router_coef=router_coef)
        self.checks = SanityChecks(services) if checked else None
        size = self.args.per_device_train_batch_size
        self.advantages = AdvantageComputer(
            services,
            score=lambda batch, hidden=True: self._score(self.model, batch.rows, Wanted(hidden=hidden), size),
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
        """The teacher, ready to score. Raises `ObjectiveError` where the objective needs one in vain."""
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
            score=lambda model, rows, wanted: self._score(model, rows, wanted, size),
            tokenize=tokenize,
            pad=self._tokenizer.pad_token_id,
            process=self.accelerator.process_index,
        )
        return self.teacher

    @property
    def objective(self) -> Objective | None:
        """The objective of the loss. It cannot be replaced: the parts hold it, and another one here would be ignored."""
        return self._objective

    def set_savings(self, *, token_budget: int | None = None, skip_flat_groups: bool = True) -> None:
        """Decides what is left out of every step; `savings_report` then says of each switch `on`, or why not."""
        self.savings_report: dict[str, str] = {}
        if self.objective is None or self.policy_loss is None:
            return
        reasons = (
            None if skip_flat_groups else OFF,
            to_skipping(self.objective),
            "the value head learns from every completion" if self.critic is not None else None,
            "the load balance of the router is one of all completions" if self.aux_loss_enabled else None,
            "the model has dropout, and its random numbers would fall on other completions"
            if has_dropout(self.model)
            else None,
        )
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason not in (None, OFF):
            log.info("skip_flat_groups is off: %s", reason)
        self.savings_report = {
            "token_budget": ON if token_budget else "no budget is set",
            "skip_flat_groups": reason or ON,
        }
        self.policy_loss.token_budget = self.scorer.token_budget = token_budget or None
        self.policy_loss.skip_flat = reason is None

    @property
    def packing_report(self) -> Report:
        """The way that scoring takes: `packing` (None before the first rows), `share_prompts`, and `reason` if not packed."""
        return self.scorer.report

    aux_loss_enabled: bool  # TRL's: the loss balances the load of experts
    _buffered_inputs: list[dict[str, Any]] | None  # TRL's: the micro-batches of a rollout

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
        before: list[dict[str, Any]] | None = self._buffered_inputs
        with self.metric_log.phases.measured("other"):
            inputs = super()._prepare_inputs(generation_batch)
            made = self._buffered_inputs
            if self.model.training and made is not None and made is not before and self.shares_prompts:
                self._buffered_inputs = grouped_by_prompt(made)
                inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts are shared, and all micro-batches of a rollout make one step, in any division."""
        one_step = self.args.steps_per_generation == self.args.gradient_accumulation_steps
        shared = (
            self.scorer.packing and self.scorer.share_prompts and self.packing_report["packing"] in (None, "packed")
        )
        if self.aux_loss_enabled or self.objective is None:  # the load balance is one of each micro-batch
            return False
        return bool(shared and one_step and to_regrouping(self.objective) is None)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        loss, training = self.policy_loss, self.model.training
        if loss is None:
            stock: Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return stock
        if return_outputs:
            raise ValueError("The loss is made of log-probabilities; there are no model outputs to return.")
        if self.accelerator.num_processes > 1:
            model = self.model  # each process by itself; parts that another one has not must not leave it waiting
        # TRL turns HF's own loss scaling off, so accumulation is divided out here. `num_items_in_batch` counts the tokens of
        # the whole generation batch over all processes; one accumulation window is accumulation / steps_per_generation of it.
        accumulation = float(self.current_gradient_accumulation_steps) if training else 1.0
        window = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if training:
            window = window * accumulation / self.args.steps_per_generation
        scale = LossScale(accumulation, window, self.max_completion_length)
        checks = self.checks if self._stepping and self.is_in_train else None  # a loop of one's own is not checked
        if checks is not None and checks.done:
            checks = None
        batch, context = MicroBatch(inputs), StepContext(scale, self.state.global_step, checks)
        if not self._stepping:
            return loss.whole(model, batch, context)
        if self.retry is None:
            return loss.step(model, batch, context)
        return self.retry.step(model, batch, context, last=self.accelerator.sync_gradients)

    def _again(self, inputs: dict[str, Any]) -> None:
        """An earlier micro-batch of this step once more, for `StepRetry`."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self.model, inputs)
        self.accelerator.backward(loss)

    # --- scoring, as TRL asks for it at a rollout ---------------------------------------------------------------------

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
        if self._state is not None:  # what TRL has no place for: as it was kept, and as the update will be given it
            width = input_ids.shape[1] - logits_to_keep
            held = self.generator.scored_inputs(self._state, width, logits_to_keep)
            fields = {name: value for name, value in fields.items() if name in MODEL_INPUTS} | held
        wanted = Wanted(
            entropy=compute_entropy,
            entropy_gradient=self.objective is None or self.objective.needs_entropy_gradient,
            aux_loss=compute_aux_loss,
            hidden=bool(self.needs & HIDDEN_NEEDS) and not torch.is_grad_enabled(),
        )
        rows = Rows(input_ids, attention_mask, logits_to_keep, fields)
        scores = self._score(model, rows, wanted, batch_size)
        return scores.logps, scores.entropy, scores.aux_loss

    def _score(self, model: Any, rows: Rows, wanted: Wanted, batch_size: int | None) -> Scores:
        """Scores rows; those of a rollout on the clock, and in smaller parts after running out of memory."""
        state, backoff = self._state, self.generator.backoff
        if state is None or torch.is_grad_enabled():
            scores = self.scorer.score(model, rows, wanted, batch_size)
        else:
            with self.metric_log.phases.measured("scoring"):
                if backoff is None:
                    scores = self.scorer.score(model, rows, wanted, batch_size)
                else:
                    rows_at_once = batch_size or len(rows.ids)
                    scores = backoff.attempt(
                        "scoring", rows_at_once, lambda size: self.scorer.score(model, rows, wanted, size)
                    )
            if wanted.hidden and scores.head is not None:
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
        """TRL's batch of these rows, with the objective's advantages and whatever else its steps need."""
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        with self.rolling_out(rows, replayed) as state:
            output: dict[str, Any] = super()._generate_and_score_completions(rows)
            width, length = output["prompt_ids"].shape[1], output["completion_ids"].shape[1]
            kept = self.generator.scored_inputs(state, width, length)
            output.update({f"{EXTRA}{name}": value for name, value in kept.items()})  # names that TRL leaves alone
            if self.objective is not None:
                settings = {"reward_weights": self.reward_weights, "group_size": group_size}
                self.advantages.fill(output, state, step=self.state.global_step, **settings)
                state.passes.clear()  # hidden states of the whole rollout
                if self.model.training:
                    self.metric_log.generated += sum(map(len, state.rewards.completion_ids))
        if self.rollout_sinks:
            scored = state.rewards
            rollout = Rollout(
                step=self.state.global_step,
                mode=self._mode(),
                rows=rows,
                completions=scored.completions,
                completion_ids=scored.completion_ids,
                truncated=truncated(scored, self.eos_token_ids),
                rewards=scored.rewards[local_slice(self.accelerator, len(rows))],
                reward_names=list(self.reward_func_names),
                advantages=output["advantages"],
                extra=scored.extra,
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
        """Inside, what is generated and scored is of these rows, in this order. Blocks may be nested."""
        before, self._state = self._state, RolloutState(rows, replayed)
        try:
            yield self._state
        finally:
            self._state = before

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
        if self.family.placeholders and not self.use_vllm:  # a picture's place in a completion could not be scored
            self.generation_config.suppress_tokens = list(self.family.placeholders)
        return self.generator.turn(
            lambda ids, seen, fields: turn(ids, seen, fields, num_generations, *rest, **keywords),
            self._state or RolloutState(),
            prompt_ids,
            images,
            multimodal_fields,
            own=not self.use_vllm and not self.use_transformers_continuous_batching,
        )

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Rewards see text, no pictures, and `prompt_ids`: the ids that the model was given, for every row."""
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
        """Adds the objective's means, exact over micro-batches and processes, to what TRL logs."""
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

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.checkpoints.sampler = super()._get_train_sampler(dataset)
        return self.checkpoints.sampler


class StepEnd(TrainerCallback):  # type: ignore[misc]
    """Informs controllers after every optimiser step, and clears the value head's gradient.

    The trainer clears the gradients of its model only.
    """

    def __init__(self, trainer: HookedGRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        if trainer.objective is not None and not state.global_step:  # it may have been used before
            for hook in trainer.objective.regularizers:
                if isinstance(controller := hook.values["coef"], Controller):
                    controller.reset()
        if trainer.retry is not None:
            trainer.retry.reset()
        if trainer.memory is not None:
            trainer.memory.finished(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.metric_log.phases.taken()  # what an evaluation between two steps took is no step's

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
            trainer.objective,
            completions * trainer.accelerator.num_processes,
            last=trainer._step % rollouts_every == 0,
        )
        if trainer.memory is not None:
            trainer.memory.finished(state.global_step)
