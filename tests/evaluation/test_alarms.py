"""kit.evaluation.alarms: every planted defect gives one alert, and sound runs give none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kit.evaluation.alarms import AlertMonitor, reward_hacking

SOUND = {
    "reward": 0.5, "groups/zero_spread": 0.4, "completions/clipped_ratio": 0.05, "completions/mean_length": 200.0,
    "entropy": 0.5, "kl": 0.02, "grad_norm": 0.2, "answers/right": 0.3,
}  # fmt: skip
KEY = "greedy_accuracy"


def lines(count: int = 60, **courses: Any) -> list[dict[str, Any]]:
    """Metric lines of a sound run, except for `courses`: functions of the step, by name with _ for /."""
    known = {key.replace("/", "_"): key for key in SOUND}
    return [
        {"step": step, **SOUND, **{known[name]: course(step) for name, course in courses.items()}}
        for step in range(1, count + 1)
    ]


def told(metric_lines: list[dict[str, Any]]) -> list[tuple[str, int]]:
    watch = AlertMonitor()
    return [(alert.name, alert.step) for line in metric_lines for alert in watch.see(line)]


@pytest.mark.parametrize(
    ("courses", "name", "step"),
    [
        (
            {"groups_zero_spread": lambda s: 1.0 if s > 20 else 0.4},
            "zero_spread",
            29,
        ),  # 8 x 1 + 2 x 0.4 < 9 <= 9 x 1 + 0.4
        ({"completions_clipped_ratio": lambda s: 0.9 if s > 20 else 0.0}, "truncated", 24),  # 4 x 0.9 / 10 >= 0.3
        (
            {"completions_mean_length": lambda s: 30.0 if s > 20 else 200.0},
            "length_collapse",
            26,
        ),  # 6 x 30 + 4 x 200 < 1000
        ({"completions_mean_length": lambda s: 900.0 if s > 20 else 200.0}, "length_explosion", 23),  # 410 > 400
        ({"completions_mean_length": lambda s: 300 * 0.96**s}, "length_collapse", None),  # slowly
        ({"entropy": lambda s: max(0.001, 0.6 - 0.02 * s)}, "entropy_collapse", None),
        ({"kl": lambda s: 2.0 if s == 30 else 0.02}, "kl_spike", 30),
        ({"reward": lambda s: min(s, 30) / 40, "answers_right": lambda s: 0.01}, "plateau", 20),
        ({"grad_norm": lambda s: None if s in (30, 32, 33) else 0.2}, "gradient_overflow", 33),
        ({"grad_norm": lambda s: float("inf") if s in (30, 32, 33) else 0.2}, "gradient_overflow", 33),
    ],
)
def test_a_defect_is_told_once_and_nothing_else_is(courses: dict[str, Any], name: str, step: int | None) -> None:
    alerts = told(lines(100, **courses))
    assert [alert for alert, _ in alerts] == [name]
    assert step is None or alerts == [(name, step)]


def test_a_reward_that_rises_with_right_answers_is_no_plateau() -> None:
    hard = lines(60, reward=lambda s: min(s, 40) / 500, answers_right=lambda s: min(s, 40) / 500)
    assert told(hard) == []


def test_a_defect_that_comes_back_is_told_again_after_ten_quiet_lines() -> None:
    waves = lines(120, groups_zero_spread=lambda s: 1.0 if s <= 20 or s > 60 else 0.0)
    assert told(waves) == [("zero_spread", 10), ("zero_spread", 69)]
    flicker = lines(60, kl=lambda s: {30: 1.0, 35: 4.0}.get(s, 0.02))
    assert told(flicker) == [("kl_spike", 30)]  # one episode


def simulated(seed: int, steps: int = 300) -> list[dict[str, Any]]:
    """A sound run with small, noisy batches: it learns, its completions grow, entropy falls, KL rises."""
    rng, course = np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        t = step / steps
        course.append(
            {
                "step": step,
                "reward": 0.2 + 0.6 * t + rng.normal(0, 0.15),
                "groups/zero_spread": rng.binomial(8, 0.3 + 0.3 * t) / 8,
                "completions/clipped_ratio": rng.binomial(64, 0.05) / 64,
                "completions/mean_length": (150 + 250 * t) * rng.lognormal(0, 0.3),
                "entropy": 0.6 * np.exp(-1.5 * t) * rng.lognormal(0, 0.2),
                "kl": 0.3 * t * rng.lognormal(0, 0.4),
                "grad_norm": rng.lognormal(-1.5, 0.5),
            }
        )
    return course


def test_sound_runs_are_left_in_peace() -> None:
    assert [told(simulated(seed)) for seed in range(20)] == [[]] * 20


# Every fourth step of the quickstart on two cores (seed 0): a small model that learns fast, sharpens and is nearly done.


# --- reward hacking ---------------------------------------------------------------------------------------------------


def evaluation(step: int, right: Any) -> dict[str, Any]:
    columns = {"id": [str(place) for place in range(len(right))], "greedy_correct": [bool(value) for value in right]}
    return {"step": step, "k": 1, KEY: {"value": float(np.mean(right))}, "per_problem": columns}


def first(share: float, problems: int = 200) -> list[bool]:
    return [place < share * problems for place in range(problems)]


def rewards(steps: int, slope: float, seed: int = 0) -> list[dict[str, Any]]:
    noise = np.random.default_rng(seed).normal(0, 0.1, steps)
    return [{"step": step, "reward": slope * step / steps + noise[step - 1]} for step in range(1, steps + 1)]


def test_reward_up_and_held_out_down_is_the_alarm() -> None:
    course = [evaluation(step, first(share)) for step, share in ((0, 0.3), (20, 0.6), (40, 0.45), (60, 0.4))]
    alarm = reward_hacking(course, rewards(60, 2.0), KEY)
    assert alarm is not None
    assert (alarm.best.step, alarm.best.value, alarm.now.step, alarm.now.value) == (20, 0.6, 60, 0.4)
    # 40 problems lost and none won: 2 ** -40
    assert alarm.drop_p == pytest.approx(2.0**-40)
    assert alarm.rise_p < 0.05


@pytest.mark.parametrize(
    ("shares", "slope"),
    [
        ((0.3, 0.6, 0.45, 0.4), 0.0),  # the reward does not rise; the model has become worse
        ((0.3, 0.6, 0.45, 0.4), -2.0),
        ((0.3, 0.6, 0.6, 0.4), 2.0),  # below for the first time, which may be chance
        ((0.3, 0.6, 0.4, 0.6), 2.0),  # it was chance
        ((0.3, 0.4, 0.5, 0.6), 2.0),
        ((0.6, 0.6, 0.59, 0.59), 2.0),  # 2 problems of 200
        ((0.6, 0.4), 2.0),  # too few evaluations
    ],
)
def test_anything_less_is_no_alarm(shares: tuple[float, ...], slope: float) -> None:
    course = [evaluation(20 * place, first(share)) for place, share in enumerate(shares)]
    assert reward_hacking(course, rewards(60, slope), KEY) is None


def alarms(seed: int, *, evaluations: int = 20, falls: float = 0.0, carried: float = 0.0) -> bool:
    """Return whether the alarm is raised in a simulated run whose reward rises all the time.

    Each problem has its own probability of being solved. From the middle on, it falls by the share `falls` within three
    evaluations. `carried`: the share of answers that stay the same between evaluations.
    """
    rng = np.random.default_rng(seed)
    chance, course, right = rng.beta(1.0, 0.6, size=200), [], np.zeros(200, bool)
    metrics = rewards(20 * evaluations, 1.0, seed)
    for number in range(evaluations + 1):
        left = 1 - falls * min(1.0, max(0.0, (number - evaluations // 2) / 3))
        drawn = rng.random(200) < chance * left
        right = np.where(rng.random(200) < carried, right, drawn) if number else drawn
        course.append(evaluation(20 * number, right))
        if reward_hacking(course, metrics[: 20 * number], KEY) is not None:
            return True
    return False


@pytest.mark.parametrize(("carried", "most"), [(0.0, 0.05), (0.7, 0.10)])
def test_it_does_not_cry_wolf(carried: float, most: float) -> None:
    """20 evaluations of 200 problems with a rising reward and a level score: at most this share of runs has a false alarm."""
    assert sum(alarms(seed, carried=carried) for seed in range(120)) / 120 <= most


def test_a_real_fall_is_found() -> None:
    assert all(alarms(seed, falls=0.25) for seed in range(25))
