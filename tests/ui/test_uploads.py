"""Files that a browser brings: where they may come to lie, and what is taken."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_security_http import page

from kit.errors import ConfigError
from kit.planning.workbench import answer
from kit.runs.store import RUN_ID
from kit.ui import uploads
from kit.ui.security import UPLOAD, Gate
from kit.ui.settings import Settings

__all__ = ["page"]


def arrive(root: Path, name: str = "rows.csv", content: bytes = b"question,answer\n1+1?,2\n") -> dict[str, str]:
    """As Gradio leaves a file."""
    place = uploads.arriving(root) / "00000000"
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes(content)
    return {"place": str(place / name), "name": name}


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_file_comes_to_lie_in_uploads_once(tmp_path: Path) -> None:
    assert uploads.take(tmp_path, arrive(tmp_path)) == str(tmp_path / ".uploads" / "rows.csv")
    assert uploads.take(tmp_path, arrive(tmp_path)) == str(tmp_path / ".uploads" / "rows.csv")
    assert uploads.take(tmp_path, arrive(tmp_path, content=b"other")) == str(tmp_path / ".uploads" / "rows-2.csv")
    assert files(tmp_path) == [".uploads/rows-2.csv", ".uploads/rows.csv"]
    assert set(uploads.kept(tmp_path)) == {str(tmp_path / ".uploads" / name) for name in ("rows.csv", "rows-2.csv")}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../../etc/cron.d/x.csv", "x.csv"),
        ("..\\..\\a.CSV", "a.csv"),
        (".hidden.jsonl", "hidden.jsonl"),
        ("größe (1);rm -rf.xlsx", "gr-e-1-rm--rf.xlsx"),
        ("...csv", "data.csv"),
        ("x" * 300 + ".csv", "x" * 60 + ".csv"),
    ],
)
def test_names_are_plain(name: str, kept: str) -> None:
    assert uploads.safe(name) == kept


@pytest.mark.parametrize("name", ["a.exe", "a", "a.csv.py", "a.xls", "a.xlsm", "a.csv/"])
def test_other_kinds_are_refused_and_leave_nothing(tmp_path: Path, name: str) -> None:
    sent = arrive(tmp_path) | {"name": name}
    if name == "a.csv/":
        assert uploads.safe(name) == "a.csv"
        return
    with pytest.raises(ConfigError, match="are not read"):
        uploads.take(tmp_path, sent)
    assert files(tmp_path) == []


def test_only_what_has_arrived_is_taken(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    secret = tmp_path / "secret.csv"
    secret.write_text("secret")
    arrive(root)
    link = uploads.arriving(root) / "link.csv"
    link.symlink_to(secret)
    outside: list[Any] = [
        {"place": str(secret), "name": "a.csv"},
        {"place": str(uploads.arriving(root) / ".." / ".." / ".." / "secret.csv"), "name": "a.csv"},
        {"place": str(link), "name": "a.csv"},
        {"place": "/etc/passwd", "name": "a.csv"},
        {"place": "\0", "name": "a.csv"},
        {"place": 3, "name": "a.csv"},
        {"path": str(secret), "meta": {"_type": "gradio.FileData"}},
        None,
        "x",
    ]
    for sent in outside:
        with pytest.raises(ConfigError, match="arrived"):
            uploads.take(root, sent)
    assert secret.read_text() == "secret"
    assert uploads.kept(root) == []


def test_a_file_of_two_gigabytes_is_refused(tmp_path: Path) -> None:
    sent = arrive(tmp_path)
    with open(sent["place"], "r+b") as file:
        file.truncate(2 * 1024**3)  # sparse
    with pytest.raises(ConfigError, match=r"rows.csv has 2,048 MiB; at most 100"):
        uploads.take(tmp_path, sent)
    assert files(tmp_path) == []


def test_what_was_never_taken_is_thrown_away(tmp_path: Path) -> None:
    sent = arrive(tmp_path)
    uploads.clear(tmp_path)
    assert Path(sent["place"]).is_file()
    folder = Path(sent["place"]).parent
    os.utime(folder, (1, 1))
    uploads.clear(tmp_path)
    assert not folder.exists()


def test_cancelled_uploads_lock_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gradio leaves one whose browser has gone: a file beside the folders of those that have arrived."""
    monkeypatch.setattr(uploads, "MOST_BYTES", uploads.LARGEST + 100)
    part = uploads.arriving(tmp_path) / "tmpcancelled"
    sent = arrive(tmp_path)  # not taken yet, and no leftover
    part.write_bytes(b"x" * 10_000)
    assert not uploads.has_room(tmp_path), "it may still be under way"
    assert part.exists()
    before = time.time() - 2 * uploads.STALLED_SECONDS - 1
    os.utime(part, (before, before))
    os.utime(Path(sent["place"]).parent, (before, before))
    monkeypatch.setattr(uploads, "MOST_BYTES", uploads.LARGEST + 2**20)
    assert uploads.has_room(tmp_path)
    assert not part.exists()
    assert Path(sent["place"]).is_file()


