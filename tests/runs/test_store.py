"""kit.runs.store: a run directory stays consistent when the process dies or the disk fails."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.errors import RunError
from kit.runs import process
from kit.runs.store import SILENCE_LIMIT, RunDir, RunStore, seconds_worked


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


@pytest.fixture
def run(store: RunStore) -> RunDir:
    return store.create("one")


def full(*_: Any, **__: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- ids and folders -------------------------------------------------------------------------------------------------


def test_a_taken_id_is_refused_with_what_to_do(store: RunStore, run: RunDir) -> None:
    run.append_metrics({"step": 1})
    with pytest.raises(RunError, match=r"already a run 'one'.*-o run.id=NAME"):
        store.create("one")
    assert run.metrics() == [{"step": 1}]


def test_of_two_processes_that_want_one_id_exactly_one_gets_it(tmp_path: Path, race: Callable[..., list[str]]) -> None:
    counts = race(
        f"""
        from kit.errors import RunError
        from kit.runs import RunStore
        won = 0
        for i in range(50):
            try: RunStore({str(tmp_path)!r}).create(f'race-{{i}}'); won += 1
            except RunError: pass
        print(won, flush=True)
        """,
        2,
    )
    assert sum(map(int, counts)) == 50


@pytest.mark.parametrize("moment", ["mkdir", "fsync", "replace", "rename"])
def test_killed_while_it_is_made_a_run_is_not_there_and_can_be_made(store: RunStore, moment: str) -> None:
    store.root.mkdir(parents=True)
    if not (child := os.fork()):
        owner = os if moment in ("fsync", "replace") else Path
        original = getattr(owner, moment)

        def killed(*args: Any, **named: Any) -> None:
            if moment == "mkdir" and args[0] == store.root:
                return
            original(*args, **named)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, moment, killed)
        store.create("one", config="run: {}\n", step=0, total_steps=3)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    if moment == "rename":  # the complete file is there
        run = store.open("one")
        assert run.config.read_text() == "run: {}\n"
        assert (run.record()["state"], run.record()["step"], run.record()["total_steps"]) == ("starting", 0, 3)
        assert run.status()["state"] == "interrupted"
        assert run.status()["reason"].startswith("the process ended without a message")
        run.claim()
        return
    assert store.list() == []
    with pytest.raises(RunError, match="no run 'one'"):
        store.open("one")
    assert store.create("one").status()["state"] == "starting"


def test_the_latest_run_is_listed_first_and_other_folders_are_not(store: RunStore) -> None:
    for name, started in (("b", 1.0), ("a", 3.0), ("c", 2.0)):
        store.create(name).write_status("finished", started=started)
    (store.root / "notes").mkdir()
    (store.root / "UPPER").mkdir()
    assert [run.id for run in store.list()] == ["a", "c", "b"]
    assert RunStore(store.root / "nowhere").list() == []


# --- status ----------------------------------------------------------------------------------------------------------


def test_queue_and_pauses_are_not_time_of_work(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.time() + 10]
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def after(seconds: float, state: str) -> float:
        clock[0] += seconds
        run.write_status(state)
        return seconds_worked(run.record())

    began = after(0, "queued")
    assert after(3600, "starting") == began
    assert [after(20, "running"), after(40, "stopped")] == [pytest.approx(began + 20), pytest.approx(began + 60)]
    clock[0] += 86400
    run.claim()
    clock[0] += 30
    assert seconds_worked(run.record()) == pytest.approx(began + 90)
    monkeypatch.setattr("kit.runs.store.runs", lambda who: False)
    assert seconds_worked(run.record()) == pytest.approx(began + 60), "it died with its last heartbeat"


@pytest.mark.parametrize(("silence", "state"), [(0.0, "running"), (SILENCE_LIMIT + 1, "interrupted")])
def test_a_run_on_another_machine_is_judged_by_its_heartbeat(run: RunDir, silence: float, state: str) -> None:
    run.write_status("running", host="elsewhere", pid=1, heartbeat=time.time() - silence)
    assert run.status()["state"] == state


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"state": "running"}', '{"state": "running", "pid": -1}'])
def test_no_or_broken_status_never_reads_as_finished(run: RunDir, content: str | None) -> None:
    run.status_file.unlink()
    if content is not None:
        run.status_file.write_text(content)
    assert run.status()["state"] == "interrupted"


def test_a_killed_run_is_stopping_until_its_supervisor_says_how_it_ended(run: RunDir) -> None:
    supervisor = process.identity()
    run.write_status("stopping", pid=2**22 + 1, supervisor=supervisor)
    assert run.status()["state"] == "stopping"
    run.write_status("running", pid=2**22 + 1, supervisor=supervisor, stop={"how": "SIGKILL"})
    assert run.status()["state"] == "stopping"
    run.write_status("running", pid=2**22 + 1, supervisor=supervisor, stop=None)
    assert run.status()["state"] == "interrupted"
    run.write_status("stopping", pid=2**22 + 1, supervisor={"pid": 2**22 + 1})
    assert run.status()["state"] == "interrupted"


def test_a_reader_never_sees_half_a_status(run: RunDir) -> None:
    states: list[Any] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            states.append(json.loads(run.status_file.read_text()).get("state"))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(100):
        run.write_status("running", step=step, padding="x" * (step * 100))
    done.set()
    reader.join()
    assert set(states) <= {"starting", "running"}
    assert not list(run.path.glob(".*tmp"))


# --- lines -----------------------------------------------------------------------------------------------------------


def test_lines_come_back_in_order_with_nan_as_null(run: RunDir) -> None:
    run.append_metrics({"step": 1, "reward": 0.5, "kl": math.nan})
    run.append_metrics({"step": 2, "reward": math.inf, "path": Path("a"), "nested": {"x": (1, -math.inf)}})
    assert run.metrics() == [
        {"step": 1, "reward": 0.5, "kl": None},
        {"step": 2, "reward": None, "path": "a", "nested": {"x": [1, None]}},
    ]
    assert "NaN" not in run.metrics_file.read_text()


def test_numbers_of_other_libraries_become_plain_ones(run: RunDir) -> None:
    numpy = pytest.importorskip("numpy")
    run.append_metrics(
        {"a": numpy.float32(0.5), "b": numpy.arange(2), "c": numpy.float64("nan"), "d": numpy.bool_(True)}
    )
    assert run.metrics() == [{"a": 0.5, "b": [0, 1], "c": None, "d": True}]


@pytest.mark.parametrize("size", [10, 4096, 5000, 10000])
def test_a_half_line_of_any_length_is_taken_back(run: RunDir, size: int) -> None:
    for lines in (0, 1):
        run.metrics_file.write_text('{"step": 1}\n' * lines + "x" * size)
        run.append_metrics({"step": 2})
        assert run.metrics() == [{"step": 1}] * lines + [{"step": 2}]


def test_a_broken_line_before_the_last_is_told_with_its_number(run: RunDir) -> None:
    run.metrics_file.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl, line 2"):
        run.metrics()


# --- failures of the disk --------------------------------------------------------------------------------------------


def test_a_full_disk_in_the_middle_of_a_line_leaves_whole_lines(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append_metrics({"step": 1})
    write = os.write

    def write_a_little(handle: int, data: bytes) -> int:
        if len(data) < 12:
            full()
        return write(handle, data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_a_little)
        with pytest.raises(
            RunError, match=r"No space left while writing .*metrics.jsonl \(free there: .*\)\. Free some space"
        ):
            run.append_metrics({"step": 2, "reward": 0.25})
    assert run.metrics_file.read_text() == '{"step": 1}\n'


def test_a_full_disk_leaves_the_old_status(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_status("running", step=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="No space left"):
            run.write_status("running", step=2)
    assert run.status()["step"] == 1
    assert not list(run.path.glob(".*tmp"))


# --- files -----------------------------------------------------------------------------------------------------------
