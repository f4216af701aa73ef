from __future__ import annotations

from typing import Any

import pytest
import yaml

from kit.errors import ConfigError
from kit.objective import Objective, recipe_names
from kit.objective.recipes import DEFAULT_RECIPE, changed_parts, resolve


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_round_trips_through_yaml_with_every_default_explicit(name: str) -> None:
    objective = Objective.from_spec(name)
    again = Objective.from_spec(yaml.safe_load(objective.to_yaml()))
    assert again.to_spec() == objective.to_spec()
    assert set(objective.to_spec()) == {"advantage", "clip", "weights", "regularizers", "reduction"}


def test_parts_that_differ_from_the_recipe() -> None:
    assert changed_parts({"recipe": "dapo", **Objective.from_spec("dapo").to_spec()}) == {}
    changed = Objective.from_spec({"recipe": "dapo", "clip": "gspo", "regularizers": ["kl"]}).to_spec()
    assert list(changed_parts({"recipe": "dapo", **changed})) == ["clip", "regularizers"]
    assert changed_parts({"recipe": "dapo", "clip": None}) == {}


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_need_no_reference(name: str) -> None:
    assert not Objective.from_spec(name).needs & {"ref_logps", "full_kl"}


def test_a_part_without_name_changes_the_recipes_own() -> None:
    spec = Objective.from_spec({"recipe": "dapo", "clip": {"eps_low": 0.1}}).to_spec()
    assert spec["clip"] == {"name": "ppo_clip", "eps_low": 0.1, "eps_high": 0.28}
    assert spec["reduction"] == {"name": "global_token_mean"}


@pytest.mark.parametrize("clip", ["ppo_clip", {"name": "ppo_clip"}])
def test_a_part_with_name_starts_from_its_own_defaults(clip: Any) -> None:
    assert Objective.from_spec({"recipe": "dapo", "clip": clip}).to_spec()["clip"]["eps_high"] == 0.2


def test_without_a_recipe_the_rest_is_the_default_one() -> None:
    assert Objective.from_spec({}).to_spec() == Objective.from_spec(DEFAULT_RECIPE).to_spec()
    spec = Objective.from_spec({"clip": {"eps_low": 0.1}}).to_spec()
    assert spec == Objective.from_spec({"recipe": DEFAULT_RECIPE, "clip": {"eps_low": 0.1}}).to_spec()
    assert Objective().to_spec() == Objective.from_spec("grpo").to_spec()


def test_lists_replace_the_recipes() -> None:
    spec = {"recipe": "gspo", "regularizers": ["kl", {"name": "entropy_bonus", "coef": 0.1}], "weights": None}
    resolved = Objective.from_spec(spec).to_spec()
    assert [term["name"] for term in resolved["regularizers"]] == ["kl", "entropy_bonus"]
    assert resolved["weights"] == []


def test_schedules_are_written_as_plain_dicts() -> None:
    objective = Objective.from_spec({"clip": {"eps_high": "linear(0.3, 0.2, 50)"}})
    plain = {"schedule": "linear", "start": 0.3, "end": 0.2, "steps": 50}
    assert yaml.safe_load(objective.to_yaml())["clip"]["eps_high"] == plain
    assert Objective.from_spec(objective.to_spec()).to_spec() == objective.to_spec()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dappo", r"No recipe is called 'dappo'. Did you mean 'dapo'\?"),
        ({"recipe": "grppo"}, r"Did you mean 'grpo'\?"),
        ({"clips": "gspo"}, r"objective has no key 'clips'. Did you mean 'clip'\?"),
        ({"regularizers": "kl"}, r"objective.regularizers must be a list, got 'kl'"),
        ({"weights": {"name": "x"}}, r"objective.weights must be a list"),
        (7, "is the name of a recipe or a mapping, got 7"),
    ],
)
def test_a_wrong_spec_says_what_was_seen(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(spec)


def test_a_hyper_parameter_that_the_recipes_part_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="clip 'gspo' has no hyper-parameter 'delta'"):
        Objective.from_spec({"recipe": "gspo", "clip": {"delta": 2.0}})
