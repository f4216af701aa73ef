import doctest
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from reward_parts import trial_parameters

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


def test_loading_a_preset_imports_nothing_heavy():
    """Presets that need a model's files fail without loading anything, too."""
    code = (
        "import sys, rewards\n"
        "for name in rewards.names():\n"
        "    try:\n"
        "        rewards.load(name).trl()\n"
        "    except rewards.RewardsError:\n"
        "        pass\n"
        "heavy = {'torch', 'transformers', 'trl', 'numpy', 'sympy', 'reasoning_gym'}\n"
        "optional = {'jsonschema', 'sacrebleu', 'py3langid'}\n"
        "print(sorted((heavy | optional) & set(sys.modules)))"
    )
    assert _run(code).strip() == "[]"


def test_public_names_exist():
    assert rewards.__all__ == sorted(rewards.__all__)
    assert all(hasattr(rewards, name) for name in rewards.__all__)


ROOT = Path(rewards.__file__).parent
# Those of presets are run by test_docs.
EXAMPLES = sorted(
    file for file in ROOT.rglob("*.py") if ">>> " in file.read_text(encoding="utf-8") and file.parent.name != "presets"
)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_in_docstrings_hold(file, own_pool):
    name = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", rewards.names())
def test_presets_are_picklable(name, tmp_path):
    preset = rewards.load(name, **trial_parameters(name, tmp_path))
    assert pickle.loads(pickle.dumps(preset)).weights == preset.weights
