"""Tables of docs/performance.md equal the recorded results of the benchmarks."""

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


def test_the_real_model() -> None:
    import real_model

    assert real_model.table(result("real_model")["rows"]) in PAGE
