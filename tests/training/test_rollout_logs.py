"""Values of a rollout for hooks, controllers and logs: rewards, masks, spreads, quantiles, coefficients, added fields."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.objective import Objective, TokenBatch, regularizers
from kit.objective.batch import TOKEN_FIELDS, Field
from kit.objective.check import check_hook
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


def late_tokens(batch: TokenBatch) -> Tensor:
    """A penalty by the position of a token, a field that only an extended batch has."""
    position: Tensor = batch.position  # type: ignore[attr-defined]
    late_tokens.seen.append(position)  # type: ignore[attr-defined]
    return batch.logps * position


@pytest.mark.parametrize("source", ["position", lambda batch: batch.completion_mask.cumsum(1).float()])
def test_a_hook_sees_a_field_that_was_added(new_trainer: NewTrainer, monkeypatch: Any, source: Any) -> None:
    field = Field("(B, T)", lambda draw: draw.normal().abs(), "there is no position. Fill it in", source=source)
    monkeypatch.setitem(TOKEN_FIELDS, "position", field)
    late_tokens.needs, late_tokens.seen = {"position"}, []  # type: ignore[attr-defined]
    findings = check_hook(regularizers.build(late_tokens))
    assert [finding.name for finding in findings if not finding.passed] == []
    trainer = new_trainer(objective=Objective(regularizers=[late_tokens]), unchecked=True)
    if isinstance(source, str):
        _add_to_rollouts(trainer, source)
    late_tokens.seen.clear()  # type: ignore[attr-defined]
    train(trainer)
    positions = late_tokens.seen  # type: ignore[attr-defined]
    assert positions
    assert all(
        torch.equal(values.long().amax(1), (values > 0).sum(1)) for values in positions
    )  # 1, 2, 3 ... and 0 at padding


def _add_to_rollouts(trainer: Any, name: str) -> None:
    original = trainer._generate_and_score_completions

    def generate(inputs: Any) -> Any:
        output = original(inputs)
        output[name] = output["completion_mask"].cumsum(1).float()
        return output

    trainer._generate_and_score_completions = generate
