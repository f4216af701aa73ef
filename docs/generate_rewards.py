"""Writes docs/rewards/, one page a preset and an index, from the docstrings.

python docs/generate_rewards.py            write
python docs/generate_rewards.py --check    write nothing; exit with 1 if a page is not what the code says
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rewards
from rewards.hacks import answered
from rewards.presets import _builder
from rewards.testing import golden

FOLDER = Path(__file__).parent / "rewards"
SECTIONS = ("Formula", "Range", "Checker", "Columns", "Source", "Hacks")
_HEAD = re.compile(rf"(?:^|(?<=\s))({'|'.join(SECTIONS)}):\s")
_ARXIV = re.compile(r"(?<![\d./])(\d{4}\.\d{5})(?!\d)")
_NOTE = "<!-- Written by docs/generate_rewards.py from the docstring in {path}: change it there. -->"


@dataclass(frozen=True)
class Documented:
    """A preset's docstring in parts; `parameters` are name, default and meaning."""

    name: str
    path: str
    summary: str
    sections: dict[str, str]
    parameters: list[tuple[str, str, str]]
    raises: str
    example: str


def documented(name: str) -> Documented:
    """The parts of a preset's docstring. Raises `ValueError` where one of them is missing."""
    build = _builder(name)
    text, _, example = (inspect.getdoc(build) or "").partition("\n>>>")
    text, _, raises = text.partition("\nRaises:\n")
    prose, _, arguments = text.partition("\nArgs:\n")
    heads = list(_HEAD.finditer(prose))
    sections = {
        head[1]: prose[head.end() : following.start() if following else None].strip()
        for head, following in zip(heads, [*heads[1:], None], strict=True)
    }
    parameters = _parameters(build, arguments)
    missing = [section for section in SECTIONS if not sections.get(section)]
    missing += [f"the meaning of {parameter}" for parameter, _, meaning in parameters if not meaning]
    missing += [] if example else ["an example"]
    if missing:
        raise ValueError(f"The docstring of {name!r} lacks {', '.join(missing)}.")
    path = build.__module__.replace(".", "/") + ".py"
    summary = prose[: heads[0].start()].strip()
    return Documented(name, path, summary, sections, parameters, " ".join(raises.split()), ">>>" + example.rstrip())


def page(name: str) -> str:
    """A preset's page in Markdown."""
    found = documented(name)
    parts = [_NOTE.format(path=found.path), f"# `{name}`", _text(found.summary)]
    parts += [f"**{section}:** {_text(found.sections[section])}" for section in SECTIONS if section != "Hacks"]
    if found.parameters:
        rows = [f"| `{name}` | {default} | {_cell(meaning)} |" for name, default, meaning in found.parameters]
        parts += ["## Parameters", "| name | default | meaning |\n|---|---|---|\n" + "\n".join(rows)]
    if found.raises:
        parts.append(f"Raises {_text(found.raises)}")
    parts += ["## Example", f"```python\n{found.example}\n```", *_golden(name)]
    parts += ["## How it can be hacked", _text(found.sections["Hacks"]), "[All presets](index.md)"]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The table of all presets."""
    rows = []
    for name in rewards.names():
        found = documented(name)
        reach = found.sections["Range"].partition(". ")[0].removesuffix(".")
        rows.append(f"| [`{name}`]({name}.md) | {_cell(found.summary)} | {_cell(reach)} |")
    parts = [
        _NOTE.format(path="rewards/presets/"),
        "# Reward presets",
        "How to use them: [docs/rewards.md](../rewards.md).",
        "| preset | what it rewards | range |\n|---|---|---|\n" + "\n".join(rows),
    ]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """File name -> text of everything in docs/rewards."""
    return {f"{name}.md": page(name) for name in rewards.names()} | {"index.md": index()}


def differences() -> list[str]:
    """Names of pages that are missing, out of date, or of no preset."""
    wanted = pages()
    there = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.md")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def _golden(name: str) -> list[str]:
    """What `grpo-kit reward test` scores: columns, and completions that must win and must lose."""
    rows = golden(name)
    if not rows:
        return []
    row = rows[0]
    own = ("prompt", "good", "bad", "completion", "style", "right", "wrong")
    columns = {key: value for key, value in row.items() if key not in own}
    lines = [f"prompt: {_short(row.get('prompt', ''))}"] + [f"{key}: {_short(value)}" for key, value in columns.items()]
    for kind, answer in (("good", "right"), ("bad", "wrong")):
        given = row.get(kind, [])
        found = list(given) if isinstance(given, list) and not (given and isinstance(given[0], dict)) else [given]
        found += [answered(row["style"], row[answer])] if "style" in row and answer in row else []
        lines += [f"{kind}: {_short(completion)}" for completion in found[:3]]
    return [
        "A row of its data, with completions that must win and must lose:",
        "```text\n" + "\n".join(lines) + "\n```",
    ]


def _short(value: Any, limit: int = 300) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cell(text: str) -> str:
    """The same within a table, where a line is a row."""
    return " ".join(_text(text).split())


def _text(text: str) -> str:
    """Docstring prose as Markdown: papers become links, tags outside of code are shown as they are."""
    pieces = re.split(r"(`+[^`]*`+)", text)
    for at in range(0, len(pieces), 2):
        plain = re.sub(r"<(?=[\w/])", r"\\<", pieces[at]).replace("|", "\\|")
        pieces[at] = _ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", plain)
    return "".join(pieces)


def _parameters(build: Callable[..., Any], arguments: str) -> list[tuple[str, str, str]]:
    meanings: dict[str, str] = {}
    for block in re.split(r"\n {4}(?=\w+(?:, \w+)*: )", "\n" + arguments):
        names, _, meaning = block.strip().partition(": ")
        meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return [
        (name, "required" if each.default is each.empty else f"`{each.default!r}`", meanings.get(name, ""))
        for name, each in inspect.signature(build).parameters.items()
    ]


def main() -> int:
    """Writes the pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if check:
        for name in (stale := differences()):
            print(f"{name} is not what the code says; run python docs/generate_rewards.py")
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for file in FOLDER.glob("*.md"):
        if file.name not in wanted:
            file.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(wanted)} pages in {FOLDER}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
