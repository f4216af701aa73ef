"""kit.report.machine: where the seconds went, and what is said of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kit.report.machine import ADVICE, MEANING, spending
from kit.report.panels import PHASES


def columns(**seconds: float) -> dict[str, Any]:
    """Five steps, of which the first took a hundred times as long."""
    shape = np.array([100.0, 1, 1, 1, 1])
    return {f"seconds/{phase}": shape * seconds.get(phase, 0.0) for phase in PHASES}


def test_the_largest_term_is_named_without_the_first_step() -> None:
    found = columns(generation=1.0, update=3.0)
    found["seconds/generation"][0] = 1e6
    spent = spending(found, {})
    assert spent is not None
    assert (spent.largest, spent.steps, spent.total) == ("update", 4, 16.0)
    assert spent.words.startswith("Update takes the most: 75% of the time, 3 s of 4 s a step")
    assert spent.rows[0][:3] == ("update", "3", "75.0%")


def test_a_single_step_counts_and_none_says_nothing() -> None:
    one = {"seconds/update": np.array([2.0])}
    assert getattr(spending(one, {}), "seconds", None) == {"update": 2.0}
    for nothing in ({}, {"reward": np.ones(3)}, {"seconds/update": np.array([math.nan])}, columns()):
        assert spending(nothing, {}) is None


@pytest.mark.parametrize(
    ("largest", "more", "config", "said"),
    [
        (
            "generation",
            {"completions/mean_length": 20.0, "completions/max_length": 400.0},
            {},
            "400 tokens where the mean is 20",
        ),
        ("generation", {"groups/zero_spread": 0.8}, {}, "80% of the groups teach nothing"),
        ("generation", {}, {"engine": {"name": "hf"}, "gpu": "H200"}, "generation.engine: vllm"),
        (
            "rewards",
            {"rewards/judge/latency_p95_ms": 900.0, "rewards/fast/latency_p95_ms": 1.0},
            {},
            "component is judge",
        ),
        ("scoring", {"kl/k3": 0.1}, {}, "reference policy"),
        ("update", {"tokens/useful": 0.4}, {}, "Only 40%"),
        ("saving", {}, {}, "run.save_every"),
        ("other", {}, {}, "Tokenizing"),
    ],
)
def test_what_to_change_fits_what_was_measured(largest: str, more: dict[str, float], config: Any, said: str) -> None:
    found = columns(**{largest: 1.0}) | {key: np.full(5, value) for key, value in more.items()}
    spent = spending(found, {}, config)
    assert spent is not None
    assert said in " ".join(spent.advice)
    without = spending(columns(**{largest: 1.0}), {})
    assert without is not None
    assert not (more or config) or said not in " ".join(without.advice)


def test_every_phase_has_a_meaning_and_advice() -> None:
    assert set(ADVICE) == set(MEANING) == set(PHASES)


def test_the_phases_are_those_that_the_trainer_measures() -> None:
    from kit.trainer.metric_log import PHASES as MEASURED
    from kit.trainer.metric_log import SAVING

    assert set(PHASES) == {*MEASURED, SAVING.removeprefix("seconds/")}
