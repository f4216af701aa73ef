"""The levels of the sandbox, and what a test does where one does not work."""

import functools
import os

import pytest

from rewards import sandbox
from rewards.sandbox import runner

LEVELS: tuple[sandbox.Level, ...] = ("landlock",)


def need(level: str) -> None:
    """Skips the test where the level does not work; fails it where SANDBOX_LEVELS names it, as in CI."""
    reason = sandbox.problem(level)
    if not reason:
        return
    if level in os.environ.get("SANDBOX_LEVELS", "").split():
        pytest.fail(f"SANDBOX_LEVELS says that {level} works here, and it does not: {reason}")
    pytest.skip(f"{level} does not work here: {reason}")


def working_levels() -> list[sandbox.Level]:
    """Those that work here."""
    return [level for level in LEVELS if not sandbox.problem(level)]


@functools.cache
def at_every_level(
    *programs: str, seconds: float, output_bytes: int = 1 << 20
) -> dict[tuple[str, str], sandbox.Result]:
    """Results of programs that run until their deadline, by level and program: all at once, so that they are waited for
    together, at every level that works here."""
    places = [(level, program) for level in working_levels() for program in programs]

    def run(place: tuple[sandbox.Level, str]) -> sandbox.Result:
        return sandbox.run(place[1], seconds=seconds, output_bytes=output_bytes, at=place[0])

    return dict(zip(places, runner.concurrently(run, places, len(places)), strict=True))
