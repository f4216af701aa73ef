"""kit.runs.files.Log and `grpo-kit logs -f`: the output of `tail -n` and `tail -F`, until the run has ended."""

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
