"""A tiny random model with a chat template for tools, and trainers of it with scripted completions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_qwen import one_thread, tiny_qwen, tiny_settings, tiny_tokenizer

one_torch_thread = pytest.fixture(one_thread, scope="session", autouse=True)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer("embedded-tools")


@pytest.fixture(scope="session")
def new_model(tokenizer: Any) -> Callable[[], Any]:
    return lambda: tiny_qwen(tokenizer)


@pytest.fixture(scope="session")
def tool_folder(new_model: Callable[[], Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model in HF layout."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    new_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def new_trainer(tmp_path: Path, new_model: Callable[[], Any], tokenizer: Any) -> Callable[..., Any]:
    """Return `new_trainer(rows, objective=..., script=...)`: 4 completions of one prompt in one micro-batch.

    `script` has the texts of each turn, one per completion; a later turn has one per completion that called a tool. The trainer's
    `seen` records what rewards receive.
    """

    def make(
        rows: list[dict[str, Any]], script: list[list[str]] | None = None, objective: Any = "grpo", **options: Any
    ) -> Any:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import GRPOConfig

        from kit.trainer.trainer import HookedGRPOTrainer

        calls: list[dict[str, Any]] = []

        def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
            calls.append({"completion_ids": completion_ids, **columns})
            return [float(index % 3) for index in range(len(completion_ids))]

        arguments = tiny_settings(tokenizer, tmp_path / "out")
        arguments |= {"max_completion_length": 160, "shuffle_dataset": False} | options.pop("arguments", {})
        trainer = HookedGRPOTrainer(
            new_model(),
            reward,
            GRPOConfig(**arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
            objective=objective,
            first_step_checks=False,
            **options,
        )
        trainer.seen = calls
        if script is not None:
            follow(trainer, script)
        return trainer

    return make


def follow(trainer: Any, script: list[list[str]]) -> None:
    """Replace the model's answers by the turns of the script."""
    turns = iter(script)

    def single_turn(prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        texts = next(turns)
        assert len(texts) == len(prompt_ids)
        return [trainer.processing_class(text, add_special_tokens=False)["input_ids"] for text in texts], None

    trainer._generate_single_turn = single_turn


def call(expression: str) -> str:
    """A call of the calculator in the model's syntax."""
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call><|im_end|>'


QUESTION = [{"role": "user", "content": "Solve the following multiplication: 12 * 7."}]
SCRIPT = [
    [call("12 * 7"), "<answer>84</answer><|im_end|>", call("12 +"), call("1") + " and on"],
    ["<answer>84</answer><|im_end|>", "<answer>?</answer><|im_end|>", "<answer>1"],
]
"""One call that is answered; none; one that fails; one whose answer is cut."""
