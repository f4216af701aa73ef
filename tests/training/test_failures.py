"""kit.models.failures: failures of memory and of the GPU, with the errors of the libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from kit.models.failures import BatchSizeBackoff, is_lost, is_out_of_memory
from kit.scoring import packing, scorer

from .rollouts import NewTrainer

ALLOC_FAILED = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NOT_INITIALIZED = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
CUDNN = "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"
ASSERT = torch.AcceleratorError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("words", [NOT_INITIALIZED, CUDNN])
@pytest.mark.parametrize(("free", "short"), [(100 << 20, True), (8 << 30, False)])
def test_a_library_without_a_handle_is_out_of_memory_where_the_card_is_full(
    monkeypatch: pytest.MonkeyPatch, words: str, free: int, short: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 16 << 30))
    assert is_out_of_memory(RuntimeError(words)) is short


def test_a_lost_context_is_told_from_memory_and_from_a_kernel_that_is_not_there() -> None:
    assert is_lost(ASSERT)
    assert is_lost(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not is_lost(torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"))
    assert not is_lost(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize("error", [ASSERT, RuntimeError(ALLOC_FAILED)], ids=["lost", "no room for a handle"])
def test_fallbacks_do_not_hide_out_of_memory_or_a_lost_context(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """Otherwise a temporary lack of memory would disable packing and the attention kernel for the rest of the run."""

    def fail(*_: Any) -> Any:
        raise error

    with pytest.raises(RuntimeError) as raised:
        scorer.first_problem(fail)
    assert raised.value is error

    monkeypatch.setattr(packing, "_in_one_call", fail)
    with pytest.raises(RuntimeError) as raised:
        packing._problem("any", torch.device("cpu"), torch.float32, 8)
    assert raised.value is error


@pytest.mark.parametrize("survived", ["memory", "another"])
def test_checkpointing_is_restored_after_a_failed_rollout(
    new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch, survived: str
) -> None:
    """TRL switches checkpointing off for a rollout, and on again only if the rollout succeeds."""
    checkpointing: list[bool] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            checkpointing.append(trainer.model.is_gradient_checkpointing)

    trainer = new_trainer(
        objective="dapo",
        unchecked=True,
        extra={"memory": BatchSizeBackoff()},
        gradient_checkpointing=True,
        max_steps=3,
    )
    trainer.add_callback(Watch())
    real, calls = trainer.model.generate, []

    def generate(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory") if survived == "memory" else ValueError("another")
        return real(*args, **named)

    monkeypatch.setattr(trainer.model, "generate", generate)
    if survived == "another":
        with pytest.raises(ValueError, match="another"):
            trainer.train()
        assert trainer.model.is_gradient_checkpointing
        return
    trainer.train()
    assert checkpointing == [True] * 3
