"""Optional packages are hidden in the kit's processes, and only while its own libraries load."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kit.config import ModelConfig
from kit.models.libraries import UNUSED, hidden, load_libraries

OPTIONAL = [*UNUSED]


def test_a_hidden_package_can_be_imported_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needless.py").write_text("loaded = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    with hidden(["needless"]):
        assert importlib.util.find_spec("needless") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("needless")
    assert importlib.import_module("needless").loaded
    with hidden(["needless"]):  # loaded modules stay
        assert importlib.import_module("needless").loaded


def test_in_a_process_of_the_users_nothing_is_loaded_or_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.models.libraries.choose_backend", lambda model: 1 / 0)
    monkeypatch.setattr(gc, "freeze", lambda: 1 / 0)
    load_libraries(ModelConfig(name="embedded"))  # pytest is the main module


@pytest.mark.survival
def test_in_a_process_of_the_kit(tmp_path: Path) -> None:
    """Load the libraries in a process like `python -m kit.train`, and import all of them afterwards.

    Nothing that prepares a run may import transformers before `load_libraries`, or TRL at all; Unsloth must be imported first.
    """
    code = f"""
import gc, importlib.util, json, sys, types
sys.modules["__main__"].__spec__ = types.SimpleNamespace(name="kit.train")
import kit.train
early = "transformers" in sys.modules
from kit.config import ModelConfig
from kit.models.libraries import load_libraries
load_libraries(ModelConfig(name="embedded"), training=False)
loaded = [name for name in {OPTIONAL!r} if name in sys.modules]
found = [name for name in {OPTIONAL!r} if importlib.util.find_spec(name)]
import peft
from kit.models import backend, loading, unsloth
from kit.runner import evaluation, lifecycle, prepare, recording, resume
early = early or "trl" in sys.modules
print(json.dumps([loaded, found, early, gc.isenabled(), gc.get_freeze_count() > 100_000]))
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
    loaded, findable, early, collects, frozen = json.loads(done.stdout.splitlines()[-1])
    installed = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    assert findable == installed
    assert loaded == []
    assert not early
    assert collects
    assert frozen
