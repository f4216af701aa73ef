"""Programs that try to escape, to harm the machine, or to outlive their run. None may print ESCAPED."""

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from pairwise import rest_in_matrix
from sandboxed import need_isolation, together, without_walls

from rewards import sandbox
from rewards.sandbox import forkserver

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

SYSCALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"
def attempt(x86, arm, *args):
    if libc.syscall(arm if ARM else x86, *args) >= 0:
        print("ESCAPED", x86)
    else:
        print("refused", os.strerror(ctypes.get_errno()))
"""

TRY = """
import os
def attempt(action, *args):
    try:
        result = action(*args)
    except BaseException as failure:
        print("refused", type(failure).__name__)
    else:
        print("ESCAPED", action, args, repr(result)[:80])
"""

# Each is run with a short deadline; {port}, {secret}, {abstract}, {pid} and {marker} are filled in.
PROGRAMS = {
    "TCP to this machine": TRY + "import socket\nattempt(socket.create_connection, ('127.0.0.1', {port}), 1)",
    "TCP to elsewhere": TRY + "import socket\nattempt(socket.create_connection, ('1.1.1.1', 53), 1)",
    "UDP": TRY
    + "import socket\nattempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})))",
    "name resolution": TRY + "import socket\nattempt(socket.gethostbyname, 'example.org')",
    "netlink and raw sockets": TRY
    + "import socket\nattempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)\n"
    + "attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 3)\nattempt(socket.socket, socket.AF_VSOCK)",
    "abstract socket of this machine": TRY
    + "import socket\nattempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0{abstract}'))",
    "datagrams to a socket of this machine": TRY
    + "import socket\nattempt(lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', '{datagrams}'))\n"
    + "attempt(lambda: socket.socketpair()[0].sendto(b'x', '{datagrams}'))\n"
    + "attempt(lambda: socket.socketpair()[0].connect('{datagrams}'))",
    "reading /root": TRY + "attempt(os.listdir, '/root')\nattempt(os.listdir, '/home')",
    "reading /proc/1/environ": TRY
    + "attempt(open, '/proc/1/environ')\nattempt(open, '/proc/{pid}/environ')\nattempt(os.listdir, '/proc/{pid}/fd')",
    "reading accounts": TRY + "attempt(open, '/etc/passwd')\nattempt(open, '/etc/shadow')",
    "reading a file of the trainer": TRY
    + "attempt(open, '{secret}')\nattempt(os.listdir, os.path.dirname('{secret}'))",
    "emptying a file of the trainer": TRY
    + "attempt(os.truncate, '{secret}', 0)\nattempt(os.open, '{secret}', os.O_TRUNC)\n"
    + "attempt(os.open, '{secret}', os.O_RDWR | os.O_TRUNC)\nattempt(os.open, '/tmp/new', os.O_CREAT)",
    "inherited environment": "import os\nprint('ESCAPED' if set(os.environ) - {{'PWD', 'LC_CTYPE'}} else 'none')",
    "inherited descriptors": (
        "import os\nfor fd in range(3, 1024):\n    try:\n        os.fstat(fd)\n    except OSError:\n        continue\n"
        "    print('ESCAPED', fd)"
    ),
    "writing outside": TRY
    + "for path in ('/x', '/usr/x', '/etc/x', '/box/x', '/dev/x', '/dev/shm/x', '/var/tmp/x', '{secret}'):\n"
    + "    attempt(open, path, 'w')",
    "changing its own source": TRY + "attempt(open, __file__, 'a')\nattempt(os.unlink, __file__)",
    "changing modes and owners outside": TRY
    + "for path in ('/usr', '{secret}', __file__):\n"
    + "    attempt(os.chmod, path, 0o777)\n    attempt(os.chown, path, os.getuid(), os.getgid())\n    attempt(os.utime, path)",
    "symbolic link out": TRY
    + "import contextlib\nwith contextlib.suppress(OSError):\n"
    + "    os.symlink('{secret}', '/tmp/link'); os.symlink('/', '/tmp/root')\n"
    + "attempt(open, '/tmp/link')\nattempt(open, '/tmp/link', 'w')\nattempt(os.listdir, '/tmp/root/root')\n"
    + "attempt(os.link, '/usr/bin/env', '/tmp/env')\nattempt(open, '/tmp/../../../../..{secret}')",
    "device nodes": TRY + "import stat\nattempt(os.mknod, '/tmp/kmem', stat.S_IFCHR | 0o666, os.makedev(1, 2))",
    "becoming root": TRY
    + "attempt(os.setgroups, [0])\n"
    + "for id in (1, 1000):\n    attempt(os.setuid, id)\n    attempt(os.setresgid, id, id, id)",
    "programs with the setuid bit": TRY
    + "def act():\n    import subprocess\n    out = subprocess.run(['/usr/bin/su', '-c', 'id'], capture_output=True, text=True)\n"
    + "    if out.returncode: raise OSError(out.stderr)\n    return out\nattempt(act)",
    "raising its limits": TRY
    + "import resource as r\n"
    + "for kind in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE):\n"
    + "    attempt(r.setrlimit, kind, (r.RLIM_INFINITY,) * 2)",
    "limits of the trainer": TRY + "import resource as r\nattempt(r.prlimit, {pid}, r.RLIMIT_NOFILE)",
    "signals to the trainer": TRY
    + "import signal\nattempt(os.kill, {pid}, signal.SIGTERM)\nattempt(os.killpg, {pid}, signal.SIGTERM)\n"
    + "attempt(signal.pidfd_send_signal, 0, signal.SIGTERM)",
    "signals to the parent": (
        "import os, signal\nfor target in (os.getppid(), -1):\n    try:\n        os.kill(target, signal.SIGKILL)\n"
        "    except OSError:\n        pass"
    ),
    "signals by a pipe of the trainer's": """
