"""Regularizers that need the model: the KL over the vocabulary, and the norm of the adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.errors import ObjectiveError
from kit.scoring.head import ChunkedLogProb, LogProbDispatcher

from .rollouts import (
    NewTrainer,
    assert_gradients_close,
    drift,
    log_of,
    losses_and_gradients,
    rollout,
    train,
    unpadded,
    watch_scoring,
)

# --- full KL ----------------------------------------------------------------------------------------------------------


def kl_by_hand(trainer: Any, reference: Callable[[Tensor], Tensor], inputs: dict[str, Any]) -> Tensor:
    """The sum of p·log(p/q) over the vocabulary, (tokens,), at live tokens, from complete logits of unpadded rows."""
    rows = []
    for row in range(len(inputs["completion_ids"])):
        prompt, completion = unpadded(inputs, row)
        ids = torch.cat([prompt, completion]).unsqueeze(0)
        logps = (trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / trainer.temperature).log_softmax(-1)
        with torch.no_grad():
            target = (reference(ids)[0, len(prompt) - 1 : -1] / trainer.temperature).log_softmax(-1)
        divergence = (logps.exp() * (logps - target)).sum(-1)
        if "tool_mask" in inputs:
            divergence = divergence[inputs["tool_mask"][row, : len(completion)].bool()]
        rows.append(divergence)
    return torch.cat(rows)


FULL = [{"name": "kl", "estimator": "full", "coef": 0.5}]


@pytest.mark.parametrize(
    ("options", "tools"),
    [
        ({"num_iterations": 2, "temperature": 0.8}, False),
        ({"num_generations": 2, "gradient_accumulation_steps": 2, "num_iterations": 2}, True),
    ],
    ids=["two_iterations", "tool_mask"],
)
def test_the_full_kl_and_its_gradient_equal_whole_logits(
    new_trainer: NewTrainer, options: dict[str, Any], tools: bool
) -> None:
    """With `token_mean`, loss = clip + 0.5 · mean over the trained tokens, divided by the accumulation."""
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


@pytest.mark.parametrize("packing", [True, False])
def test_the_reference_pass_keeps_only_the_head(new_trainer: NewTrainer, packing: bool) -> None:
    extra = {"packing": packing}
    trainer = new_trainer(objective={"recipe": "grpo", "regularizers": FULL}, unchecked=True, extra=extra)
    batches = rollout(trainer)
    width = batches[0]["ref_hidden"].shape[-1]
    for restored in (False, True):
        if restored:
            trainer.checkpoints.restore_reference_head(batches[0])
        head = trainer.rollout_memory.reference_head
        assert head.hidden.shape == (0, width)
        assert head.hidden.untyped_storage().nbytes() == 0
        assert head.weight is trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings().weight


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
        ("ppo", [False, False, False]),  # one more pass for the values; no reference
    ],
    ids=["dapo", "full_kl", "ppo"],
)
def test_nothing_is_scored_without_need(new_trainer: NewTrainer, objective: Any, passes: list[bool]) -> None:
    trainer = new_trainer(objective=objective, gradient_accumulation_steps=2, unchecked=True)
    scored = watch_scoring(trainer)
    train(trainer)
    assert scored == passes
    assert trainer._state is None  # hidden states are not stored


@pytest.mark.parametrize("objective", [{"recipe": "dapo", "regularizers": FULL}, {"recipe": "ppo"}], ids=str)
def test_a_backend_without_hidden_states_is_refused_by_hooks_that_need_them(
    new_trainer: NewTrainer, objective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogProbDispatcher, "apply", lambda _, *args: (*ChunkedLogProb.apply(*args), None, None, None))
    with pytest.raises(ObjectiveError, match=r"hidden states of"):
        train(new_trainer(objective=objective, unchecked=True))
