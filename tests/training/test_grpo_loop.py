"""examples/grpo_loop.py is GRPO: its gradient is that of the trainer on the same completions, and the model learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load_script

import rewards
from kit import HookedGRPOTrainer
from kit.objective import Objective

from .rollouts import assert_gradients_close

PATH = Path(__file__).parents[2] / "examples/grpo_loop.py"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module, with small groups and one update."""
    module = load_script(PATH)
    for name, value in {"GROUP": 4, "UPDATES": 1, "MAX_TOKENS": 16}.items():
        monkeypatch.setattr(module, name, value)
    return module


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def test_first_gradient_equals_the_trainers(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokenizer = loop.load_model()
    with torch.no_grad():  # LoRA starts with B = 0, which would leave A without a gradient
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.02 * torch.randn_like(weight)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    problems, answered = loop.make_problems(4), []
    sample = loop.sample
    monkeypatch.setattr(loop, "sample", lambda *args: answered.append(sample(*args)) or answered[-1])
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    preset = rewards.load("gsm8k-reasoning")
    loop.train_step(model, tokenizer, optimizer, Objective.from_spec("dapo"), preset, problems)
    loop_gradients = gradients(model)

    trainer = trainer_of(loop, start, tokenizer, preset, problems, tmp_path)
    (answers,) = answered
    completions = [
        ids[mask].tolist() for ids, mask in zip(answers.tokens[:, answers.start :], answers.mask, strict=True)
    ]
    assert len({len(ids) for ids in completions}) > 1
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *_: (completions, None))
    rows = [row for row in trainer.train_dataset for _ in range(loop.GROUP)]
    inputs = trainer._generate_and_score_completions(rows)
    trainer.compute_loss(trainer.model, inputs).backward()
    assert_gradients_close(loop_gradients, gradients(trainer.model), rtol=1e-5)

    trainer.model.zero_grad()  # remove the gradients of the loss above
    trainer.policy_loss.objective = Objective.from_spec("dr_grpo")
    trainer.compute_loss(trainer.model, inputs).backward()
    with pytest.raises(AssertionError):
        assert_gradients_close(loop_gradients, gradients(trainer.model), rtol=1e-5)


def trainer_of(loop: Any, start: dict[str, Any], tokenizer: Any, preset: Any, problems: Any, folder: Path) -> Any:
    """The kit's trainer with the same weights, objective, reward and problems as the example."""
    from datasets import Dataset
    from trl import GRPOConfig

    model, _ = loop.load_model()
    model.load_state_dict(start)
    scored, size = preset.trl(), loop.GROUP * len(problems)
    arguments = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=size, num_generations=loop.GROUP, max_completion_length=loop.MAX_TOKENS,
        reward_weights=scored.reward_weights,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": question}], "reference": right} for question, right in problems]
    trainer = HookedGRPOTrainer(
        model,
        scored,
        arguments,
        Dataset.from_list(rows),
        processing_class=tokenizer,
        objective="dapo",
        first_step_checks=False,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.docs
def test_the_loop_learns(tmp_path: Path) -> None:
    """Run the example with fewer steps and problems and one thread, to save time."""
    code, script = PATH.read_text(encoding="utf-8"), tmp_path / "grpo_loop.py"
    for line, short in (
        ("\nSTEPS = 12", "\nSTEPS = 6"),
        ("\nHELD_OUT = 200", "\nHELD_OUT = 50"),
        ("threads(2)", "threads(1)"),
    ):
        assert code.count(line) == 1
        code = code.replace(line, short)
    script.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    before, after = (float(score) for score in re.findall(r"^(?:before|after): ([\d.]+) of", done.stdout, re.MULTILINE))
    assert 0 < before <= 0.3
    assert after >= max(2 * before, 0.6)
