"""The trainer against TRL's own, and against plain arithmetic, on a tiny random Qwen3 with a LoRA adapter."""

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

NewTrainer = Callable[..., Any]
KL = {"name": "kl", "coef": 0.04}

# name: (our objective, the arguments of TRL's loss that mean the same)
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"recipe": "grpo"}, {"loss_type": "grpo"}),
    "bnpo": ({"recipe": "bnpo"}, {"loss_type": "bnpo"}),
    "dr_grpo": ({"recipe": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ({"recipe": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "cispo": ({"recipe": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "gspo": (
        {"recipe": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "luspo": (
        {"clip": {"name": "gspo", "eps_low": 0.1, "eps_high": 0.2}, "reduction": "sequence_sum"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2},
    ),
}
# Where the current policy is the one that generated, TRL keeps no old log-probabilities.
POLICIES: dict[str, Callable[[int], dict[str, int]]] = {
    "on_policy": lambda accumulation: {},
    "two_iterations": lambda accumulation: {"num_iterations": 2},
    "two_windows": lambda accumulation: {"steps_per_generation": 2 * accumulation},
}


def kl_term(name: str, corrected: bool) -> dict[str, Any]:
    """TRL corrects the KL by the ratio that its loss uses: of a token, or of a completion."""
    return {**KL, "bias_corrected": corrected, "level": "sequence" if name in ("gspo", "luspo") else "token"}


def rollout(trainer: Any) -> list[dict[str, Any]]:
    """The micro-batches of one generation batch, made by the trainer itself; the first seed with ragged completions."""
    trainer.model.train()
    for seed in range(50):
        torch.manual_seed(seed)
        rows = next(iter(trainer.get_train_dataloader()))
        batches = []
        for step in range(trainer.args.steps_per_generation):
            trainer._step = step
            batches.append(trainer._prepare_inputs(rows))
        if batches[0]["completion_mask"].sum(1).unique().numel() > 2:
            return batches
    raise AssertionError("the tiny model never ends its completions at different places")


def drift(trainer: Any, size: float = 0.03) -> None:
    """Moves the adapter away from the policy that generated; the same way for every trainer."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def train(trainer: Any) -> None:
    """Trains from the same state of the random generator, whatever was built before."""
    torch.manual_seed(0)
    trainer.train()


def adapter(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}


def losses_and_gradients(trainer: Any, batches: list[Any], accumulation: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of every micro-batch, and what their gradients add up to, for every LoRA weight."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = accumulation
    losses = []
    for inputs in batches:
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {
        name: value.grad.clone() for name, value in trainer.model.named_parameters() if value.requires_grad
    }


def assert_gradients_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Relative to the norm of each weight's gradient: single elements may cancel to nearly nothing."""
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        assert want.norm() > 0, f"no gradient reaches {name}: the comparison would be empty"
        assert (ours[name] - want).norm() <= rtol * want.norm(), name


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def scores(trainer: Any, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies (B, T) of a micro-batch, from the method that the trainer calls."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    logps, entropy, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, **options)
    return logps, entropy


def unpadded(inputs: dict[str, Any], row: int) -> tuple[Tensor, Tensor]:
    """Prompt ids and completion ids of one row, without padding."""
    prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
    return prompt, inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]


def plain_logps(model: Any, prompt: Tensor, completion: Tensor) -> Tensor:
    """Log-probabilities (T, V) of the next token at every place of the completion, from whole logits."""
    logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


class Recorder(Objective):
    """An objective that keeps every batch it was given, and its loss."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.seen: list[Any] = []

    def loss(self, batch: Any, scale: Any = None) -> Any:
        output = super().loss(batch, scale)
        self.seen.append(batch)
        return output

    def mean(self, function: Callable[[Any], Tensor]) -> float:
        """Mean of a per-token number over the live tokens of all batches."""
        total = sum(function(batch)[batch.mask].double().sum().item() for batch in self.seen)
        return total / sum(int(batch.mask.sum()) for batch in self.seen)


# --- equal to TRL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "beta": 0.04, "gradient_accumulation_steps": 2}])
def test_without_an_objective_training_is_that_of_stock_trl(new_trainer: NewTrainer, options: dict[str, Any]) -> None:
    stock, ours = new_trainer(stock=True, max_steps=2, **options), new_trainer(max_steps=2, **options)
    start = adapter(stock)
    for trainer in (stock, ours):
        train(trainer)
    timing = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    logs = [
        [{key: value for key, value in log.items() if key not in timing} for log in trainer.state.log_history]
        for trainer in (stock, ours)
    ]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 3  # two steps and the summary
    assert largest_difference(adapter(ours), adapter(stock)) == 0
    assert largest_difference(adapter(stock), start) > 1e-3  # the steps did move the weights


@pytest.fixture(scope="module")
def shared_rollout(new_trainer: NewTrainer) -> Callable[[str, int], list[dict[str, Any]]]:
    """Micro-batches generated once by a stock trainer, with reference and (off-policy) old log-probabilities."""

    @functools.cache
    def make(policy: str, accumulation: int) -> list[dict[str, Any]]:
        options = {"gradient_accumulation_steps": accumulation, **POLICIES[policy](accumulation)}
        batches = rollout(new_trainer(stock=True, beta=0.04, **options))
        assert ("old_per_token_logps" in batches[0]) == (policy != "on_policy")
        return batches

    return make


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("kl", ["no_kl", "kl", "corrected_kl"])
@pytest.mark.parametrize("name", list(EQUAL))
def test_loss_and_lora_gradient_equal_trl_on_the_same_rollout(
    new_trainer: NewTrainer,
    shared_rollout: Callable[[str, int], list[dict[str, Any]]],
    name: str,
    kl: str,
    policy: str,
    accumulation: int,
) -> None:
    batches = shared_rollout(policy, accumulation)
    objective, loss_arguments = EQUAL[name]
    if kl != "no_kl":
        corrected = kl == "corrected_kl"
        objective = {**objective, "regularizers": [kl_term(name, corrected)]}
        loss_arguments = {**loss_arguments, "beta": 0.04, "use_bias_correction_kl": corrected}
    options = {"gradient_accumulation_steps": accumulation, **POLICIES[policy](accumulation)}
    stock = new_trainer(stock=True, **options, **loss_arguments)
    ours = new_trainer(objective=objective, **options)
    if policy != "on_policy":
        drift(stock)
        drift(ours)
    assert largest_difference(adapter(ours), adapter(stock)) == 0

    want, want_gradients = losses_and_gradients(stock, batches, accumulation)
    loss, gradients = losses_and_gradients(ours, batches, accumulation)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    assert_gradients_close(gradients, want_gradients)
    if policy != "on_policy" and name in ("grpo", "dapo", "gspo"):  # the case with clipping is among the cases
        assert sum(stock._metrics["train"]["clip_ratio/region_mean"]) > 0


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "gspo"])
def test_two_steps_of_training_with_a_recipe_equal_trl(new_trainer: NewTrainer, name: str) -> None:
    """From generation to optimiser, with two micro-batches a step and the second step off-policy."""
    objective, loss_arguments = EQUAL[name]
    objective = {**objective, "regularizers": [kl_term(name, True)]}
    options = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 2, "optim": "sgd", "seed": 3}
    stock = new_trainer(stock=True, beta=0.04, **loss_arguments, **options)
    ours = new_trainer(objective=objective, **options)
    start = adapter(stock)
    for trainer in (stock, ours):
        train(trainer)
    moved, want = adapter(ours), adapter(stock)
    assert_gradients_close(
        {key: moved[key] - start[key] for key in start}, {key: want[key] - start[key] for key in start}, rtol=1e-4
    )
    for log, expected in zip(ours.state.log_history[:2], stock.state.log_history[:2], strict=True):
        assert log["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert log["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_evaluation_loss_equals_trl_and_logs_the_terms(new_trainer: NewTrainer, prompts: Any) -> None:
    options = {"per_device_eval_batch_size": 8, "extra": {"eval_dataset": prompts}, "gradient_accumulation_steps": 3}
    stock = new_trainer(stock=True, loss_type="dapo", epsilon_high=0.28, **options)
    sink: list[Any] = []
    options["extra"] = {**options["extra"], "rollout_sinks": [sink.append]}
    objective = Recorder(clip={"name": "ppo_clip", "eps_high": 0.28}, reduction="global_token_mean")
    ours = new_trainer(objective=objective, **options)
    reports = []
    for trainer in (stock, ours):
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
        (want, stock_trainer), (ours, trainer) = outputs
        assert torch.equal(ours["completion_ids"], want["completion_ids"])
        assert want["advantages"].abs().max() > 0.1
        assert (want["advantages"] == 0).sum() >= 2  # rows 0 and 6 have no score at all
        torch.testing.assert_close(ours["advantages"], want["advantages"], rtol=1e-5, atol=1e-6)
        # what TRL would show beside the completions is what was trained on
        assert list(trainer._logs["advantages"]) == ours["advantages"].tolist()
        assert len(stock_trainer._logs["advantages"]) == len(trainer._logs["advantages"])


def test_lengths_that_an_advantage_sees_leave_tool_tokens_out(new_trainer: NewTrainer) -> None:
    seen: list[Tensor] = []

    def by_length(batch: Any) -> Tensor:
        seen.append(batch.lengths)
        return batch.rewards / batch.lengths

    by_length.needs = {"lengths"}  # type: ignore[attr-defined]
    trainer = new_trainer(objective=Objective(advantage=by_length))
    inputs = rollout(trainer)[0]
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 1] = 0
    rewards = torch.arange(4.0).unsqueeze(1)
    advantages = trainer._advantages(rewards, inputs)
    lengths = (inputs["completion_mask"] * inputs["tool_mask"]).sum(1)
    assert seen[-1].tolist() == lengths.tolist()
    torch.testing.assert_close(advantages, rewards.squeeze(1) / lengths)


# --- hooks are live, masks hold ---------------------------------------------------------------------------------------


def test_a_regularizer_from_a_file_adds_its_mean_to_the_loss(new_trainer: NewTrainer, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def square(batch, power=2.0):\n    return batch.logps.abs() ** power\n")
    results = []
    for entries in (
        [],
        [{"name": f"{path}:square", "coef": 0.5}],
        [{"name": f"{path}:square", "coef": 0.5, "power": 1}],
    ):
        trainer = new_trainer(objective={"recipe": "bnpo", "regularizers": entries})
        batches = rollout(trainer)
        results.append((*losses_and_gradients(trainer, batches, 1), batches[0], scores(trainer, batches[0])[0]))
    (without, plain_gradients, *_), (squared, gradients, inputs, logps), (linear, *_) = results
    live = logps.detach()[inputs["completion_mask"].bool()]
    # token_mean: loss = clip + coef · sum over live tokens / live tokens
    torch.testing.assert_close((squared - without)[0], 0.5 * (live**2).mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((linear - without)[0], 0.5 * live.abs().mean(), rtol=1e-5, atol=1e-6)
    assert largest_difference(gradients, plain_gradients) > 1e-3


def test_a_clip_from_a_file_scales_the_gradient_exactly(new_trainer: NewTrainer, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def scaled(batch, by=1.0):\n    return -by * batch.ratio * batch.advantages\n")
    gradients = []
    for by in (1.0, 0.5):
        trainer = new_trainer(objective={"clip": {"name": f"{path}:scaled", "by": by}})
        gradients.append(losses_and_gradients(trainer, rollout(trainer), 1)[1])
    for name, whole in gradients[0].items():
        assert torch.equal(gradients[1][name], 0.5 * whole)  # a power of two: exact


WITH_EVERYTHING: dict[str, Any] = {
    "recipe": "dapo",
    "regularizers": [{**KL, "bias_corrected": True}, {"name": "entropy_bonus", "coef": 0.01}],
}


def test_masked_tokens_have_no_influence_and_no_gradient(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective=WITH_EVERYTHING, num_iterations=2)
    inputs = rollout(trainer)[0]
    drift(trainer)
    tool_mask = torch.ones_like(inputs["completion_mask"])
    tool_mask[:, 1] = 0  # the second token of every completion came from a tool
    inputs["tool_mask"] = tool_mask
    mask = (inputs["completion_mask"] * tool_mask).bool()
    assert (~inputs["completion_mask"].bool()).sum() > 0  # there is padding

    original, leaves = trainer._get_per_token_logps_and_entropies, []

    def run(garbage: float | None) -> Tensor:
        def score(*args: Any, **keywords: Any) -> Any:
            logps, entropy, aux = original(*args, **keywords)
            pair = [value.detach().clone() for value in (logps, entropy)]
            if garbage is not None:
                pair = [value.masked_fill(~mask, garbage) for value in pair]
            leaves[:] = [value.requires_grad_() for value in pair]
            return (*leaves, aux)

        trainer._get_per_token_logps_and_entropies = score
        loss: Tensor = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        return loss.detach()

    trainer.current_gradient_accumulation_steps = 1
    clean = run(None)
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad[~mask].eq(0).all()
        assert leaf.grad[mask].ne(0).any()
    for garbage in (1e3, float("nan"), float("-inf")):
        assert torch.equal(run(garbage), clean)
        assert all(leaf.grad[~mask].eq(0).all() for leaf in leaves)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        inputs[name] = inputs[name].masked_fill(~mask, float("nan"))
    assert torch.equal(run(None), clean)


def test_ids_at_padding_have_no_influence(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective=WITH_EVERYTHING)
    inputs = rollout(trainer)[0]
    loss, gradients = losses_and_gradients(trainer, [inputs], 1)
    changed = dict(inputs)
    for ids, mask in (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")):
        changed[ids] = torch.where(inputs[mask].bool(), inputs[ids], torch.full_like(inputs[ids], 77))
    again, same = losses_and_gradients(trainer, [changed], 1)
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-7)
    assert_gradients_close(same, gradients, rtol=1e-6)


def mixed_prompts(trainer: Any) -> dict[str, Any]:
    """One micro-batch with different prompts, so that left padding is ragged."""
    batches = rollout(trainer)
    widths = {batch["prompt_mask"].sum().item() for batch in batches}
    inputs = {
        key: torch.cat([batch[key][:1] for batch in batches]) if value.dim() else value
        for key, value in batches[0].items()
    }
    lengths = inputs["prompt_mask"].sum(1)
    assert lengths.unique().numel() > 2, widths
    return inputs


def test_log_probabilities_of_a_padded_batch_are_those_of_its_rows_alone(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective="grpo", num_generations=2, gradient_accumulation_steps=4)
    inputs = mixed_prompts(trainer)
    with torch.no_grad():
        logps, entropy = scores(trainer, inputs, compute_entropy=True)
        assert entropy is not None
        for row in range(len(logps)):
            prompt, completion = unpadded(inputs, row)
            table = plain_logps(trainer.model, prompt, completion)
            want = table.gather(1, completion.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(logps[row, : len(completion)], want, rtol=0, atol=1e-5)
            want = -(table.exp() * table).sum(-1)
            torch.testing.assert_close(entropy[row, : len(completion)], want, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo", "bnpo"])
def test_splitting_the_batch_keeps_the_lora_gradient(new_trainer: NewTrainer, name: str) -> None:
    whole = new_trainer(objective=EQUAL[name][0], per_device_train_batch_size=12)
    (inputs,) = rollout(whole)
    order = inputs["completion_mask"].sum(1).argsort()  # short ones together: micro-batches of unequal token counts
    inputs = {key: value[order] if value.dim() else value for key, value in inputs.items()}
    parts = [
        {key: value[start : start + 4] if value.dim() else value for key, value in inputs.items()}
        for start in (0, 4, 8)
    ]
    tokens = [int(part["completion_mask"].sum()) for part in parts]
    assert tokens[0] < tokens[1] < tokens[2]
    split = new_trainer(objective=EQUAL[name][0], gradient_accumulation_steps=3)
    _, gradients = losses_and_gradients(whole, [inputs], 1)
    _, summed = losses_and_gradients(split, parts, 3)
    if name == "bnpo":  # the one reduction that promises no such thing: the comparison can tell
        with pytest.raises(AssertionError):
            assert_gradients_close(summed, gradients, rtol=1e-2)
    else:
        assert_gradients_close(summed, gradients)


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_logged_means_are_exact_over_micro_batches_and_steps(new_trainer: NewTrainer, logging_steps: int) -> None:
    objective = Recorder(clip="ppo_clip", regularizers=[KL, "entropy_bonus"], reduction="global_token_mean")
    trainer = new_trainer(
        objective=objective,
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
        # a mean of the micro-batches' means would be another number
        means = [batch.entropy[batch.mask].mean().item() for batch in objective.seen]
        assert abs(sum(means) / len(means) - log["entropy"]) > 1e-5
        objective.seen = rest  # the next log starts from nothing
        assert later["entropy"] == pytest.approx(objective.mean(lambda batch: batch.entropy), abs=1e-6)
        assert later["objective/clip"] == pytest.approx(objective.mean(clip), abs=1e-6)


# --- reference and entropy --------------------------------------------------------------------------------------------


def watch_scoring(trainer: Any) -> list[bool]:
    """Lists, for every scoring pass from now on, whether it ran with the adapter disabled."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    original, passes = trainer._get_per_token_logps_and_entropies, []

    def score(model: Any, *args: Any, **keywords: Any) -> Any:
        layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
        passes.append(bool(layers) and all(layer.disable_adapters for layer in layers))
        return original(model, *args, **keywords)

    trainer._get_per_token_logps_and_entropies = score
    return passes


@pytest.mark.parametrize(
    ("objective", "passes"),
    [("dapo", [False, False]), ({"recipe": "dapo", "regularizers": [KL]}, [True, False, False])],
)
def test_the_reference_is_scored_only_for_a_term_that_needs_it(
    new_trainer: NewTrainer, objective: Any, passes: list[bool]
) -> None:
    trainer = new_trainer(objective=objective, gradient_accumulation_steps=2)
    seen = watch_scoring(trainer)
    train(trainer)
    assert seen == passes  # the reference once for the generation batch, then the two micro-batches


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
    assert (current - inputs["ref_per_token_logps"])[mask].abs().max() > 1e-3  # the adapter does something


def test_full_finetuning_loads_a_reference_model_only_if_needed(
    new_trainer: NewTrainer, new_model: Callable[[], Any], tokenizer: Any, tmp_path: Path
) -> None:
    new_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    extra = {"model": str(tmp_path), "peft_config": None}
    dtype = {"model_init_kwargs": {"dtype": "float32"}}
    assert new_trainer(objective="dapo", extra=extra, **dtype).ref_model is None
    trainer = new_trainer(objective={"recipe": "dapo", "regularizers": [KL]}, extra=extra, **dtype)
    assert trainer.ref_model is not None
    train(trainer)
    log = trainer.state.log_history[0]
    assert log["kl/k3"] == pytest.approx(0.0, abs=1e-6)  # before the first step, policy and reference are one
    assert log["grad_norm"] > 0


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


def test_entropy_carries_gradient_only_for_a_term_that_uses_it(
    new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bonus = new_trainer(objective={"recipe": "dapo", "regularizers": ["entropy_bonus"]})
    trainer = new_trainer(objective="dapo")
    batches = rollout(trainer)
    logps, entropy = scores(trainer, batches[0], compute_entropy=True)
    assert entropy is not None
    assert logps.requires_grad
    assert not entropy.requires_grad
    _, attached = scores(with_bonus, batches[0], compute_entropy=True)
    assert attached is not None
    assert attached.requires_grad
    assert torch.equal(attached, entropy)

    loss, gradients = losses_and_gradients(trainer, batches, 1)
    monkeypatch.setattr(Objective, "needs_entropy_gradient", True)
    again, same = losses_and_gradients(trainer, batches, 1)
    assert torch.equal(loss, again)
    assert largest_difference(same, gradients) == 0


# --- rollouts and state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mask_truncated_completions": True}])
def test_rollout_sinks_see_what_is_trained_on(
    new_trainer: NewTrainer, tokenizer: Any, reward: Any, options: dict[str, Any]
) -> None:
    def length(completion_ids: list[list[int]], log_extra: Any, target: list[int], **_: Any) -> list[float | None]:
        log_extra("why", [f"{len(ids)} of {wanted}" for ids, wanted in zip(completion_ids, target, strict=True)])
        return [None if len(ids) == 1 else float(len(ids)) for ids in completion_ids]

    sink: list[Any] = []
    trainer = new_trainer(
        objective="dapo",
        gradient_accumulation_steps=3,
        reward_weights=[1.0, 0.5],
        extra={"reward_funcs": [reward, length], "rollout_sinks": [sink.append, lambda rollout: None]},
        **options,
    )
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    output = trainer._generate_and_score_completions(rows)
    (seen,) = sink
    assert (seen.step, seen.mode, seen.reward_names) == (0, "train", ["placed_ids", "length"])
    assert seen.rows == rows
    assert len(seen.completions) == len(seen.completion_ids) == len(seen.truncated) == 12
    assert seen.rewards.shape == (12, 2)
    assert torch.equal(seen.advantages, output["advantages"])

    lengths = [len(ids) for ids in seen.completion_ids]
    assert 1 <= min(lengths) < max(lengths) <= 8
    assert [ids[-1] != tokenizer.eos_token_id for ids in seen.completion_ids] == seen.truncated
    assert {length for length, cut in zip(lengths, seen.truncated, strict=True) if cut} == {8}  # cut at the limit
    for row, ids in enumerate(seen.completion_ids):
        assert output["completion_ids"][row, : len(ids)].tolist() == ids
        trained = int(output["completion_mask"][row].sum())
        assert trained == (0 if options and seen.truncated[row] else len(ids))
        assert seen.completions[row] == tokenizer.decode(ids, skip_special_tokens=True)
    torch.testing.assert_close(seen.rewards[:, 0], torch.tensor(reward(seen.completion_ids)))
    want = torch.tensor([float("nan") if length == 1 else float(length) for length in lengths])
    torch.testing.assert_close(seen.rewards[:, 1], want, equal_nan=True)
    assert seen.extra["why"] == [f"{length} of {row['target']}" for length, row in zip(lengths, rows, strict=True)]


def test_every_generation_batch_reaches_the_sinks_once_while_training(new_trainer: NewTrainer) -> None:
    sink: list[Any] = []
    objective = Recorder()
    trainer = new_trainer(
        objective=objective,
        num_iterations=2,
        max_steps=4,
        gradient_accumulation_steps=2,
        extra={"rollout_sinks": [sink.append]},
    )
    train(trainer)
    assert [seen.step for seen in sink] == [0, 2]
    for first, seen in zip((0, 4), sink, strict=True):
        # shuffled into two micro-batches, gone through twice
        for start in (first, first + 2):
            batches = objective.seen[start : start + 2]
            trained = sorted(
                (int(live.sum()), value.item())
                for batch in batches
                for live, value in zip(batch.mask, batch.advantages, strict=True)
            )
            assert trained == sorted(
                (len(ids), value) for ids, value in zip(seen.completion_ids, seen.advantages.tolist(), strict=True)
            )


class Counting:
    """A regularizer that counts its calls: the least that a hook with state can be."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> Tensor:
        self.calls += 1
        return 0.0 * batch.logps

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


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


def test_an_objective_without_state_writes_none_and_does_not_resume_one_with(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective="grpo", save_strategy="steps", save_steps=1)
    train(trainer)
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    assert checkpoint.is_dir()
    assert not (checkpoint / "objective_state.json").exists()
    new_trainer(objective="grpo", max_steps=2).train(resume_from_checkpoint=str(checkpoint))
    stateful = new_trainer(objective=Objective(regularizers=[Counting()]), max_steps=2)
    with pytest.raises(ObjectiveError, match="Resume with the objective of the run"):
        stateful.train(resume_from_checkpoint=str(checkpoint))
