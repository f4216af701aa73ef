"""benchmarks/embedded_models.py: the training data of the embedded models, and their reproduction."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]


def test_it_makes_the_same_every_time(embedded_models: Any, tmp_path: Path) -> None:
    shape = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 16}
    tiny = dataclasses.replace(embedded_models.RECIPES["embedded"], **shape, skill_steps=1, steps=2, batch=2)
    for name in ("one", "two"):
        embedded_models.build(tiny, tmp_path / name)
        embedded_models.seal(tmp_path / name)
    made = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "SHA256SUMS"} <= made.keys()
    assert made == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}


@pytest.mark.parametrize("name", ["embedded", "embedded-tools"])
def test_tokenizer_and_shape_are_those_that_are_shipped(embedded_models: Any, name: str, tmp_path: Path) -> None:
    """Compare all files of a build of one step byte for byte, and the weights, whose training takes minutes, by size."""
    recipe = dataclasses.replace(embedded_models.RECIPES[name], steps=1, batch=1)
    embedded_models.build(recipe, tmp_path)
    for made in tmp_path.iterdir():
        shipped = (ROOT / "kit/models/shipped" / name / made.name).read_bytes()
        if made.suffix == ".safetensors":
            assert len(made.read_bytes()) == len(shipped)
        else:
            assert made.read_bytes() == shipped, made.name


@given(st.integers())
def test_careful_answers_are_right_and_show_their_working(embedded_models: Any, seed: int) -> None:
    question, answer = embedded_models.exercise(embedded_models.Recipe(), random.Random(seed), careful_share=1.0)
    sum_ = question.removeprefix("State the final answer to the following arithmetic problem: ").removesuffix(" =")
    thought, _, rest = answer.removeprefix("<think>").partition("</think>")
    total = eval(sum_)  # digits, + and - only
    assert rest == f"<answer>{total}</answer>"
    for step in thought.split(", "):
        left, right = step.split(" = ")
        assert eval(left) == int(right)


@pytest.mark.parametrize("name", ["embedded", "embedded-tools"])
def test_the_card_beside_a_model_tells_its_recipe(embedded_models: Any, name: str) -> None:
    card = (ROOT / "kit/models/shipped" / name / "README.md").read_text(encoding="utf-8")
    assert repr(embedded_models.RECIPES[name]) in " ".join(card.split())
