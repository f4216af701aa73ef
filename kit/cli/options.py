"""Arguments and options of several verbs, and printing of JSON and tables.

rich is imported where it is used, so that `grpo-kit --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kit.runs.files import to_json

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a preset's name.")]
RunId = Annotated[
    str, typer.Argument(metavar="RUN_ID", help="Id of a run; `grpo-kit ps` lists them.", show_default=False)
]
Root = Annotated[Path, typer.Option(help="Folder of the runs.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="Override any key, e.g. optimisation.steps=50."),
]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="best|last|STEP", help="Weights to use; default: the run's result.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once the run has started.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.")]


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    typer.echo(to_json(value, indent=2))


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table; without a terminal as wide as necessary, for grep and files."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console = Console()
    if not console.is_terminal:  # no wrapping at 80 columns
        console = Console(width=200)
    console.print(table)


def print_plain(head: list[str], rows: list[list[str]]) -> None:
    """Print columns three blanks apart, without rich: its import takes longer than listing a thousand runs."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        line = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())
