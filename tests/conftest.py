"""Fixtures of end-to-end tests: a small model, created once per session, and runs of it that take a second."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.metadata
import importlib.util
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

import kit  # noqa: F401  (before any torch: its threads sleep while they wait, here and in what tests start)

warm_processes.install()

ROOT = Path(__file__).parents[1]
Tree = dict[str, Any]

# Hundreds of processes import torch: let only the first one compile it, whatever this environment says of bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job: no child would ever hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Two workers of the whole suite need two times what the server has imported: they are forked from it."""
    warm_processes.workers = config.args_source is config.ArgsSource.TESTPATHS


def pytest_collectstart() -> None:
    """While modules are imported there is hardly any garbage, and looking for it is a fifth of the CPU time."""
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m survival` only files that use the marker are imported: the others cost more than some stages themselves."""
    marker = config.option.markexpr
    if not (marker.isidentifier() and collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    # tests/pairwise.py marks what it leaves out
    named = ("matrix", "every_pair") if marker == "matrix" else (f"mark.{marker}",)
    text = collection_path.read_text(encoding="utf-8")
    return None if any(name in text for name in named) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that cost most come first, so that no worker is left alone with a long one."""
    cost: Counter[Path] = Counter()
    for item in items:
        used = set(getattr(item, "fixturenames", ()))
        cost[item.path] += 50 if "attempt" in used else 20 if "new_trainer" in used else 1
    items.sort(key=lambda item: -cost[item.path])


def pytest_collection_finish() -> None:
    """What has been imported stays: a garbage collection, of which each run makes one, need not look through it again.

    And what a thousand small runs in one process would do a thousand times is done once, or not at all.
    """
    gc.freeze()
    gc.enable()
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # read from the disk: 1 ms
    # 3 ms a file, 50 files a run: what is tested here outlives processes, not the machine.
    os.fsync = lambda handle: None
    if runner := sys.modules.get("typer.testing"):  # the command line, built for each call of a verb: 40 ms
        runner._get_command = functools.cache(runner._get_command)
    if "accelerate" in sys.modules:
        import accelerate.utils.memory

        from kit.models.libraries import remember_packages

        remember_packages()
        # Before each training, for a GPU's memory: 20 ms.
        accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: 0)
    # pytest attaches itself to each logger that keeps its records, a hundred of torch's, six times a test.
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():  # each seed is kept for CUDA's start, with its stack: 1 ms
        torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """A worker names a warning's class, which the process that prints it then imports: for one of peft's, all of torch."""
    if warning_message.category.__module__ != "builtins":
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        warning_message.message, warning_message.category = UserWarning(text), UserWarning


@pytest.fixture
def cold_processes() -> Iterator[None]:
    """Processes that a test starts import what they need themselves, as anywhere but in these tests."""
    with warm_processes.cold():
        yield


@pytest.fixture(scope="session")
def embedded_models() -> Any:
    """benchmarks/embedded_models.py as a module."""
    spec = importlib.util.spec_from_file_location("embedded_models", ROOT / "benchmarks/embedded_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def model_folder(embedded_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller embedded model in HF layout, made in two seconds: it keeps to the answer format and cannot calculate."""
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
    return folder


@pytest.fixture
def tree(model_folder: Path, tmp_path: Path) -> Tree:
    """A run of two steps of eight completions, without evaluation, checkpoints at the end only.

    Nine tokens hold an answer, and some completions end within them: with six every reward is 0, and nothing is trained.
    """
    return {
        "model": {"name": str(model_folder), "dtype": "float32", "lora": {"rank": 4, "alpha": 8}},
        "data": {
            "source": "reasoning-gym:chain_sum",
            "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "limit": 40,
            "heldout": 8,
        },
        "reward": {"preset": "reasoning-gym"},
        "generation": {"num_generations": 4, "max_completion_tokens": 9},
        "optimisation": {"steps": 2, "batch_size": 8, "learning_rate": 1e-3},
        "evaluation": {"before": False, "after": False, "prompts": 4, "k": 2},
        "run": {"id": "it", "root": str(tmp_path / "runs"), "threads": 1, "save_every": 0},
    }


@dataclass
class Attempt:
    """How a run in this process ended: the exit code of its process, what it printed, and its directory if there is one."""

    code: int
    shown: str
    message: str
    folder: Any
    error: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def attempt(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Attempt]]:
    """Does what the training process does with `tree` and `overrides`, here: `attempt("run.seed=1").code`.

    Without report.html unless `draw=True`: a second of drawing, which is another's test.
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
