"""Sharing a run's report: what would leave, where it goes, and what is refused; the hub is played by test_hub's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.errors import RunError
from kit.export.share import MARKER, publication, to_hub
from kit.runs.store import RunDir

sys.path.append(str(Path(__file__).parents[1] / "ui"))
from made_runs import make
from test_hub import REPO, TOKEN, FakeHub, fake

__all__ = ["fake"]
SECRET_ROW = "2 + 2 ="


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make(tmp_path / "runs")


def said(*words: str, code: int = 0, **more: Any) -> str:
    result = CliRunner().invoke(app, list(words), **more)
    assert result.exit_code == code, result.output
    return result.output


def test_completions_leave_only_where_that_is_asked_for(run: RunDir) -> None:
    sample = {"prompt": SECRET_ROW, "reference": "4", "completion": "It is 4", "reward": 1.0}
    run.write_json("eval/after.json", {"step": 3, "problems": 1, "samples": [sample]})
    plain, whole = publication(run), publication(run, completions=True)
    assert not [name for name, text in plain.files.items() if SECRET_ROW in text]
    assert SECRET_ROW in whole.files["index.html"]
    assert "left out: completions" in " ".join(plain.told)
    assert "INCLUDED" in " ".join(whole.told)


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


@pytest.mark.parametrize("kind", ["space", "dataset"])
def test_a_repository_is_made_and_written_again(fake: FakeHub, run: RunDir, kind: Any) -> None:
    found = publication(run, kind=kind)
    assert to_hub(found, REPO, kind) == f"{fake.url}/{kind}s/{REPO}"
    assert fake.private, "unless it is asked for otherwise"
    assert set(fake.files) == {"index.html", "metrics.jsonl", "README.md", MARKER}
    assert ("sdk: static" in fake.files["README.md"].decode()) == (kind == "space")
    assert {path.split("/")[2] for _, path, _ in fake.seen if REPO in path} == {f"{kind}s"}
    to_hub(found, REPO, kind)
    assert len(fake.commits) == 2


def test_what_else_is_in_a_repository_stays(fake: FakeHub, run: RunDir) -> None:
    fake.private, fake.files = True, {"README.md": b"", "model.safetensors": b"weights"}
    with pytest.raises(RunError, match=r"something else than a shared run \(README\.md, model\.safetensors"):
        to_hub(publication(run), REPO, "dataset")
    assert fake.files.keys() == {"README.md", "model.safetensors"}
    fake.private = False
    with pytest.raises(RunError, match="add --public"):
        to_hub(publication(run), REPO, "dataset")
    assert fake.commits == []


def test_nothing_is_published_unasked_or_without_a_token(
    fake: FakeHub, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["share", "one", "--space", REPO, "--root", str(run.path.parent)]
    output = said(*words, code=2)
    assert "add --yes" in output
    assert "left out: completions" in output
    assert fake.seen == []
    assert "published:" in said(*words, "--yes")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    assert "HF_TOKEN" in said(*words, "--yes", code=2)
