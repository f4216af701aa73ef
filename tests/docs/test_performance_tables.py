"""docs/performance.md has the numbers that the benchmarks recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_the_train_phase() -> None:
    import train_phase

    assert train_phase.table(result("train_phase")) in PAGE


def test_the_head() -> None:
    rows = result("head")["rows"]

    def ratios(other: str) -> str:
        values = sorted(row["median"]["ours"] / row["median"][other] for row in rows)
        return f"{values[0]:.2f} to {values[-1]:.2f} of the time of"

    text = " ".join(PAGE.split())
    assert f"{ratios('plain')} plain" in text
    assert f"{ratios('trl')} TRL's chunked head" in text
    peaks = sorted(row["peak_mb"]["ours"] / row["peak_mb"]["plain"] for row in rows)
    assert f"peak memory is {peaks[0]:.0%} to {peaks[-1]:.0%}".replace("% to", " to").replace("%", " %") in text
