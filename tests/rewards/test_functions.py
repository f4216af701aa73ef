import asyncio
import functools
import math
import pickle
import sys

import pytest

from rewards import Context, FunctionPathError, Preset, PresetError, build_samples, from_function, from_functions, load


def long_enough(prompts, completions, completion_ids=None, **columns):
    return [1.0 if len(c) > 2 else 0.5 for c in completions]


async def slow_half(completions, **columns):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


class Caller:
    def __call__(self, completions):
        return [1.0] * len(completions)


def _score(fn, *completions, ctx=None, **options):
    columns = {"answer": [str(i) for i in range(len(completions))]}
    samples = build_samples(["p"] * len(completions), list(completions), **columns)
    component, weight = from_function(fn, **options)
    return Preset([(component, weight)]).score(samples, ctx)


def test_an_async_function_drops_in_even_inside_a_running_loop():
    assert _score(slow_half, "a").totals == [0.5]

    async def inside():
        return _score(slow_half, "a").totals

    assert asyncio.run(inside()) == [0.5]


def test_only_arguments_the_signature_names_are_passed():
    got = {}

    def picky(completions, answer, *, trainer_state=None):
        got.update(completions=completions, answer=answer, step=trainer_state.global_step)
        return [1.0] * len(completions)

    assert _score(picky, "a", "b", ctx=Context(step=7)).totals == [1.0, 1.0]
    assert got == {"completions": ["a", "b"], "answer": ["0", "1"], "step": 7}


def test_a_function_with_open_arguments_gets_all_of_them():
    got = {}

    def open_(**columns):
        got.update(columns)
        return [1.0]

    _score(open_, "a")
    assert set(got) == {"prompts", "completions", "completion_ids", "answer", "reference", "trainer_state"}


def test_conversational_completions_arrive_as_messages():
    chat = [{"role": "assistant", "content": "hello"}]
    assert _score(lambda completions: [float(completions[0] == chat)], chat).totals == [1.0]


def test_callable_objects_and_partials_have_names():
    assert from_function(Caller()).component.name == "Caller"
    assert from_function(functools.partial(long_enough)).component.name == "long_enough"
    assert _score(Caller(), "a").totals == [1.0]


@pytest.mark.parametrize(
    ("value", "status", "scored"),
    [
        (None, "not_applicable", None),
        (math.nan, "error", 0.0),
        (math.inf, "error", 0.0),
        ("high", "error", 0.0),
        (True, "ok", 1.0),
        (3, "ok", 3.0),
        (-2.0, "wrong", -2.0),
        (10**400, "error", 0.0),
    ],
)
def test_each_value_has_a_status(value, status, scored):
    evaluation = _score(lambda completions: [value], "a", name="f")
    assert evaluation.statuses["f"] == [status]
    assert evaluation.values["f"] == [scored]


def test_a_declared_range_is_enforced():
    evaluation = _score(lambda completions: [-1.0, 2.0, 3.0], "a", "b", "c", name="f", low=-1.0, high=2.0)
    assert evaluation.statuses["f"] == ["wrong", "ok", "error"]
    assert evaluation.values["f"] == [-1.0, 2.0, -1.0]


def test_a_range_can_be_declared_on_the_function_itself():
    def brevity(completions):
        return [0.0]

    brevity.low, brevity.high = 0.0, 0.5
    component = from_function(brevity).component
    assert (component.low, component.high) == (0.0, 0.5)
    # 0.3 of shaping in the preset + 0.5 = 0.8 <= 1
    combined = from_functions([(brevity, 1.0)], base=load("gsm8k-reasoning"))
    assert list(combined.weights) == ["accuracy", "format", "tags", "brevity"]
    assert combined.checker == "accuracy"


def test_a_function_of_unknown_range_beside_a_checker_must_be_allowed():
    with pytest.raises(PresetError, match="declare low= and high="):
        from_functions([(long_enough, 0.1)], base=load("gsm8k-reasoning"))
    from_functions([(long_enough, 0.1)], base=load("gsm8k-reasoning"), allow_shaping_above_correctness=True)


def test_the_only_function_is_the_checker_and_of_several_none_is():
    assert from_functions([(long_enough, 1.0)]).checker == "long_enough"
    assert from_functions([(long_enough, 1.0), (slow_half, 1.0)]).checker is None


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def brevity(completions, **kwargs):\n    return [0.25 for _ in completions]\n")
    return path


def test_a_function_from_a_file_survives_pickling(file):
    preset = pickle.loads(pickle.dumps(from_functions([(f"{file}:brevity", 2.0)])))
    assert preset.score(build_samples(["p"], ["c"])).totals == [0.5]


def test_a_file_that_has_changed_is_loaded_again_and_no_other(file):
    first = from_function(f"{file}:brevity").component.function
    assert from_function(f"{file}:brevity").component.function is first
    file.write_text("def brevity(completions, **kwargs):\n    return [0.5 for _ in completions]  # changed\n")
    assert from_function(f"{file}:brevity").component.function(["x"]) == [0.5]


