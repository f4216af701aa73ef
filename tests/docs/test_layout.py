"""docs/layout.md lists every folder of modules and only files that exist."""

from __future__ import annotations

import re

from code_blocks import ROOT, the_block

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
