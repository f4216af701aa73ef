"""Calls of the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from kit.cli import app as cli


def run(*arguments: str, code: int = 0, lines: str = "") -> str:
    """Return the output of `grpo-kit` for these arguments and this input, after it has ended with `code`."""
    result = CliRunner().invoke(cli.app, list(arguments), input=lines)
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result.output
