"""Pages of the site that are written when it is built, from the code: configuration, verbs, files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

INTRODUCTION = """# Configuration

One YAML file (or a mapping in Python, or the web form) decides a run. Every key is optional. `grpo-kit init run.yaml`
writes this page as a file to edit, `grpo-kit validate run.yaml` checks it, and `-o section.key=value` changes any key from
the command line. A key that does not exist is refused, with the nearest name.
"""


def configuration() -> str:
    """Every key with its default, range and meaning, section by section."""
    from kit.config import RunConfig

    return "\n".join([INTRODUCTION, *_section(RunConfig(), "", 2)])


def _section(section: Any, prefix: str, level: int) -> Iterator[str]:
    from kit.config import Section
    from kit.config.schema import document, valid_values

    fields = type(section).model_fields
    nested = {name: value for name in fields if isinstance(value := getattr(section, name), Section)}
    rows = []
    for name, field in fields.items():
        if name in nested:
            continue
        meaning = document(field).removesuffix(f" [{valid_values(field)}]")
        default = section.model_dump(mode="json", include={name})[name]
        rows.append(f"| `{prefix}{name}` | `{_written(default)}` | {_cell(valid_values(field))} | {_cell(meaning)} |")
    if rows:
        yield from ("| key | default | values | meaning |", "|---|---|---|---|", *rows, "")
    for name, value in nested.items():
        yield from (f"{'#' * level} {prefix}{name}", "", _cell(type(value).__doc__ or ""), "")
        yield from _section(value, f"{prefix}{name}.", level + 1)


def command_line() -> str:
    """Every verb with its arguments and options."""
    from typer.main import get_command

    from kit.cli.app import app

    parts = [
        "# Command line",
        "",
        f"{app.info.help}",
        "",
        "Exit codes: 0 done, 1 a crash, 2 a mistake of the user's, 130 Ctrl-C.",
        "",
    ]
    return "\n".join([*parts, *_verbs(get_command(app), "grpo-kit")])


def _verbs(group: Any, path: str) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{path} {name}")
            continue
        usage = command.make_context(f"{path} {name}", [], resilient_parsing=True).get_usage().removeprefix("Usage: ")
        yield from (f"## {path} {name}", "", command.help or "", "", "```text", usage, "```", "")
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]
        if options:
            yield from ("| option | default | meaning |", "|---|---|---|", *map(_option, options), "")


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.default
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    return f"| {names} | {shown} | {_cell(option.help or '')} |"


def files() -> str:
    """Every file of the two packages with the first sentence of its docstring, folder by folder."""
    parts = [
        "# Files",
        "",
        "Each file begins with a sentence that says what it is for. `kit/train.py` is the one to read first.",
        "",
    ]
    modules = sorted(path for name in ("kit", "rewards") for path in (ROOT / name).rglob("*.py"))
    for folder in dict.fromkeys(path.parent for path in modules):
        parts += [f"## {folder.relative_to(ROOT).as_posix()}", ""]
        opening = folder / "__init__.py"
        parts += [_cell(_first_line(opening)), ""] if opening in modules else []
        named = [path for path in modules if path.parent == folder and path != opening]
        parts += ["| file | what is in it |", "|---|---|"] if named else []
        parts += [f"| `{path.name}` | {_cell(_first_line(path))} |" for path in named] + [""]
    return "\n".join(parts)


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].partition("\n   ")[0]


def _written(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000).strip()
    return text.removesuffix("...").strip().replace("|", "\\|")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {
    "reference/configuration.md": configuration,
    "reference/cli.md": command_line,
    "reference/files.md": files,
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the written pages to those that were found (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files
