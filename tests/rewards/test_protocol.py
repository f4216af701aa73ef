import math

import pytest
from reward_parts import Fixed

from rewards import Context, Preset, Score, build_samples, from_function
from rewards.evaluation import settle


class Hostile:
    """An object whose special methods raise."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __float__(self):
        raise RuntimeError("no float")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = object.__hash__


def process(weights=(1.0,), columns=(), ids=((1, 2, 3), (4, 5))):
    """Scores of a preset whose components return the token values of `columns`, on one completion for each of `ids`."""
    parts = [
        (Fixed(f"c{n}", [Score(0.0, token_values=values) for values in column]), weight)
        for n, (column, weight) in enumerate(zip(columns, weights, strict=True))
    ]
    return Preset(parts).score(build_samples(["p"] * len(ids), ["x"] * len(ids), list(ids)))


def test_token_values_are_weighted_and_summed_over_components():
    evaluation = process((2.0, 0.5), [([0.1, 0.0, 1.0], None), ([1.0, 1.0, -1.0], [0.0, 4.0])])
    # 2 x 0.1 + 0.5 = 0.7; 0.5; 2 - 0.5 = 1.5; second completion: 0, 0.5 x 4 = 2
    assert [[round(v, 9) for v in row] for row in evaluation.token_rewards] == [[0.7, 0.5, 1.5], [0.0, 2.0]]
    assert evaluation.token_values["c0"] == [[0.1, 0.0, 1.0], None]
    assert evaluation.totals == [0.0, 0.0]  # the scalars count by themselves


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0], "1 token values for 3 tokens"),
        ([], "0 token values for 3 tokens"),
        ([1.0, math.nan, 0.0], "not a finite number"),
        ([1.0, "x", 0.0], "not a finite number"),
        ([1.0, None, 0.0], "not a finite number"),
        (7, "cannot be read"),
    ],
)
def test_token_values_that_do_not_fit_the_tokens_are_an_error(values, reason):
    evaluation = process((1.0,), [(values, [0.5, 0.5])])
    assert evaluation.statuses["c0"] == ["error", "ok"]
    assert reason in evaluation.infos["c0"][0]["reason"]
    assert evaluation.token_rewards == [[0.0, 0.0, 0.0], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("status", "values"),
    [
        *((status, None) for status in ("timeout", "error", "not_applicable", "infra")),
        *((status, [1.0, 2.0]) for status in ("ok", "wrong", "format")),
    ],
)
def test_verdicts_keep_their_token_values_and_failures_drop_them(status, values):
    score = settle(Fixed(), Score(0.0, status, token_values=(1, 2)), n_tokens=2)
    assert (score.token_values, score.status) == (values, status)


def test_a_function_may_return_one_list_of_numbers_per_completion():
    def steps(completion_ids):
        return [[0.5] * len(ids) for ids in completion_ids]

    preset = Preset([from_function(steps, weight=2.0)])
    evaluation = preset.score(build_samples(["p"] * 2, ["x"] * 2, [[1, 2], [3]]))
    assert evaluation.token_rewards == [[1.0, 1.0], [1.0]]
    assert evaluation.totals == [0.0, 0.0]
    assert evaluation.statuses["steps"] == ["ok", "ok"]


def test_prompt_ids_and_log_probabilities_reach_components_and_functions():
    got = {}

    def f(completions, prompt_ids, logps):
        got.update(prompt_ids=prompt_ids, logps=logps)
        return [1.0]

    samples = build_samples(["p"], ["x"], [[5, 6]], prompt_ids=[[1, 2]], logps=[[-0.5, -0.1]], finish_reason=["stop"])
    assert (samples[0].prompt_ids, samples[0].logps, samples[0].finish_reason) == ([1, 2], [-0.5, -0.1], "stop")
    assert "prompt_ids" not in samples[0].columns
    assert Preset([from_function(f)]).score(samples).totals == [1.0]
    assert got == {"prompt_ids": [[1, 2]], "logps": [[-0.5, -0.1]]}


def test_random_numbers_depend_on_seed_step_and_group_alone():
    context = Context(seed=1, step=2)
    first = context.rng(3).random()
    assert first == Context(seed=1, step=2, total_steps=9).rng(3).random()
    others = [Context(seed=2, step=2), Context(seed=1, step=3)]
    assert first not in [
        *(other.rng(3).random() for other in others),
        context.rng(4).random(),
        context.rng(3, "b").random(),
    ]


@pytest.mark.parametrize(
    "score",
    [
        Score(Hostile()),
        Score(1.0, Hostile()),
        Score(1.0, "ok", Hostile()),
        Score(1.0, "ok", {}, seconds="soon"),
        Score(1.0, ["ok"]),
        Score("1.0.0"),
        Hostile(),
    ],
)
def test_no_score_however_odd_raises(score):
    evaluation = Preset([(Fixed("a", [score]), 1.0)]).score(build_samples(["p"], ["x"]))
    assert evaluation.statuses["a"] == ["error"]
    assert evaluation.totals == [0.0]
