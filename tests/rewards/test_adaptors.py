import pickle
from types import SimpleNamespace

import pytest
from reward_parts import Fixed, answered

from rewards import Preset, RewardsError, Score, from_functions, load

RIGHT, WRONG = answered("72"), answered("70")


class Log(dict):
    def extra(self, column, values):
        self.setdefault(column, []).extend(values)

    def metric(self, name, value):
        self.setdefault(name, []).append(value)


def call(rewards, completions, step=1, prompts=None, ids=None, **columns):
    """Call reward functions as GRPOTrainer does: one after the other with the same lists."""
    log = Log()
    ids = ids or [[1, 2, 3]] * len(completions)
    arguments = {
        "prompts": prompts or ["6 x 12?"] * len(completions),
        "completions": completions,
        "completion_ids": ids,
        "trainer_state": SimpleNamespace(global_step=step, max_steps=10),
        "log_extra": log.extra,
        "log_metric": log.metric,
        **columns,
    }
    return [reward(**arguments) for reward in rewards], log


def test_values_are_native_and_in_order():
    columns, _ = call(load("gsm8k-reasoning").trl(), [RIGHT, WRONG, "72"], answer=["#### 72"] * 3)
    assert columns == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]


def test_a_batch_is_evaluated_once_for_all_functions():
    counting = Fixed("a", [Score(1.0)] * 2)
    rewards = Preset([(counting, 1.0), (Fixed("b", [Score(0.0)] * 2), 1.0)]).trl()
    batch = {"completions": ["x", "y"], "answer": ["1", "2"]}
    call(rewards, **batch)
    assert len(counting.batches) == 1


def test_another_step_text_or_column_is_another_batch():
    counting = Fixed("a", [Score(1.0)] * 2)
    rewards = Preset([(counting, 1.0)]).trl()
    completions, answer = ["x", "y"], [["1"], ["2"]]
    call(rewards, completions, answer=answer)
    call(rewards, completions, step=2, answer=answer)
    assert len(counting.batches) == 2
    completions[0] = "z"  # the same list, changed in place
    call(rewards, completions, step=2, answer=answer)
    assert len(counting.batches) == 3
    call(rewards, completions, step=2, answer=list(answer))
    assert len(counting.batches) == 4


def test_statuses_and_extracted_answers_are_logged():
    _, log = call(load("gsm8k-reasoning").trl(), [RIGHT, "nothing"], answer=["72"] * 2)
    assert log["accuracy/status"] == ["ok", "format"]
    assert log["accuracy/extracted"] == ["72", None]
    assert log["accuracy/reason"] == [None, "missing"]
    assert "format/extracted" not in log
    assert log["rewards/accuracy/status_ok"] == [0.5]
    assert log["rewards/accuracy/zero_spread"] == [0.0]
    assert log["rewards/accuracy/latency_p50_ms"][0] >= 0.0
    assert log["rewards/accuracy/latency_p95_ms"][0] >= log["rewards/accuracy/latency_p50_ms"][0]


def test_logged_text_can_be_stored():
    _, log = call(load("gsm8k-reasoning").trl(), [answered("\ud800" * 500)], answer=["72"])
    assert log["accuracy/extracted"] == ["?" * 200]


def test_functions_are_picklable_together_and_alone():
    rewards = load("gsm8k-hash").trl(seed=3)
    call(rewards, ["#### 72"], answer=["72"])
    copy = pickle.loads(pickle.dumps(rewards))
    assert copy.reward_weights == rewards.reward_weights
    assert copy.last_evaluation is None
    assert call(copy, ["#### 72"], answer=["72"])[0] == [[1.0], [1.0]]
    assert copy[0]._evaluator is copy[1]._evaluator
    assert pickle.loads(pickle.dumps(rewards[1])).__name__ == "format"


def test_seed_step_and_horizon_reach_components():
    contexts = []
    component = Fixed("a", act=lambda batch, ctx: contexts.append(ctx) or [Score(1.0)])
    call(Preset([(component, 1.0)]).trl(seed=9), ["x"], step=4)
    assert (contexts[0].seed, contexts[0].step, contexts[0].total_steps) == (9, 4, 10)


