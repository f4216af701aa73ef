"""Seconds per phase of a step: each is counted once, and they add up to the step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from kit.trainer.metric_log import PHASES

from .rollouts import NewTrainer


class OnStep(TrainerCallback):  # type: ignore[misc]
    """Call a function after the log of a step, when a checkpoint is written."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


def test_phases_of_a_real_step_are_its_time(new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock advances by 1000 s for rewards and by 10 s or 1 s for a forward pass without or with gradients."""
    now, passes = [0], {True: 0, False: 0}
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def forward(*_: Any) -> None:
        now[0] += 1 if torch.is_grad_enabled() else 10
        passes[torch.is_grad_enabled()] += 1

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        now[0] += 1000
        return [float(len(str(text)) % 3) for text in completions]

    objective = {"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.04}]}  # scores the reference, too
    trainer = new_trainer(objective=objective, max_steps=2, num_iterations=2, extra={"reward_funcs": rewards})
    trainer.model.get_input_embeddings().register_forward_pre_hook(forward)
    trainer.train()
    logs = trainer.state.log_history[:2]
    first, second = ({phase: log[f"seconds/{phase}"] for phase in PHASES} for log in logs)
    for parts, log in zip((first, second), logs, strict=True):
        assert sum(parts.values()) == log["step_time"]
        assert parts["other"] == 0
    assert first["rewards"] == 1000
    assert first["generation"] >= 20
    assert first["scoring"] >= 10
    gradients = [parts["update"] % 10 for parts in (first, second)]  # the first checks take none
    assert min(gradients) > 0
    assert sum(gradients) == passes[True]
    assert first["generation"] + first["scoring"] + first["update"] - gradients[0] == 10 * passes[False]
    assert second["rewards"] == second["generation"] == second["scoring"] == 0  # the same completions
    assert "tokens/per_second" not in logs[0]  # the completions are used for another step
    made = (
        logs[0]["completions/mean_length"]
        * trainer.args.per_device_train_batch_size
        * trainer.args.steps_per_generation
    )
    assert logs[1]["tokens/per_second"] == pytest.approx(made / sum(log["step_time"] for log in logs))


def test_a_checkpoint_counts_for_the_step_after_it(new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer(objective="grpo", max_steps=3)

    def save(*_: Any) -> None:
        with trainer.metric_log.saving():
            now[0] += 50

    now = [0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    trainer.add_callback(OnStep(2, save))
    trainer.train()
    logs = trainer.state.log_history[:3]
    assert [log["seconds/saving"] for log in logs] == [0, 0, 50]
    assert all(log["step_time"] == 0 for log in logs)  # no step was measured
    assert all(0.01 < log["memory/process"] < 1000 for log in logs)
    assert "memory/gpu" not in logs[0]
