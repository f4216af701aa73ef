"""The form and the schema: they cannot differ."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from kit.config import RunConfig, Section, load_config, preset_names
from kit.errors import ConfigError
from kit.ui.draft import Draft, lookup
from kit.ui.form import HIDDEN, Key, changed, component, keys, read, shown

KEYS = {key.name: key for key in keys()}


def leaves() -> set[str]:
    """Dotted names of the leaves of the schema, from pydantic's own JSON schema and not from the form."""
    found: set[str] = set()
    schema = RunConfig.model_json_schema()

    def walk(node: dict[str, Any], name: str) -> None:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        inner = [one for one in node.get("anyOf", []) if "$ref" in one]
        if "properties" in node:
            for key, value in node["properties"].items():
                walk(value, f"{name}.{key}" if name else key)
        elif inner:
            found.add(name)
            walk(inner[0], name)
        else:
            found.add(name)

    walk(schema, "")
    return found


def test_every_key_of_the_schema_is_in_the_form() -> None:
    assert set(KEYS) == leaves() - HIDDEN


@pytest.mark.parametrize("preset", preset_names())
def test_what_is_shown_is_what_is_read(preset: str) -> None:
    tree = load_config(preset).model_dump(mode="json")
    for key in KEYS.values():
        value = lookup(tree, key.name)
        if key.kind == "section" or (value is None and not key.optional):
            continue  # the second: keys of a section that is null
        assert read(key, shown(key, value)) == value, key.name


def test_every_key_has_its_words() -> None:
    for key in KEYS.values():
        info = component(key, lookup(Draft().tree(), key.name)).info
        assert info, f"{key.name} has no documentation"


class Later(Section):
    """A section to come."""

    flavour: Literal["sweet", "sour"] = "sweet"
    """How it tastes."""
    amount: Annotated[int, Field(ge=1, le=9)] | None = None
    """How much of it."""
    fresh: bool | None = None
    """Whether it is."""


def test_a_new_key_appears_by_itself() -> None:
    found = {key.name: key for key in keys(Later, "later.")}
    flavour = component(found["later.flavour"], "sweet")
    assert [choice for choice, _ in flavour.choices] == ["sweet", "sour"]
    amount = component(found["later.amount"], None)
    assert "≥ 1 and ≤ 9 or null" in amount.info
    assert (amount.value, amount.placeholder) == ("", "")
    assert [choice for choice, _ in component(found["later.fresh"], None).choices] == ["null", "true", "false"]
    assert read(found["later.fresh"], "true") is True
    assert read(found["later.fresh"], "null") is None
    assert read(found["later.amount"], "7") == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimisation.steps", "many"), ("optimisation.steps", ""), ("optimisation.learning_rate", "fast")],
)
def test_what_is_no_value_is_said(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        changed(Draft(), KEYS[name], value)


def test_a_small_learning_rate_stays_as_it_was_written() -> None:
    key = KEYS["optimisation.learning_rate"]
    assert read(key, "1e-5") == 1e-5
    assert read(key, "auto") == "auto"
    assert shown(key, "auto") == "auto"
    assert shown(key, 1e-5) == "1e-05"


def test_adapters_can_be_turned_off_and_on() -> None:
    key = KEYS["model.lora"]
    off = changed(Draft(), key, False)
    assert off.changes == {"model.lora": None}
    assert changed(off, key, True).tree()["model"]["lora"]["rank"] == 16


def test_a_label_names_its_section() -> None:
    assert component(KEYS["evaluation.every"], 0).label == "evaluation.every"


def test_names_are_chosen_from_what_is_registered() -> None:
    import rewards

    assert set(rewards.names()) <= set(KEYS["reward.preset"].choices)
    assert "dapo" in Key("objective.recipe", RunConfig.model_fields["objective"]).choices
