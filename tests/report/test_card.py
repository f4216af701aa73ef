"""The card of a run in a notebook, during training and afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kit.report.page import TEMPLATES
from kit.report.run_report import card, heard
from kit.runs.store import RunDir, RunStore


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunStore(tmp_path).create("it")


def test_progress_is_read_from_the_lines_that_the_reporter_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from kit.runner.console import Reporter

    with Reporter().bar("Held-out score, before") as advance:
        advance(7, 7, "reward 0.5")
    (line,) = capsys.readouterr().out.splitlines()
    progress = heard(line)
    assert progress is not None
    assert (progress.title, progress.done, progress.total) == ("Held-out score, before", 7, 7)
    assert progress.note.endswith("reward 0.5")


def test_before_there_is_a_directory_the_card_shows_what_is_being_done(tmp_path: Path) -> None:
    lines = ["grpo-kit: run 'it'", "Held-out score, before  34/340  0:26  eta 3:56"]
    shown = card(RunDir(tmp_path / "it"), lines)
    assert '<progress max="340" value="34">' in shown
    assert "Held-out score, before" in shown


def test_while_it_trains_the_status_on_disk_counts_not_the_last_line(run: RunDir) -> None:
    run.write_status("running", step=9, total_steps=60, eta_seconds=65.0)
    run.append_metrics({"step": 9, "reward": 0.25})
    shown = card(run, ["Training  6/60  0:08  eta 1:09  reward 0.872"])
    assert '<progress max="60" value="9">' in shown
    assert "about 1:05 left · reward 0.250" in shown
    assert '<progress max="8" value="4">' in card(run, ["Held-out score, step-00005  4/8  0:02  eta 0:02"])


def test_afterwards_it_has_state_figures_curves_and_scores(run: RunDir) -> None:
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "reward": step / 4, "completions/mean_length": 20.0})
    for name, step, value in (("before", 0, 0.1), ("after", 3, 0.9)):
        estimate = {"value": value, "low": value - 0.05, "high": value + 0.05}
        run.write_json(f"eval/{name}.json", {"step": step, "greedy_accuracy": estimate, "problems": 20})
    run.write_status("finished", step=3, total_steps=3, exit=0)
    shown = card(run, ["the last line"])
    for part in ("is finished", "Reward on training prompts", "Completion length", "Held-out accuracy: first, last"):
        assert part in shown
    assert "0.900" in shown
    assert "<details><summary>Output" in shown


def test_texts_are_escaped_and_secrets_hidden(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value")
    run.write_status("failed", reason="<script>alert(1)</script> very-secret-value")
    shown = card(run, ["<b>very-secret-value</b>"])
    assert "<script>" not in shown
    assert "<b>very" not in shown
    assert "very-secret-value" not in shown


def test_the_style_reaches_nothing_but_the_card(run: RunDir) -> None:
    style = (TEMPLATES / "card.css").read_text(encoding="utf-8")
    assert style.strip() in card(run)
    for rule in re.sub(r"/\*.*?\*/", "", style).split("}")[:-1]:
        selectors = rule.partition("{")[0].split(",")
        assert all(".grpo-kit" in selector for selector in selectors), selectors
