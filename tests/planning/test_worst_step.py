"""The largest update that a run can make, measured before its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config


@pytest.mark.survival
@pytest.mark.slow
def test_the_largest_update_is_measured_within_the_budget(tree: Any, tmp_path: Path) -> None:
    from kit.generation.prompts import count_tokens
    from kit.planning.probe import two_steps
    from kit.runner.prepare import prepare

    tree["objective"] = {"recipe": "ppo", "regularizers": [{"name": "kl", "estimator": "full"}, "nll_on_correct"]}
    found = {}
    for budget in (0, 200):
        parts = prepare(load_config(tree), fresh=False)
        parts.config.optimisation.token_budget = budget
        found[budget] = two_steps(parts, tmp_path)["worst_step"]
    longest = max(count_tokens(parts.files.tokenizer, parts.data.train["prompt"]))
    row = longest + parts.config.generation.max_completion_tokens
    assert found[0]["rows"] == parts.config.optimisation.batch_size  # the whole batch at once, on a CPU
    assert found[0]["tokens"] == found[0]["rows"] * row > 200
    assert found[200]["rows"] == 200 // row
    assert 200 - row < found[200]["tokens"] <= 200
    assert all(each["peak_bytes"] > 100 * 2**20 and each["seconds"] > 0 for each in found.values())
