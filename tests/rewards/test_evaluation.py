import pytest
from reward_parts import Fixed

from rewards import Preset, Score, build_samples


def evaluate(*values, prompts=None, seconds=None):
    scores = [Score(v, "ok" if v is not None else "infra", seconds=seconds) for v in values]
    samples = build_samples(prompts or ["p"] * len(values), ["x"] * len(values))
    return Preset([(Fixed("a", scores, low=-9.0, high=9.0), 2.0)]).score(samples)


def test_groups_of_one_value_have_no_spread():
    evaluation = evaluate(1.0, 1.0, 0.0, 1.0, None, None, None, 0.5, prompts=list("aabbccdd"))
    assert evaluation.groups == [0, 0, 1, 1, 2, 2, 3, 3]
    # a: 1 1 -> none; b: 0 1 -> some; c: excluded; d: 0.5 alone -> none. 2 of 3
    assert evaluation.zero_spread_share("a") == pytest.approx(2 / 3)
    assert evaluate(None).zero_spread_share("a") == 0.0
