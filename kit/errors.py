"""The errors that a user can cause.

KitError                      exit code 2; the message says what was seen, what was expected and what to do
├── ConfigError               a key, value or combination in YAML, CLI or Python
├── DataError                 a dataset that cannot be read, mapped or split
├── ModelError                a model or tokenizer that cannot be loaded or scored
├── RewardError               a reward that violates its contract
├── ObjectiveError            a hook that violates its contract, or needs a field that the run does not have
├── RunError                  a run id, a run directory, a disk
├── EngineError               a generation engine that died, hangs or is out of memory
└── EnvironmentUnsupported    an unsupported package version or machine
"""

from __future__ import annotations


class KitError(Exception):
    """Base of all user errors. The command line prints the message without a traceback and exits with 2."""

    exit_code = 2
    shown = False
    """Whether a child process has printed the message already."""

    def _render_traceback_(self) -> list[str]:
        """Only the message is printed in notebooks, as on the command line. `%debug` still shows where it was raised."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(KitError):
    """A configuration that cannot be run."""


class DataError(KitError):
    """A dataset that cannot be read, mapped or split."""


class ModelError(KitError):
    """A model or tokenizer that cannot be loaded, scored or saved."""


class RewardError(KitError):
    """A reward that violates its contract."""


class ObjectiveError(KitError):
    """A hook that does not keep its contract, or needs something that the run does not have."""


class RunError(KitError):
    """A run id that is taken or unknown, a directory or disk that cannot be written."""


class EngineError(KitError):
    """A generation engine that died, hangs or has no room."""


class EnvironmentUnsupported(KitError):
    """A package version or machine outside what the kit was tested with."""


def refuse(error: type[KitError], *cases: tuple[bool, str, str]) -> None:
    """Raises `error` for the first of a table of (when, what is wrong, what to do) whose condition holds."""
    for when, message, remedy in cases:
        if when:
            raise error(f"{message} {remedy}")
