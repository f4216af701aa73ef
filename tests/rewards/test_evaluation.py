import math

import pytest
from reward_parts import Fixed

from rewards import Preset, Score, build_samples


def evaluate(*values, prompts=None, seconds=None):
    scores = [Score(v, "ok" if v is not None else "infra", seconds=seconds) for v in values]
    samples = build_samples(prompts or ["p"] * len(values), ["x"] * len(values))
    return Preset([(Fixed("a", scores, low=-9.0, high=9.0), 2.0)]).score(samples)


def test_mean_and_deviation_are_over_the_values_that_are_there():
    evaluation = evaluate(1.0, 3.0, None)
    # mean (1 + 3) / 2 = 2; deviation sqrt((1 + 1) / 2) = 1; totals are twice that
    assert (evaluation.mean("a"), evaluation.std("a")) == (2.0, 1.0)
    assert (evaluation.mean(), evaluation.std()) == (4.0, 2.0)
    assert math.isnan(evaluate(None).mean("a"))
    assert math.isnan(evaluate(None).std("a"))


def test_groups_of_one_value_have_no_spread():
    evaluation = evaluate(1.0, 1.0, 0.0, 1.0, None, None, None, 0.5, prompts=list("aabbccdd"))
    assert evaluation.groups == [0, 0, 1, 1, 2, 2, 3, 3]
    # a: 1 1 -> none; b: 0 1 -> some; c: excluded; d: 0.5 alone -> none. 2 of 3
    assert evaluation.zero_spread_share("a") == pytest.approx(2 / 3)
    assert evaluation.zero_spread_share() == pytest.approx(2 / 3)
    assert evaluate(None).zero_spread_share("a") == 0.0


def test_spread_in_one_component_may_cancel_in_the_total():
    first, second = Fixed("a", [Score(1.0), Score(0.0)]), Fixed("b", [Score(0.0), Score(1.0)])
    evaluation = Preset([(first, 1.0), (second, 1.0)]).score(build_samples(["p"] * 2, ["x"] * 2))
    assert evaluation.zero_spread_share("a") == 0.0
    assert evaluation.zero_spread_share() == 1.0


def test_the_summary_holds_what_is_logged():
    summary = evaluate(1.0, 3.0, seconds=0.004).summary("a")
    assert summary["mean"] == 2.0
    assert summary["std"] == 1.0
    assert summary["zero_spread"] == 0.0
    assert summary["status_ok"] == 1.0
    assert summary["latency_p50_ms"] == pytest.approx(4.0)
    assert summary["latency_p95_ms"] == pytest.approx(4.0)
    assert len([key for key in summary if key.startswith("status_")]) == 7
