"""Arguments and options that several verbs have, and how they print JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kit.runs.files import to_json

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a preset's name.")]
RunId = Annotated[str, typer.Argument(metavar="RUN_ID", help="A run; `grpo-kit ps` lists them.", show_default=False)]
Root = Annotated[Path, typer.Option(help="Folder that holds the runs.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="Override any key, e.g. optimisation.steps=50."),
]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="best|last|STEP", help="Weights to take; else the run's result.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once it has started; it goes on by itself.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def print_json(value: Any) -> None:
    """Prints a value as indented JSON."""
    typer.echo(to_json(value, indent=2))
