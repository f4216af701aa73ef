"""docs/rewards is what the docstrings say, and every example in it runs."""

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

import rewards
from rewards import presets

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def load_generator():
    spec = importlib.util.spec_from_file_location("generate_rewards", ROOT / "docs" / "generate_rewards.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generator = load_generator()


@pytest.mark.parametrize("name", rewards.names())
def test_every_docstring_has_all_its_parts(name):
    found = generator.documented(name)
    assert found.summary.endswith((".", "`."))
    assert "\n\n" not in found.summary
    assert re.search(r"\[-?[\w., -]+, ?-?[\w. ]+\]", found.sections["Range"]), "a range such as [0, 1]"
    assert "load(" in found.example


def test_the_pages_are_what_the_code_says():
    stale = generator.differences()
    assert stale == [], "run: python docs/generate_rewards.py"


@pytest.mark.parametrize("name", rewards.names())
def test_every_docstrings_example_runs(name):
    build = presets._builder(name)
    runner = doctest.DocTestRunner(verbose=False)
    [test] = doctest.DocTestFinder(recurse=False).find(build, name=name)
    result = runner.run(test)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_row_of_a_table_is_one_line():
    """The summary of a preset may be two lines in its docstring."""
    for page in (ROOT / "docs" / "rewards").glob("*.md"):
        for block in re.findall(r"^\|.*?(?=\n\n|\Z)", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for row in block.strip().splitlines():
                assert (row[0], row[-1]) == ("|", "|"), (page.name, row)


def test_links_between_the_pages_lead_somewhere():
    for page in [ROOT / "docs" / "rewards.md", *(ROOT / "docs" / "rewards").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


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


def test_the_guide_names_every_status_and_points_to_the_index():
    from rewards.protocol import STATUSES

    assert all(f"`{status}`" in GUIDE for status in STATUSES)
    assert "rewards/index.md" in GUIDE
