"""Old log-probabilities from the first pass over a rollout: the same steps, without a scoring pass of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.errors import ObjectiveError
from kit.trainer.micro_batch import MicroBatch
from kit.trainer.savings import OFF, ON

from .rollouts import KL, NewTrainer, adapter, drift, train, watch_scoring

TWICE: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}


def trained(new_trainer: NewTrainer, objective: Any, reuse: bool, **settings: Any) -> tuple[Any, list[bool]]:
    trainer = new_trainer(
        objective=objective, unchecked=True, extra={"reuse_old_logps": reuse, "skip_flat_groups": False}, **settings
    )
    passes = watch_scoring(trainer)
    train(trainer)
    return trainer, passes


@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        ("dapo", TWICE),
        pytest.param("gspo", {**TWICE, "num_iterations": 3}, marks=pytest.mark.survival),
        pytest.param(
            {"recipe": "grpo", "regularizers": [{**KL, "bias_corrected": True}]}, TWICE, marks=pytest.mark.survival
        ),
        ({"recipe": "bnpo", "regularizers": [{"name": "kl", "estimator": "full", "coef": 0.1}]}, TWICE),
        ("dapo", {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 4, "max_steps": 4}),
    ],
)
def test_steps_are_the_same_without_a_pass_of_their_own(
    new_trainer: NewTrainer, objective: Any, settings: dict[str, Any]
) -> None:
    (plain, more), (reusing, fewer) = (trained(new_trainer, objective, reuse, **settings) for reuse in (False, True))
    assert (plain.savings_report["reuse_old_logps"], reusing.savings_report["reuse_old_logps"]) == (OFF, ON)
    rollouts = (
        4
        * settings["gradient_accumulation_steps"]
        / settings.get("steps_per_generation", settings["gradient_accumulation_steps"])
        / settings["num_iterations"]
    )
    assert len(more) - len(fewer) == -(-rollouts // 1)
    for name, value in adapter(plain).items():
        torch.testing.assert_close(adapter(reusing)[name], value, rtol=0, atol=2e-6, msg=name)
    logs = [[line for line in trainer.state.log_history if "loss" in line] for trainer in (plain, reusing)]
    for want, got in zip(*logs, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-6)
        assert got["ratio/abs_log"] == pytest.approx(want["ratio/abs_log"], abs=1e-5)
    assert max(line["ratio/abs_log"] for line in logs[1]) > 1e-3  # a later step on the same completions


def test_a_first_pass_is_exactly_on_policy(new_trainer: NewTrainer) -> None:
    trainer, _ = trained(new_trainer, "dapo", True, **TWICE)
    ratios = [line["ratio/abs_log"] for line in trainer.state.log_history if "loss" in line]
    assert [ratio == 0.0 for ratio in ratios] == [True, False, True, False]


def test_completions_that_were_not_scored_have_no_old_log_probabilities(new_trainer: NewTrainer) -> None:
    def odd(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float]:
        return [len(ids) if wanted > 1 else 1.0 for ids, wanted in zip(completion_ids, target, strict=True)]

    trainer = new_trainer(
        objective="dapo", unchecked=True, extra={"reward_funcs": odd}, num_generations=2, num_iterations=2, max_steps=1,
        per_device_train_batch_size=12, seed=2,
    )  # fmt: skip
    train(trainer)
    (inputs,) = trainer._buffered_inputs
    flat = (inputs["advantages"] == 0) & inputs["completion_mask"].any(1)
    assert flat.any()
    assert torch.equal(torch.isnan(inputs["old_per_token_logps"]).all(1), flat)
    drift(trainer)
    logps = torch.full(inputs["completion_ids"].shape, -0.5)
    old = trainer.old_logps.of(MicroBatch(inputs), logps)
    assert torch.equal(old[flat], logps[flat])
    assert torch.equal(old[~flat], inputs["old_per_token_logps"][~flat])


# --- where it is not exact --------------------------------------------------------------------------------------------


def test_dropout_a_value_head_and_steps_between_first_passes_forbid_it(new_trainer: NewTrainer) -> None:
    from peft import LoraConfig

    wet = LoraConfig(r=4, lora_alpha=4, lora_dropout=0.3, target_modules=["q_proj"], init_lora_weights=False)

    def report(**given: Any) -> str:
        objective, extra = given.pop("objective", "dapo"), given.pop("extra", {})
        return str(new_trainer(objective=objective, extra=extra, **given).savings_report["reuse_old_logps"])

    assert "dropout" in report(num_iterations=2, extra={"peft_config": wet})
    assert "value head" in report(num_iterations=2, objective="ppo")
    assert "not needed" in report()
    late = report(steps_per_generation=4, gradient_accumulation_steps=2)
    assert "steps_per_generation 4, gradient_accumulation_steps 2" in late


def test_weights_that_moved_before_the_first_pass_are_noticed(new_trainer: NewTrainer) -> None:
    from transformers import TrainerCallback

    class Nudge(TrainerCallback):  # type: ignore[misc]
        """As an average of weights that somebody swaps in."""

        def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            with torch.no_grad():
                next(weight for weight in model.parameters() if weight.requires_grad).add_(0.01)

    trainer = new_trainer(objective="dapo", extra={"callbacks": [Nudge()]}, **TWICE)
    with pytest.raises(ObjectiveError, match=r"weights changed between a rollout and the first pass.*reuse_old_logps"):
        train(trainer)
    scored = new_trainer(objective="dapo", extra={"callbacks": [Nudge()], "reuse_old_logps": False}, **TWICE)
    train(scored)
    assert scored.state.global_step == 4
