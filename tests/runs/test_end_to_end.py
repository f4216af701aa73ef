"""Real training below a supervisor: a closed terminal, a killed trainer, a resumed run, a stop that saves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import kill, wait_for

from kit import api
from kit.runs.process import identity, runs
from kit.runs.store import RunDir, RunStore

pytestmark = pytest.mark.survival


@pytest.mark.slow
def test_a_run_survives_its_terminal_and_a_kill_and_is_stopped_with_a_checkpoint(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree["optimisation"]["steps"] = 1000
    tree["run"] |= {"root": "runs", "save_every": 2, "save_completions": False}
    Path("tiny.yaml").write_text(yaml.safe_dump(tree))
    run = _in_a_terminal_that_closes("train", "tiny.yaml")

    trainer, step = run.status(), run.status()["step"]
    assert trainer["state"] == "running"
    wait_for(lambda: run.status()["step"] >= step + 3, 60)  # it continues without the terminal
    kill(trainer)
    wait_for(lambda: run.status()["state"] == "failed")  # its parent process had continued, too
    assert run.status()["exit"] == 128 + signal.SIGKILL

    resumed = api.resume("it", detach=True)
    wait_for(lambda: run.status()["state"] == "running" and run.status()["step"] > trainer["step"] + 3, 120)
    assert any(event["kind"] == "resumed" for event in run.events())
    before, last = time.monotonic(), run.metrics()[-1]
    status = resumed.stop()
    assert time.monotonic() - before < 5 + 10 * last["step_time"]  # a busy machine
    assert (status["state"], status["reason"]) == ("stopped", "control/stop")
    assert run.checkpoints[-1].name == f"checkpoint-{status['step']}"
    state = json.loads((run.checkpoints[-1] / "trainer_state.json").read_text())
    assert state["global_step"] == status["step"]
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(1, status["step"] + 1))
    times = [line["time"] for line in run.metrics()]
    assert all(earlier <= later for earlier, later in itertools.pairwise(times))


def _in_a_terminal_that_closes(*arguments: str) -> RunDir:
    """Run a verb in a terminal, and close the terminal as soon as the run trains."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "kit.cli", *arguments])
    os.set_blocking(terminal, False)

    def training() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 100_000)  # an unread terminal blocks its writers
        return Path("runs/it/metrics.jsonl").exists()

    wait_for(training, 120)
    face = identity(pid)
    os.close(terminal)
    time.sleep(0.3)
    assert runs(face)
    return RunStore("runs").open("it")
