"""AGENTS.md is short and correct, and docs/layout.md lists every folder of modules and only files that exist."""

from __future__ import annotations

import re

import pytest
from code_blocks import ROOT, blocks, commands, pages, the_block

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


TREE = the_block(ROOT / "docs/layout.md", "", "kit/train.py ")
OPENED_FIRST = {"kit/train.py", "kit/launch.py", "kit/api.py", "kit/trainer/trainer.py", "rewards/preset.py"}


def tree_faults(tree: str) -> list[str]:
    """Names in a tree that do not exist, and folders of modules or files to open first that it omits."""
    named = re.findall(r"(?:^|  )((?:kit|rewards|tests|benchmarks|examples|\.ci)/[\w./]*)", tree, re.MULTILINE)
    modules = [path for part in ("kit", "rewards") for path in (ROOT / part).rglob("*.py")]
    folders = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in modules}
    return [
        *(f"{name} does not exist" for name in named if not (ROOT / name).exists()),
        *(f"{folder} has no line" for folder in sorted(folders) if not any(name.startswith(folder) for name in named)),
        *(f"{name} has no line" for name in sorted(OPENED_FIRST - set(named))),
    ]


def test_the_tree_names_every_folder_and_the_files_to_open_first() -> None:
    assert tree_faults(TREE) == []