@pytest.mark.parametrize(
    ("preset", "columns", "reason", "advice"),
    [
        ("gsm8k-hash", {"question": ["6 x 12?"] * 2}, "Columns of this batch: question", "reference_column"),
        # a column of another length is no column
        ("gsm8k-hash", {"answer": ["72"]}, "Columns of this batch: none", "reference_column"),
        # where the other completion has no program
        ("code-stdio", {"tets": [["x"]] * 2}, "no tests: give a column", "reference_column"),
        (
            from_functions([(lambda completions: 1 / 0, 1.0)]),
            {},
            "ZeroDivisionError: division by zero (test_adaptors.py, line ",
            "none. Correct the reward",
        ),
        (
            from_functions([(lambda completions: [1.0], 1.0)]),
            {},
            "returned 1 rewards for 2 completions.",
            "none. Correct the reward",
        ),
    ],
)
def test_a_first_batch_of_which_nothing_can_be_scored_is_refused_with_the_reason(preset, columns, reason, advice):
    preset = load(preset) if isinstance(preset, str) else preset
    completions = ["#### 72\n```python\nprint(1)\n```", "no program"]
    with pytest.raises(RewardsError, match="could score none of the first 2 completions") as refused:
        call(preset.trl(), completions, **columns)
    assert reason in str(refused.value)
    assert advice in str(refused.value)
    rewards, _ = call(preset.trl(strict=False), completions, **columns)
    assert rewards[0] == [0.0, 0.0]


def test_a_function_gets_the_reference_by_both_names():
    def right(completions, reference, category, **_):
        return [float(text == a == b) for text, a, b in zip(completions, reference, category, strict=True)]

    rewards = from_functions([(right, 1.0)]).trl(reference_column="category")
    assert call(rewards, ["bug", "bill"], category=["bug", "bug"])[0][0] == [1.0, 0.0]


def test_later_failures_and_those_of_single_rows_are_logged_once(caplog):
    rewards = load("gsm8k-hash").trl()
    columns, _ = call(rewards, ["#### 72"] * 2, answer=["72", "no number"])
    assert columns[0] == [1.0, 0.0]
    for step in (2, 3):
        call(rewards, ["#### 72"] * 2, step=step, answer=["no number"] * 2)
    assert [record.message for record in caplog.records] == [
        "Reward 'accuracy' could not score a completion, which counts as its lowest value: error: reference is not a "
        "number: 'no number'; give a number in a column such as `reference`"
    ]


def tokens_of(*rows, name="a"):
    return Fixed(name, [Score(0.0, token_values=row) for row in rows])


def test_process_rewards_are_reported_once_a_batch_weighted_and_summed():
    rewards = Preset([(tokens_of([1.0, 2.0], [3.0]), 2.0), (tokens_of([0.5, 0.0], None, name="b"), 1.0)]).trl()
    batch = {"completions": ["x", "y"], "ids": [[1, 2], [3]]}
    columns, log = call(rewards, **batch)
    # 2 x 1 + 0.5 = 2.5, 2 x 2 = 4; 2 x 3 = 6
    assert log["token_rewards"] == [[2.5, 4.0], [6.0]]
    assert columns == [[0.0, 0.0], [0.0, 0.0]]
    assert call(rewards, **batch)[1]["token_rewards"] == [[2.5, 4.0], [6.0]]  # the same batch once more


ROWS = [
    {"response": "#### 72", "response_length": 4, "ground_truth": "72"},
    {"response": "#### 70", "response_length": 4, "ground_truth": "72"},
    {"response": "72", "response_length": 1, "ground_truth": "72"},
]


def test_easyr1_gives_dicts_for_a_batch_and_for_one():
    compute_score = load("gsm8k-hash").easyr1()
    # right: 1 + 0.1; wrong number: 0.1; no answer: 0
    assert compute_score(ROWS) == [
        {"overall": 1.1, "accuracy": 1.0, "format": 1.0},
        {"overall": 0.1, "accuracy": 0.0, "format": 1.0},
        {"overall": 0.0, "accuracy": 0.0, "format": 0.0},
    ]
    assert compute_score(ROWS[0], split="train")["overall"] == 1.1  # one dict, as its sequential manager gives it


def test_easyr1_rows_reach_components():
    samples = []
    component = Fixed("overall", act=lambda batch, ctx: samples.extend(batch) or [Score(0.5)] * len(batch))
    scores = Preset([(component, 1.0)]).easyr1(seed=3)([*ROWS, {**ROWS[0], "ground_truth": "5", "level": 2}], k="v")
    assert scores[0] == {"overall": 0.5, "overall_score": 0.5}
    assert [s.n_tokens for s in samples] == [4, 4, 1, 4]
    assert [s.group_id for s in samples] == [0, 0, 0, 1]
    assert samples[3].columns == {"k": "v", "ground_truth": "5", "level": 2}
    assert [s.reference for s in samples] == ["72", "72", "72", "5"]


def test_verl_scores_one_solution_by_position_or_by_name():
    compute_score = load("gsm8k-hash").verl()
    expected = {"score": 1.1, "accuracy": 1.0, "format": 1.0}
    assert compute_score("openai/gsm8k", "#### 72", "72", None) == expected
    named = {"data_source": "openai/gsm8k", "solution_str": "#### 72", "ground_truth": "72", "extra_info": {"index": 0}}
    assert compute_score(**named) == expected
    assert compute_score(**named, reward_router_address=None, reward_model_tokenizer=None) == expected
    assert load("gsm8k-hash").verl(as_dict=False)(**named) == 1.1


