"""Values of a rollout for hooks, controllers and logs: rewards, masks, spreads, quantiles, coefficients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.objective import Objective
from kit.objective.schedules import AdaptiveKL

from .rollouts import NewTrainer, Recorder, log_of, train

# --- inputs of hooks and logs -----------------------------------------------------------------------------------------


def test_rewards_and_truncation_reach_the_hooks_beside_their_completions(
    new_trainer: NewTrainer, tokenizer: Any
) -> None:
    hook_rows: list[tuple[int, float, bool]] = []

    def look(batch: Any) -> Tensor:
        rows = zip(
            batch.mask.sum(1).tolist(), batch.rewards[:, 0].tolist(), batch.truncated[:, 0].tolist(), strict=True
        )
        hook_rows.extend(rows)
        return 0.0 * batch.logps

    def sometimes(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if row == 1 else row + 10.0 * len(ids) for row, ids in enumerate(completion_ids)]

    look.needs = {"rewards", "truncated"}  # type: ignore[attr-defined]
    sink: list[Any] = []
    trainer = new_trainer(
        objective=Objective(regularizers=[look]), gradient_accumulation_steps=6, unchecked=True,
        extra={"reward_funcs": sometimes, "rollout_sinks": [sink.append]}, reward_weights=[0.5],
    )  # fmt: skip
    train(trainer)
    (made,) = sink
    want = [
        (len(ids), math.nan if row == 1 else 0.5 * (row + 10.0 * len(ids)), ids[-1] != tokenizer.eos_token_id)
        for row, ids in enumerate(made.completion_ids)
    ]
    assert len({cut for *_, cut in want}) == 2
    assert sorted(map(repr, hook_rows)) == sorted(map(repr, want))  # the trainer shuffles; NaN is not equal to itself


def test_spread_of_groups_and_of_advantages_is_that_of_plain_arithmetic(new_trainer: NewTrainer) -> None:
    scores = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 2.0, 5.0, None, 3.0, 3.0, None]

    def fixed(prompts: list[Any], **_: Any) -> list[float | None]:
        return list(scores)

    trainer = new_trainer(
        objective={"advantage": "group_mean"}, gradient_accumulation_steps=3, extra={"reward_funcs": fixed}
    )
    train(trainer)
    log = log_of(trainer)
    assert log["groups/zero_spread"] == pytest.approx(2 / 3)
    advantages = [0.0] * 4 + [-2.0, -1.0, 0.0, 3.0] + [0.0] * 4
    assert log["advantage/std"] == pytest.approx(math.sqrt(sum(a * a for a in advantages) / 12))


def test_quantiles_of_the_ratio_are_those_of_the_tokens_of_all_micro_batches(new_trainer: NewTrainer) -> None:
    objective = Recorder(clip="ppo_clip")
    trainer = new_trainer(
        objective=objective,
        unchecked=True,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_steps=2,
        logging_steps=2,
    )
    train(trainer)
    drifts = torch.cat([(batch.logps - batch.old_logps)[batch.mask] for batch in objective.seen]).detach().double()
    ordered, log = sorted(drifts.tolist()), log_of(trainer)
    assert ordered[0] < -0.01 < 0.01 < ordered[-1]
    for name, level in (("p01", 0.01), ("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        place = level * (len(ordered) - 1)
        low = ordered[int(place)]
        want = low + (place - int(place)) * (ordered[min(int(place) + 1, len(ordered) - 1)] - low)
        assert log[f"ratio/{name}"] == pytest.approx(
            math.exp(want), rel=1e-4
        )  # between two tokens; linear in the log ratio


# --- controllers ------------------------------------------------------------------------------------------------------


def steered(**changes: Any) -> Recorder:
    term = {"name": "kl", "coef": "adaptive_kl(target=0.001, horizon=40, start=0.1)", **changes}
    return Recorder(regularizers=[term])


def test_a_controller_observes_the_exact_mean_once_a_step(
    new_trainer: NewTrainer, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    observations: list[tuple[float, int]] = []
    observe = AdaptiveKL.observe

    def noted(self: Any, mean: float, completions: int) -> None:
        observations.append((mean, completions))
        observe(self, mean, completions)

    monkeypatch.setattr(AdaptiveKL, "observe", noted)
    objective = steered()
    trainer = new_trainer(
        objective=objective, unchecked=True, gradient_accumulation_steps=3, max_steps=3, eval_strategy="steps", eval_steps=1,
        extra={"eval_dataset": prompts}, num_generations_eval=2, per_device_eval_batch_size=8,
    )  # fmt: skip
    train(trainer)
    training = [batch for batch in objective.seen if batch.logps.requires_grad]
    assert len(training) == 9
    coef, logs = 0.1, [log for log in trainer.state.log_history if "loss" in log]
    for step in range(3):
        batches = training[3 * step : 3 * step + 3]
        gaps = torch.cat([(b.ref_logps - b.logps).detach()[b.mask] for b in batches]).double()
        mean = (gaps.exp() - gaps - 1).mean().item()
        assert observations[step] == (pytest.approx(mean, rel=1e-4), 12)
        assert logs[step]["coef/kl"] == pytest.approx(coef)
        coef *= 1 + min(max(mean / 0.001 - 1, -0.2), 0.2) * 12 / 40
    assert len(observations) == 3  # evaluation is not observed
    assert coef == pytest.approx(objective.regularizers[0].coef_at(3))
    assert coef != 0.1
