"""Attacks that all presets for structured output and text must resist, each on a row of its data."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from pairwise import rest_in_matrix

from rewards import build_samples, load
from rewards.attacks import render_answer


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
