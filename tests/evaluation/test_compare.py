"""kit.studies.compare: verdicts about runs on disk, and comparisons that it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import command_line
import numpy as np
import pytest
from study_runs import draw, make_run

from kit.errors import ConfigError, RunError
from kit.studies.compare import compare_runs

BETTER = ["objective.clip.eps_high=0.4"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three seeds of a baseline, of a better arm, and of an arm without a difference."""
    rng = np.random.default_rng(0)
    for seed in range(3):
        make_run(tmp_path, f"base-s{seed}", draw(rng, 80, 0.5), seed)
        make_run(tmp_path, f"clip-s{seed}", draw(rng, 80, 0.8), seed, overrides=BETTER, shift=0.1)
        make_run(tmp_path, f"slow-s{seed}", draw(rng, 80, 0.5), seed, overrides=["optimisation.learning_rate=1e-4"])
    return tmp_path


def ids(*arms: str) -> list[str]:
    return [f"{arm}-s{seed}" for arm in arms for seed in range(3)]


def command(root: Path, *arguments: str, code: int = 0) -> str:
    return command_line.run("compare", *arguments, "--root", str(root), code=code)


def test_runs_are_grouped_into_arms_and_each_is_judged(root: Path) -> None:
    report = compare_runs(ids("base", "clip", "slow"), root)
    assert [(arm["name"], arm["seeds"]) for arm in report["arms"]] == [(n, [0, 1, 2]) for n in ("base", "clip", "slow")]
    verdicts = {each["arm"]: each for each in report["comparisons"]}
    assert verdicts["clip"]["verdict"] == "better"
    assert verdicts["clip"]["scope"] == "method"
    assert verdicts["slow"]["verdict"] == "not distinguishable"
    assert verdicts["slow"]["p_holm"] >= verdicts["slow"]["p"]
    assert "at this budget (3 seeds x 80 problems)" in verdicts["slow"]["text"]
    assert re.search(r"With this budget, differences of 0\.\d+ or more", verdicts["slow"]["text"])
    assert report["metric"] == "greedy_accuracy"
    assert report["notes"] == report["warnings"] == []
    assert report["curves"]["held-out greedy accuracy"]["clip"] == [(20, pytest.approx(report["arms"][1]["value"]))]
    json.dumps(report, allow_nan=False)


def test_what_else_differs_has_intervals(root: Path) -> None:
    rows = {row["name"]: row for row in compare_runs(ids("base", "clip"), root)["quantities"]}
    assert rows["entropy"]["differences"]["clip"]["value"] == pytest.approx(0.1)
    assert rows["time per step"]["arms"]["base"] == pytest.approx(1.0), "the first, slower step is not counted"
    assert rows["training time"]["arms"]["base"] == pytest.approx(9 + 19)
    assert rows["peak memory"]["arms"]["base"] == pytest.approx(501)
    assert rows.keys() >= {"pass@4", "held-out length", "completion length", "training reward", "greedy_reward"}


def test_runs_of_one_configuration_are_compared_and_said_to_be(root: Path) -> None:
    report = compare_runs([["base-s0", "base-s1"], ["base-s2"]], root)
    assert any("same configuration" in note for note in report["notes"])
    assert any("different seeds" in warning for warning in report["warnings"])
    assert [arm["name"] for arm in compare_runs(["base-s0", "base-s1"], root)["arms"]] == ["base-s0", "base-s1"]


def test_problems_are_matched_by_content_and_not_by_place(tmp_path: Path) -> None:
    names = ["p", "q", "r", "q"]  # q twice: the second is counted as another problem
    make_run(tmp_path, "a", [[4, 1], [0, 0], [4, 1], [4, 1]], ids=names)
    make_run(tmp_path, "b", [[0, 0], [4, 1], [4, 1], [4, 1]], ids=["q", "q", "r", "p"], overrides=BETTER)
    report = compare_runs(["a", "b"], tmp_path)
    assert report["comparisons"][0]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    make_run(tmp_path, "c", [[4, 1], [4, 1], [4, 1]], ids=["p", "q", "x"], overrides=["optimisation.steps=3"])
    assert compare_runs(["a", "c"], tmp_path)["problems"] == 2


def test_weak_spots_are_said(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    make_run(tmp_path, "a", draw(rng, 20, 0.5))
    make_run(tmp_path, "b", draw(rng, 20, 0.5), overrides=BETTER, state="stopped", step=10, data="other")
    report = compare_runs(["a", "b"], tmp_path)
    warnings = " ".join(report["warnings"])
    assert "b (stopped)" in warnings
    assert "different steps (10, 20)" in warnings
    output = command(tmp_path, "a", "b")
    assert output.index("Warning: Not every run finished") < output.index("b against a:")
    page = (tmp_path / "comparisons/a-vs-b/comparison.html").read_text()
    assert page.index("Not every run finished") < page.index("b against a:")


@pytest.mark.parametrize(
    ("other", "options", "words"),
    [
        ({"checker": "gsm8k/accuracy"}, {}, "different evaluation.checker"),
        ({"ids": [f"x{n}" for n in range(20)]}, {}, "share 0 held-out problems"),
        ({"overrides": ["reward.params={format_weight: 0.5}"]}, {"metric": "greedy_reward"}, "different rewards"),
        ({}, {"metric": "pass@2"}, "Common scores: greedy_accuracy, pass@1, pass@4"),
        ({}, {"evaluation": "again"}, "eval/again.json"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, other: dict[str, Any], options: dict[str, str], words: str
) -> None:
    rng = np.random.default_rng(0)
    make_run(tmp_path, "a", draw(rng, 20, 0.5))
    make_run(tmp_path, "b", draw(rng, 20, 0.5), **({"overrides": BETTER} | other))
    with pytest.raises((ConfigError, RunError), match=words):
        compare_runs(["a", "b"], tmp_path, **options)


def test_the_verb_prints_and_leaves_a_page_and_json(root: Path) -> None:
    output = command(root, "base-s0,base-s1,base-s2", "clip-s0,clip-s1,clip-s2")
    assert "clip against base: better." in output
    folder = root / "comparisons/base-vs-clip"
    page = (folder / "comparison.html").read_text()
    assert json.loads((folder / "comparison.json").read_text())["comparisons"][0]["verdict"] == "better"
    assert "clip against base: better." in page
    assert page.count("<svg") >= 5
    assert "objective.clip.eps_high" in page
    assert "optimisation.learning_rate" not in page, "equal settings are not listed"
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", page), (
        "the page loads from another host"
    )


def test_texts_of_runs_are_data_on_the_page(tmp_path: Path) -> None:
    rng, evil = np.random.default_rng(0), "<script>alert(1)</script>"
    make_run(tmp_path, "a", draw(rng, 20, 0.5))
    make_run(tmp_path, "b", draw(rng, 20, 0.5), overrides=[f"data.system_prompt='{evil}'"])
    command(tmp_path, "a", "b")
    page = (tmp_path / "comparisons/a-vs-b/comparison.html").read_text()
    assert evil not in page
    assert "&lt;script&gt;" in page
