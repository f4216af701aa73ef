"""Teachers: prompts, scores of a rollout, and the gradient of the policy, compared with plain logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kit.config import TeacherConfig
from kit.errors import ConfigError, ModelError, ObjectiveError
from kit.trainer.teacher import (
    Teacher,
    check_teacher,
    check_vocabulary,
    demonstrations,
    feedback_of,
    prompt_maker,
)

from .rollouts import (
    NewTrainer,
    adapter,
    assert_gradients_close,
    drift,
    generated,
    plain_logps,
    rollout,
    train,
    unpadded,
)
from .steps import in_a_step

HINT = "{prompt} The answer is {target}."
SHOWN = TeacherConfig(model="self", prompt=HINT)
DISTILL = {"recipe": "opd"}


def taught(new_trainer: NewTrainer, settings: TeacherConfig = SHOWN, model: Any = None, **changes: Any) -> Any:
    options = {"objective": DISTILL, "unchecked": True} | changes
    return new_trainer(**options, extra={"teacher": Teacher(settings, model)})


def hinted(trainer: Any, row: int) -> Tensor:
    """The ids of a row's prompt with the hint, from the tokenizer alone."""
    shown = trainer.train_dataset[row]
    text = f"{shown['prompt']} The answer is {shown['target']}."
    return torch.tensor(trainer.processing_class(text)["input_ids"])


def row_of(trainer: Any, inputs: dict[str, Any], row: int) -> int:
    """The number of the data row to which a completion belongs."""
    prompt, _ = unpadded(inputs, row)
    texts = [trainer.processing_class(text)["input_ids"] for text in trainer.train_dataset["prompt"]]
    return texts.index(prompt.tolist())


