"""kit.runner.trackers: a tracker mirrors a run, and whatever befalls it the run goes on."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config
from kit.runner.tracker_process import Source, estimates, numbers
from kit.runner.trackers import Trackers
from kit.runs.files import read_lines
from kit.runs.store import RunDir, RunStore

# A stand-in for a tracker: writes what it was called with, and at one of its calls does what FAULT says.
FAKE = """
    import json, os, time
    from types import SimpleNamespace

    def note(call, **what):
        with open(os.environ["FAKE_CALLS"], "a") as file:
            file.write(json.dumps({"call": call, **what}) + "\\n")
        print("chatter on standard output")
        where, _, fault = os.environ.get("FAKE_FAULT", "").partition(":")
        if where == call:
            if fault == "raise":
                raise RuntimeError("401 for hf_abcdefghijklmnopqrstuvwx")
            if fault == "hang":
                time.sleep(600)
            if fault == "exit":
                raise SystemExit("goodbye")
            if fault == "crash":
                os.abort()

    def init(project, name, id, resume, config, dir):
        note("init", project=project, name=name, id=id, resume=resume, config=config)
        return SimpleNamespace(
            id=id or "made-by-the-tracker",
            define_metric=lambda *names, **how: None,
            log=lambda values: note("log", values=values),
            finish=lambda: note("finish"),
        )

    note("import")
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunStore(tmp_path / "runs").create("one")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """Puts the stand-in in wandb's place; returns what it was called with."""
    folder, calls = tmp_path / "packages", tmp_path / "calls.jsonl"
    folder.mkdir()
    (folder / "wandb.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("FAKE_CALLS", str(calls))
    monkeypatch.syspath_prepend(str(folder))
    return lambda: read_lines(calls)


def config(*overrides: str) -> Any:
    return load_config("quickstart", ["run.report_to=[wandb]", *overrides])


def mirrored(run: RunDir, steps: range, told: list[str] | None = None, **limits: float) -> float:
    """Writes metrics of `steps` while the trackers run; returns the seconds that their end took."""
    with Trackers(run, (told if told is not None else []).append, **limits) as trackers:
        trackers.start(config())
        for step in steps:
            run.append_metrics({"step": step, "time": 1.0, "reward": step / 10, "kl": None})
        began = time.monotonic()
    return time.monotonic() - began


def alerts(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["kind"] == "alert"]


def test_what_the_run_writes_is_mirrored_step_by_step(run: RunDir, fake: Callable[[], list[dict[str, Any]]]) -> None:
    run.write_json("eval/before.json", {"step": 0, "pass@1": {"value": 0.5, "low": 0.4, "high": 0.6}})
    mirrored(run, range(1, 4))
    calls = fake()
    assert [call["call"] for call in calls] == ["import", "init", "log", "log", "log", "log", "finish"]
    assert (calls[1]["project"], calls[1]["name"]) == ("grpo-kit", "one")
    assert calls[2]["values"] == {
        "heldout/pass@1": 0.5, "heldout/pass@1_low": 0.4, "heldout/pass@1_high": 0.6, "step": 0,
    }  # fmt: skip
    assert [call["values"] for call in calls[3:6]] == [{"reward": n / 10, "step": n} for n in (1, 2, 3)]
    assert alerts(run) == []


@pytest.mark.parametrize("where", ["import", "init", "log", "finish"])
@pytest.mark.parametrize("fault", ["raise", "exit", "crash"])
def test_a_tracker_that_fails_is_let_go_with_one_warning(
    run: RunDir, fake: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, where: str, fault: str
) -> None:
    monkeypatch.setenv("FAKE_FAULT", f"{where}:{fault}")
    told: list[str] = []
    mirrored(run, range(1, 4), told)
    assert len(run.metrics()) == 3
    (alert,) = alerts(run)
    assert (alert["name"], alert["severity"]) == ("tracker wandb", "warning")
    reason = {"raise": "RuntimeError: 401 for [hidden]", "exit": "SystemExit: goodbye", "crash": "code -6"}[fault]
    assert reason in alert["message"]
    assert told == [f"Warning: {alert['message']}"]


@pytest.mark.parametrize("where", ["import", "init", "log", "finish"])
def test_a_tracker_that_hangs_holds_nothing_up(
    run: RunDir, fake: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("FAKE_FAULT", f"{where}:hang")
    assert mirrored(run, range(1, 4), finish=2.0) < 10.0
    (alert,) = alerts(run)
    assert "not done 2 s after the run's end" in alert["message"]


def test_a_call_that_takes_too_long_ends_the_tracker_while_the_run_goes_on(
    run: RunDir, fake: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULT", "log:hang")
    with Trackers(run, lambda _: None, stall=0.5) as trackers:
        trackers.start(config())
        run.append_metrics({"step": 1, "reward": 0.5})
        deadline = time.monotonic() + 60
        while not alerts(run) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "no answer to 'log' in" in alerts(run)[0]["message"]
    assert len(alerts(run)) == 1


def test_a_resumed_run_goes_on_in_the_same_tracker_run_and_repeats_no_step(
    run: RunDir, fake: Callable[[], list[dict[str, Any]]]
) -> None:
    mirrored(run, range(1, 4))
    mirrored(run, range(4, 6))
    first, second = [call for call in fake() if call["call"] == "init"]
    assert (first["id"], first["resume"]) == (None, None)
    assert (second["id"], second["resume"]) == ("made-by-the-tracker", "allow")
    assert [call["values"]["step"] for call in fake() if call["call"] == "log"] == [1, 2, 3, 4, 5]


def test_steps_that_are_made_again_after_a_resume_are_not_sent_again(run: RunDir) -> None:
    for step in range(1, 6):
        run.append_metrics({"step": step, "reward": 1.0})
    source = Source(run.path, after=0)
    assert [step for step, _ in source.news()] == [1, 2, 3, 4, 5]
    run.metrics_file.write_text(
        "".join(json.dumps({"step": step, "reward": 1.0}) + "\n" for step in (1, 2, 3, 4, 5, 6))
    )
    assert [step for step, _ in source.news()] == [6]
    assert list(source.news()) == []


def test_secrets_of_the_configuration_are_not_sent(
    run: RunDir, fake: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "value-of-the-variable")
    began = time.monotonic()
    with Trackers(run) as trackers:  # of a run that ends at once
        trackers.start(
            config(
                "reward.params={api_key: plain-word, header: value-of-the-variable}",
                "data.system_prompt=hf_" + "a" * 30,
            )
        )
    assert time.monotonic() - began < 15
    (sent,) = (call["config"] for call in fake() if call["call"] == "init")
    assert sent["reward"]["params"] == {"api_key": "[hidden]", "header": "[hidden]"}
    assert sent["data"]["system_prompt"] == "[hidden]"
    assert sent["generation"]["max_completion_tokens"] == 64


def test_a_killed_trainer_leaves_no_tracker_behind(
    run: RunDir, fake: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    code = f"""
        import os, signal, time
        from pathlib import Path
        from kit.config import load_config
        from kit.runs.store import RunDir
        from kit.runner.trackers import Trackers
        run = RunDir(Path({str(run.path)!r}))
        with Trackers(run) as trackers:
            trackers.start(load_config("quickstart", ["run.report_to=[wandb]"]))
            run.append_metrics({{"step": 1, "reward": 0.5}})
            while not (run.path / "trackers" / "wandb.json").exists():
                time.sleep(0.02)
            print(trackers.mirrors[0].process.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    child, deadline = int(done.stdout), time.monotonic() + 30
    while time.monotonic() < deadline and not ended(child):
        time.sleep(0.05)
    assert ended(child)
    assert [call["call"] for call in fake()] == ["import", "init", "log", "finish"]


def test_a_tracker_that_hangs_outlives_a_killed_trainer_by_a_bounded_time() -> None:
    code = """
        import subprocess, sys
        child = "from kit.runner import tracker_process as t; import os, threading, time; t.ORPHAN_SECONDS = 0.2; "
        child += "threading.Thread(target=t.leave_after, args=(os.getppid(),), daemon=True).start(); time.sleep(600)"
        print(subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.DEVNULL).pid)
        time = __import__("time"); time.sleep(1.5)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    child, deadline = int(done.stdout), time.monotonic() + 30
    while time.monotonic() < deadline and not ended(child):
        time.sleep(0.05)
    assert ended(child)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_other_processes_of_one_run_start_no_tracker(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with Trackers(run) as trackers:
        trackers.start(config())
        assert trackers.mirrors == []


def test_a_process_that_cannot_be_started_is_an_alert(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    mirrored(run, range(1, 2))
    assert "cannot be started" in alerts(run)[0]["message"]


def test_a_warning_that_the_disk_refuses_ends_nothing(
    run: RunDir, fake: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULT", "init:raise")
    run.events_file.mkdir()  # a folder where the file should be: nothing can be appended
    mirrored(run, range(1, 2))
    assert [line["step"] for line in run.metrics()] == [1]
    assert not list(run.events_file.iterdir())


def test_numbers_and_scores_are_what_a_tracker_can_draw() -> None:
    assert numbers({"step": 1, "time": 2.0, "a": 1, "b": None, "c": "text", "d": True, "e": float("inf")}) == {"a": 1.0}
    assert estimates({"greedy_reward": {"value": None, "low": 0, "high": 1}, "truncated_share": 0.25, "k": 4}) == {
        "heldout/truncated_share": 0.25
    }


BLOCK = """
    import os, socket
    log = open(os.environ["CONNECTIONS"], "a")
    def watch(event, args):
        if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
            address = args[1] if event != "socket.getaddrinfo" else args[0]
            host = address[0] if isinstance(address, tuple) else address
            if str(host) not in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
                log.write(f"{event} {args}\\n"); log.flush()
                raise OSError("no network here")
    import sys
    sys.addaudithook(watch)
"""


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network for child processes, attempts noted; trackio's files in a folder of the test."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(BLOCK))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("CONNECTIONS", str(tmp_path / "connections.txt"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    return tmp_path


def trackio_rows(folder: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """(run, step, values) of everything that trackio stored, read from its database without trackio."""
    with sqlite3.connect(folder / "trackio" / "grpo-kit.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step, id").fetchall()
    return [(name, step, json.loads(values)) for name, step, values in rows]


def test_trackio_holds_what_the_run_wrote_without_a_network_and_goes_on_after_a_resume(
    attempt: Callable[..., Any], local: Path
) -> None:
    pytest.importorskip("trackio")
    done = attempt("run.report_to=[trackio]", "evaluation.before=true", "run.id=mirrored")
    assert (done.code, done.folder.status()["state"]) == (0, "finished")
    with Trackers(done.folder) as trackers:  # what a resumed run does
        trackers.start(load_config("quickstart", ["run.report_to=[trackio]"]))
        done.folder.append_metrics({"step": 3, "reward": 0.75})

    assert not (local / "connections.txt").read_text()
    assert alerts(done.folder) == []
    stored = trackio_rows(local)
    assert {name for name, _, _ in stored} == {"mirrored"}
    (_, first_step, scores), *lines = stored
    assert first_step == 0
    before = json.loads((done.folder.eval / "before.json").read_text())
    assert scores["heldout/greedy_reward"] == before["greedy_reward"]["value"]
    written = done.folder.metrics()
    assert [step for _, step, _ in lines] == [line["step"] for line in written] == [1, 2, 3]
    for (_, _, values), line in zip(lines, written, strict=True):
        assert values == numbers(line)
    with sqlite3.connect(local / "trackio" / "grpo-kit.db") as database:
        assert len(database.execute("SELECT DISTINCT run_id FROM metrics").fetchall()) == 1


def test_tensorboard_files_lie_in_the_run(run: RunDir, local: Path) -> None:
    pytest.importorskip("tensorboardX")
    with Trackers(run) as trackers:
        trackers.start(load_config("quickstart", ["run.report_to=[tensorboard]"]))
        run.append_metrics({"step": 1, "reward": 0.625})
    (file,) = (run.path / "tensorboard").glob("events.*")
    assert b"reward" in file.read_bytes()
    assert alerts(run) == []


def test_a_run_with_a_failing_tracker_ends_as_if_there_were_none(
    attempt: Callable[..., Any], fake: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = attempt("run.id=plain")
    monkeypatch.setenv("FAKE_FAULT", "init:raise")
    done = attempt("run.report_to=[wandb]", "run.id=tracked")
    assert (done.code, done.folder.status()["state"]) == (0, "finished")
    assert "The tracker wandb failed" in done.shown
    assert [line["loss"] for line in done.folder.metrics()] == [line["loss"] for line in plain.folder.metrics()]
    assert "The tracker wandb failed" in (done.folder.path / "report.html").read_text()
