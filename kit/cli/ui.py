"""The verb `ui`: the web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ui(
    host: Annotated[str, typer.Option(help="Address to serve at; any but 127.0.0.1 needs --auth.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve at.")] = 7860,
    root: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    auth: Annotated[
        str | None,
        typer.Option(metavar="FILE_OR_ENV", help="Lines `user:password`: a file, or an environment variable's name."),
    ] = None,
    hooks: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A Python file whose functions the page may use as rewards and hooks."),
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Also at a public address of Gradio's relay; needs --auth.")
    ] = False,
) -> None:
    """Open the web page: make runs, watch them, try the results. Runs outlive the page."""
    from kit.ui.server import serve
    from kit.ui.settings import Settings, read_accounts

    serve(Settings(host, port, root, read_accounts(auth), tuple(hooks or ()), share))
