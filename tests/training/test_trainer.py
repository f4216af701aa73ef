"""The trainer against TRL's trainer and against plain arithmetic, on a tiny random Qwen3 with a LoRA adapter."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kit.errors import ObjectiveError
from kit.objective import Objective

from .rollouts import (
    EQUAL,
    KL,
    Counting,
    NewTrainer,
    Recorder,
    adapter,
    assert_gradients_close,
    drift,
    kl_term,
    largest_difference,
    losses_and_gradients,
    mixed_prompts,
    plain_logps,
    rollout,
    scores,
    train,
    unpadded,
)

# --- equal to TRL -----------------------------------------------------------------------------------------------------


def test_without_an_objective_training_is_that_of_stock_trl(new_trainer: NewTrainer) -> None:
    options: dict[str, Any] = {"num_iterations": 2, "beta": 0.04, "gradient_accumulation_steps": 2}
    stock, hooked = new_trainer(stock=True, max_steps=2, **options), new_trainer(max_steps=2, **options)
    start = adapter(stock)
    for trainer in (stock, hooked):
        train(trainer)
    timing = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    logs = [
        [{key: value for key, value in log.items() if key not in timing} for log in trainer.state.log_history]
        for trainer in (stock, hooked)
    ]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 3  # two steps and the summary
    assert largest_difference(adapter(hooked), adapter(stock)) == 0
    assert largest_difference(adapter(stock), start) > 1e-3  # the steps did change the weights


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "gspo"])
def test_two_steps_of_training_with_a_recipe_equal_trl(new_trainer: NewTrainer, name: str) -> None:
    """Compare everything from generation to the optimiser step, with two micro-batches per step and an off-policy second step."""
    objective, loss_arguments = EQUAL[name]
    objective = {**objective, "regularizers": [kl_term(name, True)]}
    options = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 2, "optim": "sgd", "seed": 3}
    stock = new_trainer(stock=True, beta=0.04, **loss_arguments, **options)
    hooked = new_trainer(objective=objective, **options)
    start = adapter(stock)
    for trainer in (stock, hooked):
        train(trainer)
    moved, want = adapter(hooked), adapter(stock)
    assert_gradients_close(
        {key: moved[key] - start[key] for key in start}, {key: want[key] - start[key] for key in start}, rtol=1e-4
    )
    for log, expected in zip(hooked.state.log_history[:2], stock.state.log_history[:2], strict=True):
        assert log["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert log["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_evaluation_loss_equals_trl_and_logs_the_terms(new_trainer: NewTrainer, prompts: Any) -> None:
    options = {"per_device_eval_batch_size": 8, "extra": {"eval_dataset": prompts}, "gradient_accumulation_steps": 3}
    stock = new_trainer(stock=True, loss_type="dapo", epsilon_high=0.28, **options)
    sink: list[Any] = []
    options["extra"] = {**options["extra"], "rollout_sinks": [sink.append]}
    objective = Recorder(clip={"name": "ppo_clip", "eps_high": 0.28}, reduction="global_token_mean")
    hooked = new_trainer(objective=objective, **options)
    reports = []
    for trainer in (stock, hooked):
        torch.manual_seed(0)
        trainer.evaluate()
        reports.append(trainer.state.log_history[-1])
    assert reports[1]["eval_loss"] == pytest.approx(reports[0]["eval_loss"], abs=1e-6)
    assert reports[1]["eval_entropy"] == pytest.approx(objective.mean(lambda batch: batch.entropy), abs=1e-6)
    assert "eval_objective/clip" in reports[1]
    assert [each.mode for each in sink] == ["eval"] * 4  # 8 prompts of 4 completions, 8 at a time


def test_advantages_equal_trl_with_weights_and_missing_scores(new_trainer: NewTrainer, reward: Any) -> None:
    def sometimes(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if index % 3 == 0 else float(len(ids)) for index, ids in enumerate(completion_ids)]

    def hardly(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        values = reward(completion_ids)
        return [None if index % 6 == 0 else value for index, value in enumerate(values)]

    for advantage, scale in [("group_zscore", "group"), ("group_mean", "none"), ("batch_zscore", "batch")]:
        outputs = []
        for stock in (True, False):
            trainer = new_trainer(
                stock=stock,
                objective=None if stock else {"advantage": {"name": advantage}},
                gradient_accumulation_steps=3,
                reward_weights=[1.0, 0.25],
                extra={"reward_funcs": [hardly, sometimes]},
                **({"scale_rewards": scale} if stock else {}),
            )
            trainer.model.train()
            torch.manual_seed(5)
            outputs.append(
                (trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader()))), trainer)
            )
        (want, stock_trainer), (output, trainer) = outputs
        assert torch.equal(output["completion_ids"], want["completion_ids"])
        assert want["advantages"].abs().max() > 0.1
        assert (want["advantages"] == 0).sum() >= 2  # rows 0 and 6 have no score
        torch.testing.assert_close(output["advantages"], want["advantages"], rtol=1e-5, atol=1e-6)
        # TRL's table of completions shows the advantages that were used
        assert list(trainer._logs["advantages"]) == output["advantages"].tolist()
        assert len(stock_trainer._logs["advantages"]) == len(trainer._logs["advantages"])


# --- hooks and masks --------------------------------------------------------------------------------------------------


WITH_EVERYTHING: dict[str, Any] = {
    "recipe": "dapo",
    "regularizers": [{**KL, "bias_corrected": True}, {"name": "entropy_bonus", "coef": 0.01}],
}


@settings(max_examples=12, deadline=None, database=None)
@given(columns=st.integers(1, 6), name=st.sampled_from([*EQUAL, "with_everything"]), side=st.sampled_from("lr"))
def test_more_padding_changes_nothing(columns: int, name: str, side: str, padding_case: Any) -> None:
    trainer, inputs, loss, gradients = padding_case(name)
    padded = dict(inputs)
    for key, value in inputs.items():
        per_token = value.dim() == 2
        if per_token and side == "l" and key.startswith("prompt_"):
            padded[key] = torch.nn.functional.pad(value, (columns, 0))
        if per_token and side == "r" and not key.startswith("prompt_"):
            padded[key] = torch.nn.functional.pad(value, (0, columns))
    again, same = losses_and_gradients(trainer, [padded], 1)
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-6)
    assert_gradients_close(same, gradients)


@pytest.fixture(scope="module")
def padding_case(new_trainer: NewTrainer) -> Callable[[str], tuple[Any, ...]]:
    @functools.cache
    def make(name: str) -> tuple[Any, ...]:
        objective = WITH_EVERYTHING if name == "with_everything" else EQUAL[name][0]
        trainer = new_trainer(objective=objective, num_iterations=2)
        inputs = rollout(trainer)[0]
        drift(trainer)
        return (trainer, inputs, *losses_and_gradients(trainer, [inputs], 1))

    return make


# --- micro-batches ----------------------------------------------------------------------------------------------------


def test_logged_means_are_exact_over_micro_batches_and_steps(new_trainer: NewTrainer) -> None:
    logging_steps = 2
    objective = Recorder(clip="ppo_clip", regularizers=[KL, "entropy_bonus"], reduction="global_token_mean")
    trainer = new_trainer(
        objective=objective,
        unchecked=True,
        gradient_accumulation_steps=3,
        steps_per_generation=6,
        logging_steps=logging_steps,
        max_steps=2 * logging_steps,
    )
    train(trainer)
    log, later, _ = trainer.state.log_history
    assert len(objective.seen) == 2 * 3 * logging_steps
    objective.seen, rest = objective.seen[: 3 * logging_steps], objective.seen[3 * logging_steps :]
    assert len({int(batch.mask.sum()) for batch in objective.seen}) > 1  # unequal token counts

    def clip(batch: Any) -> Tensor:  # -min(rA, clip(r, 0.8, 1.2) A)
        ratio = (batch.logps - batch.old_logps).exp()
        return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)

    def k3(batch: Any) -> Tensor:  # exp(-d) + d - 1 with d = logp - ref
        gap = batch.logps - batch.ref_logps
        return (-gap).exp() + gap - 1

    with torch.no_grad():
        assert log["objective/clip"] == pytest.approx(objective.mean(clip), abs=1e-6)
        assert log["objective/kl"] == pytest.approx(objective.mean(k3), abs=1e-6)
        assert log["kl/k3"] == log["objective/kl"]
        assert log["entropy"] == pytest.approx(objective.mean(lambda batch: batch.entropy), abs=1e-6)
        assert log["objective/entropy_bonus"] == pytest.approx(-log["entropy"], abs=1e-6)
        assert log["ratio/mean"] == pytest.approx(objective.mean(lambda b: (b.logps - b.old_logps).exp()), abs=1e-6)
        # a mean of the means of micro-batches would differ
        means = [batch.entropy[batch.mask].mean().item() for batch in objective.seen]
        assert abs(sum(means) / len(means) - log["entropy"]) > 1e-5
        objective.seen = rest  # the next log starts with no values
        assert later["entropy"] == pytest.approx(objective.mean(lambda batch: batch.entropy), abs=1e-6)
        assert later["objective/clip"] == pytest.approx(objective.mean(clip), abs=1e-6)


# --- reference and entropy --------------------------------------------------------------------------------------------


def test_the_reference_of_an_adapter_is_the_model_without_it(
    new_trainer: NewTrainer, new_model: Callable[[], Any]
) -> None:
    trainer = new_trainer(objective={"regularizers": [KL]}, num_generations=2, gradient_accumulation_steps=4)
    inputs = mixed_prompts(trainer)
    base = new_model()
    with torch.no_grad():
        current, _ = scores(trainer, inputs)
        for row, reference in enumerate(inputs["ref_per_token_logps"]):
            prompt, completion = unpadded(inputs, row)
            want = plain_logps(base, prompt, completion).gather(1, completion.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(reference[: len(completion)], want, rtol=0, atol=1e-5)
    mask = inputs["completion_mask"].bool()
    assert (current - inputs["ref_per_token_logps"])[mask].abs().max() > 1e-3  # the adapter has an effect


def test_the_entropy_bonus_has_the_gradient_of_the_mean_entropy(new_trainer: NewTrainer) -> None:
    gradients = []
    for regularizers in ([], [{"name": "entropy_bonus", "coef": 0.1}]):
        trainer = new_trainer(objective={"recipe": "bnpo", "regularizers": regularizers})
        batches = rollout(trainer)
        gradients.append(losses_and_gradients(trainer, batches, 1)[1])
    trainer.model.zero_grad()
    rows = [unpadded(batches[0], row) for row in range(4)]
    tables = torch.cat([plain_logps(trainer.model, prompt, completion) for prompt, completion in rows])
    (0.1 * (tables.exp() * tables).sum(-1).mean()).backward()  # -0.1 · mean entropy over the tokens
    want = {name: value.grad for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert_gradients_close({name: gradients[1][name] - gradients[0][name] for name in want}, want, rtol=1e-4)


# --- rollouts and state -----------------------------------------------------------------------------------------------


def test_rollout_sinks_see_what_is_trained_on(new_trainer: NewTrainer, tokenizer: Any, reward: Any) -> None:
    def length(completion_ids: list[list[int]], log_extra: Any, target: list[int], **_: Any) -> list[float | None]:
        log_extra("why", [f"{len(ids)} of {number}" for ids, number in zip(completion_ids, target, strict=True)])
        return [None if len(ids) == 1 else float(len(ids)) for ids in completion_ids]

    sink: list[Any] = []
    trainer = new_trainer(
        objective="dapo",
        gradient_accumulation_steps=3,
        reward_weights=[1.0, 0.5],
        extra={"reward_funcs": [reward, length], "rollout_sinks": [sink.append, lambda rollout: None]},
        mask_truncated_completions=True,
    )
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    output = trainer._generate_and_score_completions(rows)
    (rollout,) = sink
    assert (rollout.step, rollout.mode, rollout.reward_names) == (0, "train", ["placed_ids", "length"])
    assert rollout.rows == rows
    assert len(rollout.completions) == len(rollout.completion_ids) == len(rollout.truncated) == 12
    assert rollout.rewards.shape == (12, 2)
    assert torch.equal(rollout.advantages, output["advantages"])

    lengths = [len(ids) for ids in rollout.completion_ids]
    assert 1 <= min(lengths) < max(lengths) <= 8
    assert [ids[-1] != tokenizer.eos_token_id for ids in rollout.completion_ids] == rollout.truncated
    assert {length for length, cut in zip(lengths, rollout.truncated, strict=True) if cut} == {8}  # cut at the limit
    for row, ids in enumerate(rollout.completion_ids):
        assert output["completion_ids"][row, : len(ids)].tolist() == ids
        trained = int(output["completion_mask"][row].sum())
        assert trained == (0 if rollout.truncated[row] else len(ids))
        assert rollout.completions[row] == tokenizer.decode(ids, skip_special_tokens=True)
    torch.testing.assert_close(rollout.rewards[:, 0], torch.tensor(reward(rollout.completion_ids)))
    want = torch.tensor([float("nan") if length == 1 else float(length) for length in lengths])
    torch.testing.assert_close(rollout.rewards[:, 1], want, equal_nan=True)
    assert rollout.extra["why"] == [f"{length} of {row['target']}" for length, row in zip(lengths, rows, strict=True)]


def test_the_state_of_hooks_is_saved_and_restored(new_trainer: NewTrainer) -> None:
    saving: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2}
    first = Counting()
    trainer = new_trainer(objective=Objective(regularizers=[first]), save_strategy="steps", save_steps=1, **saving)
    train(trainer)
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    assert json.loads((checkpoint / "objective_state.json").read_text()) == {"regularizers.0": {"calls": 2}}
    assert first.calls == 4

    second = Counting()
    resumed = new_trainer(objective=Objective(regularizers=[second]), **saving)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 2
    assert second.calls == 4  # 2 restored, 2 in the second step

    with pytest.raises(ObjectiveError, match="Resume with the objective of the run"):
        new_trainer(objective="grpo", **saving).train(resume_from_checkpoint=str(checkpoint))
