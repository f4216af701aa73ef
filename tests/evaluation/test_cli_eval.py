"""`grpo-kit eval`: the request to the scoring process, and errors before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import command_line
import pytest
from exporting_runs import finished_run

import kit.api
from kit.runs.store import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return finished_run(tmp_path / "runs")


@pytest.fixture
def sent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the requests; each is answered with a score."""
    requests: list[dict[str, Any]] = []

    def call(module: str, request: dict[str, Any], stopped: str, *, quiet: bool) -> dict[str, Any]:
        requests.append({"module": module, "quiet": quiet, **request})
        return {"pass@8": {"value": 0.5}}

    monkeypatch.setattr(kit.api, "call_for_result", call)
    return requests


def evaluate(run: RunDir, *arguments: str, code: int = 0) -> str:
    return command_line.run("eval", "it", "--root", str(run.path.parent), *arguments, code=code)


def test_the_result_is_scored_with_what_was_changed(run: RunDir, sent: list[dict[str, Any]]) -> None:
    evaluate(run, "-o", "evaluation.k=8", "-o", "generation.max_completion_tokens=32")
    (request,) = sent
    assert request == {
        "module": "kit.runner.evaluate", "quiet": False, "run_dir": str(run.path.resolve()), "checkpoint": None,
        "overrides": ["evaluation.k=8", "generation.max_completion_tokens=32"], "name": "again",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "optimisation.steps=3"], "only change keys of the sections evaluation and generation"),
        (["-o", "evaluation.kk=3"], "Did you mean 'k'"),
        (["--checkpoint", "best"], "has no best checkpoint"),
        (["--checkpoint", "40"], "Its checkpoints: 30"),
        (["--name", "after"], "cannot be called 'after'"),
        (["--name", "../up"], "cannot be called"),
    ],
)
def test_what_cannot_be_scored_is_refused_at_once(
    run: RunDir, sent: list[dict[str, Any]], arguments: list[str], words: str
) -> None:
    output = evaluate(run, *arguments, code=2)
    assert output.startswith("error: ")
    assert words in " ".join(output.split())
    assert sent == []
