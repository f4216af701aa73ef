"""A warm process is what a cold one would be, and where it could not be, the process is a cold one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes

FACTS = """
import json, os, signal, sys
torch, kit = "torch" in sys.modules, __import__("kit.errors").__file__
print(json.dumps({
    "warm": torch, "pid": os.getpid(), "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "kit": kit,
    "argv": sys.argv[1:], "name": __name__, "file": os.path.basename(__file__), "path": sys.path[:2], "cwd": os.getcwd(),
    "given": {k: v for k, v in os.environ.items() if k not in ("PWD", "SHLVL", "_")}, "stdin": sys.stdin.read(),
    "ignored": [n for n in (1, 2, 15) if signal.getsignal(n) is signal.SIG_IGN], "umask": os.umask(0),
    "tty": sys.stdout.isatty(), "passed": os.read(int(sys.argv[1]), 9).decode(), "encoding": sys.stdout.encoding,
}))
print("last words", file=sys.stderr)
sys.exit(7)
"""
ENDS = {
    "returns": ("print('x')", 0),
    "a code": ("import sys; sys.exit(3)", 3),
    "a text": ("import sys; sys.exit('no')", 1),
    "raises": ("1 / 0", 1),
    "interrupted": ("raise KeyboardInterrupt", -signal.SIGINT),
    "killed": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "at once": ("import os; os._exit(5)", 5),
    "says good-bye": ("import atexit; atexit.register(print, 'bye', flush=True)", 0),
    "waits for a thread": ("import threading, time; threading.Timer(0.1, lambda: print('thread')).start()", 0),
}


def facts(folder: Path, environment: dict[str, str]) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    (folder / "facts.py").write_text(FACTS)
    reading, writing = os.pipe()
    os.write(writing, b"handed on")
    os.close(writing)
    done = subprocess.run(
        [sys.executable, "facts.py", str(reading), "ä"],
        cwd=folder,
        env=environment,
        pass_fds=(reading,),
        start_new_session=True,
        input="asked",
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(reading)
    return json.loads(done.stdout), done


def test_it_sees_what_a_cold_one_sees(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(warm_processes.ROOT), "OF_THE_TEST": "1"}
    got, ended = facts(tmp_path, environment)
    with warm_processes.cold():
        want, cold = facts(tmp_path, environment)
    assert (got.pop("warm"), want.pop("warm")) == (True, False)
    assert got.pop("pid") != want.pop("pid")
    got["argv"][0] = want["argv"][0]  # the number of a file
    assert got == want
    assert got["parent"] == os.getpid()
    assert (ended.returncode, ended.stderr) == (cold.returncode, cold.stderr) == (7, "last words\n")


@pytest.mark.parametrize("way", ENDS)
def test_it_ends_as_a_cold_one_does(tmp_path: Path, way: str) -> None:
    code, want = ENDS[way]
    (tmp_path / "ends.py").write_text(code)
    shown = []
    for how in (contextlib.nullcontext(), warm_processes.cold()):
        with how:
            done = subprocess.run(
                [sys.executable, "ends.py"], cwd=tmp_path, capture_output=True, text=True, check=False
            )
        assert done.returncode == want, done.stderr
        shown.append((done.stdout, done.stderr.splitlines()[-1:]))
    assert shown[0] == shown[1]


def test_it_can_be_waited_for_signalled_and_killed(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("print('ready', flush=True)\nimport time\ntime.sleep(60)")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            [sys.executable, "waits.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            assert os.getpgid(process.pid) == process.pid, "a signal to its group must not reach the server"
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
            os.killpg(process.pid, number)
            assert process.wait(20) == -number
            assert process.poll() == -number


def test_it_is_a_cold_one_where_modules_would_be_others(tmp_path: Path) -> None:
    def warm(**changes: str) -> bool:
        return bool(facts(tmp_path, os.environ | {"PYTHONPATH": str(warm_processes.ROOT)} | changes)[0]["warm"])

    assert warm()
    assert warm(PYTHONBREAKPOINT="ray.util.rpdb._driver_set_trace"), "all that follows a test of Ray would be cold"
    assert not warm(HF_HOME=str(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    (other / "trl.py").write_text("")
    assert not warm(PYTHONPATH=f"{other}{os.pathsep}{warm_processes.ROOT}")


def test_a_module_is_run_as_main_and_what_it_starts_is_warm(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "kit.cli", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("grpo-kit ")
    (tmp_path / "starts.py").write_text("import subprocess, sys; subprocess.run([sys.executable, 'says.py'])")
    (tmp_path / "says.py").write_text("import sys; print('torch' in sys.modules, flush=True)")
    done = subprocess.run([sys.executable, "starts.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_workers_of_the_whole_suite_are_warm_and_those_of_a_few_tests_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    execnet = pytest.importorskip("execnet.gateway_io")
    assert execnet.popen_bootstrapline == warm_processes.WORKER
    code = repr("print('trl' in sys.modules)") + "\n"  # the bootstrap evaluates a line and executes that
    command = [sys.executable, "-u", "-c", execnet.popen_bootstrapline]
    for whole in (True, False):
        monkeypatch.setattr(warm_processes, "workers", whole)
        done = subprocess.run(command, input=code, stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout.split() == [str(whole)]


@pytest.mark.notebooks
def test_a_command_below_a_cell_is_warm_and_ends_as_it_would(tmp_path: Path) -> None:
    tests = str(warm_processes.ROOT / "tests/warm_site")
    program = str(Path(sys.executable).with_name("grpo-kit"))

    def shown(name: str, **changes: str) -> tuple[int, str, str]:
        how: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | changes, "capture_output": True, "text": True}
        with warm_processes.cold():
            done = subprocess.run([program, "reward", "show", name], **how)
        return done.returncode, done.stdout, done.stderr

    for name, code in (("length-target", 0), ("nothing", 2)):
        assert shown(name) == shown(name, PYTHONPATH=tests)
        assert shown(name)[0] == code
    known = warm_processes._place()[0] / "environment.json"
    (tmp_path / "environment.json").write_text(known.read_text())
    gone = {warm_processes.PLACE: f"{tmp_path}:{os.getpid()}", "PYTHONPATH": tests}
    assert "FileNotFoundError" in shown("length-target", **gone)[2], "no server was asked"
