"""benchmarks/selection.py: its arithmetic, and that the page shows what was measured."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("selection_benchmark", ROOT / "benchmarks" / "selection.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_target_is_met_between_two_scores(benchmark: Any) -> None:
    curve = [{"score": 0.0, "updated": 0.0}, {"score": 0.5, "updated": 100.0}, {"score": 1.0, "updated": 300.0}]
    assert benchmark.TARGET == 0.75
    assert benchmark.to_target(curve, "updated") == 200.0
    assert benchmark.to_target(curve[:2], "updated") is None


def test_the_interval_is_students_on_logarithms(benchmark: Any) -> None:
    ratios = [2.0, 3.0, 4.5, 2.5, 3.5]
    logs = [math.log(ratio) for ratio in ratios]
    half = 2.776 * statistics.stdev(logs) / math.sqrt(5)
    mean = statistics.mean(logs)
    assert benchmark.interval(ratios) == pytest.approx([math.exp(mean + sign * half) for sign in (0, -1, 1)])
    assert math.isnan(benchmark.interval([2.0])[1])


def test_the_page_shows_what_was_measured(benchmark: Any, tmp_path: Path) -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "selection.json").read_text())["runs"]
    page, shown = tmp_path / "page.md", (ROOT / "docs" / "selection.md").read_text()
    page.write_text(shown)
    benchmark.write(kept, tmp_path / "out.json", page)
    assert page.read_text() == shown, "run: python benchmarks/selection.py --seeds"
