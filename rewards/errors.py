"""Errors of this library, and helpers for their messages.

RewardsError (ValueError)
├── PresetError             a preset cannot be built from its arguments
├── UnknownPresetError      no preset has this name
├── UnknownParameterError   the preset has no such parameter
├── FunctionPathError       `file.py:function` or `package.module:function` cannot be loaded
└── SandboxError            the system cannot isolate programs (in `rewards.sandbox`)

Scoring never raises: a failure becomes the status of a score.
"""

from collections.abc import Iterable


class RewardsError(ValueError):
    """Base class of all errors of this library."""


class PresetError(RewardsError):
    """A preset cannot be built from its arguments; the message says what to change."""


class UnknownPresetError(RewardsError):
    """No preset has this name; the message names the closest preset."""


class UnknownParameterError(RewardsError):
    """The preset has no parameter of this name; the message names the closest parameter."""


class FunctionPathError(RewardsError):
    """A path to a reward function cannot be loaded; the message lists the functions of the file."""


def nearest(wrong: str, valid: Iterable[str]) -> str:
    """Return `Did you mean 'x'?` with the closest of `valid` if one is close, followed by a list of all valid names."""
    import difflib

    options = sorted(valid)
    close = difflib.get_close_matches(wrong, options, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}? Valid: {', '.join(options)}."
    return f"Valid: {', '.join(options) or 'none'}."


def require(preset: str, module: str, package: str) -> None:
    """Check that `module` is installed, without importing it.

    Raises:
        PresetError: `module` is not installed; the message says how to install `package`.
    """
    import importlib.util

    try:
        is_installed = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        is_installed = False
    if not is_installed:
        raise PresetError(f"Preset {preset!r} needs the package {package}. Run: pip install {package}")
