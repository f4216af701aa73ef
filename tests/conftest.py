"""Fixtures of end-to-end tests: a small model, created once per session, and runs of it that take a second."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.metadata
import json
import logging
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm_processes
from scripts import load_script
from tiny_qwen import tiny_run

import kit  # noqa: F401  (before torch, so that its threads sleep while they wait, here and in child processes)

warm_processes.install()

ROOT = Path(__file__).parents[1]
Tree = dict[str, Any]

# Hundreds of processes import torch, so they must write and share bytecode even if the environment forbids it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background job, children would ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Fork the workers of the complete suite from the warm server, which saves memory and imports."""
    warm_processes.workers = config.args_source is config.ArgsSource.TESTPATHS


def pytest_collectstart() -> None:
    """Disable garbage collection during imports, which produce hardly any garbage; it takes a fifth of their CPU time."""
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m MARKER`, import only the files that use it: importing the others can take longer than the tests of a stage."""
    marker = config.option.markexpr
    if not (marker.isidentifier() and collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    # tests/pairwise.py sets the marker `matrix`
    named = ("matrix", "every_pair") if marker == "matrix" else (f"mark.{marker}",)
    text = collection_path.read_text(encoding="utf-8")
    return None if any(name in text for name in named) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the expensive test files first, so that no worker ends with a long one."""
    cost: Counter[Path] = Counter()
    for item in items:
        used = set(getattr(item, "fixturenames", ()))
        cost[item.path] += 50 if "attempt" in used else 20 if "new_trainer" in used else 1
    items.sort(key=lambda item: -cost[item.path])


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collections, and cache or skip work that a thousand small runs repeat."""
    gc.freeze()
    gc.enable()
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # saves 1 ms of disk access
    # Takes 3 ms per file, with 50 files per run, and only matters if the machine fails; the tests kill processes.
    os.fsync = lambda handle: None
    if runner := sys.modules.get("typer.testing"):  # builds the command line at each call: 40 ms
        runner._get_command = functools.cache(runner._get_command)
    if "accelerate" in sys.modules:
        import accelerate.utils.memory
        from accelerate.utils import imports

        # accelerate reads peft's metadata whenever a model is unwrapped: 1 ms.
        imports._is_package_available = functools.cache(imports._is_package_available)
        # It collects garbage before each training to free GPU memory: 20 ms.
        accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: 0)
    # pytest adds its handler six times per test to each logger that does not propagate: a hundred of torch's.
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    torch = sys.modules.get("torch")
    # torch stores each seed with its stack until CUDA starts: 1 ms.
    if torch is not None and not torch.cuda.is_available():
        torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Replace the class of a warning by UserWarning: printing it would import its package, and with PEFT all of torch."""
    if warning_message.category.__module__ != "builtins":
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        warning_message.message, warning_message.category = UserWarning(text), UserWarning


@pytest.fixture
def cold_processes() -> Iterator[None]:
    """Start the processes of a test without the warm server; they import their own modules."""
    with warm_processes.cold():
        yield


@pytest.fixture(scope="session")
def embedded_models() -> Any:
    """The script benchmarks/embedded_models.py as a module."""
    return load_script("benchmarks/embedded_models.py")


@pytest.fixture(scope="session")
def model_folder(embedded_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller embedded model in HF layout, trained for two seconds: it uses the answer format but cannot calculate."""
    import torch

    recipe = embedded_models.Recipe(
        hidden=64,
        layers=1,
        heads=2,
        kv_heads=1,
        intermediate=128,
        skill_steps=0,
        steps=60,
        batch=16,
        learning_rate=0.01,
    )
    folder = tmp_path_factory.mktemp("model") / "tiny"
    with torch.random.fork_rng():
        embedded_models.build(recipe, folder)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"repetition_penalty": 1.5}))  # as Qwen2.5 has
    return folder


@pytest.fixture
def tree(model_folder: Path, tmp_path: Path) -> Tree:
    return tiny_run(model_folder, tmp_path / "runs")


@dataclass
class Attempt:
    """Result of a run in this process: exit code, stdout, stderr, the run's directory (if any), and the error as JSON."""

    code: int
    shown: str
    message: str
    folder: Any
    error: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def attempt(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Attempt]]:
    """Return a function that trains in this process with `tree` and overrides: `attempt("run.seed=1").code`.

    report.html is written only with `draw=True`, because it takes a second.
    """
    import kit.runner.console
    import kit.train
    from kit.config import load_config
    from kit.runs.store import RunDir
    from kit.runs.worker import serve

    monkeypatch.chdir(tmp_path)
    draw_report = kit.runner.console.draw_report
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*overrides: str, draw: bool = False) -> Attempt:
        monkeypatch.setattr("kit.runner.console.draw_report", draw_report if draw else lambda *_, **__: None)
        config = load_config(copy.deepcopy(tree), overrides)
        request, report = tmp_path / "request.json", tmp_path / "error.json"
        report.unlink(missing_ok=True)
        request.write_text(json.dumps({"config": config.model_dump(mode="json")}))
        capsys.readouterr()
        code = serve(kit.train.main, [str(request), "--error-file", str(report)])
        printed = capsys.readouterr()
        error = json.loads(report.read_text()) if report.exists() else {}
        path = Path(config.run.root) / str(config.run.id)
        return Attempt(code, printed.out, printed.err, RunDir(path) if path.is_dir() else None, error)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
