"""Child processes of the page: one that answers requests, and those that run for minutes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kit.errors import DataError, RunError
from kit.ui import children
from kit.ui.children import MOST_RUNNING, Bench, Benches, Job, Jobs

ANSWERS = """
import json, sys, time, os
for line in sys.stdin:
    asked = json.loads(line)["question"]
    if asked == "hang": time.sleep(60)
    if asked == "slow": time.sleep(1)
    if asked == "die": os._exit(3)
    if asked == "gpus": print(json.dumps({"answer": os.environ["CUDA_VISIBLE_DEVICES"]}), flush=True); continue
    if asked == "wrong": print(json.dumps({"error": "no such row", "kind": "DataError"}), flush=True); continue
    if asked == "odd": print(json.dumps({"error": "odd", "kind": "__class__"}), flush=True); continue
    if asked == "crash": print(json.dumps({"crash": "ValueError: x"}), flush=True); continue
    if asked == "long": print(json.dumps({"answer": "x" * (9 * 1024 * 1024)}), flush=True); continue
    print(json.dumps({"answer": os.getpid()}), flush=True)
"""
WORK = """
import json, sys, time
from pathlib import Path
from kit.errors import DataError
from kit.runs.worker import serve

def job(request, quiet):
    print("half way", flush=True)
    if request["how"] == "wait":
        time.sleep(60)
    if request["how"] == "wrong":
        raise DataError("no such row")
    if request["how"] == "crash":
        raise ValueError("broken")
    if request["how"] == "nothing":
        return
    Path(request["result"]).write_text(json.dumps({"found": 1}))

sys.exit(serve(job))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "answers.py").write_text(ANSWERS)
    (tmp_path / "work.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "MODULE", "answers")
    return tmp_path


@pytest.fixture
def child(folder: Path) -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def jobs(folder: Path) -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.close()


def test_one_child_process_answers_all_questions(child: Bench) -> None:
    assert child.ask({"question": "who"}) == child.ask({"question": "who"})


def test_a_mistake_is_raised_as_what_it_is(child: Bench) -> None:
    with pytest.raises(DataError, match="no such row"):
        child.ask({"question": "wrong"})
    with pytest.raises(Exception, match="odd"):
        child.ask({"question": "odd"})
    with pytest.raises(RunError, match="ValueError: x"):
        child.ask({"question": "crash"})


def test_a_hanging_child_is_replaced(child: Bench) -> None:
    first = child.ask({"question": "who"})
    with pytest.raises(RunError, match="no answer within"):
        child.ask({"question": "hang"}, seconds=0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert child.ask({"question": "who"}) != first


def test_a_leaving_child_finishes_its_answer(child: Bench) -> None:
    """A run that starts afterwards plans with the memory that the child frees."""
    first = child.ask({"question": "who"})
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(child.ask({"question": "slow"})))
    thread.start()
    while not child._lock.locked():
        time.sleep(0.01)
    child.leave()
    thread.join()
    assert answers == [first]
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert child.ask({"question": "who"}) == child.ask({"question": "who"}) != first


def test_a_dead_child_is_reported_and_replaced(child: Bench) -> None:
    with pytest.raises(RunError, match="died"):
        child.ask({"question": "die"})
    assert child.ask({"question": "who"})


def ended(job: Job, seconds: float = 30.0) -> Job:
    end = time.monotonic() + seconds
    while job.state == "running" and time.monotonic() < end:
        time.sleep(0.02)
    return job


def test_a_job_is_found_by_its_key_with_its_progress_and_result(jobs: Jobs) -> None:
    job = ended(jobs.start("a:1", "work", {"how": "well"}))
    assert (job.state, job.result, job.line) == ("done", {"found": 1}, "half way")
    assert jobs.get("a:1") is job
    assert jobs.latest("a:") is job
    assert jobs.latest("b:") is None
    assert jobs.get({"a": 1}) is None


def test_a_failed_job_reports_its_reason(jobs: Jobs) -> None:
    wrong = ended(jobs.start("wrong", "work", {"how": "wrong"}))
    assert (wrong.state, wrong.error) == ("failed", "no such row")
    crash = ended(jobs.start("crash", "work", {"how": "crash"}))
    assert crash.state == "failed"
    assert "ValueError: broken" in crash.error
    assert ended(jobs.start("nothing", "work", {"how": "nothing"})).state == "stopped"


def test_the_same_question_is_asked_once_and_can_be_stopped(jobs: Jobs) -> None:
    job = jobs.start("same", "work", {"how": "wait"})
    assert jobs.start("same", "work", {"how": "wait"}) is job
    with pytest.raises(RunError, match="other settings"):
        jobs.start("same", "work", {"how": "well"})
    end = time.monotonic() + 30
    while job.line != "half way" and time.monotonic() < end:
        time.sleep(0.02)
    for nothing in ("", None, "other"):
        jobs.stop(nothing)
        assert job.state == "running", "without a job, the button must stop no other job"
    jobs.stop("sam")
    assert job.state == "stopped"
    assert job.pid is not None
    while time.monotonic() < end and Path(f"/proc/{job.pid}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{job.pid}").exists(), "the job continues"
    assert jobs.start("same", "work", {"how": "well"}) is not job


def test_concurrent_jobs_are_limited(jobs: Jobs) -> None:
    for number in range(MOST_RUNNING):
        jobs.start(f"job {number}", "work", {"how": "wait"})
    with pytest.raises(RunError, match="running already"):
        jobs.start("one more", "work", {"how": "well"})


@pytest.mark.browser
def test_the_page_brings_nothing_heavy() -> None:
    import subprocess

    code = "from kit.ui.server import make_app\nfrom kit.ui.settings import Settings\nmake_app(Settings())\n"
    code += "import sys; print('LOADED', *[m for m in ('torch', 'transformers', 'trl', 'unsloth', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rpartition("LOADED")[2].split() == []


def test_a_run_that_starts_is_given_what_idle_children_hold_of_a_gpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.ui.chat import Loaded
    from kit.ui.settings import Settings
    from kit.ui.site import Site

    class Session:
        alive = True

        def __init__(self, answering: bool) -> None:
            self.answering = answering

        def close(self) -> None:
            self.alive = False

    site = Site(Settings(root=tmp_path))
    idle, busy = Session(False), Session(True)
    for session in (idle, busy):
        loaded = Loaded(site)
        loaded._session = session  # type: ignore[assignment]
        site.sessions.append(loaded.close)
    benches = (site.benches._light, site.benches._heavy)
    first = [bench.ask({"question": "who"}) for bench in benches]
    site.end_sessions()
    assert (idle.alive, busy.alive) == (False, True)
    site.make_room()
    assert not busy.alive, "it would answer beside the run"
    assert all(bench.ask({"question": "who"}) != before for bench, before in zip(benches, first, strict=True))
    site.close()


def test_a_reward_that_is_tried_takes_no_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model would stay there, beside the run that starts next or its plan."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with closing(Benches()) as benches:
        visible = [bench.ask({"question": "gpus"}) for bench in (benches._light, benches._heavy)]
    assert visible == ["", "0"]
