"""The kit's watched vLLM engine with TRL's generation class on one GPU; only `vllm.LLM` is a stand-in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in_llm import LLM, TOKEN, one_gpu, vllm_stands_in, watched

from kit.config import load_config
from kit.errors import EngineError
from kit.models.backend import Machine
from kit.trainer.arguments import engine_settings


@pytest.fixture
def gpu() -> Iterator[Any]:
    with one_gpu() as state, vllm_stands_in():
        yield state


def rollout(generation: Any) -> Any:
    return generation.generate([[1, 2], [3]], None, 1)[1]


def test_an_engine_starts_on_a_device_that_accelerate_names_without_an_index(
    gpu: Any, new_model: Callable[[], Any]
) -> None:
    generation = watched(new_model())
    assert generation.accelerator.device.index is None, "the stand-in does not simulate this case"
    assert gpu.devices == [0]
    generation.sync_weights()
    assert rollout(generation) == [[TOKEN], [TOKEN]]
    assert LLM.last is not None
    assert LLM.last.threads == {"engine"}


def test_engines_that_start_at_the_same_time_have_ports_of_their_own(
    gpu: Any, new_model: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs on two GPUs of a machine. TRL chooses a port long before vLLM binds it, and prefers 29500."""
    ports = [watched(new_model()).llm.port for _ in range(2)]
    assert len({*ports, "29500"}) == 3
    assert "MASTER_PORT" not in os.environ
    monkeypatch.setenv("MASTER_PORT", "29777")
    assert watched(new_model()).llm.port == "29777"


def test_an_engine_that_sleeps_between_rollouts_wakes_for_every_one(gpu: Any, new_model: Callable[[], Any]) -> None:
    """TRL's `generate` calls `sync_weights` itself if nothing did so since the engine went to sleep."""
    model = new_model()
    generation = watched(model, standby=True)
    for _ in range(2):
        assert rollout(generation) == [[TOKEN], [TOKEN]]
    assert LLM.last is not None
    first, second, *_ = LLM.last.loaded
    assert first == second == [name for name, _ in model.named_parameters()]
    assert LLM.last.asleep == {"weights", "kv_cache"}


def test_torchs_cache_is_freed_before_an_adapter_wakes_the_weights(
    gpu: Any, new_model: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL does so before it loads merged weights. Otherwise the cache of the update leaves no memory for the engine."""
    from trl.generation import vllm_generation

    generation, events = watched(new_model(), standby=True), []
    wake_up = generation.llm.wake_up
    monkeypatch.setattr(vllm_generation, "empty_cache", lambda: events.append("empty_cache"))
    generation.llm.wake_up = lambda tags: (events.append(f"wake {tags[0]}"), wake_up(tags))
    for wake in (generation.sync_weights, generation._wake_weights):  # TRL's method, and the kit's for an adapter
        events.clear()
        generation.llm.sleep()
        wake()
        assert events[:2] == ["empty_cache", "wake weights"]


@pytest.mark.parametrize(("dtype", "head_dtype"), [("float32", None), ("bfloat16", "float32"), ("float16", "float32")])
def test_an_engine_in_16_bits_has_the_float32_logits_of_the_trainer(
    gpu: Any, new_model: Callable[[], Any], dtype: str, head_dtype: str | None
) -> None:
    watched(new_model().to(getattr(torch, dtype)))
    assert LLM.last is not None
    assert LLM.last.given["dtype"] == dtype
    assert LLM.last.given.get("hf_overrides", {}).get("head_dtype") == head_dtype


def test_the_engine_is_made_for_the_completions_of_a_step(
    gpu: Any, new_model: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's default, 256, exceeds the recurrent state blocks of an L4, and the engine does not start."""
    monkeypatch.setattr("kit.models.backend.this_machine", lambda: Machine((8, 9), "L4"))
    args: Any = SimpleNamespace(use_vllm=True, use_cpu=False, bf16=True, fp16=False, generation_kwargs=None)
    numbers = []
    for batch in (64, 512):
        keys = ["generation.engine=vllm", f"optimisation.batch_size={batch}"]
        settings = engine_settings(load_config("qwen35-gsm8k", keys), args, print)
        assert settings is not None
        watched(new_model(), at_once=settings.at_once)
        assert LLM.last is not None
        numbers.append(LLM.last.given["max_num_seqs"])
    assert numbers == [64, 256]


def test_weights_are_read_once_the_optimiser_has_written_them(gpu: Any, new_model: Callable[[], Any]) -> None:
    """vLLM's threads have CUDA streams of their own; if Unsloth started the engine, the trainer's thread has one, too."""
    generation = watched(new_model())
    gpu.at_work.add("of the trainer's thread")
    model = generation.model
    while_read: list[set[str]] = []
    model.named_parameters = lambda read=model.named_parameters: (while_read.append(set(gpu.at_work)), read())[1]
    generation.sync_weights()
    assert while_read
    assert not any(while_read)


def test_the_trainer_goes_on_once_the_engine_has_put_the_weights_back(gpu: Any, new_model: Callable[[], Any]) -> None:
    """Unsloth's engine shares the trainer's weights, and removes a merged adapter from them on its own stream."""
    generation = watched(new_model())
    generation.sync_weights()
    generate = generation.llm.generate
    generation.llm.generate = lambda *args, **more: (gpu.at_work.add("the engine's"), generate(*args, **more))[1]
    rollout(generation)
    assert not gpu.at_work


def test_an_error_in_a_nested_call_is_reported_once(gpu: Any, new_model: Callable[[], Any]) -> None:
    generation = watched(new_model(), standby=True)
    generation.llm.reset_prefix_cache = lambda: [][1]
    with pytest.raises(EngineError, match="died taking over the weights: IndexError"):
        rollout(generation)
