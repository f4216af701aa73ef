from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from kit.errors import ConfigError
from kit.objective.schedules import parse_schedule


@pytest.mark.parametrize(
    ("spec", "step", "expected"),
    [
        ("linear(1.0, 0.0, 10)", 0, 1.0),
        ("linear(1.0, 0.0, 10)", 4, 0.6),  # 1 - 4/10
        ("linear(1.0, 0.0, 10)", 99, 0.0),  # stays at the end
        ("cosine(1.0, 0.0, 10)", 0, 1.0),
        ("cosine(1.0, 0.0, 10)", 5, 0.5),
        ("cosine(1.0, 0.0, 9)", 3, 0.75),  # (1 + cos 60°) / 2
        ("cosine(1.0, 0.0, 10)", 11, 0.0),
        ({"schedule": "linear", "start": 0, "end": 2, "steps": 4}, 1, 0.5),
    ],
)
def test_values(spec: Any, step: int, expected: float) -> None:
    assert parse_schedule(spec)(step) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["linear(1.0, 0.0, 10)", "cosine(1.0, 0.0, 10)"])
def test_every_schedule_survives_yaml_and_its_own_text(text: str) -> None:
    schedule = parse_schedule(text)
    assert parse_schedule(yaml.safe_load(yaml.safe_dump(schedule.to_spec()))) == schedule
    assert str(schedule) == text
    assert parse_schedule(schedule) is schedule


@pytest.mark.parametrize("text", ["linear(1.0, 0.2, 10)", "cosine(0.2, 1.0, 10)"])
def test_a_schedule_stays_between_its_extremes(text: str) -> None:
    schedule = parse_schedule(text)
    for step in range(20):
        assert min(schedule.extremes) <= schedule(step) <= max(schedule.extremes)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lineer(0, 1, 2)", r"No schedule is called 'lineer'. Did you mean 'linear'\?"),
        ("linear(0, 1)", "linear needs start, end, steps"),
        ("linear(0, 1, x)", "a schedule takes plain numbers"),
        ("linear", "is not a schedule. Write it as"),
        ("linear(0, 1, 0)", "steps must be a whole number of optimiser steps >= 1, got 0"),
        ("linear(0, 1, 2.5)", "steps must be a whole number of optimiser steps >= 1, got 2.5"),
        ("linear('a', 1, 2)", "linear: start must be a finite number, got 'a'"),
        ({"schedule": "linear", "start": 0, "end": math.inf, "steps": 2}, "end must be a finite number, got inf"),
        ({"schedule": "linear", "start": 0, "stop": 1, "steps": 2}, "linear has no 'stop'"),
        ({"schedule": "linear", "start": math.nan, "end": 0, "steps": 2}, "start must be a finite number, got nan"),
    ],
)
def test_a_wrong_schedule_says_what_was_seen(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_schedule(spec)
