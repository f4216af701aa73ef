"""The value head of `gae`: its values, its loss, its optimiser group and its checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .rollouts import (
    NewTrainer,
    drift,
    generated,
    largest_difference,
    log_of,
    losses_and_gradients,
    rollout,
    train,
    unpadded,
)


def random_head(trainer: Any, size: float = 0.5) -> None:
    """Set random weights, because the head starts with zeros."""
    generator = torch.Generator().manual_seed(2)
    linear = trainer.critic.head.linear
    with torch.no_grad():
        linear.weight.copy_(size * torch.randn(linear.weight.shape, generator=generator))
        linear.bias.fill_(0.3)


def values_by_hand(trainer: Any, prompt: Tensor, completion: Tensor) -> Tensor:
    """Values (T,) of one unpadded row: layer norm and linear layer of the hidden state that predicted each token."""
    with torch.no_grad():
        ids = torch.cat([prompt, completion]).unsqueeze(0)
        hidden = trainer.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 : -1]
        centred = hidden - hidden.mean(-1, keepdim=True)
        hidden = centred / (hidden.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        linear = trainer.critic.head.linear
        return hidden @ linear.weight[0] + linear.bias[0]


def gae_by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    out, later, following = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        later = delta + gamma * lam * later
        out[t], following = later, values[t]
    return out


def ppo(**changes: Any) -> dict[str, Any]:
    return {"recipe": "ppo", "advantage": {"gamma": 0.9, "lam": 0.8, "whiten": False, **changes}}


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}], ids=["one_more_scoring", "trls_scoring"])
def test_values_and_advantages_equal_plain_arithmetic_on_unpadded_rows(
    new_trainer: NewTrainer, reward: Any, options: dict[str, Any]
) -> None:
    trainer = new_trainer(objective=ppo(), num_generations=2, gradient_accumulation_steps=4, **options)
    random_head(trainer)
    torch.manual_seed(1)
    output = generated(trainer)
    assert output["completion_mask"].sum(1).unique().numel() > 2
    assert output["prompt_mask"].sum(1).unique().numel() > 2
    values, returns = [], []
    for row in range(len(output["completion_ids"])):
        prompt, completion = unpadded(output, row)
        value = values_by_hand(trainer, prompt, completion)
        length = len(completion)
        torch.testing.assert_close(output["old_values"][row, :length], value, rtol=1e-4, atol=1e-5)
        assert not output["old_values"][row, length:].any()
        rewards = [0.0] * (length - 1) + reward([completion.tolist()])
        advantages = gae_by_hand(rewards, value.tolist(), 0.9, 0.8)
        torch.testing.assert_close(output["advantages"][row, :length], torch.tensor(advantages), rtol=1e-4, atol=1e-4)
        assert not output["advantages"][row, length:].any()
        values += value.tolist()
        returns += [a + v for a, v in zip(advantages, value.tolist(), strict=True)]
        targets = torch.tensor(advantages) + value
        torch.testing.assert_close(output["value_targets"][row, :length], targets, rtol=1e-4, atol=1e-5)
    targets, guesses = torch.tensor(returns), torch.tensor(values)
    explained = 1 - (targets - guesses).var(correction=0) / targets.var(correction=0)
    metrics = trainer._metrics["train"]
    assert metrics["value/explained_variance"] == [pytest.approx(explained.item(), abs=1e-4)]
    trainer.log({})
    assert log_of(trainer, -1)["value/mean"] == pytest.approx(guesses.mean().item(), abs=1e-5)


def test_the_value_loss_reaches_the_head_and_nothing_else(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective=ppo(value_clip=0.2), num_iterations=2)
    random_head(trainer)
    inputs = rollout(trainer)[0]
    drift(trainer)
    loss, gradients = losses_and_gradients(trainer, [inputs], 1)
    head = [weight.grad.clone() for weight in trainer.critic.head.parameters()]

    # the policy's gradient is that of the clip alone, with the same advantages
    plain = new_trainer(objective={"recipe": "ppo", "advantage": "group_mean"}, num_iterations=2)
    drift(plain)
    alone, want = losses_and_gradients(plain, [inputs], 1)
    assert largest_difference(gradients, want) == 0

    # 0.5·max((V - R)², (V_clipped - R)²), mean over the tokens
    live, total = inputs["completion_mask"].bool(), torch.zeros(())
    weight, bias = (value.detach().clone().requires_grad_() for value in trainer.critic.head.linear.parameters())
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
    for gradient, expected in zip(head, torch.autograd.grad(total, [weight, bias]), strict=True):
        assert expected.any()
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


def test_the_head_has_an_optimiser_group_of_its_own(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective=ppo(value_learning_rate=0.003), weight_decay=0.1, max_steps=2)
    train(trainer)
    groups = trainer.optimizer.param_groups
    parameters = list(trainer.critic.head.parameters())
    (own,) = [group for group in groups if any(each is parameters[0] for each in group["params"])]
    assert len(own["params"]) == 2
    assert own["lr"] == 0.003
    assert own["weight_decay"] == 0.0
    assert {group["lr"] for group in groups if group is not own} == {0.01}
    assert parameters[0].abs().max() > 1e-3  # the head has learned
    assert all(weight.grad is None or not weight.grad.any() for weight in parameters)  # cleared after a step
    named = {id(weight) for weight in trainer.model.parameters()}
    assert not any(id(weight) in named for weight in parameters)
