import json

import pytest

from rewards import PresetError, build_samples, load
from rewards.components.tool_call import Call, toolrl_correctness

WEATHER = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
TIME = {"name": "time", "arguments": {}}


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def openai(*calls, text=""):
    tool_calls = [{"type": "function", "function": {**c, "arguments": json.dumps(c["arguments"])}} for c in calls]
    return [{"role": "assistant", "content": text, "tool_calls": tool_calls}]


def evaluate(*completions, reference=(WEATHER,), **params):
    size = len(completions)
    gold = json.dumps(list(reference)) if isinstance(reference, tuple) else reference
    return load("tool-call", **params).score(build_samples(["p"] * size, list(completions), reference=[gold] * size))


@pytest.mark.parametrize(
    "completion",
    [
        hermes(WEATHER),
        "<think>I need <tool_call> it</think>\nLet me look.\n" + hermes(WEATHER),
        hermes({"name": "weather", "parameters": {"days": 2.0, "city": "Rome"}}),
        openai(WEATHER),
        json.dumps([WEATHER]),
        json.dumps(WEATHER),
        f"```json\n{json.dumps(WEATHER)}\n```",
    ],
)
def test_the_right_call_is_right_in_every_format(completion):
    evaluation = evaluate(completion)
    assert evaluation.statuses["accuracy"] == ["ok"]
    assert evaluation.totals == [4.0]  # 3 + 1


def test_scores_follow_the_paper():
    def score(*calls, expected=(WEATHER,)):
        return toolrl_correctness([Call(**c) for c in expected], [Call(**c) for c in calls])

    # S = 1 + 1 + 2 = 4
    assert score(WEATHER) == 3.0
    assert score() == -3.0
    assert score(TIME) == -3.0
    # names 1, parameters 1, values 1 of 2: R = 3 -> 6 x 3/4 - 3 = 1.5
    assert score({"name": "weather", "arguments": {"city": "Oslo", "days": 2}}) == 1.5
    # parameters {city} of {city, days}: 1/2, values 1: R = 2.5 -> 6 x 2.5/4 - 3 = 0.75
    assert score({"name": "weather", "arguments": {"city": "Rome"}}) == 0.75
    # one parameter too many: 2/3, values 2: R = 1 + 2/3 + 2 = 11/3 -> 6 x 11/12 - 3 = 2.5
    assert score({"name": "weather", "arguments": {"city": "Rome", "days": 2, "x": 1}}) == pytest.approx(2.5)
    # the call twice: names 1/2: R = 1/2 + 1 + 2 = 3.5 -> 6 x 3.5/4 - 3 = 2.25
    assert score(WEATHER, WEATHER) == 2.25
    # two expected, S = 1 + 2 + 2 = 5; one said: names 1/2, parameters 1, values 2: 3.5 -> 6 x 3.5/5 - 3 = 1.2
    assert score(WEATHER, expected=(WEATHER, TIME)) == pytest.approx(1.2)
    # other order is the same
    assert score(TIME, WEATHER, expected=(WEATHER, TIME)) == 3.0


def test_calls_of_one_name_are_matched_for_the_best():
    a, b = ({"name": "f", "arguments": {"x": x}} for x in (1, 2))
    assert evaluate(hermes(b, a), reference=(a, b)).statuses["accuracy"] == ["ok"]


def test_where_no_call_is_wanted_text_is_right_and_silence_is_not():
    evaluation = evaluate("It rains.", hermes(WEATHER), "", openai(WEATHER), reference=())
    assert evaluation.statuses["accuracy"] == ["ok", "wrong", "format", "wrong"]
    assert evaluation.values["accuracy"] == [3.0, -3.0, -3.0, -3.0]


@pytest.mark.parametrize(
    "completion",
    [
        "<tool_call>",
        f"{json.dumps(WEATHER)}</tool_call>",
        "<tool_call>weather(city='Rome')</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "city": "Rome"}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        "<tool_call><tool_call>" + json.dumps(WEATHER) + "</tool_call></tool_call>",
        hermes(*[WEATHER] * 65),
        openai(WEATHER, text=hermes(WEATHER)),
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": "{"}}]}],
    ],
)
def test_calls_that_cannot_be_read_are_at_the_floor(completion):
    evaluation = evaluate(completion)
    assert evaluation.statuses["accuracy"] == ["format"]
    assert evaluation.totals == [-3.0]


def test_a_call_within_prose_is_no_silence():
    evaluation = evaluate(f"Let me see: {json.dumps([WEATHER])}", f"{json.dumps(WEATHER)} then", reference=())
    assert evaluation.statuses["accuracy"] == ["wrong", "format"]


def test_calls_of_all_assistant_turns_count():
    tool = {"role": "tool", "content": "sunny"}
    turns = [*openai(WEATHER), tool, *openai(TIME), tool, {"role": "assistant", "content": "Sunny."}]
    assert evaluate(turns, reference=(WEATHER, TIME)).statuses["accuracy"] == ["ok"]


@pytest.mark.parametrize("reference", [None, "", "{", "7", '["weather"]', '[{"name": ""}]', 7])
def test_references_that_are_no_calls_are_errors(reference):
    evaluation = evaluate(hermes(WEATHER), reference=reference)
    assert evaluation.statuses["accuracy"] == ["error"]
    assert evaluation.values["accuracy"] == [-3.0]


def test_prose_earns_the_format_only_where_no_call_is_expected():
    prose = "It rains."
    assert evaluate(prose).statuses["format"] == ["format"]
    assert evaluate(prose).totals == [-3.0]
    assert evaluate(prose, reference=()).totals == [4.0]


def test_a_fixed_format_reads_no_other():
    assert evaluate(json.dumps([WEATHER]), format="hermes").values["accuracy"] == [-3.0]
    assert evaluate(hermes(WEATHER), format="json").statuses["accuracy"] == ["format"]
    assert evaluate("It rains.", format="json", reference=()).statuses["accuracy"] == ["ok"]
    assert evaluate(openai(WEATHER), format="openai").statuses["accuracy"] == ["ok"]
    with pytest.raises(PresetError, match="hermes"):
        load("tool-call", format="xml")
