import json

import pytest
from reward_parts import answered

from rewards import (
    PresetError,
    UnknownParameterError,
    UnknownPresetError,
    build_samples,
    describe,
    load,
    names,
    parameters,
)

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

PROMPT = "What is 6 x 12? Use <think></think> and <answer></answer>, for example <answer>5</answer> or #### 5."
ENTRY = json.dumps({"question": "6 x 12 =", "answer": "72", "metadata": {}})


def evaluate(preset, *completions, reference="72", task="chain_sum", entry=ENTRY):
    size = len(completions)
    columns = {"reference": [reference] * size, "task": [task] * size, "entry": [entry] * size}
    return preset.score(build_samples([PROMPT] * size, list(completions), **columns))


def test_unknown_names_and_parameters_come_with_the_nearest():
    with pytest.raises(UnknownPresetError, match="Did you mean 'gsm8k-reasoning'"):
        load("gsm8k_reasonin")
    with pytest.raises(UnknownPresetError, match="Valid: classification-label, code-function"):
        describe("zzz")
    with pytest.raises(UnknownParameterError, match="Did you mean 'format_weight'"):
        load("gsm8k-reasoning", format_wieght=0.1)


@pytest.mark.parametrize(("target", "tolerance"), [(4, 0), (4, 5), (0, 0)])
def test_length_target_refuses_bands_that_reward_nothing_said(target, tolerance):
    with pytest.raises(PresetError, match="Lower tolerance"):
        load("length-target", target=target, tolerance=tolerance)


def test_reasoning_gym_uses_the_tasks_own_verifier():
    # chain_sum reads numbers: 72.0 is right. Text that contains the answer earns 2/8 there, which is not correct.
    completions = [answered("72"), answered("72.0"), answered("It is 72"), answered("5"), "72"]
    evaluation = evaluate(load("reasoning-gym"), *completions)
    assert evaluation.values["accuracy"] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert evaluation.statuses["accuracy"] == ["ok", "ok", "wrong", "wrong", "format"]
    lenient = evaluate(load("reasoning-gym", strict=False), *completions)
    assert lenient.values["accuracy"] == [1.0, 1.0, 0.25, 0.0, 0.0]
    assert lenient.statuses == evaluation.statuses


def test_reasoning_gym_grids_that_went_through_json_are_still_right():
    # The verifier compares ((1, 2), (3, 4)) with the entry's output, which JSON gives as [[1, 2], [3, 4]].
    entry = json.dumps({"question": "", "answer": "1 2\n3 4", "metadata": {"output": ((1, 2), (3, 4))}})
    right, other = answered("1 2\n3 4"), answered("1 2\n3 5")
    for task in ("arc_agi", "rearc"):
        evaluation = evaluate(load("reasoning-gym"), right, other, task=task, entry=entry)
        assert evaluation.statuses["accuracy"] == ["ok", "wrong"]


def test_reasoning_gym_halting_answers_are_compared_as_words():
    # The task's own verifier takes bool("True") == bool("False"), so any answer would be right.
    entry = json.dumps({"question": "", "answer": "False", "metadata": {}})
    completions = [answered(text) for text in ("False", "false", "True", "no idea")]
    evaluation = evaluate(load("reasoning-gym"), *completions, task="game_of_life_halting", entry=entry)
    assert evaluation.statuses["accuracy"] == ["ok", "ok", "wrong", "wrong"]


@pytest.mark.parametrize("task", ["string_insertion", "spiral_matrix", "countdown", "simple_integration"])
def test_reasoning_gym_answers_are_never_run_as_code(task, tmp_path):
    import reasoning_gym

    target = tmp_path / "written"
    entry = json.dumps(reasoning_gym.create_dataset(task, seed=1, size=1)[0])
    attack = answered(f"__import__('pathlib').Path({str(target)!r}).touch()")
    evaluation = evaluate(load("reasoning-gym"), attack, task=task, entry=entry)
    assert evaluation.statuses["accuracy"] == ["wrong"]
    assert not target.exists()


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"task": "chain_summ"}, "Did you mean 'chain_sum'"),
        ({"task": None}, "needs column"),
        ({"entry": None}, "needs column"),
        ({"entry": "{"}, "JSONDecodeError"),
        ({"entry": "[]"}, "JSON object"),
        ({"entry": "{}"}, "KeyError"),
    ],
)
def test_reasoning_gym_rows_that_cannot_be_scored_are_errors(columns, says):
    evaluation = evaluate(load("reasoning-gym"), answered("72"), **columns)
    assert evaluation.statuses["accuracy"] == ["error"]
    assert says in evaluation.infos["accuracy"][0]["reason"]


def test_reasoning_gym_answers_that_the_verifier_cannot_read_are_wrong_not_errors():
    entry = json.dumps({"question": "Factorise 6.", "answer": "2 × 3", "metadata": {"number": 6, "factors": [2, 3]}})
    verdict = evaluate(
        load("reasoning-gym"), answered("two"), answered("2 × 3"), task="prime_factorization", entry=entry
    )
    assert verdict.statuses["accuracy"] == ["wrong", "ok"]
    assert verdict.infos["accuracy"][0]["reason"].startswith("not an answer of this task: ValueError")
    broken = json.dumps({"question": "Factorise 6.", "answer": "six", "metadata": {"number": 6, "factors": [2, 3]}})
    verdict = evaluate(load("reasoning-gym"), answered("two"), task="prime_factorization", entry=broken)
    assert verdict.statuses["accuracy"] == ["error"]  # not even the row's own reference can be read


WRONG = [
    ("math-verify", {"deadline": 0}),
    ("math-verify", {"deadline": None}),
    ("math-verify", {"format_weight": -1}),
    ("math-verify", {"format_weight": float("nan")}),
    ("math-verify", {"format_weight": True}),
    ("code-stdio", {"memory_mb": float("inf")}),
    ("mcq-letter", {"first_index": "3"}),
    ("mcq-letter", {"strict": "maybe"}),
]


@pytest.mark.parametrize(("preset", "params"), WRONG)
def test_values_of_another_type_or_range_are_refused(preset, params):
    [(name, _)] = params.items()
    with pytest.raises(PresetError, match=f"Preset '{preset}': {name} is .* Pass "):
        load(preset, **params)


@pytest.mark.parametrize("name", names())
def test_defaults_of_every_preset_are_values_that_fit(name):
    for parameter in parameters(name):
        assert parameter.required or parameter.accepts(parameter.default), parameter
