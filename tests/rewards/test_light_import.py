import doctest
import importlib
import pickle
import subprocess
import sys

import pytest

import rewards


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light():
    code = (
        "import time, sys; start = time.process_time(); import rewards; spent = time.process_time() - start;"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'numpy', 'sympy', 'reasoning_gym', 'kit'};"
        "print(spent < 0.1, sorted(heavy & set(sys.modules)))"
    )
    assert _run(code).strip() == "True []"


def test_loading_every_preset_imports_nothing_heavy():
    code = (
        "import sys, rewards; [rewards.load(name).trl() for name in rewards.names()];"
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
        "rewards.adaptors",
        "rewards.extract",
        "rewards.numeric",
        "rewards.presets.gsm8k",
        "rewards.presets.length",
        "rewards.presets.reasoning_gym",
    ],
)
def test_examples_in_docstrings_hold(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_presets_are_picklable():
    for name in rewards.names():
        assert pickle.loads(pickle.dumps(rewards.load(name))).weights == rewards.load(name).weights
