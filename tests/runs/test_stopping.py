"""kit.runs.stopping: a run is ended in the mildest way that works, and the way is reported."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import dead, wait_for

from kit.errors import RunError
from kit.runner.lifecycle import StopSignal
from kit.runs import stopping, supervisor
from kit.runs.process import descendants, identity, runs
from kit.runs.stopping import stop
from kit.runs.store import ALIVE, RunDir, RunStore
from kit.runs.worker import STOPPED

pytestmark = pytest.mark.survival

Start = Callable[..., RunDir]
WriteJob = Callable[..., None]

COUNTING = """
    terms = []
    def note(number, frame):
        terms.append(time.monotonic())
        run.write_status("running", terms=len(terms))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    run.write_status("running", terms=0)
"""
DEAF = (
    COUNTING
    + """
    while True:
        time.sleep(0.05)
"""
)
SIGINT_ENDS = (
    COUNTING
    + """
    while len(terms) < 2:
        time.sleep(0.02)
    run.write_status("stopped", reason="interrupted at once", exit=130)
    raise KeyboardInterrupt
"""
)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "TERM_SECONDS", 0.3)
    monkeypatch.setattr(stopping, "NOW_SECONDS", 0.1)
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.02)


def begun(start: Start, write_job: WriteJob, body: str) -> RunDir:
    write_job(body)
    run = start()
    wait_for(lambda: run.status()["state"] == "running" and run.status().get("supervisor"))
    return run


def test_a_healthy_run_saves_and_ends_by_its_sentinel(running: RunDir) -> None:
    watcher = running.status()["supervisor"]
    messages: list[str] = []
    status = stop(running, on_message=messages.append)
    assert (status["state"], status["reason"], status["exit"]) == ("stopped", "control/stop", 130)
    assert len(running.checkpoints) == 1
    assert messages == []
    wait_for(lambda: dead(watcher))
    assert running.status() == status | {"supervisor": watcher}


def test_the_first_sigterm_after_the_sentinel_lets_a_run_save(tmp_path: Path) -> None:
    run = RunStore(tmp_path).create("it")
    run.write_text("control/stop", "")
    request = StopSignal(run)
    with request.listening(lambda text: None):
        assert request.is_requested()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_does_not_look_at_its_sentinel_is_interrupted(start: Start, write_job: WriteJob) -> None:
    run = begun(start, write_job, SIGINT_ENDS)
    messages: list[str] = []
    status = stop(run, timeout=0.1, on_message=messages.append)
    assert (status["state"], status["reason"]) == ("stopped", "interrupted at once")
    assert [line.split()[0] for line in messages] == ["SIGTERM", "SIGINT"]


def test_a_run_that_ends_by_nothing_is_killed_with_all_it_started(start: Start, write_job: WriteJob) -> None:
    run = begun(start, write_job, "import subprocess\nsubprocess.Popen(['sleep', '60'])\n" + _dedented(DEAF))
    family = [identity(pid) for pid in descendants(run.status()["pid"])]
    assert len(family) == 1
    messages: list[str] = []
    status = stop(run, timeout=0.1, on_message=messages.append)
    assert (status["state"], status["exit"]) == ("stopped", 137)
    assert status["reason"] == "SIGKILL: it did not end by itself"
    assert [line.split()[0] for line in messages] == ["SIGTERM", "SIGINT", "SIGKILL"]
    wait_for(lambda: not any(runs(each) for each in family))


def test_a_full_disk_does_not_keep_a_run_from_saving_first(
    disk: Callable[[str], Path], write_job: WriteJob, start: Start
) -> None:
    folder = disk("size=1m")
    body = (
        COUNTING
        + """
    with open(run.path / "junk", "wb", buffering=0) as junk:
        try:
            while True:
                junk.write(bytes(4096))
        except OSError:
            (run.path / "full").touch()
    while not terms:
        time.sleep(0.02)
    time.sleep(0.5)  # longer than it would get after a second SIGTERM
    (run.path / "junk").unlink()
    run.write_status("stopped", reason=f"SIGTERM, {len(terms)} times", exit=130)
    raise KeyboardInterrupt
    """
    )
    write_job(body.replace('run.write_status("running", terms=len(terms))', "pass"))
    run = start(overrides=[f"run.root={folder}"])
    wait_for((run.path / "full").exists)
    assert stop(run)["reason"] == "SIGTERM, 1 times"


def test_a_run_on_another_machine_is_asked_but_not_signalled(store: RunStore) -> None:
    run = store.create("one")
    with subprocess.Popen(["sleep", "60"]) as unrelated:
        run.write_status("running", host="elsewhere", pid=unrelated.pid)
        with pytest.raises(RunError, match="lives on elsewhere"):
            stop(run, timeout=0.1)
        assert (run.control / "stop").exists()
        assert unrelated.poll() is None
        unrelated.kill()


def test_the_process_that_only_starts_a_run_is_never_signalled(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "FACE_SECONDS", 0.1)
    run = store.create("one")
    with subprocess.Popen(["sleep", "20"]) as kernel, subprocess.Popen(["sleep", "20"]) as trainer:
        for state in ("starting", "queued"):
            run.write_status(state, pid=kernel.pid, face=True)
            assert stop(run, now=True)["state"] in ("stopping", "queued")
            assert (run.control / "stop").exists()
        monkeypatch.setattr(stopping, "FACE_SECONDS", 20.0)
        hand_over = threading.Timer(0.3, run.write_status, ["running"], {"pid": trainer.pid, "face": False})
        hand_over.start()
        assert stop(run, now=True)["state"] not in ALIVE  # it waited for the training process and ended it
        assert trainer.wait() == -signal.SIGTERM
        assert kernel.poll() is None
        kernel.kill()


def test_a_run_stopped_before_its_job_is_spawned_is_not_spawned(write_job: WriteJob, store: RunStore) -> None:
    run = store.create("one")
    run.write_text("control/stop", "")
    outcome = supervisor.supervise(run, {"config": {}}, module="no_such_module")
    assert outcome.code == STOPPED
    assert run.status()["reason"] == "control/stop, before training"


def _dedented(body: str) -> str:
    return "\n".join(line[4:] for line in body.splitlines())
