"""kit.report.charts, kit.report.panels and kit.runs.metrics: the choice of charts, and their drawing."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.report.charts import intervals, lines, number, svg, ticks
from kit.report.page import page
from kit.report.panels import PHASES, Panel, Series, columns_of, downsample, panels
from kit.runs.metrics import placed, points, result_of

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(-1e6, 1e6)


def drawn(svg: str) -> list[list[tuple[float, float]]]:
    """The polylines of a chart."""
    root = ElementTree.fromstring(svg)
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line)] for line in lines]


@given(st.lists(NUMBERS, max_size=3000), st.integers(4, 600))
def test_downsampling_keeps_the_ends_the_extremes_and_the_limit(values: list[float], most: int) -> None:
    places = downsample(np.array(values, float), most).tolist()
    assert len(places) <= most
    assert places == sorted(set(places))
    if values:
        assert (places[0], places[-1]) == (0, len(values) - 1)
        assert {min(values[place] for place in places), max(values[place] for place in places)} == {
            min(values),
            max(values),
        }


@given(NUMBERS, NUMBERS)
def test_ticks_cover_the_range_evenly_and_are_few(start: float, end: float) -> None:
    low, high = min(start, end), max(start, end)
    marks = ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert marks[0] <= low + slack
    assert marks[-1] >= high - slack
    assert 2 <= len(marks) <= 12
    gaps = [b - a for a, b in pairwise(marks)]
    assert max(gaps) - min(gaps) <= slack


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.9152, "0.915"), (12.84, "12.8"), (1.5e-5, "1.5e-5"), (-0.25, "−0.25"), (12_345.0, "12,345"), (0, "0"), (2e7, "2e7"),
     (None, "–"), (math.nan, "–"), (math.inf, "–"), (-3.1e-4, "−3.1e-4"), (100, "100")],
)  # fmt: skip
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_line_is_where_its_numbers_are() -> None:
    svg = lines({"a": [(0, 0.0), (5, 0.5), (10, 1.0)]}, "T", "step", "y")
    ((left, bottom), (middle, half), (right, top)) = drawn(svg)[0]
    assert middle == pytest.approx((left + right) / 2, abs=0.06)
    assert half == pytest.approx((bottom + top) / 2, abs=0.06)
    assert bottom > top  # SVG counts downward


@pytest.mark.parametrize("svg", [lines({}, "T", "x", "y"), lines({"a": []}, "T", "x", "y"), intervals([], "T")])
def test_without_numbers_a_chart_says_so(svg: str) -> None:
    assert "nothing to draw yet" in svg
    ElementTree.fromstring(svg)


def test_long_noisy_series_get_their_mean_drawn_over_them() -> None:
    series = [(float(x), float(x % 2)) for x in range(10_000)]
    single, mean = drawn(lines({"a": series}, "T", "step", "y"))
    assert len(single) <= 500
    assert max(y for _, y in mean) - min(y for _, y in mean) < 0.1 * (
        max(y for _, y in single) - min(y for _, y in single)
    )
    assert len(drawn(lines({"a": series}, "T", "step", "y", smooth=False))) == 1


def test_names_and_labels_are_text() -> None:
    bad = '<script>"&'
    dots = Series.of_points(bad, [(1.0, 1.0), (2.0, 1.0)], [(1.0, 0.0, 2.0), (2.0, 0.0, 2.0)])
    for drawing in (
        svg(Panel(bad, bad, [dots, Series.of_points("b", [(1.0, 1.0)])]), bad, marks=[(1, bad)]),
        intervals([(bad, 1, 0, 2)], bad, reference=0),
    ):
        assert "<script" not in drawing
        assert ElementTree.fromstring(drawing).findtext(f"{SVG}title") == bad


def test_a_band_lies_around_its_line_and_whiskers_stand_at_their_points() -> None:
    x, y = np.arange(4.0), np.array([1.0, 2.0, np.nan, 3.0])
    band = Series("a", x, y, y - 1, y + 1)
    dots = Series.of_points("b", [(0.0, 1.0), (3.0, 2.0)], [(3.0, 0.0, 4.0)])
    root = ElementTree.fromstring(svg(Panel("T", "y", [band, dots])))
    polygon = next(root.iter(f"{SVG}polygon")).attrib["points"].split()
    assert len(polygon) == 2 * 3, "a step without a number is omitted"
    (whisker,) = root.iter(f"{SVG}path")
    assert [circle.findtext(f"{SVG}title") for circle in root.iter(f"{SVG}circle")] == ["b: 1 at 0", "b: 2 at 3"]
    last = [float(circle.attrib["cx"]) for circle in root.iter(f"{SVG}circle")][-1]
    assert whisker.attrib["d"].startswith(f"M{last:.1f},")


def test_a_page_escapes_text_and_takes_pieces_as_they_are() -> None:
    document = page("<T>", [("One", "<b>text</b>"), ("Two", lines({}, "C", "x", "y")), ("Three", "")])
    assert "&lt;b&gt;text&lt;/b&gt;" in document
    assert "<svg" in document
    assert "<title>&lt;T&gt;</title>" in document
    assert re.findall(r'href="#(\w+)"', document) == ["one", "two", "three"]


def test_lines_without_a_quantity_leave_no_gap_and_the_first_name_counts() -> None:
    metrics = [{"step": 1, "kl/k3": 0.5}, {"step": 2}, {"step": 3, "kl/k3": None}, {"step": 4, "kl/k3": 1.0}]
    assert points(metrics, "kl", "kl/k3") == [(1.0, 0.5), (4.0, 1.0)]
    assert points([*metrics, {"step": 5, "kl": 9.0}], "kl", "kl/k3") == [(5.0, 9.0)]


def test_evaluations_stand_at_their_step_and_later_ones_by_hand_at_none() -> None:
    scores = {
        "after": {"step": 30},
        "before": {"step": 0},
        "again": {"step": 30},
        "step-00020": {"step": 20},
        "step-00010": {},
    }
    assert [step for step, _ in placed(scores)] == [0, 20, 30]
    assert result_of(scores) == "after"
    assert result_of(scores | {"after": {}}) == "step-00020", "an unreadable value is ignored"
    assert result_of({"before": {"step": 0}}) is None


def test_shares_are_drawn_in_per_cent_with_their_intervals() -> None:
    score = {
        "step": 0,
        "greedy_accuracy": {"value": 0.5, "low": 0.4, "high": 0.6},
        "pass@4": {"value": None, "low": 0, "high": 1},
    }
    (panel,) = panels({}, {"before": score})
    (line,) = panel.series
    assert (line.name, line.x.tolist(), line.y.tolist(), line.dots) == ("greedy accuracy", [0.0], [50.0], True)
    assert [end.tolist() for end in line.band()] == [[0.0], [40.0], [60.0]]
    assert (panel.low, panel.high) == (0.0, 100.0)


def test_columns_are_by_step_and_the_last_line_of_a_step_counts() -> None:
    columns = columns_of(
        [{"step": 3, "a": 1.0}, {"step": 1, "a": 5.0, "b": True}, {"step": 3, "a": 2.0, "c": 7}, {"a": None}]
    )
    assert columns["step"].tolist() == [1.0, 3.0, 4.0]
    assert columns["a"][:2].tolist() == [5.0, 2.0]
    assert np.isnan(columns["a"][2])
    assert "b" not in columns
    assert np.isnan(columns["c"][[0, 2]]).all()


def test_the_phases_are_those_that_the_trainer_measures() -> None:
    from kit.trainer.metric_log import PHASES as MEASURED
    from kit.trainer.metric_log import SAVING

    assert set(PHASES) == {*MEASURED, SAVING.removeprefix("seconds/")}
