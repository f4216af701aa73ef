"""kit.config and kit.config.schema: accepted and refused configurations, and the messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kit.cli.app import app
from kit.config import RunConfig, find_config, load_config, preset_names
from kit.config.schema import commented_yaml, json_schema
from kit.errors import ConfigError
from kit.runs.store import RUN_ID


def refusal(tree: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(tree, overrides)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_commented_and_survives_saving(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert find_config(name).read_text().startswith("# ")
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert commands | {group.name for group in app.registered_groups} >= set(
        re.findall(r"grpo-kit ([a-z]\w+)", find_config(name).read_text())
    )
    for number, text in enumerate((config.to_yaml(), commented_yaml(config))):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        assert load_config(file) == config


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"modle": {}}, ["modle", "Did you mean 'model'?"]),
        ({"optimisation": {"learning_rat": 1}}, ["optimisation.learning_rat", "'learning_rate'"]),
        ({"model": {"lora": {"rnk": 4}}}, ["model.lora.rnk", "'rank'", "alpha"]),
        ({"reward": {"functions": [{"path": "a:b", "weigth": 1}]}}, ["weigth", "'weight'"]),
    ],
)
def test_an_unknown_key_is_met_with_the_nearest_one(tree: dict, words: list[str]) -> None:
    message = refusal(tree)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"optimisation": {"batch_size": 100}}, ["batch_size", "group size 8", "96 or 104"]),
        ({"optimisation": {"batch_size": 4}}, ["use 8"]),
        ({"optimisation": {"micro_batch_size": 7}}, ["does not divide batch_size 64", "use 8"]),
        ({"generation": {"temperature": 0}}, ["generation.temperature", "greater than 0", "seen: 0"]),
        ({"optimisation": {"schedule": "cosin"}}, ["optimisation.schedule", "'cosine'", "seen: 'cosin'"]),
        ({"reward": {"preset": None}}, ["there is no reward"]),
        ({"reward": {"preset": "mine.py:score"}}, ["write functions: [mine.py:score]"]),
        ({"objective": {"clip": 3}}, ["objective.clip:", "string", "dictionary", "seen: 3"]),
        ({"model": None}, ["model: expected keys below it"]),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_seen_and_expected(tree: dict, words: list[str]) -> None:
    message = refusal(tree)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["a", "run-1", "0", "a" * 64])
def test_plain_run_ids_are_accepted_alike_by_schema_and_store(name: str) -> None:
    assert load_config({"run": {"id": name}}).run.id == name
    assert RUN_ID.fullmatch(name)


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a/b", "../a", "a.b", "a b", "a\n", "a" * 65])
def test_other_run_ids_are_refused_alike_by_schema_and_store(name: str) -> None:
    assert "run.id" in refusal({"run": {"id": name}})
    assert not RUN_ID.fullmatch(name)


def test_overrides_reach_into_hooks_lists_and_missing_sections() -> None:
    config = load_config(
        {"objective": {"clip": "ppo_clip"}},
        [
            "objective.clip.eps_high=0.28",
            "data.task_params={min_terms: 4}",
            "run.report_to=[trackio]",
            "model.lora=null",
        ],
    )
    assert config.objective.clip == {"name": "ppo_clip", "eps_high": 0.28}
    assert config.data.task_params == {"min_terms": 4}
    assert config.run.report_to == ["trackio"]
    assert config.model.lora is None
    assert load_config({}, ["objective.clip.eps_high=0.28"]).objective.clip == {"eps_high": 0.28}


def test_an_override_reaches_an_item_of_a_list_by_its_number() -> None:
    tree = {"objective": {"regularizers": ["kl", {"name": "entropy_bonus"}]}}
    config = load_config(tree, ["objective.regularizers.0.coef=1e-2", "objective.regularizers.1.coef=0.1"])
    assert config.objective.regularizers == [{"name": "kl", "coef": 0.01}, {"name": "entropy_bonus", "coef": 0.1}]
    assert "it has 2, counted from 0" in refusal(tree, "objective.regularizers.2.coef=1")
    assert "no item of that list" in refusal(tree, "objective.regularizers.kl.coef=1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: [", "not valid YAML"),
        ("model:\n\tname: x", "Indent with spaces instead of tabs"),
        ("data: {source: a.csv}\nrun: {}\ndata: {heldout: 3}", "the key 'data' is in lines 1 and 3"),
        ("- a\n- b", "found a list"),
        ("just text", "found a str"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("[" * 200_000, "nested too deep"),
        ("- " * 200_000, "nested too deep"),
    ],
    ids=["sequence", "tab", "twice", "list", "text", "object", "brackets", "dashes"],
)
def test_a_file_that_is_no_configuration_is_refused(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    message = refusal(file)
    assert words in message
    assert "bad.yaml" in message


def test_commented_yaml_documents_every_key_and_its_range() -> None:
    text = commented_yaml(RunConfig())
    assert "  # Rank r of the update B·A. [≥ 1 and ≤ 1024]" not in text.splitlines()  # it is below lora
    assert "    # Rank r of the update B·A. [≥ 1 and ≤ 1024]" in text.splitlines()
    assert "[constant | linear | cosine]" in text
    assert max(len(line) for line in text.splitlines() if "#" in line) <= 100
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if ":" in line and not line.lstrip().startswith("#"):
            assert lines[number - 1].lstrip().startswith("#"), f"no documentation above: {line}"


def test_commented_yaml_round_trips_what_is_not_a_default(tmp_path: Path) -> None:
    config = load_config(
        {
            "model": {"lora": None, "name": "a: b # c"},
            "data": {"rename": {"x": "y"}, "system_prompt": "one\ntwo: 'three'\n"},
            "reward": {"preset": None, "functions": [{"path": "f.py:g", "weight": 0.5}]},
            "objective": {"regularizers": [{"name": "kl", "coef": {"schedule": "linear", "from": 0.1, "to": 0}}]},
        }
    )
    file = tmp_path / "run.yaml"
    file.write_text(commented_yaml(config))
    assert load_config(file) == config
    assert yaml.safe_load(file.read_text())["model"]["lora"] is None


def test_json_schema_describes_every_field_and_forbids_others() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    for name, definition in schema["$defs"].items():
        assert definition["additionalProperties"] is False, name
        undocumented = [key for key, field in definition["properties"].items() if not field.get("description")]
        assert not undocumented, f"{name}: {undocumented}"


# --- a new recipe replaces explicit hooks -----------------------------------------------------------------------------

SAVED = {
    "objective": {
        "recipe": "dapo",
        "advantage": {"name": "group_zscore"},
        "clip": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28},
        "weights": [],
        "regularizers": [],
        "reduction": {"name": "global_token_mean"},
    }
}


def test_a_recipe_that_the_saved_hooks_would_win_over_is_refused_by_their_names() -> None:
    message = refusal(SAVED, "objective.recipe=rloo")
    assert "advantage, clip, weights, regularizers, reduction" in message
    assert "-o 'objective={recipe: rloo}'" in message
    some = refusal(SAVED, "objective.recipe=rloo", "objective.clip=reinforce", "objective.weights=null")
    assert "not change advantage, regularizers, reduction:" in some
    assert "change advantage" in refusal(load_config(SAVED), "objective.recipe=rloo")


def test_a_recipe_may_replace_the_section_stay_the_same_or_change_a_recipe_with_changes() -> None:
    replaced = load_config(SAVED, ["objective={recipe: rloo}"]).objective
    assert (replaced.recipe, replaced.clip, replaced.weights) == ("rloo", None, None)
    assert load_config(SAVED, ["objective.recipe=dapo"]).objective.clip == SAVED["objective"]["clip"]
    assert load_config({"objective": {"clip": "ppo_clip"}}, ["objective.recipe=grpo"]).objective.recipe == "grpo"
    assert load_config({"objective": {"weights": "sampler_correction"}}).objective.weights == ["sampler_correction"]
    every = [f"objective.{name}=null" for name in SAVED["objective"] if name != "recipe"]
    assert load_config(SAVED, ["objective.recipe=grpo", *every]).objective.clip is None


def test_functions_alone_bring_no_preset_with_them() -> None:
    functions = [{"path": "mine.py:score"}]
    assert load_config({"reward": {"functions": functions}}).reward.preset is None
    assert load_config({"reward": {"functions": functions, "preset": "gsm8k-hash"}}).reward.preset == "gsm8k-hash"
    assert load_config({}).reward.preset == "reasoning-gym"
    assert (
        load_config({"reward": {"functions": ["mine.py:score"]}}).reward
        == load_config({"reward": {"functions": functions}}).reward
    )
    saved = load_config({"reward": {"functions": functions}})
    assert load_config(saved, ["reward.max_failure_share=0.5"]).reward.preset is None


def test_the_schema_and_the_objective_have_the_same_default_recipe() -> None:
    from kit.objective.recipes import DEFAULT_RECIPE

    assert load_config({}).objective.recipe == DEFAULT_RECIPE
