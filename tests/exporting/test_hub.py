"""Pushing to a hub that this file plays: repositories, preupload, large files, commits, and its refusals."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kit.errors import ConfigError, EnvironmentUnsupported, RunError
from kit.export import hub
from kit.export.request import check_push

TOKEN = "hf_" + "x" * 30
REPO = "someone/tuned"


class FakeHub:
    """What the hub's protocol needs of a server: one repository, kept in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.private: bool | None = None
        self.commits: list[str] = []
        self.kept: list[list[str]] = []
        """Files there after each commit."""
        self.seen: list[tuple[str, str, str | None]] = []
        self.refuse: dict[str, list[int]] = {}
        """Statuses to answer a kind of request with, one after the other, before it is served."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.serve(self, "GET")

            def do_HEAD(self) -> None:
                outer.serve(self, "HEAD")

            def do_POST(self) -> None:
                outer.serve(self, "POST")

            def do_PUT(self) -> None:
                outer.serve(self, "PUT")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def serve(self, request: Any, method: str) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = request.path.partition("?")[0]
        self.seen.append((method, path, request.headers.get("Authorization")))
        kind = next((word for word in ("create", "preupload", "batch", "commit", "blob") if word in path), "info")
        if self.refuse.get(kind):
            self.reply(request, self.refuse[kind].pop(0), {"error": f"refused {TOKEN}"})
            return
        if kind == "create" and self.private is not None:
            self.reply(request, 409, {"error": "You already created this model repo", "url": f"{self.url}/{REPO}"})
            return
        if kind == "info" and self.private is None:
            self.reply(request, 404, {"error": "Repository not found"})
            return
        self.reply(request, 200, getattr(self, kind)(path, body))

    def reply(self, request: Any, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        if status == 404:
            request.send_header("X-Error-Code", "RepoNotFound")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)

    def create(self, path: str, body: bytes) -> Any:
        asked = json.loads(body)
        self.private = bool(asked.get("private") or asked.get("visibility") == "private")
        return {"url": f"{self.url}/{REPO}", "name": REPO, "id": REPO}

    def preupload(self, path: str, body: bytes) -> Any:
        files = json.loads(body)["files"]
        return {
            "files": [
                {"path": each["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
                for each in files
            ]
        }  # fmt: skip

    def batch(self, path: str, body: bytes) -> Any:
        def action(oid: str) -> dict[str, Any]:
            if oid in self.blobs:
                return {}
            return {"actions": {"upload": {"href": f"{self.url}/blob/{oid}", "header": {}}}}

        objects = json.loads(body)["objects"]
        return {"transfer": "basic", "objects": [{**each, **action(each["oid"])} for each in objects]}

    def blob(self, path: str, body: bytes) -> Any:
        assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
        self.blobs[path.rpartition("/")[2]] = body
        return {}

    def commit(self, path: str, body: bytes) -> Any:
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.commits.append(entry["value"]["summary"])
            elif entry["key"] == "file":
                self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "lfsFile":
                self.files[entry["value"]["path"]] = self.blobs[entry["value"]["oid"]]
            elif entry["key"] == "deletedFile":
                del self.files[entry["value"]["path"]]
        self.kept.append(sorted(self.files))
        oid = f"{len(self.commits):040d}"
        return {"commitUrl": f"{self.url}/{REPO}/commit/{oid}", "commitOid": oid, "success": True}

    def info(self, path: str, body: bytes) -> Any:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        return {"id": REPO, "private": bool(self.private), "sha": "0" * 40, "siblings": siblings, "tags": []}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    import huggingface_hub._commit_api as commits

    found = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", found.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(commits, "is_xet_available", lambda: False)
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "export"
    place.mkdir()
    (place / "README.md").write_text("# card")
    (place / "adapter_model.safetensors").write_bytes(b"weights" * 100)
    (place / ".holder").write_text("")
    return place


def push(folder: Path, said: list[str] | None = None, **how: Any) -> dict[str, Any]:
    tell = said.append if said is not None else lambda text: None
    return hub.push(folder, REPO, check_push(REPO), private=how.get("private", False), message="step 3", say=tell)


def test_a_folder_arrives_whole_in_one_commit(fake: FakeHub, folder: Path) -> None:
    result = push(folder, private=True)
    assert fake.files == {"README.md": b"# card", "adapter_model.safetensors": b"weights" * 100}
    assert (fake.commits, fake.private, result["private"]) == (["step 3"], True, True)
    assert result["commit"] == f"{1:040d}"
    assert TOKEN not in json.dumps(result)
    own = [token for _, path, token in fake.seen if "blob" not in path]
    assert set(own) == {f"Bearer {TOKEN}"}


def test_a_private_push_stays_out_of_a_repository_that_is_public(fake: FakeHub, folder: Path) -> None:
    fake.private = False
    with pytest.raises(RunError, match="is public, and a private one was asked for; nothing was pushed"):
        push(folder, private=True)
    assert (fake.commits, fake.files, fake.blobs) == ([], {}, {})
    fake.private = True
    assert push(folder, private=False)["private"]


def test_weights_of_an_earlier_push_go_in_the_same_commit(fake: FakeHub, folder: Path) -> None:
    stale = ["adapter_config.json", "adapter_model.bin", "it-Q8_0.gguf", "model-00001-of-00002.safetensors",
             "model.safetensors.index.json"]  # fmt: skip
    fake.files = dict.fromkeys([*stale, "notes.txt", "config.json", "step-3/model.safetensors"], b"old")
    fake.private, said = False, list[str]()
    result = push(folder, said)
    assert fake.kept == [
        ["README.md", "adapter_model.safetensors", "config.json", "notes.txt", "step-3/model.safetensors"]
    ]
    assert result["removed"] == stale
    assert ", ".join(stale) in said[0]
    assert push(folder)["removed"] == []


def test_what_arrived_is_not_sent_again(fake: FakeHub, folder: Path) -> None:
    fake.refuse["commit"] = [403]
    with pytest.raises(RunError, match="may not write"):
        push(folder)
    push(folder)
    assert sum("blob" in path for _, path, _ in fake.seen) == 1


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("create", 401, "does not accept the token"),
        ("create", 403, "may not write to someone/tuned"),
        ("preupload", 404, "does not exist, or the token"),
        ("commit", 412, "has changed while"),
        ("commit", 409, "has changed while"),
        ("commit", 400, "refused the upload"),
    ],
)
def test_refusals_are_told_in_words_and_without_the_token(
    fake: FakeHub, folder: Path, kind: str, status: int, words: str
) -> None:
    fake.refuse[kind] = [status] * 20
    fake.refuse["info"] = [status] * 20 if kind == "create" else []
    with pytest.raises(RunError, match=words) as error:
        push(folder)
    assert TOKEN not in str(error.value)


def test_without_a_token_a_repository_or_a_network_nothing_begins(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert fake.seen == []
