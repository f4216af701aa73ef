"""Helpers of the sandbox tests."""

import functools
import os

import pytest

from rewards import sandbox
from rewards.parallel import concurrently
from rewards.sandbox import forkserver


def need_isolation():
    """Skip a test if programs cannot be isolated; fail it if the variable SANDBOX is set, as in CI."""
    if reason := sandbox.problem():
        if os.environ.get("SANDBOX"):
            pytest.fail(f"SANDBOX says that programs can be isolated here, and they cannot: {reason}")
        pytest.skip(f"programs cannot be isolated here: {reason}")


def without_walls(program: str) -> sandbox.Result:
    """The result of a program that is run with resource limits only."""
    return forkserver.run_job(False, sandbox.Job(program=program))


@functools.cache
def together(*programs: str, seconds: float, output_bytes: int = 1 << 20) -> dict[str, sandbox.Result]:
    """The results of programs that run until their deadline, in parallel."""

    def run(program: str) -> sandbox.Result:
        return sandbox.run(program, seconds=seconds, output_bytes=output_bytes)

    return dict(zip(programs, concurrently(run, programs, len(programs)), strict=True))
