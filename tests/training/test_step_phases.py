"""Seconds of a step by phase: each counted once, and together the step."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from kit.trainer import step_phases
from kit.trainer.step_phases import PHASES, StepPhases

from .rollouts import NewTrainer


def test_a_second_counts_for_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(step_phases.time, "perf_counter", lambda: now[0])
    phases = StepPhases()

    def passes(seconds: float) -> None:
        now[0] += seconds

    passes(7)  # nobody's
    with phases.measured("update"):
        passes(1)
        with phases.measured("generation"):
            passes(2)
            with contextlib.suppress(KeyError), phases.measured("rewards"):
                passes(4)
                raise KeyError
            passes(8)
        passes(16)
        assert phases.taken() == {"generation": 10, "rewards": 4, "scoring": 0, "update": 17, "other": 0}
        passes(32)
    assert phases.taken()["update"] == 32  # what came after the last taking


def test_phases_of_a_real_step_are_its_time(new_trainer: NewTrainer) -> None:
    def slow(completions: list[Any], **_: Any) -> list[float]:
        time.sleep(0.3)
        return [float(len(str(text)) % 3) for text in completions]

    objective = {"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.04}]}  # scores by the reference policy
    trainer = new_trainer(objective=objective, max_steps=2, num_iterations=2, extra={"reward_funcs": slow})
    trainer.train()
    first, second = trainer.state.log_history[:2]
    for log in (first, second):
        parts = {phase: log[f"seconds/{phase}"] for phase in PHASES}
        assert sum(parts.values()) == pytest.approx(log["step_time"], rel=0.05, abs=0.02)
        assert parts["update"] > 0
    assert first["seconds/rewards"] == pytest.approx(0.3, abs=0.15)
    assert first["seconds/generation"] > 0
    assert first["seconds/scoring"] > 0 == second["seconds/scoring"]
    assert second["seconds/rewards"] == second["seconds/generation"] == 0  # the same completions once more


def test_stock_loss_logs_what_stock_trl_logs(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(max_steps=1)
    trainer.train()
    assert not [name for name in trainer.state.log_history[0] if name.startswith("seconds/")]
