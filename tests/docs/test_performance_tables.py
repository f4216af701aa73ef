"""docs/performance.md says what the benchmarks wrote, and goals that were reached once stay reached."""

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


def test_threads_that_sleep() -> None:
    import waiting_threads

    from kit.threads import SLEEPY

    found = result("waiting_threads")
    assert waiting_threads.table(found["rows"]) in PAGE
    assert found["sleep"] == SLEEPY
    alone = [row["ratio"]["median"] for row in found["rows"] if not row["busy"]]
    assert len(alone) == 2
    assert min(alone) >= 0.95  # no more than 5 % slower


def test_the_head() -> None:
    import head

    rows = result("head")["rows"]
    assert head.table(rows) in PAGE
    peak = max(rows, key=lambda row: row["peak_mb"]["plain"])["peak_mb"]
    assert f"{peak['plain']:,.0f} MB with plain logits, {peak['ours']:.0f} MB with ours" in PAGE


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
