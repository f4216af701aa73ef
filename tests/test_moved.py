"""Modules under their old names: the very same modules, with a warning; and every new name is there."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.moved import DIVIDED, MOVED, MovedModules, new_name

pytestmark = pytest.mark.filterwarnings("ignore:kit.* is now:FutureWarning")
ROOT = Path(__file__).parents[1]
QUICK = {*(name for name in MOVED if "training" not in name), "kit.training.backend", "kit.training.trainer"}
"""Those that do not load transformers, which takes seconds."""


@pytest.fixture(autouse=True)
def not_imported_yet() -> Iterator[None]:
    """Old names leave no trace, so that each test imports them anew."""
    yield
    for name in [name for name in sys.modules if name in DIVIDED or new_name(name) is not None]:
        parent, _, last = name.rpartition(".")
        if (
            new_name(parent) is None and parent in sys.modules
        ):  # else it is another module, which has its own by that name
            vars(sys.modules[parent]).pop(last, None)
        del sys.modules[name]


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_can_be_imported_and_nothing_else_has_it(old: str) -> None:
    assert importlib.util.find_spec(old) is not None
    assert importlib.util.find_spec(MOVED[old]) is not None
    assert not (ROOT / old.replace(".", "/")).with_suffix(".py").exists()
    assert not (ROOT / old.replace(".", "/") / "__init__.py").exists()


@pytest.mark.parametrize("old", [old for old in sorted(MOVED) if old in QUICK])
def test_an_old_name_is_the_module_itself(old: str) -> None:
    new = MOVED[old]
    module = importlib.import_module(new)
    spec, loader = module.__spec__, module.__loader__
    assert importlib.import_module(old) is module
    assert (module.__spec__, module.__loader__) == (spec, loader)


def test_it_warns() -> None:
    with pytest.warns(FutureWarning, match=r"kit\.run is now kit\.api\.run"):
        importlib.import_module("kit.run")
    with pytest.warns(FutureWarning, match=r"kit\.training is now kit\.models, .* and kit\.runner"):
        importlib.import_module("kit.training")


def test_modules_of_a_package_have_one_class_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVED, "kit.records", "kit.runs")
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module("kit.runs").__path__)]
    assert names
    for name in names:
        assert importlib.import_module(f"kit.records.{name}") is importlib.import_module(f"kit.runs.{name}")
    for name in [name for name in sys.modules if name.startswith("kit.records")]:
        del sys.modules[name]
    vars(sys.modules["kit"]).pop("records", None)


def test_from_imports() -> None:
    found: dict[str, Any] = {}
    exec("from kit.sections.model import ModelConfig; from kit.training import trainer", found)
    assert found["ModelConfig"] is importlib.import_module("kit.config.sections").ModelConfig
    assert found["trainer"] is importlib.import_module("kit.trainer.trainer")


@pytest.mark.parametrize(
    "name", ["kit.nonsense", "kit.training.nonsense", "kit.sections.nonsense", "kit.training.loss"]
)
def test_a_name_that_is_not_among_them_is_not_found_and_is_the_one_named(name: str) -> None:
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{name}'$"):
        importlib.import_module(name)


def test_others_modules_are_none_of_its_business() -> None:
    finder = MovedModules()
    assert finder.find_spec("kitchen.training") is finder.find_spec("training") is finder.find_spec("kit") is None


def test_import_kit_loads_none_of_them() -> None:
    code = "import kit, sys; print([name for name in sys.modules if name.startswith('kit.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(eval(done.stdout)) <= {"kit.threads", "kit.moved"}
