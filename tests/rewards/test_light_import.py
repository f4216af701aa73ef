import doctest
import importlib
import pickle
import pkgutil
import subprocess
import sys

import pytest
from reward_parts import trial_parameters

import rewards
import rewards.presets


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light():
    code = (
        "import time, sys; start = time.process_time(); import rewards; spent = time.process_time() - start;"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'numpy', 'sympy', 'reasoning_gym', 'kit'};"
        "print(spent < 0.1, sorted(heavy & set(sys.modules)))"
    )
    assert _run(code).strip() == "True []"


def test_loading_a_preset_imports_nothing_heavy():
    """Those that want a model's files say so without loading anything, either."""
    code = (
        "import sys, rewards\n"
        "for name in rewards.names():\n"
        "    try:\n"
        "        rewards.load(name).trl()\n"
        "    except rewards.RewardsError:\n"
        "        pass\n"
        "print(sorted({'torch', 'transformers', 'trl', 'numpy', 'sympy', 'reasoning_gym'} & set(sys.modules)))"
    )
    assert _run(code).strip() == "[]"


def test_public_names_exist():
    assert rewards.__all__ == sorted(rewards.__all__)
    assert all(hasattr(rewards, name) for name in rewards.__all__)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    "module",
    [
        "rewards",
        "rewards.adaptors.easyr1",
        "rewards.adaptors.trl",
        "rewards.adaptors.verl",
        "rewards.extract",
        "rewards.isolation",
        "rewards.isolation.cache",
        "rewards.numeric",
        "rewards.components.code.blocks",
        "rewards.components.code.stdio",
        "rewards.components.readable",
        *(f"rewards.presets.{module.name}" for module in pkgutil.iter_modules(rewards.presets.__path__)),
        "rewards.sandbox",
        "rewards.schedules",
    ],
)
def test_examples_in_docstrings_hold(module, own_pool):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", rewards.names())
def test_presets_are_picklable(name, tmp_path):
    preset = rewards.load(name, **trial_parameters(name, tmp_path))
    assert pickle.loads(pickle.dumps(preset)).weights == preset.weights
