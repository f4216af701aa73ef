"""Run generated Python programs isolated from the machine, on Linux, without Docker and without privileges.

Programs are forked from warm interpreters, see `forkserver`, and restricted by Landlock and a filter of system calls. A
program has no network and no environment variables, reads system directories only, writes no files, and has limits on time,
memory, threads and output. The reward compares its output outside of the sandbox.

Limits of the isolation: programs share the kernel, so a bug in the kernel is a way out, and CPU bandwidth is not limited. The
sandbox protects the machine and the reward from the programs of a model in training. It does not protect a machine with
secrets from programs of hostile strangers.

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

__all__ = ["Interpreter", "Job", "Result", "SandboxError", "interpreter", "isolates", "problem", "run", "run_job"]
