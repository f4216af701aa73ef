import math
import pickle

import pytest
from reward_parts import Fixed

from rewards import Context, Preset, PresetError, Score, build_samples
from rewards.schedules import Linear, Piecewise


def step_down(step, total_steps):
    return 1.0 if step < 3 else 0.25


def preset(weight, **options):
    accuracy, style = Fixed("accuracy", [Score(1.0)] * 2), Fixed("style", [Score(0.5), Score(None, "infra")])
    return Preset([(accuracy, 1.0), (style, weight)], **options)


@pytest.fixture
def batch():
    return build_samples(["p"] * 2, ["x"] * 2)


@pytest.mark.parametrize(
    ("step", "total", "weight"),
    [(0, 100, 1.0), (25, 100, 0.75), (50, 100, 0.5), (99, 100, 0.5), (7, 0, 1.0), (300, 100, 0.5)],
)
def test_linear_runs_between_its_ends_and_is_level_outside(step, total, weight):
    assert Linear(start=1.0, end=0.5, until=0.5)(step, total) == pytest.approx(weight)


def test_piecewise_interpolates_between_points():
    schedule = Piecewise(points=((0.1, 0.0), (0.2, 1.0), (0.6, 0.0)))
    # 0.15 is half way up; 0.4 half way down
    assert [schedule.at(f) for f in (0.0, 0.1, 0.15, 0.2, 0.4, 0.6, 1.0)] == pytest.approx([0, 0, 0.5, 1, 0.5, 0, 0])


@pytest.mark.parametrize(
    "points",
    [(), ((0.5, 1.0), (0.5, 2.0)), ((0.5, 1.0), (0.2, 2.0)), ((-0.1, 1.0),), ((0.0, math.nan),), ((1.5, 1.0),)],
)
def test_points_that_make_no_course_are_refused(points):
    with pytest.raises(PresetError, match="Give points"):
        Piecewise(points=points)


def test_the_weight_of_the_step_counts(batch):
    scheduled = preset(Linear(start=0.4, end=0.0))
    # 1 + 0.4 x 0.5 = 1.2 at the start, 1 + 0.2 x 0.5 = 1.1 half way, 1 at the end; excluded values do not count
    for step, total in ((0, 1.2), (50, 1.1), (100, 1.0)):
        evaluation = scheduled.score(batch, Context(step=step, total_steps=100))
        assert evaluation.totals == [pytest.approx(total), 1.0]
        assert evaluation.values["style"] == [0.5, None]  # native
    assert scheduled.weights == {"accuracy": 1.0, "style": 0.4}
    assert scheduled.scheduled == {"style"}
    assert "style x (schedule)" in repr(scheduled)


def test_any_function_of_the_step_will_do(batch):
    scheduled = preset(step_down)
    assert scheduled.score(batch, Context(step=2)).totals[0] == 1.5
    assert scheduled.score(batch, Context(step=3)).totals[0] == 1.125
    assert pickle.loads(pickle.dumps(scheduled)).weights_at(5, 10) == {"accuracy": 1.0, "style": 0.25}


def test_process_rewards_follow_the_schedule():
    component = Fixed("a", [Score(0.0, token_values=[1.0, 2.0])])
    evaluation = Preset([(component, Linear(start=1.0, end=0.0))]).score(
        build_samples(["p"], ["x"], [[1, 2]]), Context(step=50, total_steps=100)
    )
    assert evaluation.token_rewards == [[0.5, 1.0]]


@pytest.mark.parametrize("weight", [lambda step, total: step / total, lambda step, total: math.nan, lambda: 1.0])
def test_a_schedule_that_fails_is_refused_when_the_preset_is_built(weight):
    with pytest.raises(PresetError, match="style"):
        preset(weight)


def test_shaping_is_checked_along_the_whole_course():
    preset(Linear(start=1.0, end=0.0), checker="accuracy")
    with pytest.raises(PresetError, match="at 50% of the run"):
        preset(Piecewise(points=((0.0, 0.1), (0.5, 1.5), (1.0, 0.1))), checker="accuracy")
    with pytest.raises(PresetError, match="nothing is known"):
        preset(step_down, checker="accuracy")
    preset(step_down, checker="accuracy", allow_shaping_above_correctness=True)


def test_shaping_is_checked_between_the_corners_of_several_schedules():
    parts = [(Fixed("accuracy"), 1.0)]
    rising, falling = Linear(start=0.0, end=0.9), Linear(start=0.9, end=0.0)
    # 0.9 f + 0.9 (1 - f) = 0.9 everywhere, though the largest weights add up to 1.8
    Preset([*parts, (Fixed("a"), rising), (Fixed("b"), falling)], checker="accuracy")
    with pytest.raises(PresetError, match="Give it a positive one"):
        Preset([(Fixed("accuracy"), falling)], checker="accuracy")
