"""A tiny random Qwen3, its tokenizer, a few prompts and a reward, and a factory of trainers around them. No network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_qwen import TARGETS, placed_ids, tiny_qwen, tiny_settings, tiny_tokenizer

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


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seeded() -> None:
    """A test begins with the same random numbers, whatever was run before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a head of 3 rows and 5 columns, so that small problems cross tile borders in both directions."""
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
    """Builds the model anew: the same random weights every time, in evaluation mode."""
    return lambda: tiny_qwen(tokenizer)


@pytest.fixture(scope="session")
def prompts() -> Any:
    """Prompts of 3 to 20-odd tokens, so that left padding is ragged, and a column for rewards."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": PROMPTS, "target": [8, 15, 1, 1, 0, 9, -10, 5]})


@pytest.fixture(scope="session")
def reward() -> Callable[..., list[float]]:
    return placed_ids


@pytest.fixture(scope="session")
def arguments(tokenizer: Any) -> Callable[..., Any]:
    """`GRPOConfig` on the CPU in float32: 4 completions of one prompt a micro-batch, of 1 to 8 tokens."""
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
    """Builds a trainer of a LoRA adapter whose A and B are both random: `new_trainer(objective=..., **GRPOConfig)`.

    `stock=True` gives TRL's own class; `extra` are arguments of the trainer itself; `unchecked=True` leaves the checks of
    the first steps out, which score and call hooks more often than a test may count on.
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
        if needs & TEACHER_NEEDS:  # for tests that go through all recipes
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
