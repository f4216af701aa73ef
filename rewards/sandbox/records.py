"""Jobs and results of the sandbox."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rewards.errors import RewardsError


class SandboxError(RewardsError):
    """Programs cannot be isolated on this machine, or an interpreter cannot be run; the message says why."""


RunStatus: TypeAlias = Literal["ok", "failed", "timeout", "output", "infra"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to run, with its limits.

    Args:
        program: Python source.
        stdin: what the program reads, as text.
        seconds: wall clock and, rounded up, CPU seconds.
        memory_mb: MiB of address space.
        output_bytes: bytes of stdout, and of stderr, after which the program is stopped.
        python: path of an interpreter with its packages, such as a virtual environment's; by default the system's Python with
            the standard library alone. The program may read the whole environment.
    """

    program: str
    stdin: str = ""
    seconds: float = 5.0
    memory_mb: int = 512
    output_bytes: int = 1 << 20
    python: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a program ended.

    `status`: `ok` exit code 0; `failed` any other end of its own, or no program that could be started; `timeout` and
    `output` stopped at that limit; `infra` the sandbox did not start, which says nothing about the program. `stdout` and
    `stderr` hold what was written until then, undecodable bytes replaced. `returncode` is negative for a signal, and None when
    the program was stopped. `seconds` is wall clock.
    """

    status: RunStatus
    stdout: str = ""
    stderr: str = ""
    returncode: int | None = None
    seconds: float = 0.0
    reason: str = ""
