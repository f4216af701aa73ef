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
    """This environment has not all that warm processes import, and an engine wants a process of its own."""
    with warm_processes.cold():
        yield


@pytest.fixture(scope="session")
def _imported() -> None:
    """Modules that all engines need, left out of the garbage collections between them."""
    pytest.importorskip("vllm")
    gc.disable()
    for name in NEEDED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


@pytest.fixture
def capsys(capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """vLLM silences the file below stdout while it starts; only what captures files gives stdout one."""
    return capfd


@pytest.fixture
def attempt(attempt: Callable[..., Any]) -> Callable[..., Any]:
    """`attempt`, after which what has been imported is left out of garbage collections again: an ended engine counts it in."""

    def run(*overrides: str) -> Any:
        ended = attempt(*overrides)
        gc.collect()
        gc.freeze()
        return ended

    return run


@pytest.fixture
def engine_tree(tree: Any) -> Any:
    """The tree of `tree`, with completions from vLLM that are long enough to be answers, so that some groups teach."""
    tree["generation"] |= {"engine": "vllm", "vllm": {"timeout": 120}, "max_completion_tokens": 12}
    return tree


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], None]:
    """`plant(n, do)`: the n-th generation batch of vLLM does `do` instead of its first forward pass."""
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
    """Frees what the engine of a test held, and what it left of torch.distributed: the next one begins anew.

    An engine takes vLLM's process groups down when it is collected: before the next one is made, not while it works.
    """
    gc.collect()
    yield
    gc.collect()
    sys.modules["vllm.distributed.parallel_state"].cleanup_dist_env_and_memory()
    gc.freeze()  # it has let go of the modules, in which nothing is to be found
