"""Variable names say what they hold: names on the list below are counted, and their number must not grow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VAGUE = {"found", "given", "kept", "seen", "said", "told", "asked", "wanted", "whole", "one", "ours", "theirs"}
CEILINGS = {"kit": 0, "rewards": 0, "examples": 0, "benchmarks": 0, "tests": 0}
"""The most bindings of a vague name for each folder. Lower a ceiling when names improve; never raise it."""


def vague_names(source: str) -> list[str]:
    """Return the vague names of variables and parameters of a module, one entry per binding."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
    return [name for name in names if name in VAGUE]


def count(folder: str) -> int:
    return sum(len(vague_names(path.read_text(encoding="utf-8"))) for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(("folder", "ceiling"), CEILINGS.items())
def test_vague_names_do_not_become_more(folder: str, ceiling: int) -> None:
    assert count(folder) <= ceiling, "name the new variable after what it holds; see CONTRIBUTING.md, Language"
