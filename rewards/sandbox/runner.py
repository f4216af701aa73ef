"""Run jobs, one or many at a time."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from rewards.parallel import concurrently
from rewards.sandbox.records import Job, Result, SandboxError

_PROBE = Job(program="print(input()[::-1])", stdin="ko", seconds=10.0)


@functools.cache
def problem() -> str:
    """Return why programs cannot be isolated here, by the output of a small program; empty if they can."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    result = run_job(True, _PROBE)
    if result.status == "ok" and result.stdout == "ok\n":
        return ""
    return (result.reason or result.stderr.strip() or f"the trial program printed {result.stdout!r}")[-300:]


def isolates(allow_unsafe: bool = False) -> bool:
    """Return whether `run` would isolate a program; raises like it."""
    if not (reason := problem()):
        return True
    if allow_unsafe:
        return False
    raise SandboxError(
        f"Nothing here can keep generated programs apart: {reason}. Run on Linux 5.13 or later with Landlock, or pass "
        "allow_unsafe=True to run them with mere limits."
    )


def run(program: str, stdin: str = "", *, allow_unsafe: bool = False, **limits: Any) -> Result:
    """Run a Python program and wait for its end.

    Args:
        program: Python source.
        stdin: what the program reads, as text.
        allow_unsafe: where programs cannot be isolated, run it with mere limits: it then sees your files and your network.
        limits: the other fields of `Job`: limits and the interpreter.

    Raises:
        SandboxError: programs cannot be isolated here, and `allow_unsafe` is not given.
    """
    return run_job(isolates(allow_unsafe), Job(program=program, stdin=stdin, **limits))


def run_all(jobs: Sequence[Job], *, workers: int | None = None, allow_unsafe: bool = False) -> list[Result]:
    """Run jobs, `workers` at the same time (as many as there are CPUs), and return results in order; raises like `run`."""
    return concurrently(functools.partial(run_job, isolates(allow_unsafe)), jobs, workers)


def run_job(isolated: bool, job: Job) -> Result:
    """Run a job, isolated or with mere limits. Never raises for what the program, the machine or the job's content does."""
    from rewards.sandbox.forkserver import run_forked

    try:
        return run_forked(job, isolated)
    except UnicodeEncodeError:
        return Result(status="failed", reason="the program is no valid Unicode text")
    except OSError as failure:
        return Result(status="infra", reason=f"{failure}"[:300])
