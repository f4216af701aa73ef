import pytest

from rewards import RewardsError, build_samples
from rewards.samples import completion_text


def test_consecutive_equal_prompts_form_a_group():
    prompts = ["a", "a", "b", "b", "a"]
    assert [s.group_id for s in build_samples(prompts, [""] * 5)] == [0, 0, 1, 1, 2]
    chats = [[{"role": "user", "content": p}] for p in prompts]
    assert [s.group_id for s in build_samples(chats, [""] * 5)] == [0, 0, 1, 1, 2]


def test_columns_finish_reason_and_reference_are_taken_by_row():
    samples = build_samples(["a", "b"], ["x", "y"], answer=["1", "2"], finish_reason=["stop", "length"])
    assert [s.finish_reason for s in samples] == ["stop", "length"]
    assert [s.reference for s in samples] == ["1", "2"]
    assert samples[1].columns == {"answer": "2", "finish_reason": "length"}


def test_reference_column_can_be_named():
    sample = build_samples(["a"], ["x"], reference_column="gold", gold=["7"], answer=["8"])[0]
    assert sample.reference == "7"
    with pytest.raises(RewardsError, match="Columns: answer"):
        build_samples(["a"], ["x"], reference_column="gold", answer=["8"])


def test_uneven_columns_are_refused():
    with pytest.raises(RewardsError, match="one value per completion"):
        build_samples(["a", "b"], ["x", "y"], answer=["1"])


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("x", "x"),
        (None, ""),
        (7, ""),
        ([], ""),
        ([{"role": "assistant", "content": "x"}], "x"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant"}], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}], "x"),
        ([{"role": "assistant", "content": "x", "reasoning_content": "r"}], "<think>r</think>x"),
        ([{"role": "tool", "content": "<answer>7</answer>"}], ""),
        ([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}, {"content": "b"}], "b"),
    ],
)
def test_text_is_the_last_assistant_message(completion, text):
    assert completion_text(completion) == text


def test_a_scanner_runs_once_per_completion():
    calls = []
    sample = build_samples(["a"], ["x"])[0]
    for _ in range(3):
        sample.once(calls.append)
    assert calls == ["x"]
