import time

import pytest

from rewards import PresetError, build_samples, load
from rewards.components.json_schema import leaf_f1

PERSON = """{"type": "object", "additionalProperties": false, "required": ["name"],
             "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer"}}}"""


def evaluate(*texts, schema=PERSON, reference=None, **params):
    size = len(texts)
    samples = build_samples(["p"] * size, list(texts), schema=[schema] * size, reference=[reference] * size)
    return load("json-schema", **params).score(samples)


def test_values_that_follow_the_schema_are_right_without_a_reference():
    evaluation = evaluate('{"name": "Ann"}', '{"name": "Ann", "age": 3}', "So: ```\n", '```json\n{"name": "B"}\n```')
    assert evaluation.statuses["accuracy"] == ["ok", "ok", "format", "ok"]
    # 1 + 0.1; no value: 0
    assert evaluation.totals == [1.1, 1.1, 0.0, 1.1]


def test_values_that_break_the_schema_are_wrong_and_say_where():
    evaluation = evaluate("{}", '{"name": ""}', '{"name": "A", "age": 1.5}', '{"name": "A", "x": 1}', "null")
    assert evaluation.statuses["accuracy"] == ["wrong"] * 5
    assert evaluation.totals == [0.1] * 4 + [0.0]  # null is no object
    assert "$.age" in evaluation.infos["accuracy"][2]["reason"]


@pytest.mark.parametrize("schema", [PERSON, '{"type": ["array", "object"]}', {"schema": {"type": "object"}}])
def test_the_format_is_a_container_where_the_schema_asks_for_one(schema):
    evaluation = evaluate("7", '"Ann"', '{"x": 1}', "Ann", schema=schema)
    assert evaluation.values["format"] == [0.0, 0.0, 1.0, 0.0]
    assert "object" in evaluation.infos["format"][0]["reason"]
    assert evaluate("7", '"Ann"', schema='{"enum": [7]}').values["format"] == [1.0, 1.0]


def test_with_a_reference_the_value_counts_too():
    evaluation = evaluate(
        '{"age": 3.0, "name": "Ann"}', '{"name": "Bo", "age": 3}', reference='{"name": "Ann", "age": 3}'
    )
    assert evaluation.statuses["accuracy"] == ["ok", "wrong"]
    assert evaluation.values["accuracy"] == [1.0, 0.0]


def test_partial_credit_is_the_f1_of_leaves():
    # expected 2 leaves, given 2, 1 shared: 2 x 1 / (2 + 2) = 0.5
    evaluation = evaluate('{"name": "Bo", "age": 3}', reference='{"name": "Ann", "age": 3}', partial=True)
    assert evaluation.values["accuracy"] == [0.5]
    assert evaluation.statuses["accuracy"] == ["wrong"]
    # leaves a.0=1 a.1=2 against a.0=1: 2 x 1 / (2 + 1)
    assert leaf_f1({"a": [1, 2]}, {"a": [1]}) == pytest.approx(2 / 3)
    assert leaf_f1({}, {}) == 1.0
    assert leaf_f1({"a": True}, {"a": 1}) == 0.0


def test_patterns_that_backtrack_time_out_alone(own_pool):
    schema = '{"type": "string", "pattern": "^(a+)+$"}'
    start = time.monotonic()
    evaluation = evaluate('"aaa"', '"' + "a" * 40 + '!"', '"b"', schema=schema, deadline=0.5)
    assert evaluation.statuses["accuracy"] == ["ok", "timeout", "wrong"], evaluation.infos
    assert evaluation.values["accuracy"] == [1.0, 0.0, 0.0]
    assert time.monotonic() - start < 10


def test_formats_are_asserted():
    schema = '{"type": "string", "format": "date"}'
    assert evaluate('"2024-02-30"', schema=schema).statuses["accuracy"] == ["wrong"]
    assert evaluate('"2024-02-29"', schema=schema).statuses["accuracy"] == ["ok"]


@pytest.mark.parametrize(
    "schema",
    ["{", "7", '{"type": "objekt"}', '{"$ref": "http://127.0.0.1:9/none.json"}', '{"$ref": "#/$defs/none"}', None],
)
def test_schemas_that_cannot_be_used_are_errors_and_nothing_is_fetched(schema):
    evaluation = evaluate("{}", schema=schema)
    assert evaluation.statuses["accuracy"] == ["error"]
    assert "schema" in evaluation.infos["accuracy"][0]["reason"]
    if schema is not None:  # of all rows: said when the preset is loaded, before training
        with pytest.raises(PresetError, match="schema"):
            load("json-schema", schema=schema)


def test_a_schema_that_allows_anything_is_an_error_without_a_reference():
    for schema in ("true", "{}", '{"title": "x", "$defs": {}}'):
        assert evaluate("{}", schema=schema).statuses["accuracy"] == ["error"]
        assert evaluate("{}", "[]", schema=schema, reference="[]").statuses["accuracy"] == ["wrong", "ok"]


def test_schemas_come_as_objects_and_as_response_formats_too():
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    for schema in (wrapped, {"type": "integer"}, '{"type": "integer"}'):
        assert evaluate("7", '"7"', schema=schema).statuses["accuracy"] == ["ok", "wrong"]
    assert load("json-schema", schema='{"type": "integer"}').is_correct(build_samples(["p"], ["7"])) == [True]


def test_a_missing_package_is_named_when_the_preset_is_loaded(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for preset, package in [
        ("json-schema", "jsonschema"),
        ("ifeval", "py3langid"),
        ("text-overlap", "sacrebleu"),
    ]:
        with pytest.raises(PresetError, match=f"{preset}.*pip install {package}"):
            load(preset)
