"""A configured run with `selection:`: what it trains on, what it says it spent, and what `validate` refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.config import SelectionConfig, load_config
from kit.config.sections import REMOVED
from kit.errors import ConfigError
from kit.runner.prepare import validate

ROOT = Path(__file__).parents[1]
METHODS = [
    "selection.dynamic_sampling={max_rounds: 2}",
    "selection.pods={keep: 2}",
]


def test_a_run_trains_on_what_was_chosen_and_counts_what_it_spent(attempt: Callable[..., Any]) -> None:
    result = attempt(*METHODS)
    assert result.code == 0, result.message
    lines = result.folder.metrics()
    assert len(lines) == 2
    for line in lines:
        assert line["tokens/generated"] > 0
        assert line["tokens/updated"] > 0
        assert line["groups/rolled_out"] >= 2
        assert {"selection/rounds", "selection/reward"} <= line.keys()
    assert (result.folder.path / "config.yaml").read_text().count("keep: 2") == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["selection.pods={keep: 9}"], "at most 4"),
        (["selection.cppo={keep: 3}", "optimisation.micro_batch_size=1"], "8 equal micro-batches. Set it to 4"),
        (["selection.pods={keep: 2}", "generation.rollout=mine.py:make"], "act twice"),
        (["selection.greso={}", "objective.advantage=remax"], "greedy completion"),
    ],
)
def test_validate_refuses_what_cannot_be(overrides: list[str], words: str, tree: Any, tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text("def make(prompts, trainer):\n    return {}\n")
    overrides = [each.replace("mine.py", str(tmp_path / "mine.py")) for each in overrides]
    with pytest.raises(ConfigError, match=words):
        validate(load_config(tree, overrides))


@pytest.mark.parametrize(("name", "nearest"), [(name, nearest) for name, (_, nearest) in REMOVED.items()])
def test_a_removed_method_is_refused_with_what_comes_nearest_and_read_where_it_is_off(
    name: str, nearest: str, tree: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} .* was removed in 0.1.0.* nearest is {nearest}"):
        load_config(tree, [f"selection.{name}={{}}"])
    saved = load_config(tree, [f"selection.{name}=null", "selection.greso={}"])
    assert saved.selection.methods == ["greso"]
    assert f"{name}:" not in saved.to_yaml()
    saved.selection.greso = None  # assignments are validated, too
    assert f"| `{name}`" in (ROOT / "docs" / "selection.md").read_text().partition("## Removed")[2]


def test_validate_refuses_several_processes(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes"):
        validate(load_config(tree, ["selection.cppo={keep: 2}"]))


def test_what_is_logged_is_in_the_page() -> None:
    source = "".join(path.read_text() for path in (ROOT / "kit" / "trainer" / "selection").glob("*.py"))
    page = (ROOT / "docs" / "selection.md").read_text()
    named = set(re.findall(r'"((?:tokens|groups|selection)/\w+)"', source))
    assert len(named) >= 6
    assert {name for name in named if f"`{name}`" not in page} == set()
    for key in SelectionConfig.model_fields:
        assert f"| `{key}` |" in page, key