def test_verl_scores_a_batch_by_plural_names():
    plural = {"data_sources": ["d"] * 2, "solution_strs": ["#### 72", "x"], "ground_truths": ["72"] * 2}
    assert [s["score"] for s in load("gsm8k-hash").verl()(**plural, extra_infos=[{}, None])] == [1.1, 0.0]
    assert load("gsm8k-hash").verl(as_dict=False)(**plural) == [1.1, 0.0]


def test_verl_passes_extra_info_as_columns():
    samples = []
    component = Fixed("a", act=lambda batch, ctx: samples.extend(batch) or [Score(1.0)])
    extra = {"question": "6 x 12?", "answer": "long solution", "index": 3, "prompts": "odd name", "completions": 1}
    Preset([(component, 1.0)]).verl()("d", "x", "72", extra)
    assert samples[0].prompt == "6 x 12?"
    assert samples[0].reference == "72"
    assert samples[0].columns["answer"] == "long solution"
    assert samples[0].columns["data_source"] == "d"


ODD = [
    None, "", "\x00" * 1000, "\ud800\udfff", "x" * 10_000_000, "#### " + "7" * 10_000_000, 7, b"bytes", [], [None],
    [{"role": "assistant", "content": None}], [{"content": "\ud800"}], {"content": "72"}, float("nan"),
]  # fmt: skip
ODD_REFERENCES = [None, "", 7.5, float("nan"), {}, b"72", object(), "\ud800", "x" * 10_000_000, True, ["72"]]


@pytest.mark.parametrize("name", ["gsm8k-hash", "gsm8k-reasoning", "length-target", "reasoning-gym"])
@pytest.mark.parametrize("reference", ODD_REFERENCES, ids=lambda value: repr(value)[:12])
def test_odd_completions_and_references_never_raise_and_never_pass(name, reference):
    preset = load(name)
    size = len(ODD)
    evaluations = []
    rewards = preset.trl(strict=False)
    columns, _ = call(rewards, ODD, answer=[reference] * size, task=["chain_sum"] * size, entry=[reference] * size)
    evaluations.append(list(zip(*columns, strict=True)))
    extra = {"task": "chain_sum", "entry": reference}
    evaluations.append(preset.easyr1()([{"response": c, "ground_truth": reference, **extra} for c in ODD]))
    evaluations.append([preset.verl()("d", c, reference, extra) for c in ODD])
    assert [len(e) for e in evaluations[:3]] == [size] * 3
    if preset.checker == "accuracy":
        assert all(row[0] in (0.0, None) for row in evaluations[0])
        assert all(row["accuracy"] == 0.0 for row in [*evaluations[1], *evaluations[2]])
        assert "ok" not in rewards.last_evaluation.statuses["accuracy"]


def failing(completions, **columns):
    raise RuntimeError("no such file")


def test_what_fails_is_said_in_the_log_where_a_trainer_takes_numbers_alone(caplog):
    preset = from_functions([(failing, 1.0)])
    calls = {
        "verl": lambda adaptor: adaptor("source", "text", "72", {}),
        "easyr1": lambda adaptor: adaptor([{"response": "text", "ground_truth": "72"}]),
    }
    for kind, call in calls.items():
        caplog.clear()
        adaptor = getattr(preset, kind)()
        for _ in range(3):
            call(adaptor)
        assert [record.getMessage().count("RuntimeError: no such file") for record in caplog.records] == [1], kind
        call(pickle.loads(pickle.dumps(adaptor)))


def test_arrays_of_a_parquet_file_are_lists_to_a_preset():
    import numpy as np

    samples = []
    component = Fixed("a", act=lambda batch, ctx: samples.extend(batch) or [Score(1.0)] * 2)
    extra = [{"prompt": np.array([{"role": "user", "content": "6 x 12?"}])} for _ in range(2)]
    truths = [np.array([1, 2]), np.array([1, 2])]  # their comparison has no one truth value
    Preset([(component, 1.0)]).verl()(solution_strs=["x", "y"], ground_truths=truths, extra_infos=extra)
    assert [sample.group_id for sample in samples] == [0, 0]
    assert samples[0].prompt == [{"role": "user", "content": "6 x 12?"}]
    score = load("countdown").verl()
    columns = {"nums": np.array([1, 2, 3])}
    assert score("s", "<answer>1+2+3</answer>", np.int64(6), columns)["score"] >= 1.0
    truth = {"target": np.int64(6), "numbers": np.array([1, 2, 3])}
    assert score("s", "<answer>1+2+3</answer>", truth, {})["score"] >= 1.0
    tests = {"inputs": np.array(["2", "5"], dtype=object), "outputs": np.array(["4", "10"], dtype=object)}
    program = "```python\nprint(2 * int(input()))\n```"
    assert load("code-stdio").verl()("s", program, tests, {})["score"] == 1.0
