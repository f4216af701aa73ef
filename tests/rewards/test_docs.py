"""Presets have complete docstrings, from which the site makes their pages, and every example runs."""

import doctest
import re
from pathlib import Path

import pytest
from scripts import load_script

import rewards
from rewards import presets

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
generator = load_script("docs/site/pages.py")


@pytest.mark.parametrize("name", rewards.names())
def test_every_docstring_has_all_its_parts(name):
    doc = generator.preset_doc(name)
    assert doc.summary.endswith((".", "`."))
    assert "\n\n" not in doc.summary
    assert re.search(r"\[-?[\w., -]+, ?-?[\w. ]+\]", doc.sections["Range"]), "state a range such as [0, 1]"
    assert "load(" in doc.example


@pytest.mark.parametrize("name", rewards.names())
def test_every_docstrings_example_runs(name):
    build = presets._builder(name)
    runner = doctest.DocTestRunner(verbose=False)
    [test] = doctest.DocTestFinder(recurse=False).find(build, name=name)
    result = runner.run(test)
    assert result.attempted > 0
    assert result.failed == 0


def python_blocks():
    return re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_the_guides_examples_run(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = python_blocks()[number]
    test = doctest.DocTestParser().get_doctest(block, {}, f"docs/rewards.md, block {number + 1}", None, 0)
    assert test.examples, "write examples as >>> lines"
    result = doctest.DocTestRunner(verbose=False).run(test)
    assert result.failed == 0
