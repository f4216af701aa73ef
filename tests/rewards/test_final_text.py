import pytest

from rewards import PresetError, build_samples
from rewards.components.final_text import check_style, column, final_text, find_answer, plain_answer
from rewards.extract import MAX_CHARS


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        (" a ", "a", None),
        ("<think>a</think> b", "b", None),
        ("<think>a</think>b<think>c</think> d", "d", None),
        ("a</think>b", "b", None),
        ("<think>a", None, "unterminated_think"),
        ("a</think>b<think>c", None, "unterminated_think"),
        ("<think>a</think> \u200b\x00\n", None, "blank"),
        ("", None, "blank"),
        ("a" * (MAX_CHARS + 1), None, "too_long"),
    ],
)
def test_the_final_text_is_what_follows_the_last_thinking(text, value, reason):
    assert final_text(text) == (value, reason)


@pytest.mark.parametrize(
    "text", ["<answer>a</answer>", "a<answer>", "</answer>a", "<think>b</think></think>a </answer>"]
)
def test_plain_answers_hold_no_tags(text):
    assert plain_answer(text) == (None, "stray_tag")


def test_answers_are_found_in_every_style():
    for style, text in {"answer": "<answer>7</answer>", "boxed": r"\boxed{7}", "hash": "#### 7", "text": "7"}.items():
        check_style(style)
        assert find_answer(build_samples(["p"], [text])[0], style).value == "7"
    with pytest.raises(PresetError, match="Did you mean 'boxed'"):
        check_style("box")


def test_the_first_column_that_holds_something_is_taken():
    sample = build_samples(["p"], ["c"], a=[None], b=[0], c=[1])[0]
    assert column(sample, "a", "b", "c") == 0
    assert column(sample, "a", "x") is None
