import os
import platform
import subprocess
import sys
import threading

import pytest
from sandboxed import need_isolation, together, without_walls

from rewards import sandbox
from rewards.sandbox import forkserver
from rewards.sandbox.forkserver import sealed_file
from rewards.sandbox.seccomp import filter_program

LINUX = sys.platform.startswith("linux")


@pytest.fixture(autouse=True, scope="module")
def _isolation():
    need_isolation()


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("raise SystemExit(3)", "failed", "exit code 3"),
        ("1 / 0", "failed", "exit code 1"),
        ("not python at all", "failed", "exit code 1"),
        ("1\n\0", None, ""),  # Python 3.11 stops reading at NUL, later versions refuse
        ("", "ok", ""),
        ("\ud800", "failed", "not valid Unicode"),
        ("print('x' * 5000)", "output", "stopped after 1000 bytes"),
        ("import sys; print('x' * 5000, file=sys.stderr)", "output", "stopped after 1000 bytes"),
    ],
)
def test_every_end_has_its_status(program, status, reason):
    result = sandbox.run(program, output_bytes=1000)
    assert result.status in ([status] if status else ["ok", "failed"])
    assert reason in result.reason
    assert len(result.stdout) <= 1000
    assert (result.returncode is None) == (status == "output" or "Unicode" in reason)


# How the fast output of competitive programs is commonly written: a stream whose flush needs globals of the program.
FAST_OUTPUT = """
import os, sys
from io import BytesIO, IOBase
class Fast(IOBase):
    def __init__(self, file):
        self.fd, self.kept, self.writable = file.fileno(), BytesIO(), "r" not in file.mode
        self.write = self.kept.write
    def flush(self):
        os.write(self.fd, self.kept.getvalue())
        self.kept.truncate(0), self.kept.seek(0)
class Wrapper(IOBase):
    def __init__(self, file):
        self.buffer = Fast(file)
        self.flush, self.write = self.buffer.flush, lambda text: self.buffer.write(text.encode())
sys.stdout = Wrapper(sys.stdout)
print("x")
"""
GONE = "class A:\n    def __del__(self): print('gone', len(X))\nX = [1]\n"
OPENED = "open(1, 'w', closefd=False)"


@pytest.mark.parametrize(
    ("program", "printed", "code"),
    [
        ("import atexit\natexit.register(print, 'last')\nprint('first')", "first\nlast\n", 0),
        ("class A:\n    def __del__(self): print('gone')\na = A()\na.loop = a", "gone\n", 0),
        ("import sys\nprint(1)\nsys.stdout.close()", "1\n", 0),
        ("import sys\nsys.stdout.buffer.write(b'1\\n')\nraise SystemExit(0)", "1\n", 0),
        ("import io, sys\nout, sys.stdout = sys.stdout, io.StringIO()\nprint(1)\nout.write(sys.stdout.getvalue())", "1\n", 0),
        ("import pickle, sys\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))), sys.argv == [__file__])",
         "<class '__main__.A'> True\n", 0),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", "late\n", 0),
        ("import sys\nprint(sys.stdin.readline(), end='')\nsys.stdin.seek(0)\nprint(open(0).read(), end='')", "a\na\nb\n", 0),
        (FAST_OUTPUT, "x\n", 0),
        ("import sys\nprint(1)\nsys.stdout = None", "1\n", 0),
        ("import sys\nprint(1)\ndel sys.stdout", "1\n", 0),
        ("import os, sys\nclass W:\n    def flush(self): os.write(1, T)\nT = b'1'\nsys.stdout = W()", "11", 0),
        ("import os, sys\nclass W:\n    def flush(self): 1 / 0\nsys.stderr = sys.stdout = W()", "", 120),
        (GONE + "a = A()", "gone 1\n", 0),
        (f"import builtins, functools\nbuiltins.print = functools.partial(print, file={OPENED})\nprint('x')", "x\n", 0),
        (f"class O:\n    f = {OPENED}\nO.f.write('x')", "x", 0),
        ("import sys\nsys.exit(-1)", "", 255),
        ("import sys\nsys.exit('why')", "", 1),
        ("import sys\nsys.excepthook = None\n1 / 0", "", 1),
        ("print(__annotations__, __cached__, __name__, __file__ == __import__('sys').argv[0])", "{} None __main__ True\n", 0),
        ("def deep(n):\n    try:\n        return deep(n + 1)\n    except RecursionError:\n        return n\nprint(deep(1))",
         "999\n", 0),
    ],
)  # fmt: skip
def test_a_forked_program_ends_as_one_that_was_started(program, printed, code):
    result = sandbox.run(program, "a\nb\n")
    assert (result.stdout, result.returncode) == (printed, code), result
    assert code or not result.stderr


