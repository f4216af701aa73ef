"""A stand-in for `vllm.LLM` without weights, for TRL's own generation class. It raises the errors of vLLM.

While asleep it does not generate. Weights that sleep of level 2 has discarded must be loaded again. A thread that uses it must
have set its CUDA device, and must work in the stream of the thread that started it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

TOKEN = 7
OWN = threading.local()
"""`stream`: the current CUDA stream of this thread, as torch stores it. vLLM replaces the default stream by its own."""


class LLM:
    """The methods of vLLM's engine that TRL and the kit call; `loaded` has the names of the weights of each hand-over."""

    last: LLM | None = None

    def __init__(self, shared_weights: bool = False, **settings: Any) -> None:
        self.given, self.shared_weights = settings, shared_weights
        self.asleep: set[str] = set()
        self.lost = False
        self.loaded: list[list[str]] = [[]]
        self.requests: list[Any] = []
        self.threads, self.port = {threading.current_thread().name}, os.environ.get("MASTER_PORT")
        OWN.stream = self.main_stream = object()  # vLLM's `GPUModelRunner.main_stream` is created once
        model = SimpleNamespace(load_weights=self._load, modules=lambda: [])
        self.llm_engine: Any = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model))),
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True)),
        )
        type(self).last = self

    def sleep(self, level: int = 1) -> None:
        self.asleep = {"kv_cache"} if self.shared_weights else {"weights", "kv_cache"}
        self.lost = level == 2 and not self.shared_weights

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep -= set(tags or ("weights", "kv_cache"))

    def _load(self, weights: Any) -> None:
        assert "weights" not in self.asleep, "weights are written to memory that is not mapped"
        self.loaded[-1] += [name for name, _ in weights]

    def reset_prefix_cache(self) -> None:
        if self.loaded[-1]:
            self.lost = False
            self.loaded.append([])

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool, lora_request: Any = None) -> list[Any]:
        assert not self.asleep, f"asleep: {self.asleep}"
        assert not self.lost, "the weights were discarded and not loaded again"
        assert getattr(OWN, "stream", None) is self.main_stream, "the first tokens are copied before they are computed"
        self.threads.add(threading.current_thread().name)
        self.requests.append(lora_request)
        made = SimpleNamespace(token_ids=[TOKEN], logprobs=[{TOKEN: SimpleNamespace(rank=1, logprob=-0.5)}])
        return [SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[made]) for prompt in prompts]


@contextmanager
def vllm_stands_in() -> Iterator[type[LLM]]:
    """Replace vLLM's names in TRL's module by the stand-in."""
    from trl.generation import vllm_generation

    names = {"LLM": LLM, "SamplingParams": SimpleNamespace, "is_vllm_available": lambda *_, **__: True}
    with mock.patch.multiple(vllm_generation, create=True, **names):
        yield LLM


@contextmanager
def one_gpu() -> Iterator[SimpleNamespace]:
    """Make a real `Accelerator` use a simulated machine with one GPU.

    `devices` lists the devices that were set in torch; `at_work` is a set of streams, which `synchronize` empties.
    """
    import torch
    from accelerate import state

    import kit.generation.vllm  # noqa: F401  (first, because its imports query the real GPU)

    gpu = SimpleNamespace(devices=[], at_work=set())
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "current_stream", side_effect=lambda: getattr(OWN, "stream", None)),
        mock.patch.object(torch.cuda, "set_stream", lambda stream: setattr(OWN, "stream", stream)),
        mock.patch.object(torch.cuda, "synchronize", gpu.at_work.clear),
        mock.patch.object(torch._C, "_cuda_setDevice", gpu.devices.append, create=True),
        mock.patch.object(state, "check_cuda_p2p_ib_support", return_value=True),
    ):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield gpu
        finally:
            state.AcceleratorState._reset_state(reset_partial_state=True)


def watched(model: Any, timeout: float = 5.0, standby: bool = False, **settings: Any) -> Any:
    """Return the kit's subclass of TRL's generation class, with a stand-in engine and a real Accelerator."""
    from accelerate import Accelerator

    from kit.generation.vllm import WatchedGeneration
    from kit.models.failures import EngineSettings

    engine = EngineSettings(timeout=timeout, **settings)
    return WatchedGeneration(model, Accelerator(), None, settings=engine, enable_sleep_mode=standby)
