"""Jobs in place of training, for tests of processes that take a second."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_for

from kit import api, launch
from kit.cli import runs as cli
from kit.runs import stopping, supervisor
from kit.runs.process import kill_all
from kit.runs.store import RunDir, RunStore

JOB = """
import os, signal, sys, time
from kit.runs.worker import serve
from kit.runs.store import RunStore

def job(request, quiet):
    section = request["config"]["run"]
    store = RunStore(section["root"])
    if request.get("adopt"):
        run = store.open(section["id"])
        {before}
        run.adopt()
    else:
        run = store.create(section["id"])
    {body}

sys.exit(serve(job))
"""
STEPS = """
for step in range(1, 600):
    time.sleep(0.05)
    run.append_metrics({"step": step, "reward": step / 600, "time": time.time(), "step_time": 0.05})
    print("step", step, flush=True)
    run.write_status("running", step=step, total_steps=600)
    if (run.control / "stop").exists():
        run.write_json(f"checkpoint-{step}/trainer_state.json", {})
        run.write_status("stopped", reason="control/stop", exit=130)
        raise KeyboardInterrupt
"""


def _text(body: str, indent: int) -> str:
    return textwrap.indent(textwrap.dedent(body), " " * indent).strip()


@pytest.fixture
def write_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return `write_job(body, before="")`, which sets the job of `start`, `train` and `resume`; `before` precedes adoption."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "TRAINER", "a_job")
    monkeypatch.setattr(supervisor, "HEARTBEAT_SECONDS", 0.1)
    for module in (cli, api, stopping):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    monkeypatch.chdir(tmp_path)

    def write(body: str = STEPS, before: str = "pass") -> None:
        text = JOB.replace("{body}", _text(body, 4)).replace("{before}", _text(before, 8))
        (tmp_path / "a_job.py").write_text(text)

    write()
    return write


@pytest.fixture
def start(write_job: Callable[..., None]) -> Iterator[Callable[..., RunDir]]:
    """Return a function that starts the job detached and returns its directory; jobs are killed at the end."""
    started: list[RunDir] = []

    def begin(run_id: str = "one", **options: Any) -> RunDir:
        folder = RunDir(api.start("quickstart", run_id=run_id, **options).path.resolve())
        started.append(folder)
        return folder

    yield begin
    for run in started:
        for who in (run.record().get("supervisor"), run.record()):
            if who and who.get("pid") != os.getpid():
                kill_all(who)


@pytest.fixture
def running(start: Callable[..., RunDir]) -> RunDir:
    """A detached run at its second step or later."""
    run = start()
    wait_for(lambda: (run.status().get("step") or 0) >= 2)
    return run


@pytest.fixture
def shell(write_job: Callable[..., None], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that runs Python code with the job in a new process, which is killed at the end."""
    begun: list[subprocess.Popen[bytes]] = []

    def run(code: str, **options: Any) -> subprocess.Popen[bytes]:
        script = tmp_path / f"shell_{len(begun)}.py"
        script.write_text(
            # nohup ignores a hang-up, here and in child processes.
            "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
            f"from kit import api, launch; launch.TRAINER = 'a_job'\n{textwrap.dedent(code)}"
        )
        begun.append(subprocess.Popen([sys.executable, str(script)], **options))
        return begun[-1]

    yield run
    for process in begun:
        process.kill()
        process.wait()


@pytest.fixture
def race(shell: Callable[..., subprocess.Popen[bytes]]) -> Callable[..., list[str]]:
    """Return `race(code, count)`: the first line that each of `count` processes prints, which run the code at the same moment.

    The processes live until the end of the test, unless they end by themselves.
    """

    def run(code: str, count: int) -> list[str]:
        waiting, begin = os.pipe()
        code = "import sys; print('there', flush=True); sys.stdin.read()\n" + textwrap.dedent(code)
        racers = [shell(code, stdin=waiting, stdout=subprocess.PIPE) for _ in range(count)]
        streams = [racer.stdout for racer in racers if racer.stdout is not None]
        assert [stream.readline() for stream in streams] == [b"there\n"] * count
        os.close(waiting)
        os.close(begin)  # ends the input of all at once
        return [stream.readline().decode() for stream in streams]

    return run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return `disk("size=1m")`, which mounts a separate file system; skips if this user may not mount one."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("this user may not mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")