def test_there_are_not_any_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads.take(tmp_path, arrive(tmp_path))
    assert uploads.has_room(tmp_path)
    monkeypatch.setattr(uploads, "MOST_FILES", 2)
    assert not uploads.has_room(tmp_path)


@pytest.mark.parametrize("contents", [(b"one", b"two"), (b"one", b"one")])
def test_two_of_one_name_at_once_are_as_two_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: tuple[bytes, bytes]
) -> None:
    """Each waits, before it moves its file, until the other has found a free name too, or can be seen not to."""
    meeting = threading.Barrier(2)

    def late(fresh: Any, target: Any, replace: Any = os.replace) -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)
        replace(fresh, target)

    monkeypatch.setattr(os, "replace", late)
    sent = []
    for number, content in enumerate(contents):
        place = uploads.arriving(tmp_path) / str(number)
        place.mkdir(parents=True)
        (place / "rows.csv").write_bytes(content)
        sent.append({"place": str(place / "rows.csv"), "name": "rows.csv"})
    threads = [threading.Thread(target=uploads.take, args=(tmp_path, one)) for one in sent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Path(name).read_bytes() for name in uploads.kept(tmp_path)) == sorted(set(contents))


def test_a_name_that_another_page_took_meanwhile_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has no part in this one's lock: its file comes between the look and the move."""
    other = uploads.folder(tmp_path) / "rows.csv"
    sent = arrive(tmp_path)

    def touch(path: Path, exist_ok: bool = True, touch: Any = Path.touch) -> None:
        if path == other and not path.exists():
            path.write_bytes(b"of the other page")
        touch(path, exist_ok=exist_ok)

    monkeypatch.setattr(Path, "touch", touch)
    assert uploads.take(tmp_path, sent) == str(other.with_name("rows-2.csv"))
    assert other.read_bytes() == b"of the other page"


def test_no_run_can_be_called_as_the_folder(tmp_path: Path) -> None:
    assert not RUN_ID.fullmatch(uploads.folder(tmp_path).name)


# Through the gate


def uploading(root: Path, number: int, stalled: bool = False) -> list[int]:
    """The statuses of so many uploads whose bodies have all begun when the last is asked for."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        status = 400 if message["type"] == "http.disconnect" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def ask(gate: Gate, go: asyncio.Event) -> int:
        statuses: list[int] = []
        parts = iter(
            [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.request", "body": b"x"}]
        )

        async def receive() -> Any:
            part = next(parts)
            if not part.get("more_body"):
                await go.wait()
            return part

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": UPLOAD, "headers": [(b"host", b"localhost")]}
        await gate(scope, receive, send)
        return statuses[0]

    async def everything() -> list[int]:
        gate, go = Gate(app, Settings(root=root)), asyncio.Event()
        asked = [asyncio.create_task(ask(gate, go)) for _ in range(number)]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.02, lambda: stalled or go.set())
        first = await asyncio.gather(*asked)
        go.set()
        return [*first, await ask(gate, go)]  # one more, once all have ended

    return asyncio.run(asyncio.wait_for(everything(), 20))


def test_those_under_way_count_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_BYTES", 2 * uploads.LARGEST + 100)
    assert uploading(tmp_path, 3) == [200, 200, 507, 200]


def test_only_a_few_come_at_once(tmp_path: Path) -> None:
    number = uploads.AT_ONCE
    assert uploading(tmp_path, number + 1) == [*[200] * number, 429, 200]


def test_one_of_which_nothing_comes_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser that fell asleep: it would hold its place for ever."""
    monkeypatch.setattr(uploads, "STALLED_SECONDS", 0.05)
    number = uploads.AT_ONCE
    assert uploading(tmp_path, number, stalled=True) == [*[400] * number, 200]


# Through the server


def multipart(content: bytes, name: str = "rows.csv") -> tuple[bytes, str]:
    head = f'--edge\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    return head + content + b"\r\n--edge--\r\n", "multipart/form-data; boundary=edge"


