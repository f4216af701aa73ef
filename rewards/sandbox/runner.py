"""Run jobs, one or many at a time, at the best level that works on this machine."""

import functools
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rewards.parallel import concurrently
from rewards.sandbox import commands
from rewards.sandbox.records import LEVELS, Job, Level, LevelReport, Result, RunStatus, SandboxError

if TYPE_CHECKING:
    from rewards.sandbox.process import Ended


_PROBE = Job(program="print(input()[::-1])", stdin="ko", seconds=10.0)
_MEANING: dict[Level, str] = {
    "namespaces": "own namespaces without network, home or /proc, a filter of system calls, limits; forked from a warm Python",
    "landlock": "Landlock, a filter of system calls, limits; no processes and no writable directory",
    "unsafe": "limits only: the program sees your files and your network; for allow_unsafe=True alone",
}


def level() -> Level | None:
    """Return the best level that works here, tried once in each process; None if none works."""
    return next((name for name in LEVELS[:-1] if _report(name).available), None)


def describe() -> list[LevelReport]:
    """Report on every level, in the order of preference: whether it works here, and what it does or why it does not work."""
    return [_report(name) for name in LEVELS]


def run(program: str, stdin: str = "", *, at: Level | None = None, allow_unsafe: bool = False, **limits: Any) -> Result:
    """Run a Python program and wait for its end.

    Args:
        program: Python source.
        stdin: what the program reads, as text.
        at: insist on one level; by default the best one.
        allow_unsafe: run with mere limits where no level of isolation works.
        limits: the other fields of `Job`: limits, files and the interpreter.

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
    if at is not None:
        if not (report := _report(at)).available:
            raise SandboxError(f"Sandbox level {at!r} does not work here: {report.reason}.")
        return at
    if (best := level()) is not None:
        return best
    if allow_unsafe:
        return "unsafe"
    reasons = "; ".join(f"{report.level}: {report.reason}" for report in describe() if not report.available)
    raise SandboxError(
        f"Nothing here can keep generated programs apart ({reasons}). Allow user namespaces (of a container, too), run on "
        "Linux 6.2 or later for Landlock, or pass allow_unsafe=True to run them with mere limits."
    )


@functools.cache
def _report(name: Level) -> LevelReport:
    """Report on a level by the output of a small program."""
    if not sys.platform.startswith("linux"):
        return LevelReport(level=name, available=False, reason=f"needs Linux, this is {sys.platform}")
    result = _run_at(name, _PROBE)
    if result.status == "ok" and result.stdout == "ok\n":
        return LevelReport(level=name, available=True, reason=_MEANING[name])
    reason = result.reason or result.stderr.strip() or f"the trial program printed {result.stdout!r}"
    return LevelReport(level=name, available=False, reason=reason[-300:])


def _run_at(name: Level, job: Job) -> Result:
    """Run a job at one level. Never raises for what the program, the machine or the job's content does."""
    try:
        program = job.program.encode()
        contents = {file: text.encode() if isinstance(text, str) else text for file, text in job.files.items()}
    except UnicodeEncodeError:
        return Result(status="failed", reason="the program is no valid Unicode text")
    odd = [file for file in contents if "/" in file or "\0" in file or file in ("", ".", "..", "main.py")]
    if odd:
        return Result(status="failed", reason=f"not a plain file name: {odd[0]!r}"[:200])
    try:
        return _start(name, job, program, contents)
    except OSError as failure:
        return Result(status="infra", reason=f"{failure}"[:300])


def _start(name: Level, job: Job, program: bytes, contents: Mapping[str, bytes]) -> Result:
    from rewards.sandbox.forkserver import run_forked
    from rewards.sandbox.process import sealed_file, watch
    from rewards.sandbox.slots import uid_slot

    if name == "namespaces":
        return _result(run_forked(job, program, contents), job, b"ready\n")
    with (
        uid_slot() as uid,
        sealed_file(job.stdin.encode("utf-8", "replace")) as stdin,
        _box(program, contents, uid) as box,
    ):
        if name == "unsafe":
            command = commands.unsafe_command(job, uid, box=box)
            return _result(watch(command, stdin=stdin, status=None, job=job, cwd=box), job, b"")
        read, write = os.pipe()
        try:
            command = commands.landlock_command(job, uid, box=box, status_fd=write)
        except BaseException:
            os.close(read)
            os.close(write)
            raise
        return _result(watch(command, stdin=stdin, status=(read, write), job=job), job, b"ready\n")


def _result(ended: "Ended", job: Job, started: bytes) -> Result:
    stdout, stderr = (ended.output[pipe].decode("utf-8", "replace") for pipe in ("stdout", "stderr"))
    outcome: RunStatus
    if ended.stopped == "timeout":
        outcome, reason = "timeout", f"stopped after {job.seconds:g} s"
    elif ended.stopped == "output":
        outcome, reason = "output", f"stopped after {job.output_bytes} bytes of output"
    elif ended.stopped == "memory":
        outcome, reason = "failed", f"stopped: its processes held more than {job.memory_mb} MiB together"
    elif started not in ended.status:
        failure = bytes(ended.status).decode("utf-8", "replace").partition("failed ")[2] or stderr
        outcome, reason = "infra", f"the sandbox did not start: {failure.strip()[-200:] or 'no reason given'}"
    elif ended.returncode == 0:
        outcome, reason = "ok", ""
    else:
        outcome, reason = "failed", f"exit code {ended.returncode}"
    return Result(
        status=outcome, stdout=stdout, stderr=stderr, returncode=ended.returncode, seconds=ended.seconds, reason=reason
    )


@contextmanager
def _box(program: bytes, contents: Mapping[str, bytes], uid: int | None) -> Iterator[str]:
    """Make a directory with the program and its files that only its user may read."""
    outer = tempfile.mkdtemp(prefix="sandbox-", dir="/tmp")
    try:
        if uid is not None:
            os.chmod(outer, 0o711)  # owned by this user, so that the box can be neither moved nor replaced by a link
        box = os.path.join(outer, "box")
        os.mkdir(box, 0o700)
        for name, content in {**contents, "main.py": program}.items():
            with open(os.path.join(box, name), "wb") as file:
                file.write(content)
            if uid is not None:
                os.chown(file.name, uid, uid)
        if uid is not None:
            os.chown(box, uid, uid)
        yield box
    finally:
        with suppress(OSError):
            _empty(outer)
            os.rmdir(outer)


def _empty(folder: str) -> None:
    """Remove the contents of a folder, however deep, and follow no link: the contents of a folder are moved to the top before the
    folder is removed, so that no path gets long and nothing recurses."""
    lifted = 0
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        while names := os.listdir(top):
            for name in names:
                if _unlinked(name, top):
                    continue
                with suppress(PermissionError):
                    os.chmod(name, 0o700, dir_fd=top)  # it may have taken its own rights away
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for each in os.listdir(inner):
                        if not _unlinked(each, inner):
                            lifted += 1
                            os.rename(each, f"lifted-{lifted}-{os.getpid()}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _unlinked(name: str, folder: int) -> bool:
    """Remove an entry that is no folder; return whether it was none."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return False
    os.unlink(name, dir_fd=folder)
    return True
