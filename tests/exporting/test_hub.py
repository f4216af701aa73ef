"""Pushing to a hub that this file plays: what arrives in which commit, and the hub's refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError

from kit.errors import ConfigError, EnvironmentUnsupported, RunError
from kit.export import hub
from kit.export.request import check_push

TOKEN = "hf_" + "x" * 30
REPO = "someone/tuned"


class FakeHub:
    """One repository, with the methods of `HfApi` that a push calls."""

    endpoint = "https://hub.test"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.private: bool | None = None
        self.commits: list[list[str]] = []
        """Files there after each commit."""
        self.refuse: dict[str, int] = {}
        """The status that a method answers with."""

    def _answer(self, method: str) -> None:
        if status := self.refuse.get(method):
            request = httpx.Request("POST", self.endpoint)
            raise HfHubHTTPError(f"refused {TOKEN}", response=httpx.Response(status, request=request))

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        self._answer("create")
        assert exist_ok
        self.private = private if self.private is None else self.private

    def repo_info(self, repo: str) -> Any:
        self._answer("info")
        return SimpleNamespace(private=self.private, siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def create_commit(self, repo: str, *, operations: list[Any], commit_message: str) -> Any:
        self._answer("commit")
        for each in operations:
            if isinstance(each, CommitOperationAdd):
                self.files[each.path_in_repo] = Path(str(each.path_or_fileobj)).read_bytes()
            else:
                del self.files[each.path_in_repo]
        self.commits.append(sorted(self.files))
        return SimpleNamespace(oid=f"{len(self.commits):040d}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub()

    def api(*, endpoint: str | None, token: str) -> FakeHub:
        assert token == TOKEN
        return made

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi", api)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "export"
    place.mkdir()
    (place / "README.md").write_text("# card")
    (place / "adapter_model.safetensors").write_bytes(b"weights" * 100)
    (place / ".holder").write_text("")
    return place


def push(folder: Path, *, private: bool = False, said: list[str] | None = None) -> dict[str, Any]:
    lines = [] if said is None else said
    return hub.push(folder, REPO, check_push(REPO), private=private, message="step 3", say=lines.append)


def test_a_folder_arrives_whole_in_one_commit(fake: FakeHub, folder: Path) -> None:
    result = push(folder, private=True)
    assert fake.files == {"README.md": b"# card", "adapter_model.safetensors": b"weights" * 100}
    assert (len(fake.commits), fake.private, result["private"]) == (1, True, True)
    assert (result["commit"], result["url"]) == (f"{1:040d}", f"https://hub.test/{REPO}")
    assert TOKEN not in json.dumps(result)


def test_a_private_push_stays_out_of_a_repository_that_is_public(fake: FakeHub, folder: Path) -> None:
    fake.private = False
    with pytest.raises(RunError, match="is public, and a private one was asked for; nothing was pushed"):
        push(folder, private=True)
    assert (fake.commits, fake.files) == ([], {})
    fake.private = True
    assert push(folder)["private"]


def test_weights_of_an_earlier_push_go_in_the_same_commit(fake: FakeHub, folder: Path) -> None:
    stale = ["adapter_config.json", "adapter_model.bin", "it-Q8_0.gguf", "model-00001-of-00002.safetensors",
             "model.safetensors.index.json"]  # fmt: skip
    others = ["config.json", "notes.txt", "step-3/model.safetensors"]
    fake.files, said = dict.fromkeys([*stale, *others], b"old"), list[str]()
    result = push(folder, said=said)
    assert fake.commits == [["README.md", "adapter_model.safetensors", *others]]
    assert result["removed"] == stale
    assert ", ".join(stale) in said[0]
    assert push(folder)["removed"] == []


@pytest.mark.parametrize(
    ("method", "status", "words"),
    [
        ("create", 401, "does not accept the token"),
        ("create", 403, "may not write to someone/tuned"),
        ("info", 404, "does not exist, or the token"),
        ("commit", 412, "has changed while"),
        ("commit", 400, "refused the upload"),
        ("commit", 503, "could not be reached"),
    ],
)
def test_refusals_are_told_in_words_and_without_the_token(
    fake: FakeHub, folder: Path, method: str, status: int, words: str
) -> None:
    fake.refuse[method] = status
    with pytest.raises(RunError, match=words) as error:
        push(folder)
    assert TOKEN not in str(error.value)


def test_without_a_token_or_a_network_nothing_begins(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (None, "tuned", "a/b/c", "../x", "someone/"):
        with pytest.raises(ConfigError, match="OWNER/NAME"):
            check_push(wrong)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        check_push(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentUnsupported, match="HF_HUB_OFFLINE"):
        check_push(REPO)
