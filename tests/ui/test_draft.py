"""Edits on the page become a configuration, its command and its YAML, and back."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kit.config import load_config, preset_names
from kit.errors import ConfigError
from kit.ui.draft import Draft, from_yaml
from kit.ui.settings import Settings

SETTINGS = Settings()


def by_command(command: str) -> dict[str, Any]:
    """The configuration that the command line makes of a command of the page."""
    words = shlex.split(command)
    assert words[:2] == ["grpo-kit", "train"]
    overrides = [word for flag, word in itertools.pairwise(words[3:]) if flag == "-o"]
    return load_config(words[2], overrides).model_dump(mode="json")


AWKWARD = {
    "data.system_prompt": 'it\'s "so": {a: b} # $HOME `x`\n- no',
    "data.task_params": {"min_terms": 2, "max_terms": 3},
    "optimisation.learning_rate": 1e-5,
    "model.lora.targets": ["q_proj", "v_proj"],
    "objective.clip": {"name": "ppo_clip", "eps_low": 0.1, "eps_high": 0.3},
    "objective.regularizers": [{"name": "kl", "coef": 0.01}],
    "generation.min_p": None,
    "run.seed": 7,
    "run.id": "null",
    "data.revision": "1e3",
}


def test_the_command_is_the_draft() -> None:
    draft = Draft()
    for key, value in AWKWARD.items():
        draft = draft.change(key, value)
    assert by_command(draft.command(SETTINGS)) == draft.config(SETTINGS).model_dump(mode="json")


@how(deadline=None)  # the machine may be busy
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_the_shell(text: str) -> None:
    draft = Draft().change("data.system_prompt", text)
    assert by_command(draft.command(SETTINGS))["data"]["system_prompt"] == text


def test_the_root_is_part_of_the_command(tmp_path: Path) -> None:
    settings = Settings(root=tmp_path / "my runs")
    assert by_command(Draft().command(settings))["run"]["root"] == str(tmp_path / "my runs")


def test_a_section_replaces_what_was_changed_below_it() -> None:
    draft = Draft().change("model.lora.rank", 4).change("model.lora", None)
    assert draft.changes == {"model.lora": None}
    assert draft.config(SETTINGS).model.lora is None
    again = draft.change("model.lora.rank", 8)
    assert again.config(SETTINGS).model.lora is not None


def test_two_edits_may_pass_through_what_cannot_be_run() -> None:
    draft = Draft().change("generation.num_generations", 6)
    with pytest.raises(ConfigError, match="batch_size"):
        draft.config(SETTINGS)
    assert draft.tree()["generation"]["num_generations"] == 6
    assert draft.change("optimisation.batch_size", 60).config(SETTINGS).optimisation.batch_size == 60


@pytest.mark.parametrize("preset", preset_names())
def test_yaml_of_the_page_is_taken_back(preset: str) -> None:
    config = load_config(preset, ["reward={preset: reasoning-gym}"] if preset == "custom-reward" else [])
    draft = from_yaml(config.to_yaml(), SETTINGS)
    assert draft.preset == preset
    assert len(draft.changes) <= 1
    assert draft.config(SETTINGS) == config
    assert by_command(draft.command(SETTINGS)) == config.model_dump(mode="json")


def test_yaml_of_a_page_with_another_root_is_taken_back(tmp_path: Path) -> None:
    settings = Settings(root=tmp_path / "other")
    draft = from_yaml(Draft().change("run.seed", 5).config(settings).to_yaml(), settings)
    assert draft.changes == {"run.seed": 5}
    for foreign in (SETTINGS, Settings(root=tmp_path / "third")):
        with pytest.raises(ConfigError, match=r"run\.root"):
            from_yaml(Draft().config(settings).to_yaml(), foreign)


def test_what_plan_suggests_can_be_made() -> None:
    draft = Draft().apply(["optimisation.micro_batch_size=8", "model.lora.rank=8"])
    config = draft.config(SETTINGS)
    assert (config.optimisation.micro_batch_size, config.model.lora and config.model.lora.rank) == (8, 8)


def test_yaml_with_anchors_is_refused() -> None:
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nmodel: {name: embedded}"
    with pytest.raises(ConfigError, match="Anchors"):
        from_yaml(bomb, SETTINGS)
    with pytest.raises(ConfigError, match="characters"):
        from_yaml("x" * 200_000, SETTINGS)
    with pytest.raises(ConfigError):
        from_yaml("!!python/object/apply:os.system [id]", SETTINGS)


@pytest.mark.parametrize(
    "value",
    [3, [], "text", '"x"', "[" * 100_000, {"preset": "none"}, {"preset": 3}, {"changes": []}, {"changes": {"x": 1}},
     {"changes": {"a.b; rm": 1}},
     {"changes": {"a.b": "x" * 30_000}}, {"changes": {f"a.b{n}": 1 for n in range(300)}},
     {"changes": {"a.b": json.loads("[" * 50 + "]" * 50)}}, {"changes": {"a..b": 1}}, {"changes": {3: 1}}],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_draft_that_no_page_sends_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        Draft.read(value)