import fcntl, os, signal
read, write = os.pipe()
try:
    fcntl.fcntl(read, fcntl.F_SETOWN, {pid})
    fcntl.fcntl(read, 10, int(signal.SIGTERM))
    fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)
except OSError as failure: print("refused", failure)
os.write(write, b"x")
""",
    "ptrace": SYSCALL + "attempt(101, 117, 16, {pid}, 0, 0)\nattempt(101, 117, 0, 0, 0, 0)",
    "memory of other processes": SYSCALL
    + "buffer = ctypes.create_string_buffer(64)\nvector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)\n"
    + "attempt(310, 270, {pid}, vector, 1, vector, 1, 0)\nattempt(434, 434, {pid}, 0)",
    "nested namespaces": SYSCALL
    + "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x10020000):\n    attempt(272, 97, flag)\n"
    + "attempt(56, 220, 0x10000000 | 17, 0, 0, 0, 0)\nattempt(308, 268, 0, 0)",
    "mounts and chroot": SYSCALL
    + "attempt(165, 40, b'tmpfs', b'/tmp', b'tmpfs', 0, None)\nattempt(161, 51, b'/tmp')\nattempt(155, 41, b'/', b'/tmp')\n"
    + "attempt(166, 39, b'/usr', 2)\nattempt(428, 428, -100, b'/', 1)",
    "kernel interfaces": SYSCALL
    + "attempt(425, 425, 8, ctypes.create_string_buffer(256))\nattempt(321, 280, 0, 0, 0)\nattempt(323, 282, 0)\n"
    + "attempt(298, 241, 0, 0, 0, 0, 0)\nattempt(250, 219, 0, -3, 1)\nattempt(135, 92, 0x0040000)",
    "calls of the other ABI": SYSCALL + "if not ARM: attempt(0x40000000 + 39, 0)",
    "2 GiB at once": TRY + "attempt(lambda: len(bytearray(2 << 30)))\nimport mmap\nattempt(mmap.mmap, -1, 2 << 30)",
    "2 GiB piece by piece": (
        "kept = []\ntry:\n    for _ in range(2048): kept.append(bytearray(1 << 20))\n    print('ESCAPED')\n"
        "except MemoryError: kept.clear(); print('refused')"
    ),
    "System V objects of this machine": SYSCALL
    + "buffer = ctypes.create_string_buffer(bytes([1]) + bytes(63))\n"
    + "for key in range(64):\n"  # ids are small numbers on a machine that hardly uses them
    + "    attempt(30, 196, key, None, 0)\n    attempt(65, 193, key, buffer, 1)\n    attempt(69, 189, key, buffer, 1, 0o4000)\n"
    + "attempt(30, 196, {shm}, None, 0)\nattempt(69, 189, {queue}, buffer, 1, 0o4000)\nattempt(71, 187, {queue}, 2, buffer)",
    "memory that no limit counts": SYSCALL + "attempt(319, 279, b'x', 0)\nattempt(29, 194, 0, 1 << 30, 0o1600)",
    "filling the disk": """
