"""A time limit for a hanging call ends only the wait for it. A log is followed until the run has ended."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kit.cli.runs import added_text
from kit.runs.files import Log
from kit.runs.store import RunDir, RunStore
from kit.runs.worker import Hung, Watchdog

ROOT = Path(__file__).parents[2]


def test_results_and_errors_come_through() -> None:
    watchdog = Watchdog(30)
    assert watchdog.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        watchdog.call(lambda: 1 / 0)
    assert watchdog.call(lambda: 8) == 8, "an error ends the call, not the thread"


def test_all_calls_are_made_in_one_thread_that_was_prepared() -> None:
    prepared: list[int] = []
    watchdog = Watchdog(30, lambda: prepared.append(threading.get_ident()))
    threads = {watchdog.call(threading.get_ident) for _ in range(3)}
    assert threads == set(prepared)
    assert threading.get_ident() not in threads
    assert len(prepared) == 1


def test_a_call_that_hangs_is_given_up_and_the_next_one_is_made() -> None:
    watchdog, never = Watchdog(0.2), threading.Event()
    start = time.monotonic()
    with pytest.raises(Hung, match=r"no answer within 0\.2 s"):
        watchdog.call(never.wait)
    assert time.monotonic() - start < 10
    watchdog.timeout = 30
    assert watchdog.call(lambda: "alive") == "alive"
    never.set()


LEAVES = """
import atexit, sys, threading, time
import kit.runs.worker as worker
from kit.errors import EngineError

atexit.register(time.sleep, 60)  # the end of CUDA, which waits for a kernel that never ends

def job(request, quiet):
    try:
        worker.Watchdog(0.2).call(threading.Event().wait)
    except worker.Hung as error:
        raise EngineError("it hangs") from error

worker.leave(worker.serve(job, [sys.argv[1]]))
"""


def test_a_process_whose_call_was_given_up_ends_without_waiting_for_it(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    command = [sys.executable, "-c", LEAVES, str(tmp_path / "request.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stderr.strip()) == (2, "error: it hangs")


@pytest.fixture
def run(store: RunStore) -> RunDir:
    return store.create("one")


def test_what_is_added_comes_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    assert log.tail(5) == ""
    assert log.added() == ""
    path.write_text("a\nb")
    assert log.added() == "a\nb"
    assert log.added() == ""
    with open(path, "ab") as file:
        file.write("ä".encode()[:1])
        file.flush()
        assert log.added() == ""  # half a letter
        file.write("ä".encode()[1:])
    assert log.added() == "ä"


def test_following_ends_with_the_run_and_misses_nothing(run: RunDir) -> None:
    run.log.write_text("1\n2\n3\n")
    run.write_status("running")
    asleep = []

    def sleep(seconds: float) -> None:
        asleep.append(seconds)
        with open(run.log, "a") as log:
            log.write(f"more {len(asleep)}\n")
        if len(asleep) == 3:
            run.write_status("finished")

    assert "".join(added_text(run, 2, sleep)) == "2\n3\nmore 1\nmore 2\nmore 3\n"
    assert len(asleep) == 3
