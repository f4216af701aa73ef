"""kit.runs.process: a process is distinguished from earlier and later ones with its pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from patience import wait_for

from kit.runs.process import descendants, identity, kill_all, runs, send_signal
from kit.runs.store import RunDir, RunStore

HOUR = 3600.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as child:
        yield child
        child.kill()


@pytest.fixture
def run(store: RunStore) -> RunDir:
    return store.create("one")


@pytest.mark.parametrize("shift", [-HOUR, -3.0, 3.0, 10 * HOUR])
def test_setting_the_clock_does_not_end_a_run(run: RunDir, monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    run.write_status("running", supervisor=identity())
    moved = psutil.boot_time() + shift
    monkeypatch.setattr(f"{psutil._psplatform.__name__}.boot_time", lambda: moved)
    assert psutil.boot_time() == moved
    now = time.time() + shift
    monkeypatch.setattr(time, "time", lambda: now)
    assert run.status()["state"] == "running"
    assert run.status()["reason"] is None  # the supervisor counts as alive
    run.write_status("running")
    assert run.status()["state"] == "running"


@pytest.mark.parametrize("age", [-1.0, 1.0, HOUR])
def test_a_pid_that_another_process_got_is_not_the_run(run: RunDir, age: float) -> None:
    run.write_status("running")
    record = json.loads(run.status_file.read_text())
    run.status_file.write_text(json.dumps(record | {"create_time": record["create_time"] - age}))
    assert run.status()["state"] == "interrupted"


def test_a_signal_reaches_the_process_it_is_meant_for_and_no_other(sleeper: subprocess.Popen[bytes]) -> None:
    who = identity(sleeper.pid)
    assert not send_signal(who | {"create_time": who["create_time"] - 5}, signal.SIGKILL)
    assert sleeper.poll() is None
    assert send_signal(who, signal.SIGTERM)
    assert sleeper.wait() == -signal.SIGTERM
    assert not send_signal(who, signal.SIGTERM)


def test_a_zombie_does_not_run() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    who = identity(child)
    wait_for(lambda: psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert not runs(who)
    os.waitpid(child, 0)


FAMILY = """
import subprocess, sys, time
subprocess.Popen(["sleep", "99"], start_new_session=True)
subprocess.Popen(["sleep", "98"])
print("ready", flush=True)
time.sleep(97)
"""


@pytest.mark.parametrize("own_group", [True, False])
def test_all_of_a_family_is_killed_and_nobody_else(own_group: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=own_group
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        family = [identity(pid) for pid in descendants(parent.pid)]
        assert len(family) == 2
        who = identity(parent.pid)
        kill_all(who | {"create_time": 0.0})
        assert parent.poll() is None
        kill_all(who)
        assert parent.wait() == -signal.SIGKILL
        wait_for(lambda: not any(runs(each) for each in family))
