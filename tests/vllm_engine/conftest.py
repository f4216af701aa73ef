"""Tests with the marker `vllm` run only in .venv-vllm (`bash .ci/vllm-environment`)."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import warm_processes

NEEDED = ("kit.runner.build", "kit.trainer.trainer", "vllm.model_executor.models.qwen3", "vllm.v1.worker.cpu_worker")


@pytest.fixture(autouse=True, scope="session")
def _cold() -> Iterator[None]:
    """Disable warm processes: this environment lacks some of their imports, and an engine needs its own process."""
    with warm_processes.cold():
        yield


@pytest.fixture(scope="session")
def _imported() -> None:
    """Import the modules that all engines need, and exclude them from later garbage collections."""
    pytest.importorskip("vllm")
    gc.disable()
    for name in NEEDED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


@pytest.fixture
def capsys(capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Use `capfd`, because vLLM redirects stdout's file descriptor while it starts."""
    return capfd


@pytest.fixture
def attempt(attempt: Callable[..., Any]) -> Callable[..., Any]:
    """`attempt`, followed by `gc.freeze()`: the end of an engine calls `gc.unfreeze()`, which makes collections slow."""

    def run(*overrides: str) -> Any:
        ended = attempt(*overrides)
        gc.collect()
        gc.freeze()
        return ended

    return run


@pytest.fixture
def engine_tree(tree: Any) -> Any:
    """The configuration `tree` with completions from vLLM, which are long enough that rewards differ in some groups."""
    tree["generation"] |= {"engine": "vllm", "vllm": {"timeout": 120}, "max_completion_tokens": 12}
    return tree


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], None]:
    """Return `plant(n, do)`: the n-th generation batch of vLLM calls `do` instead of its first forward pass."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    generate, step, batches = LLM.generate, LLMEngine.step, [0]

    def plant(number: int, do: Callable[[], Any]) -> None:
        def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
            batches[0] += 1
            return generate(self, *arguments, **keywords)

        def stepped(self: Any) -> Any:
            return do() if batches[0] == number else step(self)

        monkeypatch.setattr(LLM, "generate", counted)
        monkeypatch.setattr(LLMEngine, "step", stepped)

    return plant


@pytest.fixture(autouse=True)
def no_engine_left(_imported: None) -> Iterator[None]:
    """Free the engine of a test and its state in torch.distributed.

    An engine destroys vLLM's process groups when it is collected, which must happen before the next engine starts.
    """
    gc.collect()
    yield
    gc.collect()
    sys.modules["vllm.distributed.parallel_state"].cleanup_dist_env_and_memory()
    gc.freeze()  # excludes the imported modules from later collections
