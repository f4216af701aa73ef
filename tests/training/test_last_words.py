"""kit.runner.console: commands printed at the end of a run exist, and name this run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.config import RunConfig, load_config
from kit.runner.console import Reporter, hints
from kit.runs.store import RunDir, RunStore


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunStore(tmp_path / "my runs").create("own")
    made.adapter.mkdir()
    return made


def own_config(*overrides: str) -> RunConfig:
    return load_config("quickstart", ["model.name=/models/own", *overrides])


def said(run: RunDir, config: RunConfig, stopped: str | None = None) -> dict[str, str]:
    lines = hints(run, config, stopped)
    return {line[:15].strip(): line[15:] for line in lines}


@pytest.mark.parametrize("ends", [os.pipe, os.openpty], ids=["pipe", "terminal"])
def test_a_run_goes_on_when_the_process_that_reads_its_output_dies(tmp_path: Path, ends: Any) -> None:
    """A notebook's kernel is killed, or a terminal closed. rich would end the run."""
    code = """
import sys
from kit.runner.console import Reporter
reporter = Reporter()
reporter.say("ready")
sys.stdin.read()
for text in "abc":
    reporter.say(text), print(text, flush=True), print(text, file=sys.stderr, flush=True)
open("done", "w")
"""
    reader, writer = ends()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=writer,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    os.close(writer)
    assert b"ready" in os.read(reader, 100)
    os.close(reader)
    process.communicate(timeout=60)  # closes its input
    assert process.returncode == 0
    assert (tmp_path / "done").exists()


def test_every_command_is_one_that_the_command_line_takes(run: RunDir) -> None:
    verbs = {name for name, text in said(run, own_config(), "Ctrl-C").items() if text.startswith("grpo-kit")}
    verbs |= {name for name, text in said(run, own_config()).items() if text.startswith("grpo-kit")}
    assert verbs == {"resume", "chat", "export", "another seed"}
    everything = said(run, own_config(), "Ctrl-C") | said(run, own_config())
    for name in verbs:
        words = shlex.split(everything[name])[1:]
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0, (words, done.output)
        options = [word for word in words if word.startswith("--")]
        assert all(option in done.output for option in options)


def test_the_end_of_a_run_says_how_many_rewards_failed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for step, errors in enumerate((0.0, 0.25, 0.5, 0.0), start=1):
        line = {"step": step, "rewards/own/status_error": errors, "rewards/own/status_infra": 0.5 * errors}
        with run.metrics_file.open("a") as file:
            file.write(json.dumps(line | {"rewards/own/status_wrong": 1.0}) + "\n")
    Reporter().result(run, own_config(), None)
    assert "Rewards failed in 2 of 4 steps, at most 75% of the scores of a step." in capsys.readouterr().out


@pytest.mark.parametrize(("shares", "is_flat"), [((1.0, 1.0), True), ((1.0, 0.75), False), ((), False)])
def test_a_run_without_differing_rewards_ends_with_a_notice(
    shares: tuple[float, ...], is_flat: bool, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.metrics_file.write_text("".join(json.dumps({"frac_reward_zero_std": share}) + "\n" for share in shares))
    Reporter().result(run, own_config(), None)
    assert ("No group had different rewards" in capsys.readouterr().out) is is_flat


def test_a_run_on_own_data_gets_no_hint_to_use_own_data(run: RunDir) -> None:
    assert "your own data" in said(run, load_config("quickstart"))
    assert "your own data" not in said(
        run, load_config("quickstart", ["data.source=tickets.csv", "data.task_params={}"])
    )