def test_a_file_arrives_in_the_folder_of_runs_and_nowhere_else(page: Any) -> None:
    body, kind = multipart(b"question,answer\n1+1?,2\n", "../../up.csv")
    answer = page.ask("POST", "/gradio_api/upload", body, Content_Type=kind)
    assert answer.status == 200, answer.text
    place = Path(answer.json()[0])
    assert place.is_relative_to(uploads.arriving(page.root).absolute())
    assert page.ask("GET", f"/gradio_api/file={place}").status == 404
    assert uploads.take(page.root, {"place": str(place), "name": "up.csv"}) == str(page.root / ".uploads" / "up.csv")


def test_one_that_says_or_is_too_large_is_refused(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(page.root)
    answer = page.ask(
        "POST", "/gradio_api/upload", b"x" * 1000, Content_Length=str(2 * 1024**3), Content_Type="multipart/form-data"
    )
    assert answer.status == 413
    assert "More than 100 MiB" in answer.text
    monkeypatch.setattr(uploads, "LARGEST", 5 * 1024**2)
    body, kind = multipart(b"x" * (6 * 1024**2))
    assert page.ask("POST", "/gradio_api/upload", body, Content_Type=kind).status == 413
    assert files(page.root) == before


def test_a_full_folder_takes_no_more(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_BYTES", uploads.LARGEST - 1)
    body, kind = multipart(b"x")
    answer = page.ask("POST", "/gradio_api/upload", body, Content_Type=kind)
    assert answer.status == 507
    assert "Remove some" in answer.text


def test_a_forged_file_value_is_copied_nowhere(page: Any) -> None:
    """A text box that is sent a file: Gradio would copy it to its cache."""
    event = next(one for one in page.events() if one["inputs"] and not one.get("queue"))
    file = {"path": str(page.folder / "secret.txt"), "meta": {"_type": "gradio.FileData"}}
    before = files(page.root)
    answer = page.predict(event["id"], [file] * len(event["inputs"]))
    assert answer.status >= 400 or "error" in answer.text
    assert "secret.txt" not in " ".join(set(files(page.root)) - set(before))


# What is said of one


def test_columns_say_what_they_are_taken_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [{"task": "1+1?", "right": 2, "tags": ["a", "b"]}, {"task": "2+2?", "right": 4.5, "tags": None}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")

    def told(**data: Any) -> dict[str, Any]:
        config = {"data": {"source": str(path), "heldout": 0} | data}
        return dict(answer({"question": "columns", "config": config})["answer"])

    found = told()
    assert "No column can be told to be the prompt" in found["problem"]
    assert [column["use"] for column in found["columns"]] == ["left out"] * 3
    assert (found["total"], found["faulty"]) == (3, 1)
    assert found["columns"][1]["kinds"] == ["whole number", "number"]
    found = told(prompt_column="task", reference_column="right", rename={"tags": "topics"})
    assert [column["use"] for column in found["columns"]] == ["prompt", "reference", "given to the reward as topics"]
    config = {"data": {"source": str(path), "heldout": 0, "prompt_column": "tags", "skip_bad_rows": True}}
    said = answer({"question": "rows", "config": config})["error"]
    assert "row 1: message 1 of 'tags' is of type str; expected an object with role and content" in said


def test_columns_are_shown_of_a_file_and_asked_of_nothing_else(tmp_path: Path) -> None:
    import gradio as gr

    from kit.ui import steps
    from kit.ui.settings import Settings
    from kit.ui.site import Site

    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    asked: list[str] = []

    def ask(question: str, config: Any) -> Any:
        asked.append(config.data.source)
        return answer({"question": question, "config": config.model_dump(mode="json")})["answer"]

    site.benches.ask = ask  # type: ignore[method-assign]
    html, *choices = steps.mapped(site, {"preset": "quickstart"})
    assert (html, asked) == ("", [])
    assert all(isinstance(one, gr.Dropdown) for one in choices)
    source = uploads.take(site.settings.root, arrive(site.settings.root, content=b"<b>,answer\nq,1\n"))
    draft = {"preset": "quickstart", "changes": {"data.source": source, "data.prompt_column": "<b>"}}
    html, prompt, reference = steps.mapped(site, draft)
    assert "&lt;b&gt;" in html
    assert "<b>," not in html
    assert [value for _, value in prompt.choices] == ["", "<b>", "answer"]
    assert reference.choices[0] == ("by its name: answer", "")
