"""Isolation of work that may crash or hang: jobs and workers in separate processes, calls in a separate thread.

A job (`call`, `serve`): the caller writes a request (JSON) and spawns `python -m MODULE REQUEST --error-file FILE [--quiet]`.
Exit codes: 0 done, 2 a user's error (on stderr, and in the error file with its kind), 130 stopped, 1 crash.
A worker (`Worker`): a process that keeps its models loaded and answers requests, one JSON object a line in both directions.
A call (`Watchdog`): a thread cannot be killed, so one that hangs is abandoned. It holds no lock of the kit and, as a daemon,
does not keep the process alive.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn, TypeVar

import kit.errors
from kit.errors import KitError, RunError
from kit.runs.files import to_json
from kit.runs.process import kill_group

DONE, CRASHED, USER_ERROR, STOPPED = 0, 1, 2, 130
ROOM_FOR_ERROR = 16384
"""Bytes reserved on disk for the error report of a job."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KERNEL = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "MPLBACKEND")
"""Environment variables of ipykernel for its cells, which child processes must not have."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job. `error` is set for all codes but DONE and STOPPED; `shown`: it was printed already.

    `code` is one of the four above; `exit` is the exit code of the process, or 128 plus the signal that ended it.
    """

    code: int
    error: KitError | None = None
    shown: bool = False
    exit: int = 0


LOST = (
    "device-side assert", "illegal memory access", "unspecified launch failure", "illegal instruction", "misaligned address",
    "hardware stack error", "uncorrectable ecc error", "launch timed out", "invalid program counter",
)  # fmt: skip
"""Messages of CUDA errors after which every further call of the process fails."""


def is_lost(error: BaseException) -> bool:
    """Whether the CUDA context of this process is lost. All further calls to the GPU fail, so the process must end."""
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in LOST)


def is_user_error(error: BaseException) -> bool:
    """Whether an error is defined by the kit or by the `rewards` package."""
    return isinstance(error, KitError) or type(error).__module__.partition(".")[0] == "rewards"


def serve(
    job: Callable[[dict[str, Any], bool], object],
    argv: Sequence[str] | None = None,
    read: Callable[[str, Sequence[str]], dict[str, Any]] | None = None,
) -> int:
    """The job's side: reads the request, calls `job(request, quiet)`, and returns the exit code.

    The result of the job is written as JSON to the file `result` of the request, if it has one. User errors are printed to
    stderr and reported to the caller; Ctrl-C gives 130; any other error is a crash and propagates with its traceback.
    `read` parses the request argument with `-o a.b=value` overrides; the default is JSON.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("request")
    if read is not None:
        parser.add_argument("-o", "--override", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--error-file", type=Path)
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args(argv)
    # Handle Ctrl-C even if the shell has set SIGINT to be ignored. SIGTERM means the same: save and end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        request = (
            read(arguments.request, arguments.override) if read else json.loads(Path(arguments.request).read_text())
        )
        result = job(request, arguments.quiet)
        if result is not None and "result" in request:
            Path(request["result"]).write_text(to_json(result), encoding="utf-8")
    except KeyboardInterrupt:
        return STOPPED
    except Exception as error:
        if not is_user_error(error):
            raise
        if arguments.error_file is not None:
            path, report = arguments.error_file, json.dumps({"kind": type(error).__name__, "message": str(error)})
            with contextlib.suppress(OSError), open(path, "r+b" if path.exists() else "wb") as file:
                file.write(report.encode())  # overwrites the reserved bytes
                file.truncate()
        label = "\x1b[31merror:\x1b[0m" if sys.stderr.isatty() else "error:"
        with contextlib.suppress(OSError):
            print(label, error, file=sys.stderr, flush=True)
        return USER_ERROR
    return DONE


def as_error(kind: Any, message: str, otherwise: type[KitError] = KitError) -> KitError:
    """An error of the kit's class `kind` with the message; of class `otherwise` for an unknown name."""
    error_class = getattr(kit.errors, str(kind), None)
    return (error_class if isinstance(error_class, type) and issubclass(error_class, KitError) else otherwise)(message)


