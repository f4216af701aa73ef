import math

import pytest
from reward_parts import Fixed

from rewards import Preset, PresetError, Score, build_samples, combine, from_functions, gate

OK = Score(1.0)


def test_combined_presets_add_their_parts_and_keep_gates_and_checker(samples):
    inner = [(Fixed("a", [Score(0.0)]), 1.0), (Fixed("b", [Score(1.0)]), 0.5)]
    first = Preset([(Fixed("a", [Score(1.0)]), 2.0)], name="first", checker="a")
    second = Preset(inner, name="second", gates=[gate("a", "b")])
    both = combine([(first, 1.0), (second, 0.1)])
    assert both.weights == {"a": 2.0, "second.a": 0.1, "b": 0.05}
    assert both.checker == "a"
    # The gate is that of the second preset's own `a`, which did not pass.
    assert both.score(samples("x")).values["b"] == [0.0]
    assert second.weights == {"a": 1.0, "b": 0.5}, "the original presets must not change"


@pytest.mark.parametrize("status", ["wrong", "format", "timeout", "error"])
def test_bad_statuses_score_the_floor(samples, status):
    preset = Preset([(Fixed("a", [Score(None, status)], floor=-1.0, low=-1.0), 1.0)])
    evaluation = preset.score(samples("x"))
    assert evaluation.values["a"] == [-1.0]
    assert evaluation.statuses["a"] == [status]


@pytest.mark.parametrize("status", ["not_applicable", "infra"])
def test_excluded_statuses_score_none_whatever_value_they_carry(samples, status):
    evaluation = Preset([(Fixed("a", [Score(1.0, status)]), 1.0)]).score(samples("x"))
    assert evaluation.values["a"] == [None]
    assert evaluation.totals == [None]


def test_partial_credit_is_kept_with_wrong_and_format_but_not_with_error(samples):
    scores = [Score(0.25, "wrong"), Score(0.5, "format"), Score(0.75, "error"), Score(0.75, "timeout")]
    assert Preset([(Fixed("a", scores), 1.0)]).score(samples(*"wxyz")).values["a"] == [0.25, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "text", [1]])
def test_a_value_that_is_no_finite_number_is_an_error_at_the_floor(samples, value):
    evaluation = Preset([(Fixed("a", [Score(value)]), 1.0)]).score(samples("x"))
    assert evaluation.values["a"] == [0.0]
    assert evaluation.statuses["a"] == ["error"]
    assert "finite" in evaluation.infos["a"][0]["reason"]


class _UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("failure", [ValueError("boom"), SystemExit(0), RecursionError(), _UnprintableError()])
def test_a_component_that_raises_scores_every_item_as_error_and_leaves_the_others_alone(samples, failure):
    def act(batch, ctx):
        raise failure

    evaluation = Preset([(Fixed("bad", act=act), 1.0), (Fixed("good", [OK, OK]), 1.0)]).score(samples("x", "y"))
    assert evaluation.statuses["bad"] == ["error", "error"]
    assert type(failure).__name__ in evaluation.infos["bad"][0]["reason"]
    assert evaluation.totals == [1.0, 1.0]


def test_an_interrupt_from_the_keyboard_passes(samples):
    def act(batch, ctx):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Preset([(Fixed("a", act=act), 1.0)]).score(samples("x"))


@pytest.mark.parametrize("result", [[], [OK], [OK] * 3, None, 1.0])
def test_a_result_of_the_wrong_length_scores_every_item_as_error(samples, result):
    evaluation = Preset([(Fixed("a", act=lambda batch, ctx: result), 1.0)]).score(samples("x", "y"))
    assert evaluation.statuses["a"] == ["error", "error"]


def test_failure_share_counts_completions_with_any_failed_component(samples):
    first = Fixed("a", [OK, Score(None, "error"), OK, OK])
    second = Fixed("b", [OK, Score(None, "timeout"), Score(None, "infra"), Score(None, "wrong")])
    evaluation = Preset([(first, 1.0), (second, 1.0)]).score(samples(*"wxyz"))
    assert evaluation.failure_share == 0.5  # x and y of w, x, y, z
    assert evaluation.status_shares("b")["wrong"] == 0.25
    assert sum(evaluation.status_shares("b").values()) == 1.0


