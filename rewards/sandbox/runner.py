"""Run jobs, one or many at a time, at the best level that works on this machine."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from rewards.parallel import concurrently
from rewards.sandbox.records import Job, Level, Result, SandboxError

_PROBE = Job(program="print(input()[::-1])", stdin="ko", seconds=10.0)


def level() -> Level | None:
    """Return the best level that works here, or None."""
    return None if problem() else "landlock"


@functools.cache
def problem(at: Level = "landlock") -> str:
    """Return why programs cannot be run at a level here, by the output of a small program; empty if they can."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    result = _run_at(at, _PROBE)
    if result.status == "ok" and result.stdout == "ok\n":
        return ""
    return (result.reason or result.stderr.strip() or f"the trial program printed {result.stdout!r}")[-300:]


def run(program: str, stdin: str = "", *, at: Level | None = None, allow_unsafe: bool = False, **limits: Any) -> Result:
    """Run a Python program and wait for its end.

    Args:
        program: Python source.
        stdin: what the program reads, as text.
        at: insist on one level; by default the best one.
        allow_unsafe: run with mere limits where no level of isolation works.
        limits: the other fields of `Job`: limits and the interpreter.

    Raises:
        SandboxError: nothing keeps the program apart here and `allow_unsafe` is not given, or `at` does not work here.
    """
    return _run_at(choose(at, allow_unsafe), Job(program=program, stdin=stdin, **limits))


def run_all(
    jobs: Sequence[Job], *, workers: int | None = None, at: Level | None = None, allow_unsafe: bool = False
) -> list[Result]:
    """Run jobs, `workers` at the same time (as many as there are CPUs), and return results in order; raises like `run`."""
    chosen = choose(at, allow_unsafe)
    return concurrently(functools.partial(_run_at, chosen), jobs, workers)


def choose(at: Level | None = None, allow_unsafe: bool = False) -> Level:
    """Return the level that `run` would use with these arguments; raises like it."""
    if at == "unsafe" and not allow_unsafe:
        raise SandboxError("Level 'unsafe' runs programs with mere limits. Pass allow_unsafe=True if you mean it.")
    if not (reason := problem(at or "landlock")):
        return at or "landlock"
    if at is None and allow_unsafe:
        return "unsafe"
    raise SandboxError(
        f"Nothing here can keep generated programs apart ({at or 'landlock'}: {reason}). Run on Linux 5.13 or later with "
        "Landlock, or pass allow_unsafe=True to run them with mere limits."
    )


def _run_at(name: Level, job: Job) -> Result:
    """Run a job at one level. Never raises for what the program, the machine or the job's content does."""
    from rewards.sandbox.forkserver import run_forked

    try:
        return run_forked(job, isolated=name != "unsafe")
    except UnicodeEncodeError:
        return Result(status="failed", reason="the program is no valid Unicode text")
    except OSError as failure:
        return Result(status="infra", reason=f"{failure}"[:300])
