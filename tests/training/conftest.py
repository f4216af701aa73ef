"""A tiny random Qwen3, its tokenizer, a few prompts and a reward, and a factory of trainers around them. No network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_qwen import TARGETS, one_thread, placed_ids, tiny_qwen, tiny_settings, tiny_tokenizer

PROMPTS = [
    "3 + 5 =",
    "State the final answer to the following arithmetic problem: 12 - 4 + 7 =",
    "1 =",
    "8 - 9 + 2 =",
    "State the final answer: 6 - 6 =",
    "The sum of 2 and 7 is",
    "0 - 1 - 2 - 3 - 4 =",
    "5 =",
]


one_torch_thread = pytest.fixture(one_thread, scope="session", autouse=True)


@pytest.fixture
def seeded() -> None:
    """Set torch's seed to 0 before each test, so that the result does not depend on earlier tests."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the tiles of the head to 3 rows and 5 columns, so that small problems cross tile borders in both directions."""
    from kit.scoring import head

    monkeypatch.setitem(head.TILES, "cpu", (3, 15))


@pytest.fixture(scope="session", autouse=True)
def offline() -> Iterator[None]:
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def new_model(tokenizer: Any) -> Callable[[], Any]:
    """Return a function that builds a model in evaluation mode, with the same random weights at each call."""
    return lambda: tiny_qwen(tokenizer)


@pytest.fixture(scope="session")
def prompts() -> Any:
    """A dataset of prompts of 3 to about 20 tokens, so that left padding is ragged, and a column for the rewards."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": PROMPTS, "target": [8, 15, 1, 1, 0, 9, -10, 5]})


@pytest.fixture(scope="session")
def reward() -> Callable[..., list[float]]:
    return placed_ids


@pytest.fixture(scope="session")
def arguments(tokenizer: Any) -> Callable[..., Any]:
    """Return a factory of `GRPOConfig`: float32 on the CPU, micro-batches of 4 completions of one prompt, 1 to 8 tokens each."""
    from trl import GRPOConfig

    return lambda folder, **changes: GRPOConfig(**tiny_settings(tokenizer, folder) | changes)


@pytest.fixture(scope="session")
def new_trainer(
    tmp_path_factory: pytest.TempPathFactory,
    new_model: Callable[[], Any],
    tokenizer: Any,
    prompts: Any,
    reward: Callable[..., list[float]],
    arguments: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a factory of trainers whose LoRA matrices A and B are random: `new_trainer(objective=..., **GRPOConfig)`.

    `stock=True` builds TRL's own class; `extra` holds arguments of the trainer itself; `unchecked=True` disables the checks of
    the first steps, which call scorer and hooks more often than some tests expect.
    """

    def make(
        stock: bool = False,
        objective: Any = None,
        extra: dict[str, Any] | None = None,
        unchecked: bool = False,
        **changes: Any,
    ) -> Any:
        from peft import LoraConfig
        from trl import GRPOTrainer

        from kit.config import TeacherConfig
        from kit.objective import Objective
        from kit.scoring.head import install_torch_logprob_kernel
        from kit.trainer.teacher import TEACHER_NEEDS, Teacher
        from kit.trainer.trainer import HookedGRPOTrainer

        install_torch_logprob_kernel()
        needs = Objective.from_spec(objective).needs if isinstance(objective, str) else frozenset()
        if needs & TEACHER_NEEDS:  # for tests over all recipes
            hint = TeacherConfig(model="self", prompt="{prompt} The answer is {target}.")
            extra = {"teacher": Teacher(hint), **(extra or {})}
        options: dict[str, Any] = {
            "model": new_model(),
            "reward_funcs": reward,
            "args": arguments(tmp_path_factory.mktemp("run"), **changes),
            "train_dataset": prompts,
            "processing_class": tokenizer,
            "peft_config": LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False),
        } | (extra or {})
        if stock:
            return GRPOTrainer(**options)
        return HookedGRPOTrainer(**options, objective=objective, first_step_checks=not unchecked)

    return make
