"""Uploaded files: allowed targets and types."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_security_http import page

from kit.errors import ConfigError
from kit.planning.workbench import answer
from kit.runs.store import RUN_ID
from kit.ui import uploads
from kit.ui.settings import Settings

__all__ = ["page"]


def arrive(root: Path, name: str = "rows.csv", content: bytes = b"question,answer\n1+1?,2\n") -> dict[str, str]:
    """Write an uploaded file to the place where Gradio puts it."""
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
    ("name", "safe_name"),
    [
        ("../../../etc/cron.d/x.csv", "x.csv"),
        ("..\\..\\a.CSV", "a.csv"),
        (".hidden.jsonl", "hidden.jsonl"),
        ("größe (1);rm -rf.csv", "gr-e-1-rm--rf.csv"),
        ("...csv", "data.csv"),
        ("a.csv/", "a.csv"),
        ("x" * 300 + ".csv", "x" * 60 + ".csv"),
    ],
)
def test_names_are_plain(name: str, safe_name: str) -> None:
    assert uploads.safe(name) == safe_name


@pytest.mark.parametrize("name", ["a.exe", "a", "a.csv.py", "a.xls", "a.xlsm"])
def test_other_kinds_are_refused_and_leave_nothing(tmp_path: Path, name: str) -> None:
    sent = arrive(tmp_path) | {"name": name}
    with pytest.raises(ConfigError, match="cannot be read"):
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


def test_what_was_never_taken_is_thrown_away(tmp_path: Path) -> None:
    sent = arrive(tmp_path)
    uploads.clear(tmp_path)
    assert Path(sent["place"]).is_file()
    folder = Path(sent["place"]).parent
    os.utime(folder, (1, 1))
    uploads.clear(tmp_path)
    assert not folder.exists()


def test_no_run_can_be_called_as_the_folder(tmp_path: Path) -> None:
    assert not RUN_ID.fullmatch(uploads.folder(tmp_path).name)


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
    assert (answer.status, "Remove some" in answer.text) == (507, True)


def test_a_forged_file_value_is_copied_nowhere(page: Any) -> None:
    """A text box receives the value of a file component, which Gradio would copy to its cache."""
    event = next(event for event in page.events() if event["inputs"] and not event.get("queue"))
    file = {"path": str(page.folder / "secret.txt"), "meta": {"_type": "gradio.FileData"}}
    before = files(page.root)
    answer = page.predict(event["id"], [file] * len(event["inputs"]))
    assert answer.status >= 400 or "error" in answer.text
    assert "secret.txt" not in " ".join(set(files(page.root)) - set(before))


# The description of an upload


def test_columns_are_shown_of_a_file_and_asked_of_nothing_else(tmp_path: Path) -> None:
    import gradio as gr

    from kit.ui import steps
    from kit.ui.site import Site

    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    sources: list[str] = []

    def ask(question: str, config: Any) -> Any:
        sources.append(config.data.source)
        return answer({"question": question, "config": config.model_dump(mode="json")})["answer"]

    site.benches.ask = ask  # type: ignore[method-assign]
    html, *choices = steps.mapped(site, {"preset": "quickstart"})
    assert (html, sources) == ("", [])
    assert all(isinstance(choice, gr.Dropdown) for choice in choices)
    source = uploads.take(site.settings.root, arrive(site.settings.root, content=b"<b>,answer\nq,1\n"))
    draft = {"preset": "quickstart", "changes": {"data.source": source, "data.prompt_column": "<b>"}}
    html, prompt, reference = steps.mapped(site, draft)
    assert "&lt;b&gt;" in html
    assert "<b>," not in html
    assert [value for _, value in prompt.choices] == ["", "<b>", "answer"]
    assert reference.choices[0] == ("by its name: answer", "")
