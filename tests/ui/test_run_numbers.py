"""What the charts of a run are made of: read as the file grows, thinned without losing peaks, small enough for a poll."""

from __future__ import annotations

import base64
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from made_runs import line, make

from kit.errors import RunError
from kit.report.panels import MOST_POINTS, panels
from kit.ui.curves import MISSING, TOP, Growing, Library, pack, parted, quantised


def decoded(packed: list) -> np.ndarray:
    low, high, text = packed
    places = np.frombuffer(base64.b64decode(text), dtype="<u2").astype(float)
    return np.where(places == MISSING, np.nan, low + places * ((high - low) or 1.0) / TOP)


def test_packed_numbers_come_back_to_a_thousandth_of_a_percent() -> None:
    values = np.array([0.0, -3.5, np.nan, 1e4, np.inf, 17.25])
    found = decoded(quantised(values))
    assert np.isnan(found[[2, 4]]).all()
    np.testing.assert_allclose(found[[0, 1, 3, 5]], values[[0, 1, 3, 5]], atol=1e4 * 1e-5)
    assert np.isnan(decoded(quantised(np.array([np.nan, np.nan])))).all()
    np.testing.assert_array_equal(decoded(quantised(np.array([2.0, 2.0]))), [2.0, 2.0])


def test_parts_keep_the_lowest_and_the_highest_of_each_stretch() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=997)
    values[500] = np.nan
    edges = np.linspace(0, 997, 41).astype(int)
    least, most, mean = parted(values, edges)
    for part, (start, end) in enumerate(itertools.pairwise(edges)):
        stretch = values[start:end][np.isfinite(values[start:end])]
        assert (least[part], most[part]) == (stretch.min(), stretch.max())
        assert mean[part] == pytest.approx(stretch.mean())
    empty = parted(np.array([1.0, np.nan, np.nan, 4.0]), np.array([0, 1, 3, 4]))
    assert np.isnan([column[1] for column in empty]).all()


def test_lines_that_come_are_added_and_those_taken_back_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    growing = Growing(path)
    assert growing.columns() == {}
    path.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    assert growing.columns()["reward"].tolist() == [0.5]
    with path.open("a") as file:
        file.write('ard": null, "kl": 0.1}\n{"step": 3, "reward": 0.7}\n')
    library = Library()
    run = make(tmp_path / "runs")
    run.metrics_file.write_bytes(path.read_bytes())
    columns = library.columns(run)
    assert columns["reward"][[0, 2]].tolist() == [0.5, 0.7]
    assert np.isnan(columns["reward"][1])
    assert np.isnan(columns["kl"][[0, 2]]).all()
    assert len(growing.columns()["step"]) == 3
    # A resume takes lines back, and writes as many others: same inode or not, same size.
    text = path.read_text().replace("0.7", "0.9")
    path.write_text(text)
    os.utime(path, (1, 1))
    assert growing.columns()["reward"].tolist()[-1] == 0.9
    path.write_text('{"step": 1, "reward": 0.1}\n')
    assert growing.columns()["reward"].tolist() == [0.1]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(RunError, match="line 2"):
        Growing(path).columns()


@pytest.mark.parametrize("steps", [400, 5_000, 10_000])
def test_a_poll_is_small_and_quick_however_long_the_run(tmp_path: Path, steps: int) -> None:
    run = make(tmp_path, steps=steps)
    library = Library()

    def look() -> str:
        packed = pack(panels(library.columns(run), library.evaluations(run)))
        return json.dumps(packed, separators=(",", ":"))

    look()
    run.append_metrics(line(steps + 1, steps))
    begun = time.process_time()
    text = look()
    spent = time.process_time() - begun
    assert len(text) <= 40 * 1024
    assert spent < 0.2  # a few milliseconds on a quiet machine
    data = json.loads(text)
    assert data["grids"][0][-1] == steps + 1, "the whole range"
    for panel in data["panels"]:
        for one in panel["series"]:
            points = len(one.get("points", ())) or sum(len(decoded(one[key])) for key in ("a", "b") if key in one)
            assert points <= MOST_POINTS
    reward = next(panel for panel in data["panels"] if panel["title"].startswith("Reward"))["series"][0]
    known = library.columns(run)["reward"]
    peak = decoded(reward.get("b", reward["v"]))
    assert np.nanmax(peak) == pytest.approx(known.max(), abs=1e-4)
    titles = [panel["title"] for panel in data["panels"]]
    assert "Held-out problems solved" in titles
    assert "Groups without a lesson" in titles


def test_a_damaged_evaluation_is_left_out(tmp_path: Path) -> None:
    run, library = make(tmp_path), Library()
    (run.eval / "step-00010.json").write_text("{")
    (run.eval / "step-00011.json").write_text("[]")
    assert sorted(library.evaluations(run)) == ["after", "before"]
    run.write_json("eval/after.json", {"step": 20, "greedy_accuracy": {"value": 0.25}})
    assert library.evaluations(run)["after"]["greedy_accuracy"]["value"] == 0.25
