"""Attacks that all presets for structured output and text must resist, each on a row of its data; lengths."""

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from pairwise import rest_in_matrix

from rewards import Context, PresetError, build_samples, load
from rewards.attacks import render_answer
from rewards.components.lengths import SoftOverlong, length_in_tokens
from rewards.evaluation import run_component


class Row(NamedTuple):
    """A right answer, its style in completions (see rewards.attacks), columns of the row and parameters of the preset."""

    preset: str
    style: str
    right: str
    columns: dict[str, Any]
    params: Mapping[str, Any] = MappingProxyType({})


SUMMARY = "The council closed the old bridge after the flood and will build a new one next year."
SETUP = "CREATE TABLE t (x); INSERT INTO t VALUES (1), (2), (3)"
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
SCHEMA = '{"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}'
INSTRUCTIONS = {
    "instruction_id_list": ["startend:quotation", "length_constraints:number_words", "startend:end_checker"],
    "kwargs": [{}, {"num_words": 4, "relation": "at least"}, {"end_phrase": "at last"}],
}
ROWS = [
    Row("classification-label", "answer", "positive", {"reference": "positive"}, {"labels": ("positive", "negative")}),
    Row("classification-label", "plain", "positive", {"reference": "positive"}, {"style": "text"}),
    Row("ifeval", "plain", '"We came home at last"', INSTRUCTIONS),
    Row("json-schema", "json", '{"city": "Rome"}', {"schema": SCHEMA, "reference": '{"city": "Rome"}'}),
    Row("json-schema", "json", '{"city": "Rome"}', {"schema": SCHEMA}),
    Row("qa-short", "answer", "Paris", {"reference": ["Paris", "City of Paris"]}),
    Row("qa-short", "plain", "Paris", {"reference": "Paris"}, {"style": "text"}),
    Row("sql-exec", "sql", "SELECT max(x) FROM t", {"setup": SETUP, "reference": "SELECT 3 FROM t LIMIT 1"}),
    Row("text-overlap", "prose", SUMMARY, {"reference": SUMMARY}),
    Row("tool-call", "tool", CALL, {"reference": f"[{CALL}]"}),
]


def evaluate(row, *completions):
    size = len(completions)
    columns = {name: [value] * size for name, value in row.columns.items()}
    return load(row.preset, **row.params).score(build_samples(["What is it?"] * size, list(completions), **columns))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.preset}-{row.style}")
class TestEveryPreset:
    def test_unusable_rows_are_a_status_and_never_a_reward(self, row):
        preset = load(row.preset, **row.params)
        for value in (None, "", 7, -1.5, True, [], [None], {}, "\ud800", "\x00", "x" * 1_000_000, object(), b"x"):
            spoilt = row._replace(columns=dict.fromkeys(row.columns, value))
            evaluation = evaluate(spoilt, render_answer(row.style, row.right))
            assert evaluation.statuses[preset.checker] != ["ok"], value
            assert evaluation.values[preset.checker] in ([preset.components[0].component.floor], [None]), value

    def test_rows_without_their_columns_are_errors(self, row):
        preset = load(row.preset, **row.params)
        evaluation = evaluate(row._replace(columns={}), render_answer(row.style, row.right))
        assert evaluation.statuses[preset.checker] == ["error"]

    @pytest.mark.parametrize("size", rest_in_matrix(2, [1_000_000, 10_000_000]))
    def test_huge_completions_are_refused_at_once(self, row, size):
        checker = load(row.preset, **row.params).checker
        assert evaluate(row, render_answer(row.style, row.right)).statuses[checker] == ["ok"]
        for piece in ("<answer>", "{", " ", "\\boxed{", "</think>", "a", "\ud800", "```\n"):
            start = time.process_time()
            evaluation = evaluate(row, piece * (size // len(piece)))
            assert time.process_time() - start < 0.2
            assert "ok" not in evaluation.statuses[checker]


def samples(*words, lengths, prompts=None, **columns):
    prompts = prompts or ["?"] * len(words)
    return build_samples(prompts, list(words), [[1] * n for n in lengths], **columns)


def values(component, batch):
    return [score.value for score in run_component(component, batch, Context())]


def test_length_is_in_tokens_or_a_quarter_of_the_characters():
    [with_ids] = samples("right", lengths=[7])
    [without] = build_samples(["?"], ["right"])
    assert length_in_tokens(with_ids) == (7, "tokens")
    assert length_in_tokens(without) == (2, "characters")  # 5 characters / 4, rounded up


def test_soft_overlong_is_a_ramp_before_the_maximum():
    # L = 100, c = 20: 80 -> 0; 85 -> (100 - 20 - 85)/20 = -0.25; 100 -> -1; 101 -> -1
    batch = samples(*["right"] * 5, lengths=[0, 80, 85, 100, 101])
    assert values(SoftOverlong(max_length=100, cache=20), batch) == [0.0, 0.0, -0.25, -1.0, -1.0]
    with pytest.raises(PresetError, match="0 < cache <= max_length"):
        SoftOverlong(max_length=10, cache=20)


def test_ranges_hold_what_components_give():
    component = SoftOverlong(max_length=100, cache=20)
    batch = samples(*["right", "wrong"] * 6, lengths=[0, 1, 50, 99, 100, 101, 200, 5, 5, 1000, 10_000, 3])
    for value in values(component, batch):
        assert component.low <= value <= component.high
        assert not math.isnan(value)