def call(
    module: str,
    request: dict[str, Any],
    *,
    quiet: bool = False,
    inherit: Sequence[int] = (),
    started: Callable[[int], None] = lambda pid: None,
    on_line: Callable[[str], object] | None = None,
) -> Outcome:
    """The caller's side: spawns `python -m module`, waits for its end, and returns the outcome.

    The job handles Ctrl-C: it saves and ends while this process waits. The job prints to the output of this process, in a
    notebook to the cell.

    Args:
        on_line: called with each line of stdout and stderr, which are then not printed.
        inherit: open files for the job.
        started: called with the job's pid.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-kit-") as folder:
        request_file, error_file = Path(folder, "request.json"), Path(folder, "error.json")
        request_file.write_text(json.dumps(request), encoding="utf-8")
        error_file.write_bytes(b" " * ROOM_FOR_ERROR)  # so that a full disk can be reported
        command = [sys.executable, "-P", "-m", module, str(request_file), "--error-file", str(error_file)]
        code = _wait(command + ["--quiet"] * quiet, inherit, started, on_line)
        if code in (DONE, STOPPED):
            return Outcome(code, exit=code)
        if -code in PASSED_ON:  # the signal came before the job could handle it
            return Outcome(STOPPED, exit=128 - code)
        if code == USER_ERROR and (report_text := error_file.read_text(encoding="utf-8").strip()):
            report = json.loads(report_text)
            return Outcome(USER_ERROR, as_error(report["kind"], report["message"]), True, code)
    if code == -signal.SIGKILL:
        text = (
            "The process was killed (signal 9) from outside, or by the kernel because memory ran out. For training, lower "
            "optimisation.micro_batch_size or generation.max_completion_tokens, or choose a smaller model; an export needs less "
            "memory with --no-verify."
        )
    elif code < 0:
        text = f"The process was ended by signal {-code} ({signal.Signals(-code).name})."
    else:
        text = f"The process crashed with exit code {code}. See its output for the reason."
    return Outcome(CRASHED, RunError(text), False, code if code >= 0 else 128 - code)


class JobStopped(RunError):
    """A job ended on request, without a result."""


def call_for_result(module: str, request: dict[str, Any], stopped: str, **options: Any) -> dict[str, Any]:
    """Runs a job and returns its result. `options`: keywords of `call`.

    Raises the job's error, and `JobStopped` with the text `stopped` if the job ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-kit-") as folder:
        path = Path(folder, "result.json")
        outcome = call(module, request | {"result": str(path)}, **options)
        if outcome.error is not None:
            outcome.error.shown = outcome.shown
            raise outcome.error
        if outcome.code == STOPPED or not path.is_file():
            raise JobStopped(stopped)
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result


def _wait(
    command: list[str], inherit: Sequence[int], begun: Callable[[int], None], on_line: Callable[[str], object] | None
) -> int:
    notebook = "ipykernel" in sys.modules
    # In a terminal the job shares the process group, so Ctrl-C reaches it directly. Elsewhere (a notebook kernel, a service)
    # it has its own group, and this process forwards interrupts. It never receives an interrupt twice.
    terminal = False
    with contextlib.suppress(OSError), open("/dev/tty") as tty:
        terminal = os.tcgetpgrp(tty.fileno()) == os.getpgrp()
    with (
        _forwarding(terminal) as started,
        subprocess.Popen(
            command,
            env=environment(),
            pass_fds=tuple(inherit),
            stdout=subprocess.PIPE if notebook or on_line else None,
            stderr=subprocess.STDOUT if notebook or on_line else None,
            text=True,
            encoding="utf-8",
            start_new_session=not terminal,
        ) as process,
    ):
        started.append(process)
        begun(process.pid)
        for line in process.stdout or ():
            if on_line is not None:
                on_line(line)
            else:
                print(line, end="", flush=True)
        if not terminal and hasattr(os, "waitid"):
            # The process is not collected yet, so its pid is not reused. After a failure, kill the rest of its group.
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                if ended is not None and (ended.si_code, ended.si_status) != (os.CLD_EXITED, DONE):
                    kill_group(process.pid)
        process.wait()
    return process.returncode


def environment() -> dict[str, str]:
    """Environment variables for a child process: PYTHONPATH for the kit, and one GPU.

    A run trains on one GPU. Unless CUDA_VISIBLE_DEVICES is set, or accelerate or torchrun started this process, the child sees
    only the first. Variables of a notebook kernel are removed, because a child would print escape codes into the cell.
    Colab's secret HF_TOKEN is included, because only the kernel can read it.
    """
    home = Path(kit.errors.__file__).resolve().parents[1]
    path = os.environ.get("PYTHONPATH", "")
    if home.name not in ("site-packages", "dist-packages") and str(home) not in path.split(os.pathsep):
        path = os.pathsep.join(filter(None, (path, str(home))))
    kernel = KERNEL if "ipykernel" in sys.modules else ()
    inherited = {name: value for name, value in os.environ.items() if name not in kernel}
    if "HF_TOKEN" not in inherited and (token := _colab_token()):
        inherited["HF_TOKEN"] = token
    chosen = {"CUDA_VISIBLE_DEVICES", "LOCAL_RANK"} & os.environ.keys() or os.environ.get("WORLD_SIZE", "1") != "1"
    device = {} if chosen else {"CUDA_VISIBLE_DEVICES": "0"}
    return inherited | device | ({"PYTHONPATH": path} if path else {}) | {"PYTHONUNBUFFERED": "1"}


