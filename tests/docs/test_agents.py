"""AGENTS.md is short and correct: its commands exist, the cheap ones run, and every path in it exists."""

from __future__ import annotations

import re

import pytest
from code_blocks import ROOT, blocks, commands, pages

PAGE = ROOT / "AGENTS.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = [words for block in blocks(PAGE) for words in commands(block.text)]
DEAR = ("quickstart", "train", "validate")
"""Verbs that train, as the stage `quickstart` of CI does, or load a model's tokenizer."""


def missing(text: str) -> list[str]:
    """Paths in backticks that do not exist; a single name may be in any folder that the text names."""
    named = [name for name in re.findall(r"`([\w./]+)`", text) if re.search(r"/|\.\w+$", name)]
    folders = [ROOT, *(ROOT / name for name in named if name.endswith("/"))]
    return [name for name in named if not any((folder / name).exists() for folder in folders)]


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 60


def test_every_path_is_there() -> None:
    assert missing(TEXT) == []


def test_its_commands_are_looked_at_with_those_of_the_other_pages() -> None:
    assert PAGE in pages()  # test_documented_code.py: verbs, options, keys and files
    assert {words[0] for words in COMMANDS} == {"grpo-kit", "python", "pytest", "bash"}


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[0] == "grpo-kit" and w[1] not in DEAR], ids=" ".join)
def test_a_cheap_command_runs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from kit.cli.app import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, capsys.readouterr().err
    assert capsys.readouterr().out
