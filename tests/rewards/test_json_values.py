import pytest

from rewards.components.json_values import MAX_JSON_CHARS, find_json, parse_json, same_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('  [1, 2, {"b": "}]"}]\n', [1, 2, {"b": "}]"}]),
        ("3", 3),
        ('"a {b} c"', "a {b} c"),
        ("null", None),
        ('Here it is: {"a": "say \\"hi\\" \\\\"}', {"a": 'say "hi" \\'}),
        ('A citation [3], then {"a": []}', {"a": []}),
        ('<think>{"a": 0}</think>\n{"a": 1}', {"a": 1}),
        ('Result:\n```json\n{"a": "```"}\n```', {"a": "```"}),
    ],
)
def test_the_last_value_is_found_in_prose_fences_and_behind_thinking(text, value):
    result = find_json(text)
    assert result.reason is None
    assert result.value == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "blank"),
        ("no value here", "missing"),
        ('<think>{"a": 1}', "unterminated_think"),
        ('{"a": 1} and {"a":', "unterminated"),
        ('{"a": 1} {"a": 2}', "several values"),
        ('{"a": 1} I hope it helps', "text after the value"),
        ('```json\n{"a": 1}\n``` done', "text after the value"),
        ('```json\n{"a": 1}', "unterminated"),
        ("```json\n1\n```\n```json\n2\n```", "several values"),
        ('{"a": 1, "a": 2}', "not JSON"),
        ('{"a": NaN}', "not JSON"),
        ("[1e999]", "not JSON"),
        ("x }", "unbalanced"),
        ("[" * 100 + "]" * 100, "nested too deep"),
        ("[" * 5000 + "]" * 5000, "not JSON"),
        ("[" + "0," * 30_000 + "0]", "too many values"),
        ('["' + "a" * MAX_JSON_CHARS + '"]', "too_long"),
    ],
)
def test_what_is_not_one_strict_value_has_a_reason(text, reason):
    result = find_json(text)
    assert result.value is None
    assert result.reason == reason or (reason == "not JSON" and result.reason.startswith("repeated key"))


def test_lenient_scanning_takes_the_last_of_several_values_and_allows_text_behind():
    assert find_json('{"a": 1} {"a": 2} done', strict=False).value == {"a": 2}
    assert find_json("```\n1\n```\n```json\n2\n```", strict=False).value == 2
    assert find_json('{"a": 1} {"a": ', strict=False).reason == "unterminated"


def test_equality_is_that_of_json():
    assert same_json({"a": 1, "b": [2.0]}, {"b": [2], "a": 1.0})
    assert not same_json([1, 2], [2, 1])
    assert same_json(parse_json("1e2").value, 100)
