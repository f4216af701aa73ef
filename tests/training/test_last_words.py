"""kit.runner.console: the commands at the end of a run are this run's own, and each of them is one that exists."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.config import RunConfig, load_config
from kit.runner.console import hints
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


def test_a_run_of_ones_own_is_told_of_its_own_commands(run: RunDir) -> None:
    found = said(run, own_config("run.seed=3"))
    assert list(found) == ["report", "completions", "adapter", "talk to it", "take it along", "another seed"]
    assert found["another seed"] == f"grpo-kit train '{run.config}' -o run.seed=4 --run-id own-seed-4"
    assert "quickstart" not in str(found)
    assert all(f"--root '{run.path.parent}'" in found[name] for name in ("talk to it", "take it along"))


def test_every_command_is_one_that_the_command_line_takes(run: RunDir) -> None:
    verbs = {name for name, text in said(run, own_config(), "Ctrl-C").items() if text.startswith("grpo-kit")}
    verbs |= {name for name, text in said(run, own_config()).items() if text.startswith("grpo-kit")}
    assert verbs == {"go on", "talk to it", "take it along", "another seed"}
    everything = said(run, own_config(), "Ctrl-C") | said(run, own_config())
    for name in verbs:
        words = shlex.split(everything[name])[1:]
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0, (words, done.output)
        options = [word for word in words if word.startswith("--")]
        assert all(option in done.output for option in options)


def test_a_long_name_stays_a_valid_one(tmp_path: Path) -> None:
    run = RunStore(tmp_path / "runs").create("a" * 49 + "-" + "b" * 14)
    words = shlex.split(said(run, own_config("run.seed=123456789"))["another seed"])
    assert load_config(own_config(), [f"run.id={words[-1]}"]).run.id == "a" * 49 + "-seed-1234567" + "90"
