"""Modules under their old names: the very same modules, with a warning; and every new name is there."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from kit.moved import MOVED


@pytest.mark.parametrize("new", sorted(set(MOVED.values())))
def test_what_an_old_name_stands_for_is_there(new: str) -> None:
    assert importlib.util.find_spec(new) is not None


def test_an_old_name_is_the_module_itself_and_warns() -> None:
    with pytest.warns(FutureWarning, match=r"kit\.run is now kit\.api\.run"):
        old = importlib.import_module("kit.run")
    new = importlib.import_module("kit.api.run")
    assert old is new
    assert new.__spec__ is not None
    assert new.__spec__.name == "kit.api.run"
    assert old.Run.__module__ == "kit.api.run"


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kit.nonsense")


def test_import_kit_loads_none_of_them() -> None:
    code = "import kit, sys; print([name for name in sys.modules if name.startswith('kit.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(eval(done.stdout)) <= {"kit.threads", "kit.moved"}
