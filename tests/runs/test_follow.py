"""kit.runs.files.Log and `grpo-kit logs -f`: what `tail -n` and `tail -F` show, until the run has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.cli.runs import added_text
from kit.runs.files import Log
from kit.runs.store import RunDir, RunStore


@pytest.fixture
def run(store: RunStore) -> RunDir:
    return store.create("one")


def test_what_is_added_comes_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    assert log.tail(5) == ""
    assert log.added() == ""
    path.write_text("a\nb")
    assert log.added() == "a\nb"
    assert log.added() == ""
    with open(path, "ab") as file:
        file.write("ä".encode()[:1])
        file.flush()
        assert log.added() == ""  # half a letter
        file.write("ä".encode()[1:])
    assert log.added() == "ä"


def test_a_log_that_is_cut_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first\n" * 10)
    log = Log(path)
    log.tail(0)
    path.write_text("third\n")
    assert log.added() == "third\n"


def test_following_ends_with_the_run_and_misses_nothing(run: RunDir) -> None:
    run.log.write_text("1\n2\n3\n")
    run.write_status("running")
    asleep = []

    def sleep(seconds: float) -> None:
        asleep.append(seconds)
        with open(run.log, "a") as log:
            log.write(f"more {len(asleep)}\n")
        if len(asleep) == 3:
            run.write_status("finished")

    assert "".join(added_text(run, 2, sleep)) == "2\n3\nmore 1\nmore 2\nmore 3\n"
    assert len(asleep) == 3


def test_the_words_between_the_last_look_and_the_end_are_told(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_status("running")
    status = RunDir.status

    def ends_after_the_look(self: RunDir) -> dict[str, object]:
        found = status(self)
        with open(run.log, "a") as log:
            log.write("last words\n")
        run.write_status("finished")
        return found

    monkeypatch.setattr(RunDir, "status", ends_after_the_look)
    assert "last words\n" in "".join(added_text(run, 0, lambda seconds: None))
