"""Warm processes: forks of one server that has imported everything, in place of cold processes.

Tests that start processes spend most of their time on imports, several seconds each. After `install()`, `subprocess.Popen` of
`python -m MODULE` (of `MODULES`) or of a script asks the server for a fork. The child has the requested command line,
environment, folder, open files, session and signals; it runs the module as `__main__` and ends as an interpreter does.
`Popen` has its pid, exit code and streams, and the processes that it starts are warm, too.

Differences: the server is its parent (`os.getppid()` returns the caller, or 1 when that has ended), and it is reaped as soon
as it has ended. A process is cold if its modules may differ (an environment variable that libraries read at import, a module
of the same name in the folder), and inside `cold()`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import faulthandler
import fcntl
import importlib
import inspect
import json
import os
import runpy
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = "GRPO_KIT_TESTS_WARM"
"""Environment variable: the folder of the server's socket and log. `none` disables warm processes."""
MODULES = ("kit.", "ipykernel_launcher", "accelerate.commands.accelerate_cli")
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""The code with which a worker of pytest-xdist begins (execnet's `popen_bootstrapline`)."""
PRELOADED = (
    "accelerate", "datasets", "gradio", "math_verify",
    "pandas", "peft", "pyarrow.parquet", "rewards", "torch", "transformers.models.qwen3.modeling_qwen3",
    "trl.trainer.grpo_trainer", "kit.chat.answering", "kit.cli.app", "kit.evaluation.heldout", "kit.runner.build",
    "kit.runner.console", "kit.runner.evaluation", "kit.runner.prepare", "kit.runner.recording", "kit.runner.resume",
    "kit.runner.trackers", "kit.runs.supervisor", "kit.trainer.trainer",
)  # fmt: skip
READ_WHILE_IMPORTED = (
    "HF_",
    "HUGGINGFACE",
    "TRANSFORMERS_",
    "TRITON_",
    "GOMP_",
    "LD_",
    "LC_",
    "LANG",
    "PYTHON",
    "HOME",
)
MAY_DIFFER = (
    "HF_TOKEN",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONBREAKPOINT",
    "HF_HUB_OFFLINE",
    "HF_HUB_DISABLE_TELEMETRY",
)
"""Exceptions: HF_TOKEN and PYTHONBREAKPOINT, which Ray sets, are read when they are used; PYTHONPATH is set in the child; and
the server, like all tests, does not use the hub."""
RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


# --- client: in tests, and in the warm processes that they start ------------------------------------------------------

_cold = installed = workers = False
"""`workers`: fork the workers of pytest-xdist, too. Few tests need few imports, so their workers start faster cold."""
_execute = subprocess.Popen._execute_child
_names = list(inspect.signature(_execute).parameters)[1:]


def install() -> None:
    """Fork the later child processes of this one from the warm server, if possible."""
    global installed
    if installed or os.environ.get(PLACE) == "none" or not hasattr(socket, "send_fds"):
        return
    if PLACE not in os.environ:
        os.environ[PLACE] = f"{tempfile.gettempdir()}/warm-{secrets.token_hex(4)}:{os.getpid()}"
    installed = True
    subprocess.Popen._execute_child = _start  # type: ignore[method-assign]
    for name in ("_internal_poll", "_try_wait"):
        setattr(subprocess.Popen, name, _asking(getattr(subprocess.Popen, name), name))


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Start processes in the usual way inside the block."""
    global _cold
    before, _cold = _cold, True
    try:
        yield
    finally:
        _cold = before


def _start(self: Any, *values: Any) -> None:
    arguments = dict(zip(_names, values, strict=True))
    request = None if _cold else _request(arguments)
    if request is None:
        _execute(self, *values)
        return
    ends = [arguments[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    handles = [end if end >= 0 else number for number, end in enumerate(ends)]
    request["numbers"] = [0, 1, 2, *arguments["pass_fds"]]
    sys.stdout.flush()
    self._warm = _connection()
    self._told = b""
    socket.send_fds(self._warm, [b"!"], [*handles, *arguments["pass_fds"]])
    body = json.dumps(request).encode()
    self._warm.sendall(struct.pack("!I", len(body)) + body)
    while b"\n" not in self._told:
        if not (reply := self._warm.recv(64)):
            raise OSError(f"the server of warm processes has ended; {_place()[0]}/log.txt says why")
        self._told += reply
    pid, _, self._told = self._told.partition(b"\n")
    self.pid = int(pid)
    self._child_created = True
    self._close_pipe_fds(
        *(arguments[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _asking(original: Any, name: str) -> Any:
    """Wrap a waiting method of `Popen`, so that it reads the exit status of a warm process from the server."""

    def status(self: Any, wait: bool) -> int | None:
        self._warm.setblocking(wait)
        with contextlib.suppress(BlockingIOError):
            while b"\n" not in self._told:
                reply = self._warm.recv(64)
                self._told += reply or b"9\n"  # the server was killed, so the status is unknown
        self._warm.setblocking(True)
        if b"\n" not in self._told:
            return None
        self._warm.close()
        return int(self._told)

    def poll(self: Any, *args: Any, **named: Any) -> int | None:
        if not hasattr(self, "_warm"):
            return original(self, *args, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None and (ended := status(self, False)) is not None:
                    self._handle_exitstatus(ended)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def try_wait(self: Any, flags: int) -> tuple[int, int]:
        if not hasattr(self, "_warm"):
            return original(self, flags)
        ended = status(self, not flags & os.WNOHANG)
        return (0, 0) if ended is None else (self.pid, ended)

    return poll if name == "_internal_poll" else try_wait


def _request(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the request to the server; None if the process cannot be a fork."""
    words = [os.fsdecode(word) for word in arguments["args"]] if isinstance(arguments["args"], (list, tuple)) else []
    if arguments["shell"] or arguments["preexec_fn"] or len(words) < 2 or words[0] != sys.executable:
        return None
    if arguments["executable"] not in (None, words[0]) or arguments["process_group"] not in (-1, None):
        return None
    folder = os.path.abspath(os.fsdecode(arguments["cwd"] or "."))
    variables = os.environ if arguments["env"] is None else arguments["env"]
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    path = [os.path.join(folder, entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if shows_faults := words[1:3] == ["-X", "faulthandler"]:
        del words[1:3]
        if len(words) < 2:
            return None
    safe_path = words[1] == "-P"
    _, *words = [word for number, word in enumerate(words) if (number, word) not in ((1, "-u"), (1, "-P"))]
    if words[0] == "-m" and words[1].startswith(MODULES):
        kind, name, rest, first = "module", words[1], words[2:], folder
    elif words[0].endswith(".py"):
        script = os.path.join(folder, words[0])
        kind, name, rest, first = "script", script, words[1:], os.path.dirname(os.path.realpath(script))
    elif workers and words == ["-c", WORKER]:
        kind, name, rest, first = "code", "-c", [], folder
    else:
        return None
    path = path if safe_path else [first, *path]
    if not os.path.isdir(folder) or not _same_modules(environment, path):
        return None
    ignored = [number for number in RESET if signal.getsignal(number) is signal.SIG_IGN]
    return {
        "kind": kind, "name": name, "rest": rest, "folder": folder, "environment": environment, "path": path,
        "caller": os.getpid(), "session": arguments["start_new_session"], "ignored": ignored, "umask": arguments["umask"],
        "shows_faults": shows_faults,
    }  # fmt: skip


def _same_modules(environment: Mapping[str, str], path: list[str]) -> bool:
    """Return whether a process with this environment and path would import the modules of the server."""

    def read(variables: Mapping[str, str]) -> dict[str, str]:
        return {k: v for k, v in variables.items() if k.startswith(READ_WHILE_IMPORTED) and k not in MAY_DIFFER}

    server = json.loads((_place()[0] / "environment.json").read_text())
    if server["executable"] != sys.executable or read(environment) != read(server["environment"]):
        return False
    loaded = {name.partition(".")[0] for name in PRELOADED} | {"sitecustomize", "usercustomize"}
    known = {str(ROOT), str(ROOT / "tests/warm_site"), *sys.path[1:]}
    for folder in path:
        ends = () if folder in known else (".py", "/__init__.py")
        if any(Path(folder, name + end).exists() for name in loaded for end in ends):
            return False
    return True


def _place() -> tuple[Path, int]:
    """Return the server's folder and the pid of its owner; start the server if necessary."""
    folder, _, owner = os.environ[PLACE].rpartition(":")
    place = Path(folder)
    if not (place / "environment.json").exists():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(place / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "environment.json").exists():
                _start_server(place, int(owner))
    return place, int(owner)


def _start_server(place: Path, owner: int) -> None:
    settings = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE")}
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MPLBACKEND", "PYTHONDONTWRITEBYTECODE")
    }
    tests = str(ROOT / "tests")
    code = f"import sys; sys.path[0] = {tests!r}; import warm_processes; warm_processes.main({str(place)!r}, {owner})"
    with cold(), open(place / "log.txt", "a") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", code],
            env=inherited | settings | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        while not (place / "socket").exists():
            if server.poll() is not None:
                raise OSError(f"the server of warm processes did not start:\n{(place / 'log.txt').read_text()}")
            time.sleep(0.05)
    began = {"executable": sys.executable, "environment": dict(os.environ)}
    (place / "environment.json").write_text(json.dumps(began))


def _connection() -> socket.socket:
    place, _ = _place()
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(place / "socket"))
    return made


# --- the server -------------------------------------------------------------------------------------------------------


def main(place: str, owner: int) -> None:
    """Fork the requested processes until the process `owner` ends."""
    import gc

    gc.disable()
    import kit  # noqa: F401  (before torch: its threads sleep while they wait)
    from kit.models.libraries import UNUSED, hidden, silence_import_noise

    silence_import_noise()
    with hidden(UNUSED):
        for name in PRELOADED:
            importlib.import_module(name)
    threads = {Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert len(threads - {"jemalloc_bg_thd"}) == 1, (
        f"these would be missing in every child: {threads}"
    )  # jemalloc restarts its thread in a fork
    # Skip torch's work at the exit of each child: printing compile times and removing 300 operators.
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    for left in list(weakref.finalize._registry):
        left.atexit = False
    gc.freeze()
    gc.enable()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{place}/begin")
    listener.listen(64)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.rename(f"{place}/begin", f"{place}/socket")
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(reading, selectors.EVENT_READ)
    children: dict[int, socket.socket] = {}
    while _lives(owner):
        for key, _ in waiting.select(timeout=1):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    request, handles = _receive(connection)
                except (OSError, ValueError):
                    connection.close()
                    continue
                pid = os.fork()
                if not pid:
                    _become(request, handles, connection)
                    return
                children[pid] = connection
                for handle in handles:
                    os.close(handle)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(reading, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (connection := children.pop(ended[0], None)) is not None:
                    with contextlib.suppress(OSError), connection:
                        connection.sendall(f"{ended[1]}\n".encode())
    shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    room = array.array("i")
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(64 * room.itemsize))
    for _, _, data in ancillary:
        room.frombytes(data[: len(data) - len(data) % room.itemsize])
    file = connection.makefile("rb")
    (size,) = struct.unpack("!I", file.read(4))
    return json.loads(file.read(size)), list(room)


def _become(request: dict[str, Any], handles: list[int], caller: socket.socket) -> None:
    """Turn the child into the requested process: set session and signals, report the pid, and run it."""
    signal.set_wakeup_fd(-1)
    for number in RESET:
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    with contextlib.suppress(OSError):
        caller.sendall(f"{os.getpid()}\n".encode())
    high = [fcntl.fcntl(handle, fcntl.F_DUPFD, 512) for handle in handles]
    os.closerange(3, 512)
    for handle, number in zip(high, request["numbers"], strict=True):
        os.dup2(handle, number, inheritable=True)
    os.closerange(512, 1024)
    if request["umask"] >= 0:
        os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    parent = request["caller"]
    os.getppid = lambda: parent if _lives(parent) else 1
    _begin_anew()
    if request["shows_faults"]:
        faulthandler.enable()
    sys.path[:] = [*request["path"], *(entry for entry in sys.path[1:] if entry not in request["path"])]
    sys.argv = [request["name"], *request["rest"]]
    _run(request["kind"], request["name"])


def _begin_anew() -> None:
    """Reset the state that a fork inherits and that a new process would create."""
    import numpy
    import torch

    tempfile.tempdir = None
    os.fsync = lambda handle: None  # as in tests/conftest.py
    numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else len(os.sched_getaffinity(0)))
    if PLACE in os.environ:
        install()


def _run(kind: str, name: str) -> None:
    """Run the module or file as the interpreter does, but exit without the clean-up of modules, which takes a second."""
    code, interrupted = 0, False
    main = sys.modules["__main__"].__dict__
    for left in [key for key in main if not key.startswith("__")]:
        del main[left]
    try:
        if kind == "module":
            runpy._run_module_as_main(name)
        elif kind == "code":
            exec(WORKER, main)
        else:
            main["__file__"] = name
            exec(compile(Path(name).read_bytes(), name, "exec"), main)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if not isinstance(ended.code, (int, type(None))):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    with contextlib.suppress(BaseException):
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)
