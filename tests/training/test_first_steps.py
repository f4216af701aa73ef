"""First-step checks: each detects its planted defect, and sound runs pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_qwen import tiny_tokenizer
from torch import Tensor

from kit.errors import ObjectiveError
from kit.objective import Objective, RewardBatch, TokenBatch
from kit.scoring.scorer import has_dropout
from kit.trainer.arguments import check_combination
from kit.trainer.policy_loss import MicroBatch
from kit.trainer.sanity_checks import scoring_error

from .rollouts import KL, Counting, NewTrainer, adapter, drift, rollout, train, watch_scoring

RAGGED = {"num_generations": 2, "gradient_accumulation_steps": 2}  # two prompts in a micro-batch, so prompts are padded
Score = Callable[..., Any]


def patch_scorer(trainer: Any, change: Callable[[Score, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Replace the trainer's scorer by `change(score, args, keywords)`, which receives the original as `score`."""
    original = trainer.scorer.score
    trainer.scorer.score = lambda *args, **keywords: change(original, args, keywords)


def derive(trainer: Any, **methods: Any) -> Any:
    """Make the trainer an instance of a subclass with these methods; each receives the parent class as its first argument."""
    parent = type(trainer)
    bound = {
        name: (lambda method: lambda self, *a, **k: method(parent, self, *a, **k))(m) for name, m in methods.items()
    }
    trainer.__class__ = type("Other", (parent,), bound)
    return trainer


# --- the scorer -------------------------------------------------------------------------------------------------------


