"""kit.runs.supervisor: a run outlives the process that started it, and its status is correct afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import dead, kill, wait_for

from kit import api, launch
from kit.cli.runs import ending
from kit.errors import DataError, RunError
from kit.runs import supervisor
from kit.runs.process import identity
from kit.runs.store import RunDir, RunStore

pytestmark = pytest.mark.survival

Start = Callable[..., RunDir]
WriteJob = Callable[..., None]


# --- SIGKILL of each process -----------------------------------------------------------------------------------------


def test_a_killed_trainer_is_failed_with_its_signal(running: RunDir) -> None:
    kill(running.status())
    wait_for(lambda: running.status()["state"] == "failed")
    status = running.status()
    assert status["exit"] == 128 + signal.SIGKILL
    assert "signal 9" in status["reason"]
    assert "from outside, or by the kernel because memory ran out" in status["reason"]
    assert "signal 9" in running.log.read_text()
    assert status["ended"] is not None


def test_a_run_goes_on_without_its_supervisor_says_so_and_ends_by_itself(
    start: Start, write_job: Callable[..., None]
) -> None:
    write_job("""
        run.write_status("running")
        while not (run.control / "go").exists():
            time.sleep(0.02)
        run.write_status("finished")
    """)
    run = start()
    wait_for(lambda: run.status()["state"] == "running" and run.status().get("supervisor"))
    kill(run.status()["supervisor"])
    status = run.status()
    assert status["state"] == "running"
    assert "supervisor" in status["reason"]
    assert "died; the run continues" in status["reason"]
    run.write_text("control/go", "")
    wait_for(lambda: run.status()["state"] == "finished")
    assert run.status()["reason"] is None


def test_both_killed_at_once_is_interrupted_and_never_finished(running: RunDir) -> None:
    status = running.status()
    os.kill(status["supervisor"]["pid"], signal.SIGSTOP)  # so that it cannot act between the two
    kill(status)
    kill(status["supervisor"])
    assert running.status()["state"] == "interrupted"
    assert "without a message" in running.status()["reason"]


@pytest.mark.parametrize(
    ("killed", "state", "reason"),
    [
        ("trainer", "failed", "signal 9"),
        ("supervisor", "starting", "died; the run continues"),
    ],
)
def test_killed_while_it_prepares_it_starts_again_with_its_id(
    killed: str, state: str, reason: str, start: Start, write_job: WriteJob
) -> None:
    write_job(before="time.sleep(60)")  # a download
    run = start(steps=80)
    wait_for(lambda: run.status().get("supervisor") and run.status()["pid"] != run.status()["supervisor"]["pid"])
    status = run.status()
    kill(status if killed == "trainer" else status["supervisor"])
    wait_for(lambda: run.status()["state"] == state)
    assert reason in run.status()["reason"]
    assert (run.status()["step"], run.status()["total_steps"]) == (0, 80)
    if state == "starting":
        with pytest.raises(RunError, match="Only one process can train a run"):
            api.resume("one")
        kill(status)  # now both are gone
        assert run.status()["state"] == "interrupted"
        assert "without a message while the run was starting" in run.status()["reason"]
    assert "Start it again from the beginning with: grpo-kit resume one" in ending(run)
    write_job("run.write_json('seen.json', request); run.write_status('finished')")
    assert api.resume("one", detach=True).wait(20).status["state"] == "finished"
    request = json.loads((run.path / "seen.json").read_text())
    assert (request["resume"], request["force"], request["config"]["run"]["id"]) == (True, False, "one")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGHUP])
def test_a_run_outlives_the_shell_that_started_it(shell: Callable[..., subprocess.Popen[bytes]], end: int) -> None:
    code = "import time; api.start('quickstart', run_id='one'); print('ready', flush=True); time.sleep(60)"
    started_from = shell(code, stdout=subprocess.PIPE, start_new_session=True)
    assert started_from.stdout is not None
    assert started_from.stdout.readline() == b"ready\n"
    os.killpg(started_from.pid, end)
    started_from.wait()
    run = RunStore("runs").open("one")
    step = run.status()["step"]
    wait_for(lambda: run.status()["step"] > step + 2)
    for who in (run.status(), run.status()["supervisor"]):
        os.kill(who["pid"], signal.SIGHUP)  # sent to the process directly, too
    step = run.status()["step"]
    wait_for(lambda: run.status()["step"] > step + 2)
    api.Run("one").stop()


def test_a_face_that_is_killed_leaves_a_run_that_goes_on(shell: Callable[..., subprocess.Popen[bytes]]) -> None:
    face = shell("api.train('quickstart', run_id='one')", start_new_session=True, stdout=subprocess.DEVNULL)
    run = wait_for(lambda: Path("runs/one/metrics.jsonl").exists() and RunStore("runs").open("one"))
    wait_for(lambda: run.status()["state"] == "running")
    face.kill()
    face.wait()
    assert run.status()["state"] == "running"
    api.Run("one").stop()
    assert run.status()["state"] == "stopped"


@pytest.mark.parametrize(
    ("body", "state", "reason"),
    [
        ("os._exit(0)", "failed", "ended with code 0 and no message"),
        ("os._exit(7)", "failed", "exit code 7"),
        ("1 / 0", "failed", "exit code 1"),
        ("from kit.errors import DataError; raise DataError('no rows')", "failed", "DataError: no rows"),
        ("raise KeyboardInterrupt", "stopped", "interrupted"),
    ],
)
def test_a_job_that_ends_without_a_word_is_never_finished(
    start: Start, write_job: Callable[..., None], body: str, state: str, reason: str
) -> None:
    write_job(body)
    run = start()
    wait_for(lambda: run.status()["state"] not in ("starting", "interrupted"))
    assert run.status()["state"] == state
    assert reason in run.status()["reason"]


# --- the owner of a run ----------------------------------------------------------------------------------------------


Race = Callable[..., list[str]]


def test_of_several_that_resume_one_run_exactly_one_gets_it(running: RunDir, race: Race) -> None:
    api.Run("one").stop()
    outputs = race(
        """
        from kit.errors import RunError
        try:
            api.resume('one', detach=True)
            print('won', flush=True)
        except RunError as error:
            print(error, flush=True)
        """,
        3,
    )
    assert sum(text == "won\n" for text in outputs) == 1, outputs
    assert sum("Only one process can train a run" in text for text in outputs) == 2, outputs
    wait_for(lambda: running.status()["state"] == "running")
    api.Run("one").stop()


def test_a_run_that_was_claimed_for_another_is_not_adopted(store: RunStore) -> None:
    run = store.create("one")
    run.write_status("starting", pid=os.getppid())
    with pytest.raises(RunError, match="was not claimed for this process"):
        run.adopt()
    # This process is an orphan of an earlier attempt; the supervisor of the next one waits for its own.
    run.write_status("starting", pid=1, supervisor=identity(1))
    with pytest.raises(RunError, match="was not claimed for this process"):
        run.adopt()
    run.write_status("starting", pid=os.getppid(), supervisor=identity(os.getppid()))
    run.adopt()
    run.write_status("starting", pid=os.getppid())
    run.write_status("finished")
    with pytest.raises(RunError, match="it is finished"):
        run.adopt()


def test_a_run_is_resumed_in_its_directory(running: RunDir, write_job: Callable[..., None]) -> None:
    with pytest.raises(RunError, match="Only one process can train a run"):
        api.resume("one")
    api.Run("one").stop()
    write_job("run.write_json('seen.json', request); run.write_status('finished')")
    assert api.resume("one", force=True).status["state"] == "finished"
    request = json.loads((running.path / "seen.json").read_text())
    assert (request["resume"], request["force"], request["adopt"]) == (True, True, True)
    assert (request["config"]["run"]["id"], request["config"]["run"]["root"]) == ("one", "runs")
    with pytest.raises(RunError, match="has finished"):
        api.resume("one")


def test_a_run_that_may_not_go_on_stays_as_it_was(running: RunDir, write_job: Callable[..., None]) -> None:
    api.Run("one").stop()
    earlier = running.status()
    write_job(before="from kit.errors import DataError; raise DataError('the data changed')")
    with pytest.raises(DataError, match="the data changed"):
        api.resume("one")
    for key in ("state", "reason", "exit", "ended"):
        assert running.status()[key] == earlier[key]
    supervisor_of = api.resume("one", detach=True).status["supervisor"]
    wait_for(lambda: dead(supervisor_of))
    assert running.status()["state"] == "stopped"
    assert "the data changed" in running.log.read_text()
    assert "Resuming was refused: the data changed" in ending(running)
    with pytest.raises(RunError, match="was not resumed and is still stopped: the data changed"):
        api.Run("one").wait()
    write_job("run.write_status('finished')")
    assert api.resume("one", detach=True).wait(20).status["refused"] is None


# --- the start of the supervisor -------------------------------------------------------------------------------------


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_a_run_is_made_leaves_nothing(write_job: WriteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("write_text", "write_status"):
        with monkeypatch.context() as patch:
            patch.setattr(RunDir, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                api.start("quickstart", run_id="one")
        assert not Path("runs/one").exists()


def test_ctrl_c_while_a_run_is_handed_over_ends_it(write_job: WriteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(supervisor.subprocess, "Popen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            api.start("quickstart", run_id="one")
        assert api.Run("one").status["state"] == "stopped"
        with pytest.raises(KeyboardInterrupt):
            api.resume("one", detach=True)
        assert api.Run("one").status["state"] == "stopped"
    monkeypatch.setattr(launch, "supervise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.resume("one")
    assert api.Run("one").status["state"] == "stopped"


# --- failures of the disk --------------------------------------------------------------------------------------------


def test_on_a_full_disk_the_end_is_told_from_what_was_set_aside(
    disk: Callable[[str], Path], start: Start, write_job: Callable[..., None]
) -> None:
    write_job("""
        (run.path / ".reserve").write_bytes(bytes(65536))
        run.write_status("running")
        try:
            with open(run.path / "junk", "wb", buffering=0) as junk:
                while True:
                    junk.write(bytes(4096))
        except OSError:
            pass
        while True:
            run.append_metrics({"step": 1})
    """)
    run = start(overrides=[f"run.root={disk('size=1m')}"])
    wait_for(lambda: run.status()["state"] == "failed")
    assert "No space left" in run.status()["reason"]


def test_signs_of_life_come_while_the_job_is_silent(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "HEARTBEAT_SECONDS", 0.02)
    run = store.create("one")
    run.write_status("running", heartbeat=1.0)
    watch = supervisor.Heartbeat(run)
    with watch:
        watch.started(os.getpid())
        wait_for(lambda: run.status()["heartbeat"] > 1.0)
    assert run.status()["supervisor"]["pid"] == os.getpid()
    run.write_status("finished", heartbeat=1.0)
    with supervisor.Heartbeat(run) as _:
        time.sleep(0.1)
    assert run.status()["heartbeat"] == 1.0


def test_a_job_that_cannot_be_spawned_is_not_live_for_ever(
    write_job: Callable[..., None], store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.create("one")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(FileNotFoundError):
        supervisor.supervise(run, {"config": {}}, module="a_job")
    assert run.status()["state"] == "failed"
