"""kit.runs.metrics: the numbers of a long run at once, and never those of another file."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import wait_for

from kit.errors import RunError
from kit.runs import metrics, supervisor
from kit.runs.metrics import MetricsCache
from kit.runs.store import RunDir, RunStore


@pytest.fixture
def run(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(metrics, "LINES", 10)
    return store.create("one")


def write(run: RunDir, records: list[dict[str, Any]]) -> None:
    run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))


def lines(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [{"step": step, "reward": draw.random()} for step in range(1, count + 1)]


def same(run: RunDir) -> bool:
    """Whether the columns say what the lines say."""
    records, found = run.metrics(), run.columns()
    keys = {key for record in records for key, value in record.items() if isinstance(value, (int, float))}
    assert set(found) == keys
    for key, column in found.items():
        assert len(column) == len(records)
        for value, record in zip(column, records, strict=True):
            number = record.get(key)
            if not isinstance(number, (int, float)):
                assert math.isnan(value)
            elif value != number:
                return False
    return True


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 35, 100])
def test_columns_are_the_lines_by_key_kept_or_not(run: RunDir, count: int) -> None:
    write(run, lines(count))
    assert same(run)
    assert len(list((run.path / ".metrics").glob("*"))) == count // 10
    assert same(run)


def test_null_texts_and_keys_that_come_and_go_are_nan(run: RunDir) -> None:
    records: list[dict[str, Any]] = lines(34)
    for step, record in enumerate(records):
        record |= {"kl": None if step % 3 else 0.5, "note": "x", "never": None}
        if 12 < step < 15 or step > 30:
            record["late"] = step
        if step > 20:
            del record["reward"]
    write(run, records)
    assert same(run)
    assert same(run)
    assert set(run.columns()) == {"step", "reward", "kl", "late"}


def test_kept_numbers_are_read_and_not_parsed_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, lines(30))
    first = run.columns()
    monkeypatch.setattr(metrics, "parse_lines", lambda lines, *_: [] if not lines else pytest.fail("parsed again"))
    assert run.columns() == first


def test_a_file_that_was_cut_and_went_on_otherwise_is_read_anew(run: RunDir) -> None:
    write(run, lines(40))
    run.columns()
    write(run, lines(25))
    assert same(run)
    write(run, lines(25) + lines(40, seed=1)[25:])
    assert same(run)
    write(run, lines(40, seed=2))
    assert same(run)


@pytest.mark.parametrize("damage", [b"", b"rubbish", b"[1, 2, 3]\n", b'[1, 2, 10, ["step"]]\nxx'])
def test_a_damaged_block_is_made_anew(run: RunDir, damage: bytes) -> None:
    write(run, lines(30))
    run.columns()
    (run.path / ".metrics" / "000001").write_bytes(damage)
    assert same(run)


def test_half_a_line_is_left_out_and_a_broken_one_named(run: RunDir) -> None:
    write(run, lines(12))
    with open(run.metrics_file, "a") as file:
        file.write('{"step": 13, "rew')
    assert same(run)
    with open(run.metrics_file, "a") as file:
        file.write("\n")
    with pytest.raises(RunError, match=r"line 13"):
        run.columns()


def test_without_a_file_there_is_nothing(run: RunDir) -> None:
    assert run.columns() == {}


def test_a_folder_that_cannot_be_written_is_read_all_the_same(run: RunDir) -> None:
    write(run, lines(30))
    (run.path / ".metrics").touch()
    assert same(run)


def test_whoever_watches_a_run_keeps_up_with_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = MetricsCache(run.metrics_file)
    cache.keep_up()
    kept: Callable[[], int] = lambda: len(list((run.path / ".metrics").glob("*")))  # noqa: E731
    for count, blocks in ((9, 0), (25, 2), (39, 3)):
        write(run, lines(count))
        cache.keep_up()
        assert kept() == blocks
    write(run, lines(20, seed=1))  # cut by a resumed run
    cache.keep_up()
    monkeypatch.setattr(metrics, "parse_lines", lambda lines, *_: [] if not lines else pytest.fail("parsed again"))
    assert list(run.columns()["reward"]) == [line["reward"] for line in lines(20, seed=1)]


def test_a_supervised_run_is_kept_up_with(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "HEARTBEAT_SECONDS", 0.02)
    run.write_status("running")
    write(run, lines(25))
    watch = supervisor.Heartbeat(run, adopted=False)
    with watch:
        watch.started(os.getpid())
        wait_for(lambda: len(list((run.path / ".metrics").glob("0*"))) == 2)


def test_a_hundred_thousand_lines_are_loaded_at_once(tmp_path: Path) -> None:
    names = [f"rewards/part-{number}/mean" for number in range(20)]
    draw = random.Random(0)
    tenth = "".join(json.dumps({"step": n, **{name: draw.random() for name in names}}) + "\n" for n in range(10_000))
    run = RunDir(tmp_path)
    run.metrics_file.write_text(tenth)
    run.columns()
    with open(run.metrics_file, "w") as file:
        file.writelines(tenth for _ in range(10))
    for block in sorted((tmp_path / ".metrics").iterdir()):  # those of the other lines, which are the same
        for more in range(5, 50, 5):
            shutil.copy(block, block.with_name(f"{int(block.name) + more:06}"))
    spent = []
    for _ in range(3):
        began = time.process_time()
        found = run.columns()
        spent.append(time.process_time() - began)
    assert len(list((tmp_path / ".metrics").iterdir())) == 50
    assert len(found["step"]) == 100_000
    assert min(spent) < 1.0, spent
