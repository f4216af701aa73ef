"""docs/performance.md and README say what the benchmarks wrote, and goals that were reached once stay reached."""

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
    import head

    assert head.table(result("head")["rows"]) in PAGE


def test_growth() -> None:
    import growth

    assert growth.table(result("growth")["rows"]) in PAGE


def test_custom_hooks() -> None:
    found = result("custom_hooks")
    ratio, peaks = found["ratio"], found["peak_bytes"]
    assert f"{ratio['median']:.3f} of the time ({ratio['least']:.3f} to {ratio['most']:.3f})" in PAGE
    assert f"{peaks['custom'] / peaks['built-in']:.3f} of the memory" in PAGE


def test_overlap() -> None:
    found = result("overlap")
    for row in found["rows"]:
        assert f"| {row['chunks']} | {row['behind']:.2f} | {row['ahead']:.2f} |" in PAGE


def test_the_readme_has_the_lines_that_matter() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = result("train_phase")["rows"]
    last = list(rows)[-1]
    assert f"{rows[last]['speedup']['median']:.1f} times as fast" in readme
