"""kit.cli.runs: output of ps, logs, stop, resume and --detach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run
from patience import wait_for
from typer.testing import CliRunner

from kit.cli import app as cli
from kit.runs.store import RunDir, RunStore


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.runner.prepare.validate", lambda config: [])


@pytest.fixture
def many(write_job: Callable[..., None]) -> RunStore:
    store = RunStore("runs")
    for number in range(30):
        run = store.create(f"run-{number:02}")
        run.append_metrics({"step": 1, "reward": number / 100})
        run.write_status("finished", step=1, total_steps=1, started=1e9 + number)
    store.create("live").write_status("running", started=1.0, eta_seconds=90, step=2, total_steps=9)
    return store


def test_a_detached_start_says_the_id_alone_on_stdout(start: Callable[..., RunDir], checked: None) -> None:
    result = CliRunner().invoke(cli.app, ["train", "quickstart", "--detach", "-o", "run.id=mine"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "mine\n"
    assert result.stderr == "Follow it: grpo-kit logs -f mine    Stop it: grpo-kit stop mine\n"
    assert "Stopping 'mine'" in run("stop", "mine")


def test_a_configuration_that_cannot_run_is_refused_before_it_is_started(
    write_job: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "optimisation.batch_size" in run(
        "train", "quickstart", "--detach", "-o", "optimisation.batch_size=9", code=2
    )
    monkeypatch.setattr("kit.runner.prepare.validate", _refuse)
    assert "no such rows" in run("quickstart", "--detach", code=2)
    assert not Path("runs").exists()


def _refuse(config: object) -> None:
    from kit.errors import DataError

    raise DataError("no such rows")


def test_ps_shows_the_latest_and_all_live_ones(many: RunStore) -> None:
    lines = [line.split() for line in run("ps").splitlines() if "run-" in line or "live" in line]
    assert [line[0] for line in lines] == [f"run-{number:02}" for number in range(29, 9, -1)] + ["live"]
    assert lines[0] == ["run-29", "finished", "1/1", "0.290", "-"]
    assert lines[-1] == ["live", "running", "2/9", "-", "2", "min"]
    assert "10 earlier runs" in run("ps")
    assert run("ps", "-n", "3").count("run-") == 3
    assert "live" not in run("ps", "-n", "3")


def test_logs_show_the_last_lines(many: RunStore) -> None:
    many.open("live").log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert run("logs", "live", "-n", "2") == "line 98\nline 99\n"
    assert run("logs", "live").count("line") == 40
    assert run("logs", "run-00") == "Its log is empty. Run 'run-00' is finished at step 1/1.\n"
    assert run("logs", "run-00", "-n", "0") == ""
    assert "no run 'nothing'" in run("logs", "nothing", code=2)


def test_a_stop_says_how_it_ended_and_what_to_do_next(running: RunDir) -> None:
    output = run("stop", "one")
    assert "its step is finished and saved first" in output
    assert "is stopped at step" in output
    assert " on request. Continue with: grpo-kit resume one" in output
    assert f"checkpoint is runs/one/{running.checkpoints[-1].name}" in output
    assert "There is nothing to stop. Run 'one' is stopped" in run("stop", "one")


def test_resume_in_the_background_and_its_refusals(running: RunDir) -> None:
    assert "Only one process can train a run" in run("resume", "one", code=2)
    run("stop", "one")
    output = run("resume", "one", "--detach")
    assert f"Run 'one' continues from its last complete checkpoint, {running.checkpoints[-1].name}.\n" in output
    assert "Follow it: grpo-kit logs -f one" in output
    wait_for(lambda: running.status()["state"] == "running")
    run("stop", "one", "--now")
    assert "no run 'nothing'" in run("resume", "nothing", code=2)
    running.write_status("finished")
    assert "there is nothing to resume" in run("resume", "one", code=2)
