"""float16 with a loss scaler: the parts of a micro-batch are scaled once, and an overflow in one of them skips the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.objective import Objective

from .rollouts import NewTrainer, adapter, train
from .steps import in_a_step, mixed_rollout, switch

SCALE = 256.0
LOOKS_ACROSS = {"recipe": "dapo", "weights": ["high_entropy_only"]}
"""A quantile over the micro-batch: scores first, gradients in a second pass."""


@pytest.fixture
def in_float16(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that gives a trainer autocast to float16 and a scaler on the CPU, as accelerate does on a GPU."""

    def turn(trainer: Any, scale: float = SCALE) -> Any:
        accelerator = trainer.accelerator
        monkeypatch.setitem(accelerator.state._shared_state, "_mixed_precision", "fp16")
        accelerator.native_amp, trainer.scorer.half = True, True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        return trainer

    return turn


@pytest.mark.parametrize(
    ("objective", "savings"),
    [
        ("dapo", {"budget": 40, "skip": True}),
        (LOOKS_ACROSS, {"budget": 40}),
        ("ppo", {"budget": 40}),
    ],
)
def test_every_part_is_scaled_once(
    new_trainer: NewTrainer, in_float16: Callable[..., Any], objective: Any, savings: dict[str, Any]
) -> None:
    trainer, batches = mixed_rollout(new_trainer, objective)
    if trainer.critic is not None:
        torch.nn.init.normal_(trainer.critic.head.linear.weight)
    results = []
    for scale, chosen in ((1.0, {}), (SCALE, savings)):
        in_float16(trainer, scale)
        switch(trainer, **chosen)
        results.append(in_a_step(trainer, batches))
    (losses, unscaled), (scaled_losses, gradients) = results
    torch.testing.assert_close(scaled_losses, losses, rtol=1e-3, atol=1e-4)
    for name, want in unscaled.items():
        assert want.norm() > 0, name
        assert (gradients[name] / SCALE - want).norm() <= 0.02 * want.norm(), name  # float16 has 11 bits


def test_an_overflow_in_one_part_skips_the_step_and_the_next_one_trains(
    new_trainer: NewTrainer, in_float16: Callable[..., Any]
) -> None:
    trainer = in_float16(
        new_trainer(
            objective=Objective.from_spec("ppo"),
            extra={"token_budget": 12},
            gradient_accumulation_steps=2,
            max_steps=3,
        )
    )
    assert trainer.savings_report["token_budget"] == "on"
    first, parts = next(weight for weight in trainer.model.parameters() if weight.requires_grad), []

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        parts.append(trainer.state.global_step)
        return gradient * float("inf") if parts == [0, 0] else gradient  # the second part of the first step

    first.register_hook(overflow)
    weights, head = [adapter(trainer)], [trainer.critic.head.linear.weight.detach().clone()]
    log = trainer.log

    def after(*args: Any) -> None:
        weights.append(adapter(trainer))
        head.append(trainer.critic.head.linear.weight.detach().clone())
        log(*args)

    trainer.log = after
    train(trainer)
    assert parts.count(0) > 2  # parts after the one that overflowed
    steps = range(3)
    moved = [any(not torch.equal(value, weights[n][name]) for name, value in weights[n + 1].items()) for n in steps]
    assert moved == [False, True, True]
    assert [not torch.equal(head[n + 1], head[n]) for n in steps] == [False, True, True]
    assert trainer.accelerator.scaler.get_scale() == SCALE / 2
    assert all(value.isfinite().all() for value in adapter(trainer).values())
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in trainer.state.log_history if "loss" in line)


def test_the_first_pass_over_a_rollout_finds_its_log_probabilities_again_in_bfloat16(
    new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollout and training use the same kernels and layout, but other packs; the log ratio of the first pass stays below 1e-3."""
    trainer = new_trainer(objective="dapo", num_iterations=2, gradient_accumulation_steps=2, max_steps=2)
    monkeypatch.setitem(trainer.accelerator.state._shared_state, "_mixed_precision", "bf16")
    trainer.accelerator.native_amp = trainer.scorer.half = True
    train(trainer)
    assert trainer.packing_report["packing"] == "packed"
    first, second = (line["ratio/abs_log"] for line in trainer.state.log_history[:2])
    assert first <= 1e-3 < second
