"""The command line."""

from kit.cli.app import main

__all__ = ["main"]
