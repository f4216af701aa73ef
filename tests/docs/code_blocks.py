"""Fenced code blocks of all pages (README.md, AGENTS.md, CONTRIBUTING.md, docs/), treated by their language and marker."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
LANGUAGES = ("python", "bash", "yaml", "json", "text", "")


@dataclass(frozen=True)
class Block:
    """A code block with its position, and the reason if it is not run."""

    path: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The pages beside the code, and all pages of docs/."""
    beside = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")]
    return [*beside, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    place, before = 0, ""
    while place < len(lines):
        opening = FENCE.match(lines[place])
        if not opening:
            before = lines[place] if lines[place].strip() else before
            place += 1
            continue
        indent, start = len(opening["indent"]), place + 1
        end = next((i for i in range(start, len(lines)) if lines[i].strip() == "```"), len(lines))
        text = "\n".join(line[indent:] for line in lines[start:end]) + "\n"
        mark = MARK.search(before)
        yield Block(path, start, opening["language"], text, mark["reason"] if mark else None)
        place, before = end + 1, ""


def the_block(path: Path, language: str, containing: str) -> str:
    """The text of the only block of this language that contains a text."""
    texts = [block.text for block in blocks(path) if block.language == language and containing in block.text]
    assert len(texts) == 1, f"{path.name}: {len(texts)} {language} blocks contain {containing!r}"
    return texts[0]


def everything() -> list[Block]:
    """The code blocks of all pages."""
    return [block for path in pages() for block in blocks(path)]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of a shell block, without comments, `&&`, `uv run` and variables before them."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            ends = [words.index(end) for end in ("&&", "||", "|", ";") if end in words]
            end = min(ends, default=len(words))
            if words[:end]:
                yield _bare(words[:end])
            words = words[end + 1 :]


def _bare(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        while words and words[0].startswith("--"):
            words = words[2:] if words[0] in ("--extra", "--group", "--with", "--python") else words[1:]
    return words


def shell(block: Block) -> str:
    """The shell commands of a block.

    All lines of a bash block; of a plain block, lines that begin with the kit's command, and the commands that a run prints at
    its end (`  chat           grpo-kit chat ID`).
    """
    if block.language == "bash":
        return block.text
    named = re.finditer(
        r"^(?:  [a-z ]+  )?((?:uv run )?grpo-kit .*?)(?:, then (grpo-kit .*))?$", block.text, re.MULTILINE
    )
    return "\n".join(command for line in named for command in line.groups() if command)
