"""Tokens written by tools: their mask, and their absence from the loss and gradient of every recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kit.environments.calculator import Calculator
from kit.objective import Objective
from kit.objective.recipes import recipe_names
from kit.runner.recording import columns
from kit.trainer.teacher import TEACHER_NEEDS
from tests.training.rollouts import generated
from tests.turns.conftest import QUESTION, SCRIPT, call

NewTrainer = Callable[..., Any]
ROW = {"prompt": QUESTION, "reference": "84"}


@pytest.fixture
def scripted(new_trainer: NewTrainer) -> Callable[..., Any]:
    def make(objective: Any = "grpo", script: Any = SCRIPT, **options: Any) -> Any:
        return new_trainer([ROW], script, objective, environment_factory=Calculator, **options)

    return make


def test_turns_masks_lengths_and_reasons(scripted: Callable[..., Any]) -> None:
    rollouts: list[Any] = []
    trainer = scripted(rollout_sinks=[rollouts.append])
    output = generated(trainer)
    (rollout,) = rollouts
    decode = trainer.processing_class.decode
    for ids, mask, text, answer in zip(
        rollout.completion_ids, rollout.tool_mask, SCRIPT[0], [*SCRIPT[1][:1], None, *SCRIPT[1][1:]], strict=True
    ):
        own = decode([token for token, mine in zip(ids, mask, strict=True) if mine])
        tool_text = decode([token for token, mine in zip(ids, mask, strict=True) if not mine])
        assert own == text + (answer or "")
        assert (tool_text == "") == (answer is None)
    roles = [[message["role"] for message in completion] for completion in rollout.completions]
    assert roles == [["assistant", "tool", "assistant"], ["assistant"], *[["assistant", "tool", "assistant"]] * 2]
    assert rollout.completions[0][1]["content"] == "84"
    assert "no arithmetic expression" in rollout.completions[2][1]["content"]
    assert rollout.truncated == [False, False, False, True]
    assert [environment.expressions for environment in trainer.environments] == [["12 * 7"], [], ["12 +"], ["1"]]
    assert trainer.seen[0]["environments"] == trainer.environments
    own_lengths = [sum(mask) for mask in rollout.tool_mask]
    assert output["tool_mask"].sum() - (output["completion_mask"] == 0).sum() == sum(own_lengths)
    assert trainer._metrics["train"]["completions/mean_length"] == [sum(own_lengths) / 4]


def test_a_turn_goes_on_from_the_very_ids_that_were_sampled(scripted: Callable[..., Any]) -> None:
    """The ids are not those that the tokenizer makes of the text, so tokenising a turn again would change them."""
    rollouts: list[Any] = []
    trainer = scripted(script=[], rollout_sinks=[rollouts.append])
    tokenizer = trainer.processing_class

    def encoded(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def oddly(text: str) -> list[int]:
        splits = (encoded(text[:cut]) + encoded(text[cut:]) for cut in range(1, len(text)))
        return next(ids for ids in splits if ids != encoded(text) and tokenizer.decode(ids) == text)

    turns = [[oddly(text) for text in texts] for texts in SCRIPT]
    prompts: list[Any] = []

    def single_turn(prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        prompts.append([list(ids) for ids in prompt_ids])
        return [list(ids) for ids in turns[len(prompts) - 1]], None

    trainer._generate_single_turn = single_turn
    generated(trainer)
    (rollout,) = rollouts
    calling = [0, 2, 3]
    for place, row in enumerate(calling):
        began = prompts[0][row] + turns[0][row]
        assert prompts[1][place][: len(began)] == began
        tool = prompts[1][place][len(began) :]
        assert tool
        assert rollout.completion_ids[row] == turns[0][row] + tool + turns[1][place]
        assert rollout.tool_mask[row] == [1] * len(turns[0][row]) + [0] * len(tool) + [1] * len(turns[1][place])
    assert rollout.completion_ids[1] == turns[0][1]


def test_files_show_the_turns_and_the_tools_tokens(scripted: Callable[..., Any]) -> None:
    rollouts: list[Any] = []
    generated(scripted(rollout_sinks=[rollouts.append]))
    table = columns(rollouts[0])
    assert table["completion"][0] == "calculate(expression='12 * 7')\n[calculate] 84\n<answer>84</answer>"
    assert table["tokens"] == [sum(mask) for mask in rollouts[0].tool_mask]
    assert table["tool_tokens"][1] == 0 < table["tool_tokens"][0]
    assert table["finish_reason"] == ["stop", "stop", "stop", "length"]
    assert '"role": "tool"' in table["turns"][0]
    assert [len(mask) for mask in table["tool_mask"]] == [len(ids) for ids in table["completion_ids"]]


def test_an_answer_that_does_not_fit_is_not_given(scripted: Callable[..., Any]) -> None:
    rollouts: list[Any] = []
    ids = scripted().processing_class(call("12 * 7"), add_special_tokens=False)["input_ids"]
    short = {"arguments": {"max_completion_length": len(ids) + 2}}
    generated(scripted(script=[[call("12 * 7")] * 4], rollout_sinks=[rollouts.append], **short))
    assert rollouts[0].completion_ids == [ids] * 4
    assert rollouts[0].tool_mask == [[1] * len(ids)] * 4
    assert rollouts[0].truncated == [True] * 4


SUPPORTED = [name for name in recipe_names() if not Objective.from_spec(name).needs & TEACHER_NEEDS]


@pytest.mark.parametrize("recipe", SUPPORTED)
def test_no_recipe_learns_from_what_tools_wrote(scripted: Callable[..., Any], recipe: str) -> None:
    """The gradient at a tool's tokens is zero.

    Their log-probabilities change neither the loss nor the other gradients.
    """
    trainer = scripted(recipe)
    inputs = generated(trainer)
    trainer.current_gradient_accumulation_steps = 1
    of_tools = (inputs["completion_mask"] == 1) & (inputs["tool_mask"] == 0)
    assert of_tools.any()
    score = trainer.scorer.score
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for shift in (0.0, 5.0):
        leaves: list[torch.Tensor] = []

        def scoring(*args: Any, moved: float = shift, scored: list[torch.Tensor] = leaves, **keywords: Any) -> Any:
            output = score(*args, **keywords)
            leaf = (output.logps + moved * of_tools).detach().requires_grad_()
            scored.append(leaf)
            entropy = None if output.entropy is None else output.entropy.detach() + moved * of_tools
            return replace(output, logps=leaf, entropy=entropy)

        trainer.scorer.score = scoring
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        (slope,) = torch.autograd.grad(loss, leaves[-1])
        results.append((loss.detach(), slope))
    (loss, slope), (moved_loss, moved_slope) = results
    assert slope.abs().sum() > 0
    assert slope[of_tools].abs().max() == 0
    assert moved_slope[of_tools].abs().max() == 0
    torch.testing.assert_close(moved_loss, loss)
    torch.testing.assert_close(moved_slope, slope)


def test_the_loss_is_that_of_the_policys_tokens_alone(scripted: Callable[..., Any]) -> None:
    """The reference computes GRPO from the logits of each unpadded row, over the tokens that the model wrote."""
    rollouts: list[Any] = []
    trainer = scripted("grpo", rollout_sinks=[rollouts.append])
    inputs = generated(trainer)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    trainer.model.zero_grad()
    (rollout,) = rollouts
    rewards = torch.tensor([0.0, 1.0, 2.0, 0.0])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    terms = []
    for prompt, ids, mask, advantage in zip(
        rollout.prompt_ids, rollout.completion_ids, rollout.tool_mask, advantages, strict=True
    ):
        logits = trainer.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)][torch.tensor(mask).bool()]
        terms.append(-(advantage * (logps - logps.detach()).exp()).mean())
    reference = torch.stack(terms).mean()
    reference.backward()
    torch.testing.assert_close(loss.detach(), reference.detach(), atol=1e-5, rtol=1e-4)
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad:
            assert (weight.grad - gradients[name]).norm() <= 1e-4 * weight.grad.norm(), name


def test_a_rollout_function_with_tokens_of_others(new_trainer: NewTrainer) -> None:
    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        return {
            "prompt_ids": [[30, 31]] * count,
            "completion_ids": [[40, 41, 42, trainer.eos_token_ids[0]]] * count,
            "logprobs": None,
            "env_mask": [[1, 0, 0, 1]] * count,
            "told": list(range(count)),
        }

    rollouts: list[Any] = []
    options = {"rollout_func": rollout, "rollout_sinks": [rollouts.append]}
    trainer = new_trainer([ROW], **options)
    output = generated(trainer)
    assert output["tool_mask"].tolist() == [[1, 0, 0, 1]] * 4
    assert trainer.seen[0]["prompt_ids"] == [[30, 31]] * 4
    assert trainer.seen[0]["told"] == [0, 1, 2, 3]
    trainer.current_gradient_accumulation_steps = 1
    assert torch.isfinite(trainer.compute_loss(trainer.model, output))
