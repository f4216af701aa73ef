"""Pages of the site that are written when it is built: the reference of configuration and command line, from the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    from kit.schema import document, valid_values

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

    from kit.cli import app

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


def _written(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000).strip()
    return text.removesuffix("...").strip().replace("|", "\\|")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {"reference/configuration.md": configuration, "reference/cli.md": command_line}


def on_files(files: Any, config: Any) -> Any:
    """Adds the written pages to those that were found (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files