def test_functions_of_one_name_from_two_files_are_told_apart(file, tmp_path):
    other = tmp_path / "yours.py"
    other.write_text(file.read_text())
    preset = from_functions([(f"{file}:brevity", 1.0), (f"{other}:brevity", 1.0)])
    assert list(preset.weights) == ["mine.brevity", "yours.brevity"]


def test_a_file_does_not_shadow_a_module_of_its_name(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("def f(completions):\n    return []\n")
    before = sys.modules["rewards"]
    from_function(f"{path}:f")
    assert sys.modules["rewards"] is before


def test_a_path_that_leads_nowhere_says_what_is_there(file, tmp_path):
    with pytest.raises(FunctionPathError, match="Did you mean 'brevity'"):
        from_function(f"{file}:brevety")
    with pytest.raises(FunctionPathError, match=r"Did you mean 'mine\.py'"):
        from_function(f"{tmp_path / 'mime.py'}:brevity")
    with pytest.raises(FunctionPathError, match=r"file\.py:function"):
        from_function("brevity")
    with pytest.raises(FunctionPathError, match="cannot be imported"):
        from_function("no_such_module:f")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(FunctionPathError, match="ZeroDivisionError"):
        from_function(f"{tmp_path / 'broken.py'}:f")


def verl_like(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == f"{data_source}{ground_truth}{extra_info.get('more')}"), "other": 5.0}


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]


async def verl_async(solution_str, ground_truth, **kwargs):
    return float(solution_str == ground_truth)


def easyr1_batch(reward_inputs, weight=0.1):
    return [
        {"overall": float(row["response"] == row["ground_truth"]) + weight * row["response_length"]}
        for row in reward_inputs
    ]


def easyr1_single(reward_input):
    return {"overall": float(reward_input["response"] == reward_input["ground_truth"]), "accuracy": 9.0}


@pytest.mark.parametrize(
    ("function", "texts", "values"),
    [
        (verl_like, ["d72x", "d71x"], [1.0, 0.0]),
        (verl_batch, ["72", "71"], [1.0, 0.0]),
        (verl_async, ["72", "71"], [1.0, 0.0]),
        (easyr1_batch, ["72", "7 1"], [1.1, 0.2]),
        (easyr1_single, ["72", "71"], [1.0, 0.0]),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_functions_of_other_trainers_are_known_by_their_parameters(function, texts, values, chat):
    chats = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    samples = build_samples(["?"] * 2, chats, answer=["72"] * 2, data_source=["d"] * 2, extra_info=[{"more": "x"}] * 2)
    component = from_function(function)[0]
    assert component.name == function.__name__
    assert [score.value for score in component.score(samples, Context())] == pytest.approx(values)


def test_a_function_that_raises_on_a_row_fails_its_group_and_no_other():
    calls = []

    def ranked(prompts, completions, answer):  # compares the completions of a group
        calls.append(len(completions))
        numbers = [int(each) for each in answer]
        return [number + (text == max(completions)) for number, text in zip(numbers, completions, strict=True)]

    prompts, answers = [p for p in "abcd" for _ in range(2)], [a for a in ("1", "2", "high", "4") for _ in range(2)]
    samples = build_samples(prompts, ["x", "y"] * 4, answer=answers)
    verdict = Preset([from_function(ranked)]).score(samples)
    assert verdict.totals == [1.0, 2.0, 2.0, 3.0, 0.0, 0.0, 4.0, 5.0]
    assert verdict.statuses["ranked"] == ["ok"] * 4 + ["error"] * 2 + ["ok"] * 2
    assert "prompt: 'c'" in verdict.infos["ranked"][4]["reason"]
    assert calls == [8, 4, 4, 2, 2]  # whole groups


@pytest.mark.parametrize("result", [None, 0.5, "1.0", {"score": 1.0}])
def test_a_function_that_returns_no_list_is_told_to_return_one(result):
    def single(completions):
        return result

    verdict = Preset([from_function(single)]).score(build_samples(["p" * 99], ["x"]))
    assert f"it returned {result!r}. Return a list with one number per" in verdict.infos["single"][0]["reason"]
    assert "(prompt: '...ppp" in verdict.infos["single"][0]["reason"]


def test_a_function_that_fails_slowly_is_not_called_again(monkeypatch):
    monkeypatch.setattr("rewards.functions.RETRY_SECONDS", 0.0)
    calls = []

    def unreachable(completions):
        calls.append(len(completions))
        raise TimeoutError("no answer")

    samples = build_samples(["a", "b"], ["x", "y"])
    assert Preset([from_function(unreachable)]).score(samples).failure_share == 1.0
    assert calls == [2]


def test_a_missing_file_says_to_what_its_path_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text("")
    with pytest.raises(FunctionPathError, match=r"relative to the current folder\.$"):
        from_function("triage.py:triage")