import os
total = 0
for folder in ("/tmp", ".", "/dev/shm", "/"):
    try:
        for number in range(400):
            with open(os.path.join(folder, f"fill{{number}}"), "wb") as file:
                total += file.write(bytes(1 << 20))
    except OSError as failure:
        print("refused", failure)
print("ESCAPED" if total > 64 << 20 else total)
""",
    "fork bomb": """
import os, time
started = 0
try:
    for _ in range(500):
        if os.fork() == 0:
            time.sleep(60)
        started += 1
    print("ESCAPED")
except OSError as failure:
    print("refused", started, failure)
""",
    "recursive fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "thread bomb": """
import threading, time
threading.stack_size(65536)
try:
    for _ in range(20000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    print("ESCAPED")
except (RuntimeError, MemoryError): print("refused", threading.active_count())
""",
    "endless output": "while True: print('x' * 1000)",
    "endless errors": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "closed output, endless sleep": "import os, time\nos.close(1); os.close(2)\ntime.sleep(1000)",
    "ignoring SIGTERM": (
        "import signal, time\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)"
    ),
    "busy loop that ignores its CPU limit": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        while True: time.sleep(0.1)
    os._exit(0)
print("left one behind")
""",
    "daemon that holds the output open": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
""",
    "endless chain of processes": "import os\nwhile True:\n    if os.fork(): os._exit(0)",
}

ENDLESS = [name for name in PROGRAMS if name.startswith(("closed", "ignoring", "busy", "recursive"))]
LIMITS = {"seconds": 1.5, "output_bytes": 1 << 18}


@pytest.fixture(autouse=True, scope="module")
def _isolation():
    need_isolation()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The targets of the programs: a file that all users may read and write, two listening sockets, and this process."""
    folder = Path("/tmp") / f"escape-target-{os.getpid()}"
    folder.mkdir(mode=0o777)
    secret = folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    abstract = f"escape-target-{os.getpid()}"
    datagrams = folder / "datagrams"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
    ):
        unix.bind(f"\0{abstract}")
        unix.listen()
        log.bind(str(datagrams))
        datagrams.chmod(0o666)
        for listener in (tcp, unix):
            listener.setblocking(False)
        aims = {"port": tcp.getsockname()[1], "secret": str(secret), "abstract": abstract, "pid": os.getpid()}
        aims["datagrams"] = str(datagrams)
        libc = ctypes.CDLL(None, use_errno=True)
        aims |= {"shm": libc.shmget(0, 4096, 0o1666), "queue": libc.msgget(0, 0o1666)}
        yield aims, (tcp, unix)
        libc.shmctl(aims["shm"], 0, None)
        libc.msgctl(aims["queue"], 0, None)
    secret.unlink()
    datagrams.unlink()
    folder.rmdir()


@pytest.fixture(scope="module")
def ended(target, request):
    """The results of this session's endless programs, which run together until the deadline."""
    names = {getattr(item, "callspec", None) and item.callspec.params.get("name") for item in request.session.items}
    programs = [PROGRAMS[name].format(**target[0]) for name in ENDLESS if name in names]
    return lambda program: together(*programs, **LIMITS | {"seconds": 1.0})[program]


WORKERS = set()  # process ids of children that other tests keep, such as isolation's warm workers


@pytest.fixture(autouse=True)
def _leave_workers_alone():
    WORKERS.clear()
    WORKERS.update(pid for _, pid, _ in processes())


