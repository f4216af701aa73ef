"""An export folder is complete or absent, at whatever moment its process dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.errors import RunError
from kit.export import target as export_target
from kit.export.request import LIMITS, limits_of

WRITER = """
import sys, time
from pathlib import Path
from kit.export.target import staged, publish
target = Path(sys.argv[1])
with staged(target) as place:
    (place / "model.safetensors").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
    publish(place, target)
"""


def writer(target: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_killed_export_leaves_nothing_that_looks_whole_and_the_next_one_clears_up(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    process = writer(target)
    with pytest.raises(RunError, match="Another process is writing"):
        export_target.staged(target).__enter__()
    process.kill()
    process.communicate()
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".merged.grpo-kit-partial"]
    with export_target.staged(target) as place:
        (place / "model.safetensors").write_text("whole")
        export_target.publish(place, target)
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    assert {path.name for path in target.iterdir()} == {"model.safetensors", export_target.MARKER}


def test_an_interrupted_export_clears_up_behind_itself(tmp_path: Path) -> None:
    process = writer(tmp_path / "merged")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_an_old_export_is_replaced_as_a_whole_and_comes_back_where_the_process_died_in_between(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    published(target, "old")
    published(target, "new")
    assert {path.name for path in target.iterdir()} == {"new", export_target.MARKER}
    target.rename(tmp_path / ".merged.grpo-kit-old")  # as after the first of the two renames
    with export_target.staged(target):
        assert {path.name for path in target.iterdir()} == {"new", export_target.MARKER}


def published(target: Path, *names: str) -> None:
    with export_target.staged(target) as place:
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(name)
        export_target.publish(place, target)


def test_a_place_that_is_taken_is_refused_unless_it_is_an_exports_and_forced(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    export_target.check_free(target, force=False)
    published(target, "model.safetensors", "sub/folder/tokenizer.json")
    with pytest.raises(RunError, match="--force"):
        export_target.check_free(target, force=False)
    export_target.check_free(target, force=True)
    (target / "notes.txt").write_text("a week's work")
    with pytest.raises(RunError, match=r"1 files that the export did not write, for example notes\.txt"):
        export_target.check_free(target, force=True)


@pytest.mark.parametrize("marker", [None, "", "[]", '{"files": 3}'])
def test_a_folder_that_is_no_export_is_never_replaced(tmp_path: Path, marker: str | None) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter.tex").write_text("text")
    if marker is not None:
        (target / export_target.MARKER).write_text(marker)
    with pytest.raises(RunError, match="is no export of grpo-kit"):
        export_target.check_free(target, force=True)
    with pytest.raises(RunError, match="is no export of grpo-kit"):  # made while the export was written
        published(target, "new")
    assert (target / "chapter.tex").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis"]


def test_limits_are_those_of_the_roughest_number_that_plays_a_part() -> None:
    assert limits_of("float16", "float32", base_in_4bit=False) == LIMITS["float16"]
    assert limits_of("float16", "bfloat16", base_in_4bit=False) == LIMITS["bfloat16"]
    assert limits_of("q8_0", "float32", base_in_4bit=True) == LIMITS["nf4"]
