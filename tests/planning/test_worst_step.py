"""The largest update that a run can make, before its first step; and what a plan knows of work that is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config


@pytest.mark.survival
@pytest.mark.slow
def test_the_largest_update_is_measured_within_the_budget(tree: Any, tmp_path: Path) -> None:
    from kit.evaluation.heldout import count_tokens
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


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        (
            {},
            {
                "token_budget": "by the free memory",
                "skip_flat_groups": "on",
                "reuse_old_logps": "not needed: there is one",
            },
        ),
        ({"optimisation.iterations": 2}, {"reuse_old_logps": "on"}),
        ({"optimisation.token_budget": 500}, {"token_budget": "at most 500 tokens at once"}),
        ({"optimisation.token_budget": 0}, {"token_budget": "switched off"}),
        ({"optimisation.skip_flat_groups": False}, {"skip_flat_groups": "switched off"}),
        (
            {"objective.regularizers": [{"name": "kl"}]},
            {"skip_flat_groups": "regularizer 'kl' gives completions a gradient"},
        ),
        (
            {"model.lora.dropout": 0.1, "optimisation.iterations": 2},
            {"skip_flat_groups": "dropout", "reuse_old_logps": "dropout"},
        ),
        (
            {"objective.recipe": "ppo", "optimisation.iterations": 2},
            {"skip_flat_groups": "value head", "reuse_old_logps": "value head"},
        ),
    ],
)
def test_a_plan_says_what_forbids_a_saving(tree: Any, changes: dict[str, Any], want: dict[str, str]) -> None:
    import json

    from kit.runner.prepare import build_objective
    from kit.trainer.savings import planned

    config = load_config(tree, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    found = planned(config, build_objective(config))
    assert set(found) == {"token_budget", "skip_flat_groups", "reuse_old_logps"}
    for name, text in want.items():
        assert text in found[name], found


def test_a_plan_prints_what_is_left_out(tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml
    from typer.testing import CliRunner

    from kit.cli.app import app

    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    done = CliRunner().invoke(app, ["plan", "run.yaml", "-o", "objective.regularizers=[{name: kl}]"])
    assert done.exit_code == 0, done.output
    assert "skip_flat_groups: regularizer 'kl' gives completions a gradient without an advantage" in done.output
