"""What the trainer makes of a rollout for hooks: greedy baselines, values, token rewards, full KL, norms, and its logs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.errors import ObjectiveError, RewardError, RunError
from kit.objective import LossOutput, Objective
from kit.training.greedy import check_greedy
from kit.training.lora_norm import lora_weight_norm

from .rollouts import (
    NewTrainer,
    Recorder,
    adapter,
    assert_gradients_close,
    drift,
    largest_difference,
    losses_and_gradients,
    rollout,
    train,
    unpadded,
    watch_scoring,
)

TIMES = ("time", "second")


def log_of(trainer: Any, step: int = 0) -> dict[str, float]:
    found: dict[str, float] = trainer.state.log_history[step]
    return found


def generated(trainer: Any) -> dict[str, Any]:
    """One generation batch, scored, not yet shuffled."""
    trainer.model.train()
    output: dict[str, Any] = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    return output


# --- remax ------------------------------------------------------------------------------------------------------------


def greedy_by_hand(trainer: Any, prompt: str) -> list[int]:
    """The likeliest allowed token again and again, by whole forward passes."""
    tokenizer, ids = trainer.processing_class, []
    start = tokenizer(prompt)["input_ids"]
    silent = trainer.args.generation_kwargs["suppress_tokens"]
    for _ in range(trainer.args.max_completion_length):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([start + ids])).logits[0, -1]
        logits[silent] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return ids


def test_greedy_rewards_are_those_of_greedy_completions_made_by_hand(new_trainer: NewTrainer, reward: Any) -> None:
    sink: list[Any] = []
    trainer = new_trainer(objective="remax", gradient_accumulation_steps=3, extra={"rollout_sinks": [sink.append]})
    generated(trainer)
    (seen,) = sink
    prompts = [row["prompt"] for row in seen.rows]
    by_hand = [greedy_by_hand(trainer, prompt) for prompt in prompts[::4]]
    want = torch.tensor(reward(by_hand)).repeat_interleave(4)
    assert want.unique().numel() > 1
    assert any(ids not in by_hand for ids in seen.completion_ids)  # the rollout itself was sampled
    torch.testing.assert_close(trainer._greedy, want)
    torch.testing.assert_close(seen.advantages, seen.rewards[:, 0] - want)
    metrics = trainer._metrics["train"]
    assert metrics["greedy/reward"] == [pytest.approx(want.mean().item())]
    assert metrics["greedy/tokens"] == [sum(len(ids) for ids in by_hand)]


def test_a_greedy_completion_without_a_score_gives_no_advantage(new_trainer: NewTrainer) -> None:
    calls = []

    def first_is_greedy(prompts: list[Any], **_: Any) -> list[float | None]:
        calls.append(len(prompts))
        return [None if len(calls) == 1 and row == 0 else float(row) for row in range(len(prompts))]

    trainer = new_trainer(objective="remax", gradient_accumulation_steps=2, extra={"reward_funcs": first_is_greedy})
    output = generated(trainer)
    assert calls == [2, 8]
    assert output["advantages"].tolist() == [0, 0, 0, 0, 3, 4, 5, 6]  # rewards 0 to 7, greedy ones NaN and 1


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_greedy_pass_leaves_no_trace_but_its_own_metrics(new_trainer: NewTrainer, prompts: Any, mode: str) -> None:
    """Completions, rewards, random stream and every other metric are those of a run without it."""
    seen: list[list[str]] = []

    def noted(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("text", list(completions))
        log_metric("letters", sum(map(len, completions)))
        seen.append(list(completions))
        return [float(len(text)) for text in completions]

    runs = []
    for advantage in ("remax", "group_mean"):
        options = {"num_generations_eval": 2, "per_device_eval_batch_size": 4}
        trainer = new_trainer(
            objective={"advantage": advantage, "clip": "reinforce"}, gradient_accumulation_steps=2, num_iterations=2,
            extra={"reward_funcs": noted, "eval_dataset": prompts}, **options,
        )  # fmt: skip
        sampling, sink = trainer.generation_config, []
        trainer.rollout_sinks = (sink.append,)
        torch.manual_seed(0)
        if mode == "train":
            trainer.train()
        else:
            trainer.evaluate()
        assert trainer.generation_config is sampling
        log = {key: value for key, value in log_of(trainer).items() if not any(word in key for word in TIMES)}
        own = {key for key in log if "greedy/" in key}
        follows = ("loss", "grad_norm", "objective/", "advantage/", "runtime")  # from the advantages, which do differ
        kept = {k: v for k, v in log.items() if k not in own and not any(word in k for word in follows)}
        tables = {key: list(value) for key, value in trainer._logs.items() if key in ("prompt", "completion")}
        extra = {key: list(value) for key, value in trainer._logs["extra"].items()}
        rollouts = [(each.completion_ids, each.rewards.tolist(), dict(each.extra)) for each in sink]
        runs.append((own, kept, tables, extra, rollouts, trainer.state.num_input_tokens_seen, torch.rand(1).item()))
    assert {key.removeprefix("eval_") for key in runs[0][0]} == {"greedy/reward", "greedy/tokens"}
    assert runs[1][0] == set()
    assert runs[0][1:] == runs[1][1:]


OBSTACLES: dict[str, dict[str, Any]] = {
    "use_vllm": {"use_vllm": True},
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "a rollout_func": {"rollout_func": print},
    "tools": {"tools": [print]},
    "an environment_factory": {"environment_factories": {"default": print}},
    "images": {"_is_vlm": True},
    "groups that are spread over processes": {
        "accelerator": SimpleNamespace(num_processes=2),
        "args": SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=1),
    },
}


@pytest.mark.parametrize("name", [None, *OBSTACLES])
def test_the_greedy_pass_refuses_what_it_cannot_drive_by_name(name: str | None) -> None:
    plain: dict[str, Any] = {
        "use_vllm": False,
        "use_transformers_continuous_batching": False,
        "rollout_func": None,
        "tools": [],
        "environment_factories": None,
        "_is_vlm": False,
        "accelerator": SimpleNamespace(num_processes=1),
        "args": SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=1),
        "num_generations": 4,
    }
    if name is None:
        check_greedy(SimpleNamespace(**plain))
        return
    with pytest.raises(ObjectiveError, match=rf"cannot make with {name}\. Generate text with"):
        check_greedy(SimpleNamespace(**plain | OBSTACLES[name]))


def test_the_refusal_is_in_the_trainer_and_only_for_an_advantage_that_needs_it(new_trainer: NewTrainer) -> None:
    def own(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {}

    with pytest.raises(ObjectiveError, match="cannot make with a rollout_func"):
        new_trainer(objective="remax", extra={"rollout_func": own})
    new_trainer(objective="rloo", extra={"rollout_func": own})


# --- value head -------------------------------------------------------------------------------------------------------


def random_head(trainer: Any, size: float = 0.5) -> None:
    """A head that says something: it starts from zeros."""
    generator = torch.Generator().manual_seed(2)
    linear = trainer._critic.head.linear
    with torch.no_grad():
        linear.weight.copy_(size * torch.randn(linear.weight.shape, generator=generator))
        linear.bias.fill_(0.3)


def values_by_hand(trainer: Any, prompt: Tensor, completion: Tensor) -> Tensor:
    """(T,) of one unpadded row: layer norm and linear of the last hidden state in which each token was chosen."""
    with torch.no_grad():
        ids = torch.cat([prompt, completion]).unsqueeze(0)
        hidden = trainer.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 : -1]
        centred = hidden - hidden.mean(-1, keepdim=True)
        hidden = centred / (hidden.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        linear = trainer._critic.head.linear
        return hidden @ linear.weight[0] + linear.bias[0]


def gae_by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    out, later, following = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        later = delta + gamma * lam * later
        out[t], following = later, values[t]
    return out


def ppo(whiten: bool = False, **changes: Any) -> dict[str, Any]:
    return {"recipe": "ppo", "advantage": {"gamma": 0.9, "lam": 0.8, "whiten": whiten, **changes}}


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}], ids=["one_more_scoring", "trls_scoring"])
def test_values_and_advantages_equal_plain_arithmetic_on_unpadded_rows(
    new_trainer: NewTrainer, reward: Any, options: dict[str, Any], whiten: bool
) -> None:
    trainer = new_trainer(objective=ppo(whiten), num_generations=2, gradient_accumulation_steps=4, **options)
    random_head(trainer)
    torch.manual_seed(1)
    output = generated(trainer)
    assert output["completion_mask"].sum(1).unique().numel() > 2
    assert output["prompt_mask"].sum(1).unique().numel() > 2
    everything, values, returns = [], [], []
    for row in range(len(output["completion_ids"])):
        prompt, completion = unpadded(output, row)
        value = values_by_hand(trainer, prompt, completion)
        length = len(completion)
        torch.testing.assert_close(output["old_values"][row, :length], value, rtol=1e-4, atol=1e-5)
        assert not output["old_values"][row, length:].any()
        rewards = [0.0] * (length - 1) + reward([completion.tolist()])
        advantages = gae_by_hand(rewards, value.tolist(), 0.9, 0.8)
        everything.append(advantages)
        values += value.tolist()
        returns += [a + v for a, v in zip(advantages, value.tolist(), strict=True)]
        targets = torch.tensor(advantages) + value
        torch.testing.assert_close(output["value_targets"][row, :length], targets, rtol=1e-4, atol=1e-5)
    flat = torch.tensor([a for row in everything for a in row])
    mean, std = (flat.mean(), flat.std() + 1e-4) if whiten else (torch.tensor(0.0), torch.tensor(1.0))
    for row, advantages in enumerate(everything):
        want = (torch.tensor(advantages) - mean) / std
        torch.testing.assert_close(output["advantages"][row, : len(want)], want, rtol=1e-4, atol=1e-4)
        assert not output["advantages"][row, len(want) :].any()
    targets, guesses = torch.tensor(returns), torch.tensor(values)
    explained = 1 - (targets - guesses).var(correction=0) / targets.var(correction=0)
    metrics = trainer._metrics["train"]
    assert metrics["value/explained_variance"] == [pytest.approx(explained.item(), abs=1e-4)]
    assert metrics["value/mean"] == [pytest.approx(guesses.mean().item(), abs=1e-5)]


def test_the_value_loss_reaches_the_head_and_nothing_else(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective=ppo(value_clip=0.2), num_iterations=2)
    random_head(trainer)
    inputs = rollout(trainer)[0]
    drift(trainer)
    loss, gradients = losses_and_gradients(trainer, [inputs], 1)
    head = [weight.grad.clone() for weight in trainer._critic.head.parameters()]

    # the policy's gradient is that of the clip alone, with the same advantages
    plain = new_trainer(objective={"recipe": "ppo", "advantage": "group_mean"}, num_iterations=2)
    drift(plain)
    alone, want = losses_and_gradients(plain, [inputs], 1)
    assert largest_difference(gradients, want) == 0

    # 0.5·max((V - R)², (V_clipped - R)²), mean over the tokens
    live, total = inputs["completion_mask"].bool(), torch.zeros(())
    weight, bias = (value.detach().clone().requires_grad_() for value in trainer._critic.head.linear.parameters())
    for row in range(len(live)):
        prompt, completion = unpadded(inputs, row)
        with torch.no_grad():
            ids = torch.cat([prompt, completion]).unsqueeze(0)
            hidden = trainer.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 : -1]
        value = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:]) @ weight[0] + bias[0]
        old, target = (inputs[name][row, : len(completion)] for name in ("old_values", "value_targets"))
        near = torch.maximum(torch.minimum(value, old + 0.2), old - 0.2)
        total = total + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2).sum()
    total = total / live.sum()
    torch.testing.assert_close((loss - alone)[0], total.detach(), rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(head, torch.autograd.grad(total, [weight, bias]), strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_splitting_the_batch_keeps_the_gradient_of_the_head(new_trainer: NewTrainer) -> None:
    whole = new_trainer(objective=ppo(), per_device_train_batch_size=12)
    random_head(whole)
    (inputs,) = rollout(whole)
    order = inputs["completion_mask"].sum(1).argsort()  # micro-batches of unequal token counts
    inputs = {key: value[order] if value.dim() else value for key, value in inputs.items()}
    parts = [{k: v[i : i + 4] if v.dim() else v for k, v in inputs.items()} for i in (0, 4, 8)]
    split = new_trainer(objective=ppo(), gradient_accumulation_steps=3)
    random_head(split)
    results = []
    for trainer, batches in ((whole, [inputs]), (split, parts)):
        gradients = losses_and_gradients(trainer, batches, len(batches))[1]
        results.append((gradients, [weight.grad for weight in trainer._critic.head.parameters()]))
    assert_gradients_close(results[1][0], results[0][0])
    for ours, theirs in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_head_has_an_optimiser_group_of_its_own(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective=ppo(value_learning_rate=0.003), weight_decay=0.1, max_steps=2)
    train(trainer)
    groups = trainer.optimizer.param_groups
    parameters = list(trainer._critic.head.parameters())
    (own,) = [group for group in groups if any(each is parameters[0] for each in group["params"])]
    assert len(own["params"]) == 2
    assert own["lr"] == 0.003
    assert own["weight_decay"] == 0.0
    assert {group["lr"] for group in groups if group is not own} == {0.01}
    assert parameters[0].abs().max() > 1e-3  # it did learn
    assert all(weight.grad is None or not weight.grad.any() for weight in parameters)  # and starts anew each step
    named = {id(weight) for weight in trainer.model.parameters()}
    assert not any(id(weight) in named for weight in parameters)


def optimiser_state(trainer: Any) -> list[Tensor]:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    parameters = list(trainer._critic.head.parameters())
    return [value.float() for each in parameters for _, value in sorted(optimizer.state[each].items())]


def test_a_resumed_run_ends_with_the_head_of_an_uninterrupted_one(new_trainer: NewTrainer) -> None:
    options: dict[str, Any] = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = new_trainer(objective=ppo(), **options)
    train(whole)
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    assert (checkpoint / "value_head.safetensors").is_file()
    resumed = new_trainer(objective=ppo(), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    for name, value in whole._critic.head.state_dict().items():
        assert value.any()
        torch.testing.assert_close(resumed._critic.head.state_dict()[name], value, rtol=1e-5, atol=1e-7)
    states = optimiser_state(whole), optimiser_state(resumed)
    assert len(states[0]) == 6  # step and both moments of weight and bias
    for ours, theirs in zip(states[1], states[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-9)
    assert largest_difference(adapter(resumed), adapter(whole)) < 1e-6


def test_a_checkpoint_without_a_head_is_not_resumed_with_one(new_trainer: NewTrainer) -> None:
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = new_trainer(objective="ppo", **options)
    train(trainer)
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    (checkpoint / "value_head.safetensors").unlink()
    with pytest.raises(RunError, match=r"has no value head \(value_head\.safetensors\)"):
        new_trainer(objective="ppo", **options).train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_of_a_run_without_value_head_is_refused_in_words(new_trainer: NewTrainer) -> None:
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = new_trainer(objective="dapo", **options)
    train(trainer)
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    with pytest.raises(RunError, match=r"has no value head \(value_head\.safetensors\)"):
        new_trainer(objective="ppo", **options).train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_with_a_value_head_is_refused_by_a_run_without(new_trainer: NewTrainer) -> None:
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = new_trainer(objective="ppo", **options)
    train(trainer)
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    with pytest.raises(RunError, match=r"has a value head .* needs none"):
        new_trainer(objective="dapo", **options).train(resume_from_checkpoint=str(checkpoint))


def test_the_value_loss_is_logged_also_in_evaluation(new_trainer: NewTrainer, prompts: Any) -> None:
    extra = {"extra": {"eval_dataset": prompts}, "per_device_eval_batch_size": 8, "num_generations_eval": 2}
    trainer = new_trainer(objective="ppo", **extra)
    trainer.evaluate()
    log = trainer.state.log_history[-1]
    # the head says 0 everywhere: loss 0.5·R², nothing explained
    assert log["eval_value/mean"] == 0.0
    assert log["eval_value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert log["eval_value/loss"] > 0


# --- process rewards --------------------------------------------------------------------------------------------------


def with_steps(reward: Any, **changes: Any) -> Callable[..., list[float]]:
    """Half a point at every third token, besides the reward of the completion."""

    def scored(completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
        rows = [[0.5 if place % 3 == 2 else 0.0 for place in range(len(ids))] for ids in completion_ids]
        log_extra("token_rewards", changes.get("change", lambda given: given)(rows))
        return list(reward(completion_ids))

    return scored


def test_process_rewards_are_laid_over_tokens(new_trainer: NewTrainer, reward: Any) -> None:
    objective = {"advantage": {"name": "token_returns", "gamma": 0.5}}
    trainer = new_trainer(
        objective=objective, extra={"reward_funcs": with_steps(reward)}, gradient_accumulation_steps=3
    )
    torch.manual_seed(0)
    output = generated(trainer)
    for row, mask in enumerate(output["completion_mask"].bool()):
        ids = output["completion_ids"][row][mask].tolist()
        rewards = [0.5 if place % 3 == 2 else 0.0 for place in range(len(ids))]
        rewards[-1] += reward([ids])[0]
        want = [sum(r * 0.5 ** (u - t) for u, r in enumerate(rewards) if u >= t) for t in range(len(ids))]
        torch.testing.assert_close(output["advantages"][row, : len(ids)], torch.tensor(want))
        assert not output["advantages"][row, len(ids) :].any()
    assert "token_rewards" not in trainer._logs["extra"]  # a table of completions has no room for it


def test_process_rewards_of_another_length_are_refused(new_trainer: NewTrainer, reward: Any) -> None:
    shorter = with_steps(reward, change=lambda rows: [*rows[:1], rows[1][:-1], *rows[2:]])
    trainer = new_trainer(objective={"advantage": "token_returns"}, extra={"reward_funcs": shorter})
    with pytest.raises(RewardError, match=r"token_rewards of completion 1 holds \d numbers, but the completion has"):
        train(trainer)


@pytest.mark.parametrize("advantage", ["group_zscore", "leave_one_out"])
def test_process_rewards_beside_an_estimator_of_whole_completions_are_refused(
    new_trainer: NewTrainer, reward: Any, advantage: str
) -> None:
    trainer = new_trainer(objective={"advantage": advantage}, extra={"reward_funcs": with_steps(reward)})
    with pytest.raises(ObjectiveError, match=f"advantage '{advantage}' sees one reward a completion"):
        train(trainer)


# --- full KL ----------------------------------------------------------------------------------------------------------


def kl_by_hand(trainer: Any, reference: Callable[[Tensor], Tensor], inputs: dict[str, Any]) -> Tensor:
    """(tokens,) sum over the vocabulary of p·log(p/q) at live tokens, from whole logits of unpadded rows."""
    rows = []
    for row in range(len(inputs["completion_ids"])):
        prompt, completion = unpadded(inputs, row)
        ids = torch.cat([prompt, completion]).unsqueeze(0)
        ours = (trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / trainer.temperature).log_softmax(-1)
        with torch.no_grad():
            theirs = (reference(ids)[0, len(prompt) - 1 : -1] / trainer.temperature).log_softmax(-1)
        divergence = (ours.exp() * (ours - theirs)).sum(-1)
        if "tool_mask" in inputs:
            divergence = divergence[inputs["tool_mask"][row, : len(completion)].bool()]
        rows.append(divergence)
    return torch.cat(rows)


FULL = [{"name": "kl", "estimator": "full", "coef": 0.5}]


@pytest.mark.parametrize(
    ("options", "tools"),
    [
        ({"num_generations": 2, "gradient_accumulation_steps": 3}, False),
        ({"num_iterations": 2, "temperature": 0.8}, False),
        ({"num_generations": 2, "gradient_accumulation_steps": 2, "num_iterations": 2}, True),
    ],
    ids=["accumulation", "two_iterations", "tool_mask"],
)
def test_the_full_kl_and_its_gradient_equal_whole_logits(
    new_trainer: NewTrainer, options: dict[str, Any], tools: bool
) -> None:
    """`token_mean`: loss = clip + 0.5 · mean over the trained tokens, divided by the accumulation."""
    trainer = new_trainer(objective={"recipe": "bnpo", "regularizers": FULL}, **options)
    batches = rollout(trainer)
    drift(trainer)
    if tools:
        for inputs in batches:
            inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
            inputs["tool_mask"][:, 1] = 0
    loss, gradients = losses_and_gradients(trainer, batches, len(batches))
    plain = new_trainer(objective="bnpo", **options)
    drift(plain)
    without, plain_gradients = losses_and_gradients(plain, batches, len(batches))

    def reference(ids: Tensor) -> Tensor:
        with trainer.model.disable_adapter():
            logits: Tensor = trainer.model(input_ids=ids).logits
            return logits

    trainer.model.zero_grad()
    values = []
    for inputs in batches:
        divergence = kl_by_hand(trainer, reference, inputs)
        (0.5 * divergence.mean() / len(batches)).backward()
        values.append(divergence.detach())
    want = torch.stack([0.5 * each.mean() / len(batches) for each in values])
    torch.testing.assert_close(loss - without, want, rtol=1e-4, atol=1e-5)
    expected = {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert_gradients_close({k: gradients[k] - plain_gradients[k] for k in gradients}, expected, rtol=1e-4)

    torch.manual_seed(0)
    trainer._metrics["train"].clear()
    trainer.log({})
    assert log_of(trainer, -1)["kl/full"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)


def test_the_full_kl_of_full_finetuning_is_to_the_model_as_it_was(
    new_trainer: NewTrainer, new_model: Callable[[], Any], tokenizer: Any, tmp_path: Path
) -> None:
    new_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    trainer = new_trainer(
        objective={"recipe": "bnpo", "regularizers": FULL},
        extra={"model": str(tmp_path), "peft_config": None},
        model_init_kwargs={"dtype": "float32"},
        num_iterations=2,
    )
    assert trainer.ref_model is not None
    inputs = rollout(trainer)[0]
    drift(trainer, 0.01)
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, dict(inputs))
    original = new_model()
    want = kl_by_hand(trainer, lambda ids: original(input_ids=ids).logits, inputs).mean().item()
    trainer._metrics["train"].clear()
    trainer.log({})
    assert want > 1e-3
    assert log_of(trainer, -1)["kl/full"] == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize(
    ("objective", "passes"),
    [
        ("dapo", [False, False]),
        ({"recipe": "dapo", "regularizers": FULL}, [True, False, False]),
        ("ppo", [False, False, False]),  # one more pass for the values of the rollout, no reference
    ],
    ids=["dapo", "full_kl", "ppo"],
)
def test_nothing_is_scored_without_need(new_trainer: NewTrainer, objective: Any, passes: list[bool]) -> None:
    trainer = new_trainer(objective=objective, gradient_accumulation_steps=2, unchecked=True)
    seen = watch_scoring(trainer)
    train(trainer)
    assert seen == passes
    assert trainer._passes is None  # no hidden states are kept


@pytest.mark.parametrize("objective", [{"recipe": "dapo", "regularizers": FULL}, {"recipe": "ppo"}], ids=str)
def test_a_backend_that_scores_in_a_way_of_its_own_is_refused_where_hidden_states_are_needed(
    new_trainer: NewTrainer, objective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kit.training.trl_kernel.record", lambda projection: None)
    with pytest.raises(ObjectiveError, match="hidden states of the rollout's scoring were not seen"):
        train(new_trainer(objective=objective, unchecked=True))


# --- norm of the adapter ----------------------------------------------------------------------------------------------


def peft_model(new_model: Callable[[], Any], **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(new_model(), LoraConfig(init_lora_weights=False, **options))


def updates(model: Any) -> list[Tensor]:
    """The change of every adapted weight: what it is merged less what it is."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    held = [(layer, name) for layer in layers for name in layer.active_adapters if name in layer.scaling]
    return [layer.get_delta_weight(name) for layer, name in held]


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        {"r": 3, "lora_alpha": 12, "target_modules": ["up_proj", "down_proj"], "use_rslora": True},
        {"r": 2, "lora_alpha": 1, "target_modules": ["embed_tokens", "q_proj"]},
        {"r": 2, "lora_alpha": 1, "target_modules": ["q_proj"], "rank_pattern": {"layers.0.self_attn.q_proj": 5}},
    ],
    ids=["linear", "rslora", "embedding", "ranks"],
)
def test_the_norm_is_that_of_the_update_formed_by_hand(new_model: Callable[[], Any], options: dict[str, Any]) -> None:
    model = peft_model(new_model, **options)
    norm = lora_weight_norm(model)
    assert norm is not None
    want = sum((update**2).sum() for update in updates(model))
    torch.testing.assert_close(norm, want)
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    for ours, theirs in zip(torch.autograd.grad(norm, trainable), torch.autograd.grad(want, trainable), strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_only_the_active_adapter_counts_and_a_model_without_one_has_no_norm(new_model: Callable[[], Any]) -> None:
    from peft import LoraConfig

    model = peft_model(new_model, r=4, target_modules=["q_proj"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    before = lora_weight_norm(model)
    model.set_adapter("other")
    after = lora_weight_norm(model)
    assert before is not None
    assert after is not None
    torch.testing.assert_close(after, sum((update**2).sum() for update in updates(model)))
    assert abs(after.item() - before.item()) > 1e-3
    assert lora_weight_norm(new_model()) is None


def test_the_weights_penalty_is_added_once_a_step(new_trainer: NewTrainer) -> None:
    coef, results = 0.01, []
    for terms in ([], [{"name": "reference_free_l2", "coef": coef}]):
        trainer = new_trainer(objective={"recipe": "dapo", "regularizers": terms}, gradient_accumulation_steps=3)
        batches = rollout(trainer)
        results.append(losses_and_gradients(trainer, batches, 3))
    (without, plain), (loss, gradients) = results
    norm = sum((update**2).sum() for update in updates(trainer.model))
    torch.testing.assert_close(loss - without, (coef * norm.detach() / 3).expand(3), rtol=1e-3, atol=1e-5)
    names = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    want = dict(zip(names, torch.autograd.grad(coef * norm, weights), strict=True))
    assert_gradients_close({name: gradients[name] - plain[name] for name in names}, want, rtol=1e-3)


def test_a_model_without_lora_has_no_norm_to_offer(new_trainer: NewTrainer) -> None:
    with pytest.raises(ObjectiveError, match="set peft_config"):
        new_trainer(objective={"regularizers": ["reference_free_l2"]}, extra={"peft_config": None})


# --- what hooks and logs see ------------------------------------------------------------------------------------------


def test_rewards_and_truncation_reach_the_hooks_beside_their_completions(
    new_trainer: NewTrainer, tokenizer: Any
) -> None:
    seen: list[tuple[int, float, bool]] = []

    def look(batch: Any) -> Tensor:
        rows = zip(
            batch.mask.sum(1).tolist(), batch.rewards[:, 0].tolist(), batch.truncated[:, 0].tolist(), strict=True
        )
        seen.extend(rows)
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
    assert sorted(map(repr, seen)) == sorted(map(repr, want))  # the trainer shuffles; NaN is not equal to itself


def test_shares_of_masked_tokens_are_counted_in_tokens(new_trainer: NewTrainer, tokenizer: Any) -> None:
    sink: list[Any] = []
    trainer = new_trainer(
        objective="dapo", mask_truncated_completions=True, gradient_accumulation_steps=3, logging_steps=2, max_steps=2,
        extra={"rollout_sinks": [sink.append]},
    )  # fmt: skip
    train(trainer)
    ids = [row for made in sink for row in made.completion_ids]
    cut = sum(len(row) for row in ids if row[-1] != tokenizer.eos_token_id)
    assert 0 < cut < sum(map(len, ids))
    assert log_of(trainer)["masked/truncated"] == pytest.approx(cut / sum(map(len, ids)))
    weighted = new_trainer(objective={"weights": ["drop_truncated"]}, gradient_accumulation_steps=3)
    train(weighted)
    assert "masked/truncated" not in log_of(weighted)
    assert 0 < log_of(weighted)["masked/drop_truncated"] < 1
    assert log_of(weighted)["masked/drop_truncated"] == pytest.approx(1 - log_of(weighted)["weight/drop_truncated"])


def test_tokens_of_tools_are_counted_and_do_not_train(new_trainer: NewTrainer) -> None:
    """An `env_mask` of a rollout function, which TRL treats as the mask of tools."""
    width = 6

    def own(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [[20 + (row + place) % 7 for place in range(width - row % 2)] for row in range(len(prompts))]
        masks = [[0 if place in (1, 2) else 1 for place in range(len(row))] for row in completions]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}

    objective = Recorder(advantage={"name": "token_returns", "gamma": 0.5}, reduction="global_token_mean")
    trainer = new_trainer(objective=objective, extra={"rollout_func": own}, unchecked=True)
    train(trainer)
    (batch,) = objective.seen
    assert batch.mask[:, [1, 2]].any() == torch.tensor(False)
    assert sorted(batch.mask.sum(1).tolist()) == [3, 3, 4, 4]
    assert log_of(trainer)["masked/tools"] == pytest.approx(8 / 22)
    assert not batch.advantages[~batch.mask].any()
    for row, live in zip(batch.advantages, batch.mask, strict=True):  # time is counted in tokens that train
        values = row[live].tolist()
        assert values == pytest.approx([values[-1] * 0.5 ** (len(values) - 1 - place) for place in range(len(values))])


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
        )  # between two tokens, linear in the log ratio


def test_an_objective_of_ones_own_that_logs_nothing_trains(new_trainer: NewTrainer) -> None:
    class Quiet(Objective):
        def loss(self, batch: Any, scale: Any = None) -> LossOutput:
            return LossOutput(super().loss(batch, scale).loss, {}, {}, {})

    trainer = new_trainer(objective=Quiet())
    train(trainer)
    assert trainer.state.global_step == 1


# --- controllers ------------------------------------------------------------------------------------------------------


def steered(**changes: Any) -> Recorder:
    term = {"name": "kl", "coef": "adaptive_kl(target=0.001, horizon=40, start=0.1)", **changes}
    return Recorder(regularizers=[term])


def test_a_controller_observes_the_exact_mean_once_a_step(
    new_trainer: NewTrainer, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.objective.controllers import AdaptiveKL

    told: list[tuple[float, int]] = []
    observe = AdaptiveKL.observe

    def noted(self: Any, mean: float, completions: int) -> None:
        told.append((mean, completions))
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
        assert told[step] == (pytest.approx(mean, rel=1e-4), 12)
        assert logs[step]["coef/kl"] == pytest.approx(coef)
        coef *= 1 + min(max(mean / 0.001 - 1, -0.2), 0.2) * 12 / 40
    assert len(told) == 3  # evaluation in between is not observed
    assert coef == pytest.approx(objective.regularizers[0].coef_at(3))
    assert coef != 0.1


def test_a_controller_survives_a_resume(new_trainer: NewTrainer) -> None:
    options: dict[str, Any] = {
        "max_steps": 4,
        "gradient_accumulation_steps": 3,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = new_trainer(objective=steered(), **options)
    train(whole)
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    saved = json.loads((checkpoint / "objective_state.json").read_text())
    assert saved == {"regularizers.0.coef": {"coef": pytest.approx(log_of(whole, 2)["coef/kl"])}}
    resumed = new_trainer(objective=steered(), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    want = [log["coef/kl"] for log in whole.state.log_history[:4]]
    assert len(set(want)) == 4
    assert [log["coef/kl"] for log in resumed.state.log_history[:4]] == pytest.approx(want)


def test_a_scheduled_coefficient_is_logged_and_a_fixed_one_is_not(new_trainer: NewTrainer) -> None:
    objective = {
        "regularizers": [{"name": "kl", "coef": "linear(0.1, 0.3, 2)"}, {"name": "entropy_bonus", "coef": 0.01}]
    }
    trainer = new_trainer(objective=objective, max_steps=3)
    train(trainer)
    assert [log_of(trainer, step)["coef/kl"] for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert "coef/entropy_bonus" not in log_of(trainer)
