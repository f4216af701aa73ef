"""The kit's handle on vLLM over TRL's own generation class, as on one GPU; only `vllm.LLM` is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stand_in_llm import LLM, TOKEN, one_gpu, vllm_stands_in, watched


@pytest.fixture
def gpu() -> Iterator[Any]:
    with one_gpu() as seen, vllm_stands_in():
        yield seen


def rollout(generation: Any) -> Any:
    return generation.generate([[1, 2], [3]], None, 1)[1]


def test_an_engine_starts_on_a_device_that_accelerate_names_without_an_index(
    gpu: Any, new_model: Callable[[], Any]
) -> None:
    generation = watched(new_model())
    assert generation.accelerator.device.index is None, "the case that this test is about"
    assert gpu.devices == [0]
    generation.sync_weights()
    assert rollout(generation) == [[TOKEN], [TOKEN]]
    assert LLM.last is not None
    assert LLM.last.threads == {"engine"}


def test_an_engine_that_sleeps_between_rollouts_wakes_for_every_one(gpu: Any, new_model: Callable[[], Any]) -> None:
    """TRL's `generate` itself calls `sync_weights` where nobody did since the engine went to sleep."""
    model = new_model()
    generation = watched(model, standby=True)
    for _ in range(2):
        assert rollout(generation) == [[TOKEN], [TOKEN]]
    assert LLM.last is not None
    first, second, *_ = LLM.last.loaded
    assert first == second == [name for name, _ in model.named_parameters()]
    assert LLM.last.asleep == {"weights", "kv_cache"}


def test_weights_are_read_once_the_optimiser_has_written_them(gpu: Any, new_model: Callable[[], Any]) -> None:
    """vLLM's thread has a CUDA stream of its own, which is not ordered behind that of the optimiser."""
    generation = watched(new_model())
    before, model = gpu.waits.call_count, generation.model
    waits: list[int] = []
    model.named_parameters = lambda read=model.named_parameters: (waits.append(gpu.waits.call_count), read())[1]
    generation.sync_weights()
    assert waits
    assert min(waits) > before


def test_what_fails_inside_a_call_of_a_call_is_told_once(gpu: Any, new_model: Callable[[], Any]) -> None:
    from kit.errors import EngineError

    generation = watched(new_model(), standby=True)
    generation.llm.reset_prefix_cache = lambda: [][1]
    with pytest.raises(EngineError, match="died taking over the weights: IndexError"):
        rollout(generation)
