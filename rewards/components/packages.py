"""Optional packages: looked for when a preset is loaded, imported when it first scores."""

import importlib.util

from rewards.errors import PresetError


def require(preset: str, module: str, package: str) -> None:
    """Checks that `module` could be imported, without importing it.

    Raises:
        PresetError: it is not installed; the message says how to install `package`.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise PresetError(f"Preset {preset!r} needs the package {package}. Run: pip install {package}")
