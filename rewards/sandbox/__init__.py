"""Run generated Python programs isolated from the machine, on Linux, without Docker and without privileges.

Programs are forked from warm interpreters, see `forkserver`, and restricted by Landlock and a filter of system calls. A
program has no network, no environment, no home, only system directories to read, nothing to write, and limits on time, memory,
threads and output; grading happens outside, on what it wrote.

Limits of the isolation: the kernel is shared, so that a bug in it is a way out. CPU bandwidth is not shared fairly. The
sandbox keeps the programs of a model in training from harming the machine or cheating its reward; it is not made for hostile
strangers on a machine that holds secrets.

>>> from rewards import sandbox
>>> sandbox.run("print(int(input()) * 2)", "21", allow_unsafe=True).stdout.strip()
'42'
"""

from rewards.sandbox.forkserver import (
    Interpreter,
    Job,
    Result,
    SandboxError,
    interpreter,
    isolates,
    problem,
    run,
    run_job,
)

__all__ = [
    "Interpreter",
    "Job",
    "Result",
    "SandboxError",
    "interpreter",
    "isolates",
    "problem",
    "run",
    "run_job",
]
