"""docs/performance.md and teachers.md say what the benchmarks wrote, and goals that were reached once stay reached."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
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


def test_teachers() -> None:
    import teachers

    found, page = result("teachers"), (ROOT / "docs/teachers.md").read_text(encoding="utf-8")
    assert len(found["seeds"]) == 5
    for rows in found["tasks"].values():
        assert teachers.table(rows) in page
        assert all(row["memory_ratio"] <= 1.3 for row in rows)
    tried = found["settings"]
    assert tried["seed"] not in found["seeds"]
    assert teachers.settings_table(tried["rare"]) in page
    assert found["reader"] == json.loads(json.dumps(asdict(teachers.Reader())))  # of the model that was measured


class Letters:
    """A tokenizer of one token a letter."""

    eos_token = "."

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return self(messages[0]["content"])


def test_the_hint_that_the_reader_has_learned_is_that_of_the_runs() -> None:
    import teachers

    from kit.config import load_config

    assert load_config(
        "quickstart", ["objective={recipe: sdpo}", teachers.SELF]
    ).teacher.prompt == teachers.HINT.format("{prompt}", "{reference}")
    recipe, rng = replace(teachers.Reader(), shown_share=1.0), Random(0)
    for _ in range(20):
        ids, labels = recipe.example(Letters(), rng, 0.0)
        text, begins = "".join(map(chr, ids)), labels.count(-100)
        found = re.search(r"problem: (.*) =\nA right answer is (-?\d+)\.$", text[:begins])
        assert found is not None
        terms, hint = found.groups()
        assert sum(int(sign + digit) for sign, digit in re.findall(r"([+-]?) ?(\d)", terms)) == int(hint)
        assert text[begins:].endswith(f"<answer>{hint}</answer>.")
