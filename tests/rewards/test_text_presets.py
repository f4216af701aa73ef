"""What all presets for structured output and text must withstand, each with a row of its own kind of data."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from pairwise import rest_in_matrix

from rewards import build_samples, load
from rewards.hacks import answered, known_hacks


class Row(NamedTuple):
    """A prompt with a right and a wrong answer, and how answers stand in completions (see rewards.hacks)."""

    preset: str
    style: str
    right: str
    wrong: str
    columns: dict[str, Any]
    params: Mapping[str, Any] = MappingProxyType({})
    prompt: str = "What is it?"


SUMMARY = "The council closed the old bridge after the flood and will build a new one next year."
GERMAN = "Der Hund schläft heute den ganzen Tag im Garten und träumt von der Jagd."
SETUP = "CREATE TABLE t (x); INSERT INTO t VALUES (1), (2), (3)"
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
SCHEMA = '{"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}'
INSTRUCTIONS = {
    "instruction_id_list": ["startend:quotation", "length_constraints:number_words", "startend:end_checker"],
    "kwargs": [{}, {"num_words": 4, "relation": "at least"}, {"end_phrase": "at last"}],
}
ROWS = [
    Row(
        "classification-label",
        "answer",
        "positive",
        "negative",
        {"reference": "positive"},
        {"labels": ("positive", "negative")},
    ),
    Row("classification-label", "plain", "positive", "negative", {"reference": "positive"}, {"style": "text"}),
    Row("ifeval", "plain", '"We came home at last"', 'Not "yet" it seems', INSTRUCTIONS),
    Row(
        "ifeval",
        "answer",
        '"We came home at last"',
        'Not "yet" it seems',
        INSTRUCTIONS,
        {"style": "answer"},
    ),
    Row(
        "json-schema",
        "json",
        '{"city": "Rome"}',
        '{"city": "Oslo"}',
        {"schema": SCHEMA, "reference": '{"city": "Rome"}'},
    ),
    Row("json-schema", "json", '{"city": "Rome"}', '{"town": "Rome"}', {"schema": SCHEMA}),
    Row("qa-short", "answer", "Paris", "London", {"reference": ["Paris", "City of Paris"]}),
    Row("qa-short", "answer", "72", "70", {"reference": "72"}),
    Row("qa-short", "plain", "Paris", "London", {"reference": "Paris"}, {"style": "text"}),
    Row(
        "sql-exec",
        "sql",
        "SELECT max(x) FROM t",
        "SELECT min(x) FROM t",
        {"setup": SETUP, "reference": "SELECT 3 FROM t LIMIT 1"},
    ),
    Row("summarize", "prose", SUMMARY, "A cat sat in the sun all day.", {"reference": SUMMARY}),
    Row("tool-call", "tool", CALL, CALL.replace("Rome", "Oslo"), {"reference": f"[{CALL}]"}),
    Row("translate", "prose", GERMAN, "Morgen wird es überall regnen.", {"reference": GERMAN, "target_language": "de"}),
]


def evaluate(row, *completions):
    size = len(completions)
    columns = {name: [value] * size for name, value in row.columns.items()}
    return load(row.preset, **row.params).score(build_samples([row.prompt] * size, list(completions), **columns))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.preset}-{row.style}")
class TestEveryPreset:
    def test_right_is_correct_and_wrong_is_not_nor_a_known_hack(self, row):
        preset = load(row.preset, **row.params)
        hacks = known_hacks(row.prompt, row.right, row.wrong, row.style)
        honest = [answered(row.style, row.right), answered(row.style, row.wrong)]
        evaluation = evaluate(row, *honest, *(hack.completion for hack in hacks))
        right, wrong, *statuses = evaluation.statuses[preset.checker]
        assert (right, wrong) == ("ok", "wrong")
        assert set(statuses) <= {"wrong", "format", "timeout"}
        assert max(evaluation.totals[1:]) < evaluation.totals[0]

    def test_unusable_rows_are_a_status_and_never_a_reward(self, row):
        preset = load(row.preset, **row.params)
        for value in (None, "", 7, -1.5, True, [], [None], {}, "\ud800", "\x00", "x" * 1_000_000, object(), b"x"):
            spoilt = row._replace(columns=dict.fromkeys(row.columns, value))
            evaluation = evaluate(spoilt, answered(row.style, row.right))
            assert evaluation.statuses[preset.checker] != ["ok"], value
            assert evaluation.values[preset.checker] in ([preset.components[0].component.floor], [None]), value

    def test_rows_without_their_columns_are_errors(self, row):
        preset = load(row.preset, **row.params)
        evaluation = evaluate(row._replace(columns={}), answered(row.style, row.right))
        assert evaluation.statuses[preset.checker] == ["error"]

    @pytest.mark.parametrize("size", rest_in_matrix(2, [1_000_000, 10_000_000]))
    def test_huge_completions_are_refused_at_once(self, row, size):
        evaluate(row, answered(row.style, row.right))
        for piece in ("<answer>", "{", " ", "\\boxed{", "</think>", "a", "\ud800", "```\n"):
            start = time.process_time()
            evaluation = evaluate(row, piece * (size // len(piece)))
            assert time.process_time() - start < 0.2
            assert "ok" not in evaluation.statuses[load(row.preset, **row.params).checker]