def survivors():
    """Processes of the sandbox's user ids, and children of this process, that still exist after a second."""
    for _ in range(20):
        alive = [process for process in processes() if process[1] not in WORKERS]
        if not alive:
            return []
        time.sleep(0.05)
    return alive


def below(trainer, *, but=()):
    """The processes that a trainer has started and that still exist; at least one.

    User ids do not identify them, because all trainers use the same few hundred.
    """
    started = [process for process in psutil.Process(trainer.pid).children(recursive=True) if process.pid not in but]
    assert started
    return started


def left_of(started):
    """The processes that still run a second after the trainer's end; zombies, which init has to reap, do not count."""
    dead = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    _, alive = psutil.wait_procs(started, timeout=1)
    return [process for process in alive if process.is_running() and process.status() not in dead]


def processes():
    """Name, process id and state of the sandbox's processes and this process's children.

    Excludes fork servers, dead programs of dead servers (init has to reap them), and sandboxes of other processes.
    """
    owned = []
    servers = [server for idle in forkserver._idle.values() for server in idle]
    uids = {uid for uid, _ in [*forkserver._free, *(server.slot for server in servers if server.slot)]}
    pids = {server.process.pid for server in servers}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
            fields = dict(line.split(":\t", 1) for line in itertools.islice(status, 12) if ":\t" in line)
            is_sandboxed = int(fields["Uid"].split()[0]) in uids
            child = int(fields["PPid"]) in {os.getpid(), *pids}
            dead = fields["State"].startswith("Z") and not child
            if (is_sandboxed or child) and int(pid) not in pids and not dead:
                owned.append((fields["Name"], pid, fields["State"]))
    return owned


@pytest.mark.parametrize("name", rest_in_matrix(2, PROGRAMS))
def test_no_program_gets_out_or_stays(name, target, ended):
    aims, listeners = target
    before = Path(aims["secret"]).stat()
    start = time.monotonic()
    program = PROGRAMS[name].format(**aims)
    result = ended(program) if name in ENDLESS else sandbox.run(program, **LIMITS)
    assert time.monotonic() - start < 8
    assert result.status != "infra", result.reason
    assert "ESCAPED" not in result.stdout
    assert "SyntaxError" not in result.stderr
    assert len(result.stdout) + len(result.stderr) <= 1 << 19
    after = Path(aims["secret"]).stat()
    assert (after.st_size, after.st_mode, after.st_uid, after.st_mtime) == (
        6,
        before.st_mode,
        before.st_uid,
        before.st_mtime,
    )
    for listener in listeners:
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert survivors() == []