def test_a_traceback_shows_the_program_and_nothing_of_the_sandbox():
    lines = sandbox.run("def f():\n    1 / 0\nf()").stderr.splitlines()
    assert [line.split(", ", 1)[1] for line in lines if "File" in line] == ["line 3, in <module>", "line 2, in f"]
    assert "File" in sandbox.run("x = (").stderr.splitlines()[0]


def test_output_before_a_timeout_is_kept():
    program = "import time\nprint('first', flush=True)\ntime.sleep(60)"
    result = together(program, seconds=1)[program]
    assert (result.status, result.reason, result.returncode) == ("timeout", "stopped after 1 s", None)
    assert result.stdout == "first\n"
    assert 1.0 <= result.seconds < 4.0


def test_a_crashing_interpreter_is_a_failed_program():
    result = sandbox.run("import ctypes\nprint(1, flush=True)\nctypes.string_at(0)")
    assert (result.status, result.stdout) == ("failed", "1\n")


def test_programs_cannot_claim_that_the_sandbox_did_not_start():
    # That would be `infra`, which excludes a completion instead of scoring it.
    program = "import os, sys\nprint('failed: no Landlock', file=sys.stderr)\nos._exit(125)"
    assert sandbox.run(program).status == "failed"


def test_no_descriptor_thread_or_child_is_left():
    sandbox.run("print(1)")
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for program in ("print(1)", "import time; time.sleep(60)", "\0"):
        sandbox.run(program, seconds=0.3)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_where_programs_cannot_be_isolated_mere_limits_have_to_be_asked_for(monkeypatch):
    monkeypatch.setattr(forkserver, "problem", lambda: "no Landlock")
    with pytest.raises(sandbox.SandboxError, match=r"no Landlock.*allow_unsafe=True"):
        sandbox.run("print(1)")
    program = "import os; print(os.listdir('/root' if os.getuid() == 0 else '/etc') != [])"
    assert sandbox.run(program, allow_unsafe=True).stdout == without_walls(program).stdout == "True\n"


@pytest.mark.skipif(not LINUX or os.geteuid() != 0, reason="needs root to become somebody else")
def test_ordinary_users_have_the_sandbox_too():
    # Under another user id, with the system's interpreter, which that user may read.
    code = (
        "import os; os.setgroups([]); os.setgid(60001); os.setuid(60001)\n"
        "from rewards import sandbox\n"
        "bomb = 'import os\\ntry:\\n  for _ in range(500): os.fork()\\nexcept OSError: print(1)'\n"
        "plain = sandbox.run('print(input())', 'x')\n"
        "bombed = sandbox.run(bomb, seconds=2)\n"
        "print(plain.status, plain.stdout.strip(), set(bombed.stdout) <= {'1', chr(10)})\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    version = subprocess.run(
        [forkserver.python(), "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True
    )
    if version.stdout.strip() != b"True":
        pytest.skip("the system's Python is older than 3.11")
    ran = subprocess.run(
        [forkserver.python(), "-c", code], capture_output=True, text=True, cwd=root, env={"PYTHONPATH": root}
    )
    if "No module named 'rewards'" in ran.stderr or "Permission" in ran.stderr:
        pytest.skip("this checkout is not readable by other users")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok x True\n"


@pytest.mark.skipif(not LINUX or os.geteuid() != 0, reason="slots are for root")
def test_each_server_has_a_user_id_of_its_own():
    first, second = forkserver.take_slot(), forkserver.take_slot()
    assert first[0] != second[0]
    code = "from rewards.sandbox.forkserver import take_slot\nprint(take_slot()[0])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) not in (first[0], second[0])
    forkserver.give_slot(first)
    forkserver.give_slot(second)
    again = forkserver.take_slot()
    forkserver.give_slot(again)
    assert again[0] in (first[0], second[0])


@pytest.mark.skipif(not LINUX, reason="needs Linux")
def test_sealed_files_cannot_be_changed():
    with sealed_file(b"content") as fd:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        with pytest.raises(OSError, match="not permitted"):
            os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_TRUNC)
        assert os.read(fd, 100) == b"content"