def test_gate_evaluates_the_second_only_where_the_first_passed(samples):
    first = Fixed(
        "format", [OK, Score(None, "format"), Score(None, "not_applicable"), Score(None, "infra"), Score(0.0)]
    )
    then = Fixed("accuracy", [OK] * 5)
    # Listed in the other order on purpose: gates, not order, decide what is evaluated first.
    preset = Preset([(then, 1.0), (first, 0.2)], gates=[gate("format", "accuracy")])
    evaluation = preset.score(samples(*"abcde"))
    assert then.batches == [[0, 2]]
    assert evaluation.values["accuracy"] == [1.0, 0.0, 1.0, None, 0.0]
    assert evaluation.statuses["accuracy"] == ["ok", "format", "ok", "infra", "wrong"]
    assert evaluation.infos["accuracy"][1]["reason"] == "gated by format"
    assert list(evaluation.values) == ["accuracy", "format"]


def test_gates_chain(samples):
    a, b, c = Fixed("a", [Score(None, "wrong")]), Fixed("b", [OK]), Fixed("c", [OK])
    preset = Preset([(c, 1.0), (b, 1.0), (a, 1.0)], gates=[gate(b, c), gate(a, b)])
    assert preset.score(samples("x")).totals == [0.0]
    assert b.batches == [[]] or b.batches == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"components": []}, "at least one"),
        ({"components": [Fixed("a")]}, r"list of \(component, weight\)"),
        ({"components": [(Fixed("a"), "much")]}, r"list of \(component, weight\)"),
        ({"components": [(len, 1.0)]}, "from_function"),
        ({"components": [(Fixed, 1.0)]}, "an instance"),
        ({"components": [(Fixed("a"), 1.0)], "gates": [("a", "a")]}, r"Write gate\("),
        ({"components": [(Fixed("a"), 1.0)], "checker": Fixed("a")}, "name of a component: a"),
        ({"components": [(Fixed("a"), 1.0), (Fixed("a"), 1.0)]}, "Pass name="),
        ({"components": [(Fixed("a"), math.nan)]}, "finite"),
        ({"components": [(Fixed("a", floor=2.0), 1.0)]}, "Set floor"),
        ({"components": [(Fixed("accuracy"), 1.0)], "checker": "acuracy"}, "Did you mean 'accuracy'"),
        ({"components": [(Fixed("a"), -1.0)], "checker": "a"}, "positive"),
        ({"components": [(Fixed("a"), 1.0)], "gates": [gate("b", "a")]}, "not a component of the preset"),
        (
            {"components": [(Fixed("a"), 1.0), (Fixed("b"), 1.0)], "gates": [gate("a", "b"), gate("b", "a")]},
            "cycle",
        ),
    ],
)
def test_a_preset_that_cannot_be_meant_is_refused_with_what_to_do(arguments, says):
    with pytest.raises(PresetError, match=says):
        Preset(arguments.pop("components"), **arguments)


@pytest.mark.parametrize("parts", [[], None, 7, [Preset([(Fixed("a"), 1.0)])]])
def test_presets_and_functions_are_combined_in_pairs_with_weights(parts):
    for function, kind in ((combine, "preset"), (from_functions, "function")):
        with pytest.raises(PresetError, match=f"is not a list of .{kind}, weight"):
            function(parts)


def test_shaping_that_could_outweigh_correctness_is_refused():
    # |-0.3| x (1 - -1) + 0.5 x 1 = 1.1 > 1 x 1
    parts = [(Fixed("accuracy"), 1.0), (Fixed("style", low=-1.0), -0.3), (Fixed("format"), 0.5)]
    with pytest.raises(PresetError, match="allow_shaping_above_correctness=True"):
        Preset(parts, checker="accuracy")
    assert issubclass(PresetError, ValueError)
    Preset(parts, checker="accuracy", allow_shaping_above_correctness=True)
    Preset([(Fixed("accuracy"), 1.1), *parts[1:]], checker="accuracy")


def test_correct_is_the_checkers_ok_and_nothing_else(samples):
    checker = Fixed("accuracy", [OK, Score(0.99, "wrong"), Score(None, "infra"), Score(math.nan)])
    other = Fixed("format", [Score(None, "format")] * 4)
    preset = Preset([(other, 0.1), (checker, 1.0)], checker="accuracy", gates=[gate("format", "accuracy")])
    assert preset.is_correct(samples(*"abcd")) == [True, False, False, False]
    assert other.batches == []


def test_groups_of_one_value_have_no_spread():
    values = [1.0, 1.0, 0.0, 1.0, None, None, None, 0.5]
    scores = [Score(value, "infra" if value is None else "ok") for value in values]
    evaluation = Preset([(Fixed("a", scores), 2.0)]).score(build_samples(list("aabbccdd"), ["x"] * 8))
    # a: 1 1 -> none; b: 0 1 -> some; c: excluded; d: 0.5 alone -> none. 2 of 3
    assert evaluation.zero_spread_share("a") == pytest.approx(2 / 3)
