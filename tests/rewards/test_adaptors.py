import inspect
import pickle
from types import SimpleNamespace

import pytest
from conftest import Fixed, answered

from rewards import Preset, Score, load
from rewards.protocol import STATUSES

RIGHT, WRONG = answered("72"), answered("70")


class Log(dict):
    def extra(self, column, values):
        self.setdefault(column, []).extend(values)

    def metric(self, name, value):
        self.setdefault(name, []).append(value)


def call(rewards, completions, step=1, prompts=None, ids=None, **columns):
    """What GRPOTrainer does: each function with the same lists, one after the other."""
    log = Log()
    ids = ids or [[1, 2, 3]] * len(completions)
    given = {
        "prompts": prompts or ["6 x 12?"] * len(completions),
        "completions": completions,
        "completion_ids": ids,
        "trainer_state": SimpleNamespace(global_step=step, max_steps=10),
        "log_extra": log.extra,
        "log_metric": log.metric,
        **columns,
    }
    return [reward(**given) for reward in rewards], log


def test_each_component_is_a_named_function_with_its_weight():
    rewards = load("gsm8k-reasoning").trl()
    assert isinstance(rewards, list)
    assert [reward.__name__ for reward in rewards] == ["accuracy", "format", "tags"]
    assert rewards.reward_weights == [1.0, 0.2, 0.1]
    assert not any(inspect.iscoroutinefunction(reward.__call__) for reward in rewards)


def test_values_are_native_and_in_order():
    columns, _ = call(load("gsm8k-reasoning").trl(), [RIGHT, WRONG, "72"], answer=["#### 72"] * 3)
    assert columns == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]


def test_conversational_batches_score_the_same():
    completions = [[{"role": "assistant", "content": text}] for text in (RIGHT, WRONG)]
    prompts = [[{"role": "user", "content": "6 x 12?"}]] * 2
    columns, _ = call(load("gsm8k-reasoning").trl(), completions, prompts=prompts, answer=["72"] * 2)
    assert columns == [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_batch_is_evaluated_once_for_all_functions():
    counting = Fixed("a", [Score(1.0)] * 2)
    rewards = Preset([(counting, 1.0), (Fixed("b", [Score(0.0)] * 2), 1.0)]).trl()
    batch = {"completions": ["x", "y"], "answer": ["1", "2"]}
    call(rewards, **batch)
    assert len(counting.seen) == 1


def test_another_step_text_or_column_is_another_batch():
    counting = Fixed("a", [Score(1.0)] * 2)
    rewards = Preset([(counting, 1.0)]).trl()
    completions, answer = ["x", "y"], [["1"], ["2"]]
    call(rewards, completions, answer=answer)
    call(rewards, completions, step=2, answer=answer)
    assert len(counting.seen) == 2
    completions[0] = "z"  # the same list, changed in place
    call(rewards, completions, step=2, answer=answer)
    assert len(counting.seen) == 3
    answer[0] = ["3"]
    call(rewards, completions, step=2, answer=answer)
    assert len(counting.seen) == 4


def test_statuses_and_extracted_answers_are_logged():
    _, log = call(load("gsm8k-reasoning").trl(), [RIGHT, "nothing"], answer=["72"] * 2)
    assert log["accuracy/status"] == ["ok", "format"]
    assert log["accuracy/extracted"] == ["72", None]
    assert log["accuracy/reason"] == [None, "missing"]
    assert "format/extracted" not in log
    assert log["rewards/accuracy/status_ok"] == [0.5]
    assert log["rewards/accuracy/latency_p50_ms"][0] >= 0.0
    assert log["rewards/accuracy/latency_p95_ms"][0] >= log["rewards/accuracy/latency_p50_ms"][0]


def test_all_statuses_are_logged_always_so_that_ranks_agree_on_the_keys():
    _, log = call(load("gsm8k-hash").trl(), ["x"], answer=["72"])
    assert {f"rewards/accuracy/status_{status}" for status in STATUSES} <= set(log)


def test_logged_text_can_be_stored():
    _, log = call(load("gsm8k-reasoning").trl(), [answered("\ud800" * 500)], answer=["72"])
    assert log["accuracy/extracted"] == ["?" * 200]


def test_calling_without_loggers_or_state_works():
    rewards = load("gsm8k-hash").trl()
    assert rewards[0](prompts=["p"], completions=["#### 72"], answer=["72"]) == [1.0]


def test_functions_are_picklable_together_and_alone():
    rewards = load("gsm8k-hash").trl(seed=3)
    call(rewards, ["#### 72"], answer=["72"])
    copy = pickle.loads(pickle.dumps(rewards))
    assert copy.reward_weights == rewards.reward_weights
    assert copy.last_evaluation is None
    assert call(copy, ["#### 72"], answer=["72"])[0] == [[1.0], [1.0]]
    assert copy[0]._evaluator is copy[1]._evaluator
    assert pickle.loads(pickle.dumps(rewards[1])).__name__ == "format"


def test_the_last_evaluation_tells_the_failing_share():
    rewards = load("gsm8k-hash").trl()
    assert rewards.last_evaluation is None
    call(rewards, ["#### 72"] * 2, answer=["72", "no number"])
    assert rewards.last_evaluation.failure_share == 0.5


def test_seed_step_and_horizon_reach_components():
    seen = []
    component = Fixed("a", act=lambda batch, ctx: seen.append(ctx) or [Score(1.0)])
    call(Preset([(component, 1.0)]).trl(seed=9), ["x"], step=4)
    assert (seen[0].seed, seen[0].step, seen[0].total_steps) == (9, 4, 10)


def test_tokens_reach_components():
    preset = load("length-target", target=4, tolerance=2)
    # 4 tokens -> 1; 3 -> 1 - 1/2 = 0.5; 7 -> 0
    columns, _ = call(preset.trl(), ["x"] * 3, ids=[[1] * 4, [1] * 3, [1] * 7])
    assert columns == [[1.0, 0.5, 0.0]]


def test_reference_column_can_be_named():
    rewards = load("gsm8k-hash").trl(reference_column="gold")
    assert rewards[0](prompts=["p"], completions=["#### 72"], gold=["72"], answer=["5"]) == [1.0]


@pytest.mark.parametrize("completion", [None, [], [{"role": "assistant", "content": None}]])
def test_missing_completions_are_scored(completion):
    columns, _ = call(load("gsm8k-reasoning").trl(), [completion], answer=["72"])
    assert columns == [[0.0], [0.0], [0.0]]