def _verdict(program: bytes, machine: int, number: int, *arguments: int) -> int:
    """Interpret the filter as the kernel does, for one system call."""
    import struct

    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    data = {0: number, 4: machine} | {16 + 8 * at: value for at, value in enumerate((*arguments, 0, 0, 0)[:3])}
    accumulator = position = 0
    while True:
        kind, if_true, if_false, constant = code[position]
        position += 1
        if kind == 0x20:
            accumulator = data[constant]
        elif kind == 0x54:
            accumulator &= constant
        elif kind == 0x06:
            return constant
        else:
            holds = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: accumulator & constant}[kind]
            position += if_true if holds else if_false


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


@pytest.mark.parametrize(
    ("number", "arguments", "verdict"),
    [
        (0, (), ALLOW),  # read
        (101, (), EPERM),  # ptrace
        (165, (), EPERM),  # mount
        (435, (), ENOSYS),  # clone3
        (437, (), ENOSYS),  # openat2
        (56, (17,), EPERM),  # clone as fork does
        (56, (0x3D0F00,), ALLOW),  # clone as pthread_create does
        (56, (0x10000011,), EPERM),  # clone with CLONE_NEWUSER
        (57, (), EPERM),  # fork
        (62, (), EPERM),  # kill
        (41, (1,), EPERM),  # socket(AF_UNIX)
        (53, (1, 1), ALLOW),  # socketpair(AF_UNIX, SOCK_STREAM)
        (53, (1, 0x80002), EPERM),  # socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC)
        (302, (0,), ALLOW),  # prlimit64 of itself
        (302, (1,), EPERM),  # prlimit64 of another process
        (157, (1,), EPERM),  # prctl(PR_SET_PDEATHSIG)
        (157, (15,), ALLOW),  # prctl(PR_SET_NAME)
        (76, (), EPERM),  # truncate
        (2, (0, 0o1101), ALLOW),  # open(O_WRONLY | O_CREAT | O_TRUNC), which is Landlock's to refuse
        (2, (0, 0o1000), EPERM),  # open(O_RDONLY | O_TRUNC), which is not before Linux 6.2
        (257, (0, 0, 0o1000), EPERM),  # openat likewise
        (72, (0, 1), ALLOW),  # fcntl(F_GETFD)
        (72, (0, 8), EPERM),  # fcntl(F_SETOWN)
        (72, (0, 10), EPERM),  # fcntl(F_SETSIG)
        (72, (0, 15), EPERM),  # fcntl(F_SETOWN_EX)
        (16, (0, 0x8901), EPERM),  # ioctl(FIOSETOWN)
        (0x40000000, (), KILL),  # the x32 ABI
    ],
)
def test_the_filter_answers_each_call(number, arguments, verdict):
    assert _verdict(filter_program("x86_64"), 0xC000003E, number, *arguments) == verdict


def test_the_filter_knows_its_machines():
    arm = filter_program("aarch64")
    assert _verdict(arm, 0xC00000B7, 117) == EPERM  # ptrace
    assert _verdict(arm, 0xC00000B7, 56, 0, 0, 0o1000) == EPERM  # openat(O_RDONLY | O_TRUNC)
    assert _verdict(arm, 0xC00000B7, 63) == ALLOW  # read
    assert _verdict(arm, 0xC000003E, 63) == KILL  # calls of another machine
    assert filter_program("riscv64") is None
    assert platform.machine() != "x86_64" or filter_program()


def test_a_loaded_machine_does_not_lengthen_the_deadline():
    programs = [f"while True: x = {number}" for number in range(4)]
    results = together(*programs, seconds=0.5)
    for program in programs:
        assert results[program].status == "timeout"
        assert results[program].seconds < 5
