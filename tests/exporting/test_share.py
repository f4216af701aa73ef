"""Sharing a run's report: what is in it, and where it is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.errors import RunError
from kit.export.share import MARKER, publication
from kit.runs.store import RunDir

sys.path.append(str(Path(__file__).parents[1] / "ui"))
from made_runs import make

TOKEN = "hf_" + "x" * 30
SECRET_ROW = "2 + 2 ="


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make(tmp_path / "runs")


def said(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_completions_leave_only_where_that_is_asked_for(run: RunDir) -> None:
    sample = {"prompt": SECRET_ROW, "reference": "4", "completion": "It is 4", "reward": 1.0}
    run.write_json("eval/after.json", {"step": 3, "problems": 1, "samples": [sample]})
    plain, whole = publication(run), publication(run, completions=True)
    assert not [name for name, text in plain.files.items() if SECRET_ROW in text]
    assert SECRET_ROW in whole.files["index.html"]
    assert "left out: completions" in " ".join(plain.contents)
    assert "INCLUDED" in " ".join(whole.contents)


def test_secrets_and_the_home_folder_stay(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path))
    run.append_event("alert", step=1, name="x", severity="error", message=f"my key {TOKEN}, in {tmp_path}/keys")
    text = "".join(publication(run, completions=True).files.values())
    assert TOKEN not in text
    assert str(tmp_path) not in text
    assert "my key [hidden], in ~/keys" in text


def test_a_folder_is_new_or_an_earlier_publication(run: RunDir, tmp_path: Path) -> None:
    to = tmp_path / "site"
    root = ["--root", str(run.path.parent)]
    assert f"written: {to / 'index.html'}" in said("share", "one", "--to", str(to), *root)
    assert json.loads((to / MARKER).read_text())["run"] == "one"
    said("share", "one", "--to", str(to), *root)  # once more
    (to / MARKER).unlink()
    with pytest.raises(RunError, match="holds something else"):
        publication(run).write(to)
