"""kit.runs.worker and kit.launch: start, interruption and result of a job in another process."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kit
from kit import api, launch
from kit.errors import KitError, RunError
from kit.runs import worker

JOB = """
import sys, time, os, signal
from kit.runs.worker import serve
from kit.runs.store import RunStore

def job(request, quiet):
    {body}

sys.exit(serve(job))
"""


@pytest.fixture
def write_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes the module `a_job` with this body, which `kit.train` starts instead of a training."""

    def write(body: str) -> None:
        (tmp_path / "a_job.py").write_text(JOB.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip()))

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "TRAINER", "a_job")
    monkeypatch.setattr(api, "EVALUATOR", "a_job")
    monkeypatch.chdir(tmp_path)
    return write


def test_a_file_beside_ones_data_named_like_a_package_is_not_imported(
    write_job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job("import psutil; print(psutil.__version__)")
    beside = tmp_path / "data"
    beside.mkdir()
    (beside / "psutil.py").write_text("raise SystemExit('this is not psutil')")
    monkeypatch.chdir(beside)
    outcome = worker.call("a_job", {}, on_line=print)
    assert (outcome.code, outcome.error) == (worker.DONE, None)


def test_a_user_error_in_the_job_arrives_with_its_kind_and_words(write_job, capfd: pytest.CaptureFixture[str]) -> None:
    write_job("from kit.errors import DataError; raise DataError('no rows\\nsecond line')")
    with pytest.raises(kit_error("DataError"), match="no rows\nsecond line"):
        kit.train("quickstart")
    assert capfd.readouterr().err == "error: no rows\nsecond line\n"  # once, by the job


def kit_error(name: str) -> type[KitError]:
    return getattr(sys.modules["kit.errors"], name)


def test_a_crash_is_a_run_error_and_keeps_its_traceback(write_job, capfd: pytest.CaptureFixture[str]) -> None:
    write_job("1 / 0")
    with pytest.raises(RunError, match="crashed with exit code 1"):
        kit.train("quickstart")
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_killed_job_points_at_memory(write_job) -> None:
    write_job("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RunError, match="memory ran out"):
        kit.train("quickstart")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_the_job_save_and_the_caller_gets_the_stopped_run(write_job, number: int) -> None:
    write_job("""
        run = RunStore('runs').open('mine')
        run.adopt()
        run.write_status('running')
        os.kill(os.getppid(), request['config']['optimisation']['steps'])
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            run.write_status('stopped')
            raise
    """)
    caller = "import kit, sys; run = kit.train('quickstart', steps=int(sys.argv[1]), run_id='mine'); print(repr(run))"
    Path("caller.py").write_text(caller_with_job(caller))
    # A session of its own has no terminal: the caller must pass the signal on, once.
    done = subprocess.run(
        [sys.executable, "caller.py", str(int(number))],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "<Run mine, stopped" in done.stdout


def test_ctrl_c_in_a_terminal_reaches_the_job_once(write_job, tmp_path: Path) -> None:
    write_job("""
        run = RunStore('runs').open('mine')
        run.adopt()
        run.write_status('running')
        count = 0
        end = time.time() + 30
        while time.time() < end:
            try:
                if not count:
                    print('ready', flush=True)
                time.sleep(0.5 if count else 30)
                break
            except KeyboardInterrupt:
                count += 1
        run.write_status('stopped', interrupts=count)
        raise KeyboardInterrupt
    """)
    code = caller_with_job("import kit; print(kit.train('quickstart', run_id='mine').status['interrupts'])")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    output = b""
    while b"ready" not in output:
        output += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # a terminal raises this after its last process has ended
        while more := os.read(terminal, 1000):
            output += more
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, output
    assert output.rpartition(b"^C")[2].split()[-1] == b"1", output  # the echo may come before the line's end


def caller_with_job(code: str) -> str:
    return f"from kit import api, launch; launch.TRAINER = 'a_job'; {code}"


def test_the_child_finds_the_kit_where_only_sys_path_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    home = str(Path(kit.__file__).parents[1])
    path = worker.environment().get("PYTHONPATH", "").split(os.pathsep)
    assert home in path or Path(home).name in ("site-packages", "dist-packages")


def test_a_job_is_shown_the_first_gpu_unless_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert worker.environment()["CUDA_VISIBLE_DEVICES"] == "0"
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "1")  # Kubernetes sets it without a launcher
        assert worker.environment()["CUDA_VISIBLE_DEVICES"] == "0"
    for name, value in (("CUDA_VISIBLE_DEVICES", "1,2"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert worker.environment().get("CUDA_VISIBLE_DEVICES") == (value if "," in value else None)


def test_colabs_secret_reaches_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub reads the secret only in a kernel, which it detects by `get_ipython`; a child process is none."""
    import inspect
    from types import ModuleType

    from huggingface_hub.utils import _auth, _runtime

    assert "get_ipython()" in inspect.getsource(_runtime).split("def is_google_colab")[0]
    assert 'userdata.get("HF_TOKEN")' in inspect.getsource(_auth._get_token_from_google_colab)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    colab = ModuleType("google.colab")
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    for secrets, token in (({"HF_TOKEN": "mine"}, "mine"), (ModuleType("without access"), None)):
        worker._colab_token.cache_clear()
        monkeypatch.setitem(sys.modules, "google.colab.userdata", secrets)  # a module that Colab does not import
        assert worker.environment().get("HF_TOKEN") == token
    monkeypatch.setenv("HF_TOKEN", "one's own")
    assert worker.environment()["HF_TOKEN"] == "one's own"
    worker._colab_token.cache_clear()
