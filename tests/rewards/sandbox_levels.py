"""The levels of the sandbox, and what a test does where one does not work."""

import os

import pytest

from rewards import sandbox

LEVELS = ("namespaces", "bwrap", "landlock")


def need(level: str) -> None:
    """Skips the test where the level does not work; fails it where SANDBOX_LEVELS names it, as in CI."""
    report = next(each for each in sandbox.describe() if each.level == level)
    if report.available:
        return
    if level in os.environ.get("SANDBOX_LEVELS", "").split():
        pytest.fail(f"SANDBOX_LEVELS says that {level} works here, and it does not: {report.reason}")
    pytest.skip(f"{level} does not work here: {report.reason}")
