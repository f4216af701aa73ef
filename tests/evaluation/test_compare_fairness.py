"""kit.studies.compare: the compared weights, and conditions under which a verdict would be too strong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study_runs import draw, make_run

from kit.config import load_config
from kit.errors import ConfigError
from kit.runs.store import RunDir
from kit.studies.compare import compare_runs

BETTER = ["objective.clip.eps_high=0.4"]


def problems(share: float, count: int = 40, seed: int = 0) -> list[list[int]]:
    return draw(np.random.default_rng(seed), count, share)


def change(run: RunDir, edit: Callable[[dict[str, Any]], Any], name: str = "after") -> None:
    """Edit an evaluation on disk."""
    result = json.loads((run.eval / f"{name}.json").read_text())
    edit(result)
    run.write_json(f"eval/{name}.json", result)


def test_different_data_has_no_verdict(tmp_path: Path) -> None:
    make_run(tmp_path, "a", problems(0.1, 80))
    make_run(tmp_path, "b", problems(0.9, 80), overrides=BETTER, data="other")
    make_run(tmp_path, "c", problems(0.9, 80), overrides=["optimisation.steps=3"])
    other, same = compare_runs(["a", "b", "c"], tmp_path)["comparisons"]
    assert (other["verdict"], same["verdict"]) == ("not comparable", "better")
    assert "trained on different data" in other["text"]
    assert "better" not in other["text"]


def test_an_evaluation_made_with_other_generation_settings_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, "a", problems(0.5))
    other = make_run(tmp_path, "b", problems(0.5), overrides=BETTER)
    own = load_config("quickstart").generation.model_dump()
    change(other, lambda result: result.update(generation=own | {"top_p": 0.5}))
    with pytest.raises(ConfigError, match=r"different generation\.top_p: 0\.5, 1\.0"):
        compare_runs(["a", "b"], tmp_path, metric="pass@1")
    assert compare_runs(["a", "b"], tmp_path)["warnings"] == [], "top_p has no effect on greedy completions"
    change(other, lambda result: result.update(generation=own | {"max_completion_tokens": 7}))
    with pytest.raises(ConfigError, match=r"-o generation\.max_completion_tokens="):
        compare_runs(["a", "b"], tmp_path)


def test_equal_answers_promise_no_budget(tmp_path: Path) -> None:
    right = problems(0.5)
    for seed in range(3):
        make_run(tmp_path, f"a-s{seed}", right, seed)
        make_run(tmp_path, f"b-s{seed}", right, seed, overrides=BETTER)
    text = compare_runs([[f"{arm}-s{seed}" for seed in range(3)] for arm in "ab"], tmp_path)["comparisons"][0]["text"]
    assert "have equal scores on every problem" in text
    assert "This budget finds" not in text
