"""The report that a run writes at its end, for every way to end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from kit.errors import RewardError
from kit.report.run_report import write_report
from kit.runner.console import LogCapture, Reporter, draw_report
from kit.runner.lifecycle import lifecycle
from kit.runner.recording import Recorder
from kit.runs.store import RunDir

Make = Callable[..., RunDir]


def ended(run: RunDir, error: BaseException | None = None) -> str:
    """End a run, with `error` if there is one; return its report."""
    run.write_status("running", step=7, total_steps=20)
    with suppress(RewardError, KeyboardInterrupt), lifecycle(run, LogCapture(), Reporter(quiet=True), write_report):
        if error is not None:
            raise error
    return (run.path / "report.html").read_text(encoding="utf-8")


def test_a_run_that_ends_leaves_a_report_of_its_end(make_run: Make) -> None:
    run = make_run()
    assert "This run is finished after 7 of 20 steps." in ended(run)
    assert run.status()["state"] == "finished"


def test_a_run_that_fails_leaves_a_report_with_the_reason(make_run: Make) -> None:
    run = make_run()
    assert "This run failed after 7 of 20 steps. Reason: RewardError: the judge is down." in ended(
        run, RewardError("the judge is down")
    )
    assert run.status()["state"] == "failed"


def test_the_steps_since_the_last_heartbeat_count(make_run: Make) -> None:
    """Three steps within a second write no heartbeat."""
    run, state, control = make_run(), TrainerState(max_steps=20), TrainerControl()
    with suppress(RewardError), lifecycle(run, LogCapture(), Reporter(quiet=True), write_report) as stop:
        recorder = Recorder(run, stop, lambda *_: None)
        recorder.on_train_begin(TrainingArguments(max_steps=20, report_to=[]), state, control)
        for state.global_step in (1, 2, 3):
            recorder.on_step_end(None, state, control)
        assert run.status()["step"] == 0
        raise RewardError("the judge is down")
    assert run.status()["step"] == 3
    assert "failed after 3 of 20 steps" in (run.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("error", [RuntimeError("odd"), MemoryError(), RecursionError()])
def test_a_report_that_cannot_be_made_ends_no_run(
    make_run: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    run = make_run()
    run.write_status("running", step=20)
    with lifecycle(run, LogCapture(), Reporter(quiet=True), fail):
        pass
    assert run.status()["state"] == "finished"
    assert not (run.path / "report.html").exists()


def test_on_a_full_disk_the_space_is_left_to_the_last_word(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    monkeypatch.setattr("kit.runs.store.free_bytes", lambda path: 100_000)
    assert draw_report(run, write_report, state="failed", reason="no space") is None
    assert not (run.path / "report.html").exists()
