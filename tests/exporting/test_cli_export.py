"""`grpo-kit export` and `Run.export`: the request to the export process, and errors before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import command_line
import pytest
from exporting_runs import finished_run

from kit.api import Run
from kit.export import request as face
from kit.runs.store import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return finished_run(tmp_path / "runs")


@pytest.fixture
def sent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the requests; a seed of 13 gets a failed verification."""
    requests: list[dict[str, Any]] = []

    def answer(module: str, request: dict[str, Any], stopped: str, *, quiet: bool) -> dict[str, Any]:
        requests.append({"module": module, "quiet": quiet, **request})
        faults = ["the chat template is not the one of training"] if request["seed"] == 13 else []
        return {"path": "there", "verification": {"verified": not faults, "faults": faults}}

    monkeypatch.setattr(face, "call_for_result", answer)
    return requests


def export(run: RunDir, *arguments: str, code: int = 0) -> str:
    return command_line.run("export", "it", "--root", str(run.path.parent), *arguments, code=code)


def test_what_was_asked_reaches_the_process(run: RunDir, sent: list[dict[str, Any]], tmp_path: Path) -> None:
    export(run, "--to", "merged_16bit", "--checkpoint", "30", "--out", str(tmp_path / "x"), "--prompts", "4", "--force")
    (request,) = sent
    expected = {
        "module": "kit.export.job", "format": "merged-16bit", "checkpoint": "30", "out": str(tmp_path / "x"), "prompts": 4,
        "force": True, "verify": True, "quiet": False, "run_dir": str(run.path.resolve()),
    }  # fmt: skip
    assert expected.items() <= request.items()


def test_an_export_that_is_not_verified_fails(run: RunDir, sent: list[dict[str, Any]]) -> None:
    output = export(run, "--to", "adapter", "--seed", "13", code=1)
    assert "not verified: there differs from the trained model: the chat template" in output
    assert json.loads(export(run, "--to", "adapter", "--seed", "13", "--json", code=1))["path"] == "there"
    with pytest.raises(face.NotVerified) as failure:
        Run("it", run.path.parent).export("adapter", seed=13)
    assert failure.value.result["verification"]["verified"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "onnx"], "There is no format 'onnx'"),
        (["--to", "adapter", "--checkpoint", "40"], "Its checkpoints: 30"),
        (["--to", "gguf", "--quantization", "q4_k_x"], "Did you mean"),
        (["--to", "adapter", "--out", "RUN/adapter"], "is inside the run directory"),
        (["--to", "adapter", "--out", "RUN", "--force"], "is or contains the run"),
        (["--to", "adapter", "--out", "RUN/../new/../..", "--force"], "is or contains the run"),
        (["--to", "adapter", "--out", ".", "--force"], "the working directory"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    run: RunDir, sent: list[dict[str, Any]], arguments: list[str], words: str
) -> None:
    arguments = [each.replace("RUN", str(run.path)) for each in arguments]
    assert words in " ".join(export(run, *arguments, code=2).split())
    assert sent == []