def by_hand(trainer: Any, model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Log-probabilities (T, V) of each completion after its hint."""
    with torch.no_grad():
        return [
            plain_logps(model, hinted(trainer, row_of(trainer, inputs, row)), unpadded(inputs, row)[1])
            for row in range(len(inputs["completion_ids"]))
        ]


def test_the_teacher_reads_its_own_prompt(new_trainer: NewTrainer) -> None:
    settings = TeacherConfig(model="self", prompt=HINT)
    trainer = taught(new_trainer, settings, objective={"recipe": "grpo_sdpo"})
    drift(trainer)
    output = generated(trainer)
    for row, logps in enumerate(by_hand(trainer, trainer.model, output)):
        _, completion = unpadded(output, row)
        torch.testing.assert_close(
            output["teacher_logps"][row][: len(completion)],
            logps.gather(1, completion[:, None])[:, 0],
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("divergence", ["reverse", "forward", "jensen_shannon"])
def test_loss_and_gradients_of_distillation_are_those_of_plain_logits(new_trainer: NewTrainer, divergence: str) -> None:
    objective = {"recipe": "opd", "regularizers": [{"name": "distill", "divergence": divergence, "coef": 0.7}]}
    trainer = taught(new_trainer, objective=objective, gradient_accumulation_steps=2, num_generations=2)
    batches = rollout(trainer)
    teachers = [by_hand(trainer, trainer.model, inputs) for inputs in batches]
    losses, gradients = in_a_step(trainer, batches, accumulation=2)
    trainer.model.zero_grad()
    for inputs, teacher_logps, logged_loss in zip(batches, teachers, losses, strict=True):
        total = torch.zeros(())
        for row, teacher in enumerate(teacher_logps):
            prompt, completion = unpadded(inputs, row)
            policy = plain_logps(trainer.model, prompt, completion)
            mixture = torch.logaddexp(policy, teacher) - torch.log(torch.tensor(2.0))
            forward = (teacher.exp() * (teacher - policy)).sum()
            reverse = (policy.exp() * (policy - teacher)).sum()
            shannon = (
                0.5 * (policy.exp() * (policy - mixture)).sum() + 0.5 * (teacher.exp() * (teacher - mixture)).sum()
            )
            total = total + {"forward": forward, "reverse": reverse, "jensen_shannon": shannon}[divergence]
        loss = 0.7 * total / inputs["num_items_in_batch"]
        torch.testing.assert_close(loss.detach(), logged_loss, rtol=1e-4, atol=1e-6)
        loss.backward()
    expected = {name: w.grad.clone() for name, w in trainer.model.named_parameters() if w.requires_grad}
    assert_gradients_close(gradients, expected, rtol=1e-3)


def test_a_teacher_like_the_policy_teaches_nothing(new_trainer: NewTrainer) -> None:
    trainer = taught(new_trainer, TeacherConfig(model="self", prompt="{prompt}"), objective={"recipe": "sdpo"})
    batches = rollout(trainer)
    losses, gradients = in_a_step(trainer, batches, accumulation=1)
    torch.testing.assert_close(losses, torch.zeros_like(losses), rtol=0, atol=1e-6)
    assert max(gradient.abs().max() for gradient in gradients.values()) < 1e-5


def test_the_limit_without_a_teacher_is_grpo_to_the_bit(new_trainer: NewTrainer) -> None:
    advantage = {"name": "sdpo", "mix": 1.0}
    with_teacher = taught(new_trainer, objective={"recipe": "grpo", "advantage": advantage}, max_steps=2)
    without = new_trainer(objective="grpo", unchecked=True, max_steps=2)
    train(with_teacher)
    train(without)
    weights = adapter(without)
    assert all(torch.equal(value, weights[name]) for name, value in adapter(with_teacher).items())


def test_completions_without_a_prompt_for_the_teacher_have_none(new_trainer: NewTrainer) -> None:
    settings = TeacherConfig(model="self", prompt=HINT)
    trainer = taught(new_trainer, settings, gradient_accumulation_steps=4, num_generations=2)
    make = trainer.teacher.make
    trainer.teacher.make = lambda row, **columns: make(row=row, **columns) if row["target"] > 5 else None
    batches = rollout(trainer)
    for inputs in batches:
        for row in range(len(inputs["completion_ids"])):
            has = trainer.train_dataset[row_of(trainer, inputs, row)]["target"] > 5
            live = inputs["completion_mask"][row].bool()
            assert bool(inputs["teacher_known"][row]) == has
            assert bool(inputs["teacher_logps"][row][live].isfinite().all()) == has
    losses, _ = in_a_step(trainer, batches, accumulation=4)
    assert losses.isfinite().all()
    share = sum(float(inputs["teacher_known"].float().mean()) for inputs in batches) / len(batches)
    assert 0.0 < share < 1.0
    assert trainer._metrics["train"]["teacher/share"][-1] == pytest.approx(share)


# --- prompts of a teacher ---------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def test_a_template_takes_the_place_of_the_last_message_of_the_user() -> None:
    made = prompt_maker("{prompt} It is {reference}.")(row={"prompt": CHAT, "reference": "4"}, prompt="2 + 2?")
    assert made == [CHAT[0], {"role": "user", "content": "2 + 2? It is 4."}]
    assert CHAT[1]["content"] == "2 + 2?"


@pytest.mark.parametrize("missing", [None, ""])
def test_a_template_without_one_of_its_parts_gives_none(missing: str | None) -> None:
    assert prompt_maker("{prompt} {demonstration}")(row={"prompt": "x"}, prompt="x", demonstration=missing) is None


def test_demonstrations_are_the_best_other_completions_of_the_group() -> None:
    rewards, groups = [0.0, 1.0, 2.0, 1.0, 0.0, 0.5], [0, 0, 0, 0, 1, 1]
    assert demonstrations(rewards, groups, least=1.0) == [2, 2, None, 2, None, None]
    assert demonstrations([1.0, 1.0, 1.0], [0, 0, 0], least=1.0) == [1, 0, 0]
    assert demonstrations([float("nan"), 1.0], [0, 0], least=1.0) == [1, None]


def test_feedback_is_the_column_of_that_name_or_else_every_reason() -> None:
    extra = {"accuracy/reason": ["no number", None], "format/reason": ["no box", None], "accuracy/status": ["ok", "ok"]}
    assert feedback_of(extra, 2) == ["no number; no box", ""]
    assert feedback_of(extra | {"feedback": ["try again", ""]}, 2) == ["try again", ""]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "needs", "error", "message"),
    [
        ({}, {"teacher_kl"}, ObjectiveError, "has no teacher"),
        ({"model": "self", "prompt": "{prompt}"}, set(), ConfigError, "would be ignored"),
        ({"model": "self", "prompt": "{refrence}"}, {"teacher_kl"}, ConfigError, "Did you mean 'reference'"),
    ],
)
def test_what_cannot_teach_is_refused(config: Any, needs: set[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_teacher(TeacherConfig(**config), needs, ["prompt", "reference"])


def test_another_tokenizer_is_refused(tokenizer: Any) -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {**tokenizer.get_vocab(), "another": 10_000}

    check_vocabulary(tokenizer, tokenizer, "here")
    with pytest.raises(ModelError, match="another tokenizer than the policy"):
        check_vocabulary(tokenizer, Other(), "there")
