"""Notebooks equal the output of their scripts and have the agreed form."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = [path.stem for path in sorted((FOLDER / "scripts").glob("*.py"))]


def cells(name: str, kind: str) -> list[str]:
    every = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in every if cell["cell_type"] == kind]


def test_there_are_ten() -> None:
    assert [name[:2] for name in NAMES] == [f"{number:02d}" for number in range(1, 11)]
    assert "[ten notebooks]" in (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^[|] `(\d\d_\w+)` [|]", (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert rows == NAMES


def test_they_are_what_their_scripts_give() -> None:
    assert load_script("notebooks/make.py").differences() == [], "run: python notebooks/make.py"


@pytest.mark.parametrize("name", NAMES)
def test_no_notebook_has_outputs_or_more_than_fifteen_code_cells(name: str) -> None:
    every = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in every if cell["cell_type"] == "code"]
    assert 3 < len(code) <= 15
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in every}) == len(every)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_installs_and_is_the_same_in_all(name: str) -> None:
    first = cells(name, "code")[0]
    assert first == cells(NAMES[0], "code")[0]
    assert "pip" in first
    assert 'find_spec("kit") is None' in first


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the first cell on a T4 without the kit, with this GRPO_KIT; it records the commands."""
    import shutil
    import subprocess

    commands: list[list[str]] = []
    for name in ("PATH", "COLUMNS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONUNBUFFERED"):  # the cell changes them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def run(command: list[str], **how: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "Tesla T4, 15360 MiB\n", "")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", run)

    def first_cell(source: str | None) -> list[str]:
        monkeypatch.delenv("GRPO_KIT", raising=False)
        if source is not None:
            monkeypatch.setenv("GRPO_KIT", source)
        commands.clear()
        exec(cells(NAMES[0], "code")[0], {})
        return [command[-1] for command in commands if "pip" in command]

    first_cell.asked = commands  # type: ignore[attr-defined]
    return first_cell


def test_without_a_source_nothing_is_installed_and_one_sentence_says_what_to_set(installed: Any) -> None:
    """The name on a package index may belong to another project."""
    for source in (None, ""):
        with pytest.raises(SystemExit) as ended:
            installed(source)
        assert "set GRPO_KIT" in str(ended.value)
        assert str(ended.value).count(".") == 1
        assert not any("pip" in command for command in installed.asked)


def test_what_is_installed_is_the_source_that_is_named(installed: Any, tmp_path: Path) -> None:
    assert installed(str(tmp_path)) == [f"{tmp_path}[tested,unsloth]"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0", "TRL refuses a trainer in the kernel that sees two GPUs"
    wheel = tmp_path / "grpo_kit-0.1.0-py3-none-any.whl"
    assert installed(str(wheel)) == [f"{wheel}[tested,unsloth]"]
    assert installed("git+https://host.example/kit.git@main") == [
        "grpo-kit[tested,unsloth] @ git+https://host.example/kit.git@main"
    ]
    (name,) = installed("grpo-kit")
    assert name == f"{Path.cwd() / 'grpo-kit'}[tested,unsloth]", "pip would search an index for a name without a folder"


def test_the_extras_exist() -> None:
    import tomllib

    first = cells(NAMES[0], "code")[0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for group in re.findall(r'"\[([\w,]+)\]"', first) for extra in group.split(",")}
    assert named <= set(extras)
    assert {"unsloth", "vllm"} <= named


@pytest.mark.parametrize("name", NAMES)
def test_no_logic_lives_in_a_notebook(name: str) -> None:
    for source in cells(name, "code")[1:]:
        if source.startswith("%%writefile"):
            continue
        code = "\n".join(re.sub(r"^( *)[!%].*", r"\1pass", line) for line in source.splitlines())
        for node in ast.walk(ast.parse(code)):
            assert not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.While)), ast.unparse(node)


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_cells_exist(name: str) -> None:
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "docs"))
    try:
        from code_blocks import commands
        from test_documented_code import check_command
    finally:
        sys.path.pop(0)
    lines = [line[1:] for source in cells(name, "code") for line in source.splitlines() if line.startswith("!")]
    for line in lines:
        for words in commands(line):
            if words[0] != "echo":
                check_command(words)


def test_what_is_changed_where_notebooks_are_tried_is_there() -> None:
    from smoke import EMBEDDED, SHORT, edited

    from kit.config import load_config, preset_names

    for name in NAMES:
        for cell in json.loads(edited(FOLDER / f"{name}.ipynb"))["cells"]:
            if cell["cell_type"] == "code" and not re.search(r"(?m)^ *[!%]", text := "".join(cell["source"])):
                ast.parse(text)
    for preset in preset_names():
        config = load_config(preset, EMBEDDED + SHORT)
        assert (config.model.name, config.generation.engine, config.optimisation.steps) == ("embedded", "hf", 4)
        assert not config.model.load_in_4bit