def without_mask(score: Score, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Plant the defect that left padding is read as text: the model attends to it and counts it in positions."""
    model, rows, *rest = args
    return score(model, replace(rows, mask=torch.ones_like(rows.mask), copy=None), *rest, **keywords)


def shifted(score: Score, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Plant the defect that log-probabilities of padded rows come from one position too far left."""
    output = score(*args, **keywords)
    padded = (args[1].mask[:, :1] == 0).expand_as(output.logps)
    return replace(output, logps=torch.where(padded, output.logps.roll(1, dims=1), output.logps))


def cold(score: Score, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Plant the defect of a missing logit transform: all log-probabilities are 1.1 times as large."""
    output = score(*args, **keywords)
    return replace(output, logps=1.1 * output.logps)


@pytest.mark.parametrize("defect", [without_mask, shifted, cold])
def test_a_scorer_that_misreads_rows_stops_the_run_before_its_first_step(new_trainer: NewTrainer, defect: Any) -> None:
    trainer = new_trainer(objective="grpo", **RAGGED)
    patch_scorer(trainer, defect)
    with pytest.raises(ObjectiveError, match=r"differ from the model's own logits by .* nats a token"):
        train(trainer)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_sound_scorer_agrees_with_plain_logits(new_trainer: NewTrainer, temperature: float) -> None:
    trainer = new_trainer(objective="grpo", temperature=temperature, **RAGGED)
    inputs = rollout(trainer)[0]
    assert (inputs["prompt_mask"] == 0).any()
    drift(trainer)
    trainer.model.train()
    assert scoring_error(trainer.services, trainer.model, MicroBatch(inputs)) < 1e-5
    assert trainer.model.training
    forgetful = dataclasses.replace(
        trainer.services, temperature=1.2 * temperature
    )  # another temperature than the logits
    assert scoring_error(forgetful, trainer.model, MicroBatch(inputs)) > 0.01


# --- old and new log-probabilities ------------------------------------------------------------------------------------


def test_old_log_probabilities_from_another_scorer_stop_the_first_step(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective="grpo", num_iterations=2)
    patch_scorer(
        trainer,
        lambda score, args, keywords: (
            score(*args, **keywords) if trainer._state is None
            else replace(output := score(*args, **keywords), logps=1.2 * output.logps)
        ),
    )  # fmt: skip
    with pytest.raises(ObjectiveError, match="differ from those at the rollout by"):
        train(trainer)
    assert trainer.state.global_step == 0


def test_a_subclass_that_scores_rollouts_in_its_own_way_is_refused(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective="dapo")
    objective, kind = trainer.objective, type(trainer)
    check_combination(derive(trainer), objective, kind)
    with pytest.raises(ObjectiveError, match=r"Other overrides .*Change trainer\.scorer\.score"):
        check_combination(derive(trainer, _get_per_token_logps_and_entropies=lambda *_, **__: None), objective, kind)


@pytest.mark.parametrize(
    "spec",
    [
        {"recipe": "ppo"},
        {"recipe": "gspo", "regularizers": [{"name": "kl", "estimator": "full"}, "entropy_bonus"]},
        {"recipe": "grpo", "weights": ["drop_truncated", "off_policy_mask"], "regularizers": [KL]},
    ],
    ids=str,
)
def test_sound_objectives_pass_and_train_as_without_checks(new_trainer: NewTrainer, spec: dict[str, Any]) -> None:
    results = []
    for unchecked in (False, True):
        trainer = new_trainer(objective=spec, unchecked=unchecked, gradient_accumulation_steps=3, max_steps=2)
        train(trainer)
        results.append(adapter(trainer))
        logged = [
            {k: v for k, v in log.items() if not any(w in k for w in ("time", "second", "memory/"))}
            for log in trainer.state.log_history
        ]
        results.append(logged)  # type: ignore[arg-type]
    assert all(torch.equal(value, results[2][name]) for name, value in results[0].items())
    assert results[1] == results[3]


# --- hooks ------------------------------------------------------------------------------------------------------------


def without_advantage(batch: TokenBatch) -> Tensor:
    return -batch.logps


def test_a_hook_that_is_ignored_stops_the_run_by_name(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective=Objective(clip=without_advantage))
    with pytest.raises(ObjectiveError, match=r"advantage 'group_zscore'.* is ignored"):
        train(trainer)
    assert trainer.state.global_step == 0


def test_a_clip_or_an_advantage_of_the_wrong_sign_is_refused_by_the_trainer(new_trainer: NewTrainer) -> None:
    def minus(batch: TokenBatch) -> Tensor:
        return batch.advantages * batch.ratio

    def worst_first(batch: RewardBatch) -> Tensor:
        return -batch.rewards

    with pytest.raises(ObjectiveError, match="lowers the probability of every token"):
        new_trainer(objective={"clip": minus})
    with pytest.raises(ObjectiveError, match="a higher reward gives a lower advantage in every pair"):
        new_trainer(objective={"advantage": worst_first})
    new_trainer(objective={"clip": minus}, unchecked=True)


def test_a_gradient_that_is_not_finite_stops_the_first_step(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective="grpo")
    _, weight = next((n, w) for n, w in trainer.model.named_parameters() if w.requires_grad)
    weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(ObjectiveError, match="is NaN or infinite"):
        train(trainer)
    assert trainer.state.global_step == 0


# --- no false alarm ---------------------------------------------------------------------------------------------------


def same(prompts: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(prompts)


def dropping(batch: TokenBatch) -> Tensor:
    """A weight that drops 30 % of the tokens at random."""
    return (torch.rand_like(batch.logps) > 0.3).float()


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ({"regularizers": [{"name": "kl", "coef": 0.0}]}, {}),
        ({"regularizers": [{"name": "kl", "coef": "adaptive_kl(target=0.05)"}]}, {"num_iterations": 2}),
        ({"regularizers": [{"name": "nll_on_correct", "coef": 0.1}]}, {"extra": {"reward_funcs": same}}),
        ({"weights": ["drop_truncated"]}, {"generation_kwargs": {"suppress_tokens": [tiny_tokenizer().eos_token_id]}}),
        (Objective(weights=[dropping]), {}),
    ],
    ids=["coefficient 0", "adaptive", "groups without spread", "every completion dropped", "lots"],
)
def test_inactive_and_random_hooks_raise_no_alarm(
    new_trainer: NewTrainer, objective: Any, options: dict[str, Any]
) -> None:
    trainer = new_trainer(objective=objective, max_steps=4, **options)
    train(trainer)
    assert trainer.state.global_step == 4


def test_the_kl_of_a_fresh_adapter_raises_no_alarm(new_trainer: NewTrainer) -> None:
    fresh = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"])  # B is 0: policy = reference
    for estimator in ("k3", "full"):
        objective = {"regularizers": [{"name": "kl", "estimator": estimator, "coef": 0.04}]}
        trainer = new_trainer(objective=objective, max_steps=2, extra={"peft_config": fresh})
        train(trainer)
        assert trainer.state.log_history[0][f"kl/{estimator}"] == pytest.approx(0.0, abs=1e-6)


def test_groups_without_spread_do_not_count_among_the_steps_without_gradient(new_trainer: NewTrainer) -> None:
    calls = []

    def later(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(1)
        return [1.0] * len(completion_ids) if len(calls) < 5 else [float(row) for row in range(len(completion_ids))]

    trainer = new_trainer(
        objective=Objective(clip=lambda batch: 0.0 * batch.logps),
        max_steps=9,
        extra={"reward_funcs": later},
    )
    with pytest.raises(ObjectiveError, match="In 3 steps no weight got a gradient"):
        train(trainer)
    assert trainer.state.global_step == 6  # four steps without spread do not count


def test_hooks_with_state_are_left_as_they_were(new_trainer: NewTrainer) -> None:
    """The check calls a hook many times, but restores its state: one call per micro-batch remains."""
    counting = Counting()
    train(new_trainer(objective=Objective(regularizers=[counting]), max_steps=3, gradient_accumulation_steps=2))
    assert counting.calls == 6


def test_dropout_raises_no_alarm(new_trainer: NewTrainer) -> None:
    wet = LoraConfig(r=4, lora_alpha=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = new_trainer(objective="grpo", num_iterations=2, max_steps=4, extra={"peft_config": wet})
    assert has_dropout(trainer.model)
    train(trainer)
    assert trainer.state.global_step == 4
    assert not has_dropout(new_trainer(objective="grpo").model)


# --- steps and passes of the checks -----------------------------------------------------------------------------------


def test_first_step_checks_can_be_switched_off(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective=Objective(clip=without_advantage), unchecked=True, **RAGGED)
    patch_scorer(trainer, cold)
    train(trainer)
    assert trainer.state.global_step == 1
    assert trainer.checks is None


def test_after_the_first_step_nothing_more_is_scored(new_trainer: NewTrainer) -> None:
    every = {"skip_flat_groups": False}
    trainer = new_trainer(objective="dapo", max_steps=5, gradient_accumulation_steps=3, extra=every)
    passes = watch_scoring(trainer)
    train(trainer)
    assert len(passes) == 5 * 3 + 1  # one per micro-batch, and one of two rows before the first step
