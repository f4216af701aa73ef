"""Errors of this library, and helpers for their messages.

RewardsError (ValueError)
├── PresetError             a preset that cannot be built as asked
├── UnknownPresetError      no preset of that name
├── UnknownParameterError   the preset has no such parameter
├── FunctionPathError       `file.py:function` or `package.module:function` leads nowhere
└── SandboxError            nothing here can keep programs apart (in `rewards.sandbox`)

Scoring itself never raises: whatever goes wrong there becomes the status of a score.
"""

from collections.abc import Iterable


class RewardsError(ValueError):
    """Base of all errors of this library."""


class PresetError(RewardsError):
    """A preset that cannot be built as asked; the message says what to change."""


class UnknownPresetError(RewardsError):
    """No preset has this name; the message gives the nearest one."""


class UnknownParameterError(RewardsError):
    """The preset has no parameter of this name; the message gives the nearest one."""


class FunctionPathError(RewardsError):
    """A path to a reward function leads nowhere; the message lists what was found there."""


def nearest(wrong: str, valid: Iterable[str]) -> str:
    """Return `Did you mean 'x'?` with the closest of `valid`, or a list of all of them when none is close."""
    import difflib

    options = sorted(valid)
    close = difflib.get_close_matches(wrong, options, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}? Valid: {', '.join(options)}."
    return f"Valid: {', '.join(options) or 'none'}."


def require(preset: str, module: str, package: str) -> None:
    """Check that `module` could be imported, without importing it.

    Raises:
        PresetError: it is not installed; the message says how to install `package`.
    """
    import importlib.util

    try:
        is_installed = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        is_installed = False
    if not is_installed:
        raise PresetError(f"Preset {preset!r} needs the package {package}. Run: pip install {package}")
