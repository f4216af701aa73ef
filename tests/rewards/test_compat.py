"""rewards.compat: the functions of open-r1 without their known bugs."""

import pickle

import pytest

from rewards import compat, from_functions

LAYOUT = "<think>\nsix dozens\n</think>\n<answer>\n72\n</answer>"
HOSTILE = [None, "", "\x00", "\ud800", "</think>", [], [{"role": "assistant", "content": None}], [None], 7, {}]


def conversational(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_tags_count_a_quarter_each():
    texts = [LAYOUT, LAYOUT + LAYOUT, "<think>\n", "<think>", "<think>\na\n</think>\n<answer>\n"]
    # the fourth has no line break behind the tag; the fifth lacks `\n<answer>\n` because its line break is spent
    assert compat.tag_count_reward(texts) == [1.0, 0.0, 0.25, 0.0, 0.75]


def test_steps_count_a_third_each():
    texts = [
        "First, a. Second, b. Finally, c.",
        "Step 1: a\nStep 22: b",
        "x\n- a",
        "nothing",
        "\n*a\n*b\n*c\n*d",
        "1. a\n2. b\n3. c",
    ]
    # open-r1 counts numbers on the first line only
    assert compat.reasoning_steps_reward(texts) == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0, 1.0, 1.0])


def test_length_follows_kimi():
    ids = [[1] * n for n in (100, 150, 300, 100, 300)]
    texts = [r"\boxed{3}"] * 3 + [r"\boxed{4}"] * 2
    # right: 0.5 - (n - 100)/200 = 0.5, 0.25, -0.5; wrong: min(0, 0.5), min(0, -0.5)
    assert compat.len_reward(texts, ["3"] * 5, completion_ids=ids) == [0.5, 0.25, -0.5, 0.0, -0.5]
    assert compat.len_reward([r"\boxed{3}"] * 2, ["3"] * 2) == [0.0, 0.0]


def test_lengths_are_compared_within_a_prompt():
    ids = [[1] * n for n in (10, 20, 1000, 2000)]
    columns = {"prompts": ["p", "p", "q", "q"], "completion_ids": ids}
    # each prompt has its own shortest (0.5) and longest (-0.5); over the whole batch the first two would be near 0.5
    assert compat.len_reward([r"\boxed{3}"] * 4, ["3"] * 4, **columns) == [0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("name", compat.__all__)
def test_hostile_completions_get_the_lowest_value_and_nothing_raises(name):
    reward = getattr(compat, name)
    columns = {"solution": ["7"] * len(HOSTILE), "completion_ids": [[] for _ in HOSTILE]}
    values = reward(completions=HOSTILE, prompts=["p"] * len(HOSTILE), **columns)
    assert len(values) == len(HOSTILE)
    assert all(value <= 0 for value in values)
    assert pickle.loads(pickle.dumps(reward)).__name__ == reward.__name__


def test_they_compose_into_a_preset_with_their_ranges_and_with_functions_of_trl():
    from trl.rewards import accuracy_reward

    preset = from_functions([(accuracy_reward, 1.0), (compat.format_reward, 0.2)], checker="accuracy_reward")
    assert (preset.components[1].component.low, preset.components[1].component.high) == (0.0, 1.0)
