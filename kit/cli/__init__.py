"""The command line."""

from kit.cli.app import main as main