@functools.cache
def _colab_token() -> str | None:
    """Colab's secret HF_TOKEN, if it exists and the notebook has access. It is read once."""
    with contextlib.suppress(Exception):  # errors of Colab: no such secret, no access, no answer
        if "google.colab" in sys.modules:  # which does not import `userdata` itself
            return importlib.import_module("google.colab.userdata").get("HF_TOKEN") or None
    return None


@contextlib.contextmanager
def _forwarding(terminal: bool) -> Iterator[list[subprocess.Popen[str]]]:
    """Ignores Ctrl-C in this process, and forwards signals to jobs that do not receive them directly."""
    started: list[subprocess.Popen[str]] = []
    if threading.current_thread() is not threading.main_thread():
        yield started  # only the main thread may set handlers and receives interrupts
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in started if not (terminal and number in (signal.SIGINT, signal.SIGHUP)) else ():
            with contextlib.suppress(OSError):
                process.send_signal(number)

    numbers = [
        number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP
    ]
    earlier = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield started
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


# --- a process that answers requests ----------------------------------------------------------------------------------------

MOST_BYTES = 8 * 1024 * 1024
"""Maximum size of a message of a worker, in bytes. A worker that sends a longer one is killed."""


class Worker:
    """The process `python -m MODULE ARGUMENTS`, which receives requests and sends answers as JSON objects, one per line.

    It has its own session, so that only its owner handles Ctrl-C. `on_message` is called in a thread with each object that it
    writes, and with None when it has ended. `options`: of `subprocess.Popen`, e.g. a file as `stderr`.
    """

    def __init__(
        self, module: str, *arguments: str, on_message: Callable[[dict[str, Any] | None], object], **options: Any
    ) -> None:
        self.too_long = False
        self._on_message, self._writing = on_message, threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=options.pop("env", None) or environment(),
            **options,
        )
        threading.Thread(target=self._listen, name=f"worker {module}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends one object. Returns False if the process has ended. Raises `TypeError` or `ValueError` for invalid JSON."""
        line = encode(message)
        try:
            with self._writing:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def close(self, seconds: float = 0.0) -> None:
        """Closes its input, and after `seconds` kills the process and its descendants."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_group(self._process.pid)
            self._process.wait()

    def _listen(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            while line := stream.readline(MOST_BYTES + 1):
                if len(line) > MOST_BYTES:
                    self.too_long = True
                    kill_group(self._process.pid)
                    break
                if (message := decode(line)) is not None:
                    self._on_message(message)
        self._process.wait()
        self._on_message(None)


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as one line with its newline."""
    return (json.dumps(dict(message), ensure_ascii=True, allow_nan=False, default=str) + "\n").encode()


def decode(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object in a line; None for anything else."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def claim_stdout() -> BinaryIO:
    """Returns the stream for messages of a worker. From then on, printed text goes to stderr instead of between messages."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


# --- a call that may hang, in a separate thread -----------------------------------------

Result = TypeVar("Result")


class Hung(TimeoutError):
    """The call did not end in time."""


class Watchdog:
    """A thread that makes calls one after the other, each within `timeout` seconds.

    `prepare` runs first in the thread. It sets torch's state per thread (device, number of threads).
    """

    gave_up = False
    """Whether a call of this process was abandoned. Its thread may still be running."""

    def __init__(self, timeout: float, prepare: Callable[[], None] = lambda: None) -> None:
        self.timeout, self.prepare = timeout, prepare
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] | None = None
        self._own = threading.local()

    def call(self, do: Callable[[], Result]) -> Result:
        """Returns or raises what `do()` does. Raises `Hung` after `timeout` seconds and abandons the thread.

        A nested call runs directly, because the thread cannot wait for itself.
        """
        if getattr(self._own, "working", False):
            return do()
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._calls,), name="engine", daemon=True).start()
        result: Future[Result] = Future()
        self._calls.put((result, do))
        try:
            if not wait([result], self.timeout).done:
                raise Hung(f"no answer within {self.timeout:g} s")
        except BaseException:  # also for an interrupt
            self._calls, Watchdog.gave_up = None, True
            raise
        return result.result()

    def _work(self, calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
        self._own.working = True
        prepared = False
        while True:
            result, do = calls.get()
            try:
                if not prepared:
                    self.prepare()
                    prepared = True
                result.set_result(do())
            except BaseException as error:
                result.set_exception(error)
            del result, do  # otherwise the waiting thread keeps references to the last call and its arguments


def leave(code: int) -> NoReturn:
    """Ends this process, immediately if a call was abandoned: CUDA would wait for its kernel at exit and keep the GPU."""
    if Watchdog.gave_up:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
