"""What is done after every optimiser step."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class StepEnd(TrainerCallback):  # type: ignore[misc]
    """After every optimiser step: controllers observe, and the value head starts from no gradient.

    The trainer clears the gradients of its model only.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer  # a `HookedGRPOTrainer`

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        if trainer.objective is not None and not state.global_step:  # it may have been used before
            trainer.objective.reset_controllers()
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
        if trainer.teacher is not None:
            trainer.teacher.step_made()
        completions = trainer.args.per_device_train_batch_size * trainer.current_gradient_accumulation_steps
        rollouts_every = trainer.args.steps_per_generation * trainer.num_iterations  # micro-batches
        trainer.metric_log.step_made(
            trainer.objective,
            completions * trainer.accelerator.num_processes,
            last=trainer._step % rollouts_every == 0,
        )
        if trainer.memory is not None:
            trainer.memory.finished(state.global_step)
