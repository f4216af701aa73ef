import math

import pytest

from rewards import Context, PresetError, build_samples
from rewards.components.lengths import SoftOverlong, length_in_tokens
from rewards.evaluation import run_component


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