@pytest.fixture(scope="module")
def killed():
    """The processes of a trainer that was killed while a program ran in its sandbox."""
    code = (
        "from rewards import sandbox\n"
        "sandbox.run('print(1)'); print('started', flush=True)\n"
        "sandbox.run('import time; time.sleep(1000)', seconds=500)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "started\n"
    time.sleep(0.6)
    started = below(trainer)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    return started


def test_programs_end_with_the_trainer(killed):
    assert left_of(killed) == []


@pytest.mark.parametrize(
    "name", ["TCP to this machine", "reading accounts", "reading a file of the trainer", "symbolic link out"]
)
def test_the_same_programs_do_get_out_where_nothing_holds_them(name, target):
    aims, listeners = target
    result = without_walls(PROGRAMS[name].format(**aims))
    assert "ESCAPED" in result.stdout
    for listener in listeners:
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
    Path(aims["secret"]).write_text("secret")


@pytest.mark.parametrize("abi", [1, 2])
@pytest.mark.parametrize("name", ["emptying a file of the trainer", "writing outside", "symbolic link out"])
def test_files_are_safe_on_older_kernels(abi, name, target, monkeypatch):
    ask = 'abi = syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)'
    source = forkserver._launcher_source()
    assert ask in source
    monkeypatch.setattr(forkserver, "_launcher_source", lambda: source.replace(ask, f"abi = {abi}"))
    forkserver.close_idle()
    result = sandbox.run(PROGRAMS[name].format(**target[0]))
    forkserver.close_idle()
    assert "ESCAPED" not in result.stdout
    assert "refused" in result.stdout, result
    assert Path(target[0]["secret"]).read_text() == "secret"


# What a program may try on its own fork server and on the next. {server} is a process id on this machine.
LEAVE = """
import builtins, ctypes, fcntl, json, os, signal, sys, threading, time
builtins.sum, json.loads = None, None
os.umask(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = open("/usr/bin/env")
fcntl.flock(lock, fcntl.LOCK_EX)
libc = ctypes.CDLL(None)
for pid in (os.getppid(), {server}, {server} + 1, 2):
    for number in (0, signal.SIGSTOP, signal.SIGKILL) if pid else ():
        try:
            os.kill(pid, number)
            sys.stdout.write("ESCAPED signal %d to %d" % (number, pid))
        except OSError:
            pass
    for call in ((101, 16, pid, 0, 0), (310, pid, 0, 0, 0, 0, 0), (311, pid, 0, 0, 0, 0, 0), (438, pid, 4, 0)):
        if libc.syscall(*call) >= 0:
            sys.stdout.write("ESCAPED call %d on %d" % (call[0], pid))
for fd in range(3, 1024):
    try:
        os.fstat(fd)
        if fd != lock.fileno(): sys.stdout.write("ESCAPED descriptor %d" % fd)
    except OSError:
        pass
if libc.prctl(1, 0, 0, 0, 0) == 0: sys.stdout.write("ESCAPED the end of its server")
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
sys.stdout.write("done")
"""
LOOK = """
import fcntl, json, os, signal
assert os.umask(0) == 0o022
assert sum([1, 2]) == 3 and json.loads("[1]") == [1] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
fcntl.flock(open("/usr/bin/env"), fcntl.LOCK_EX | fcntl.LOCK_NB)
print("clean")
"""


@pytest.fixture
def server():
    """The process id of the one fork server that runs all programs of the test."""
    forkserver.close_idle()
    sandbox.run("print(1)")
    [[only]] = forkserver._idle.values()
    yield only.process.pid
    forkserver.close_idle()
    assert not Path(f"/proc/{only.process.pid}").exists()


def test_no_program_reaches_the_fork_server_or_the_next_program(server):
    def signals():
        lines = Path(f"/proc/{server}/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]

    before = signals()
    for _ in range(2):
        left = sandbox.run(LEAVE.format(server=server))
        assert (left.status, left.stdout) == ("ok", "done"), left
        assert survivors() == []
        look = sandbox.run(LOOK.format())
        assert (look.status, look.stdout) == ("ok", "clean\n"), look
    assert "T (stopped)" not in Path(f"/proc/{server}/status").read_text()
    assert len(before) == 3
    assert signals() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to read another process's memory")
def test_nothing_of_a_program_is_in_the_memory_that_the_next_inherits(server):
    def memory():
        held = b""
        with open(f"/proc/{server}/mem", "rb") as file:
            for line in Path(f"/proc/{server}/maps").read_text().splitlines():
                start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
                if " rw" in line:
                    file.seek(start)
                    held += file.read(end - start)
        return held

    halves = "of_the_program", "of_its_input"
    program = f"secret_{halves[0]} = input()\nprint(secret_{halves[0]})\nraise SystemExit(3)"
    result = sandbox.run(program, f"secret_{halves[1]}\n")
    assert result.stdout == f"secret_{halves[1]}\n"
    held = memory()
    assert [half for half in halves if f"secret_{half}".encode() in held] == []


def test_a_fork_server_that_dies_is_replaced_and_costs_its_program_no_verdict(server):
    def kill():
        time.sleep(0.3)
        os.kill(server, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    start = time.monotonic()
    result = sandbox.run("import time; time.sleep(60)", seconds=50)
    killer.join()
    assert (result.status, result.reason) == ("infra", "the sandbox's fork server ended")
    assert time.monotonic() - start < 10
    assert survivors() == []
    sandbox.run("print(1)")
    [[other]] = forkserver._idle.values()
    other.process.kill()  # and one that dies while it waits
    other.process.wait()
    assert sandbox.run("print(2)").stdout == "2\n"


def test_a_forked_child_of_the_trainer_has_servers_of_its_own(server):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            fine = not any(forkserver._idle.values()) and sandbox.run("print(3)").stdout == "3\n"
            forkserver.close_idle()
            os._exit(0 if fine else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sum(map(len, forkserver._idle.values())) == 1
    assert sandbox.run("print(4)").stdout == "4\n"


# A trainer that forks while a program runs; the child has copies of its open files. With `hooks`, Python announces
# the fork, as for a DataLoader's worker; without, it does not, as for the child of a C library.
FORKING = """
import ctypes, os, sys, threading, time
from rewards import sandbox
from rewards.sandbox import forkserver
fork = os.fork if {hooks} else ctypes.PyDLL(None).fork
source = "import time; time.sleep({seconds})"
program = threading.Thread(target=lambda: sandbox.run(source, seconds=60))
sandbox.run("print(1)")
program.start()
time.sleep(0.3)
child = fork()
if child == 0:
    time.sleep(20)
    os._exit(0)
print(child, flush=True)
"""


@pytest.mark.parametrize("hooks", [True, False])
def test_a_program_ends_with_a_trainer_whose_forked_child_stays(hooks):
    code = FORKING.format(hooks=hooks, seconds=1000)
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(trainer.stdout.readline())
    started = below(trainer, but=[child])
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    try:
        assert left_of(started) == []
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("hooks", [True, False])
def test_a_forked_child_does_not_hold_up_the_end_of_a_fork_server(hooks):
    code = (
        FORKING.format(hooks=hooks, seconds=0.5) + "program.join(); start = time.monotonic()\nforkserver.close_idle()\n"
    )
    code += "print(time.monotonic() - start < 5)\nos.kill(child, 9)"
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert ran.stdout.splitlines()[1:] == ["True"]


def test_a_forked_child_keeps_no_socket_of_a_server_in_use(server):
    with forkserver._server(None) as used:
        held = [used.control.fileno()] + [used.slot[1].fileno()] * (used.slot is not None)
        child = os.fork()
        if child == 0:
            os._exit(sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in held))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_program_that_does_not_go_away_keeps_its_verdict(server, monkeypatch):
    def answer(self, seconds, real=forkserver._Server.answer):
        if start and time.monotonic() > start[0] + 0.3:
            raise OSError("nothing is heard")  # as if the kernel took longer to clean up than the server waits
        return real(self, seconds)

    start = [time.monotonic()]
    monkeypatch.setattr(forkserver._Server, "answer", answer)
    result = sandbox.run("while True: pass", seconds=0.5)
    monkeypatch.undo()
    assert (result.status, result.reason) == ("timeout", "stopped after 0.5 s")
    assert not any(forkserver._idle.values())  # the server is not used again
    assert survivors() == []


def test_a_timeout_ends_soon_whatever_its_server_does(server):
    """A stopped server does not report its program's end, as on a very slow machine."""
    threading.Timer(0.2, os.kill, (server, signal.SIGSTOP)).start()
    start = time.monotonic()
    result = sandbox.run("while True: pass", seconds=0.5)
    assert (result.status, result.reason) == ("timeout", "stopped after 0.5 s")
    assert time.monotonic() - start < 4  # 0.5 s for the program, 1 s for its end, and what a busy machine takes
    assert not any(forkserver._idle.values())
    assert sandbox.run("print(4)").stdout == "4\n"
    assert survivors() == []


def test_a_request_may_be_long():
    assert sandbox.run(f"print(len('{'x' * 5_000_000}'))").stdout == "5000000\n"


def test_few_servers_are_kept(monkeypatch):
    forkserver.close_idle()
    monkeypatch.setattr(forkserver, "_MOST_IDLE", 2)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(forkserver._server(None))
    assert sum(map(len, forkserver._idle.values())) == len(forkserver._live) == 2


def test_an_interrupted_start_leaves_no_process(monkeypatch):
    def interrupted(self, seconds):
        raise KeyboardInterrupt

    forkserver.close_idle()
    monkeypatch.setattr(forkserver._Server, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sandbox.run("print(1)")
    assert survivors() == []
