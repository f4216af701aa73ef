import math
import pickle
import time

import pytest

from rewards import Context, PresetError, build_samples, load
from rewards.components.lengths import (
    CosineLength,
    KimiLength,
    LengthBudget,
    RepetitionPenalty,
    Shared,
    SoftOverlong,
    items_of,
    length_in_tokens,
    repeated_share,
)
from rewards.evaluation import run_component
from rewards.protocol import Score


class Marked:
    """Right where the text says `right`, and failing where it says `fail`; counts what it was asked."""

    name, floor, low, high, version = "marked", 0.0, 0.0, 1.0, "1"

    def __init__(self):
        self.asked = 0

    def score(self, samples, ctx):
        self.asked += len(samples)
        status = {"right": "ok", "wrong": "wrong", "fail": "timeout", "gone": "infra"}
        return [Score(1.0 if "right" in s.text else None, status[s.text.split()[0]]) for s in samples]


def samples(*words, lengths, prompts=None, **columns):
    prompts = prompts or ["?"] * len(words)
    return build_samples(prompts, list(words), [[1] * n for n in lengths], **columns)


def values(component, batch):
    return [score.value for score in run_component(component, batch, Context())]


def test_length_is_in_tokens_or_a_quarter_of_the_characters():
    [with_ids] = samples("right", lengths=[7])
    [without] = build_samples(["?"], ["right"])
    assert length_in_tokens(with_ids) == (7, "tokens")
    assert length_in_tokens(without) == (2, "characters")  # 5 characters / 4, rounded up


def test_cosine_goes_through_its_middle_and_its_ends_and_stops_there():
    # right: 0.5 + 0.25 (1 + cos 0) = 1; half way 0.5 + 0.25 (1 + 0) = 0.75; at the end 0.5; unclamped, 200 would earn 1
    batch = samples(
        "right", "right", "right", "right", "wrong", "wrong", "wrong", "wrong", lengths=[0, 50, 100, 200] * 2
    )
    component = CosineLength(checker=Marked(), max_length=100)
    assert values(component, batch) == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.75, -0.5, -0.5])
    batch = samples("right", "wrong", lengths=[200, 200])
    assert values(CosineLength(checker=Marked(), max_length=100, exceeded=-1.5), batch) == [-1.5, -1.5]


@pytest.mark.parametrize("kind", [CosineLength, KimiLength, LengthBudget])
def test_the_checkers_status_and_its_failures_are_kept(kind):
    batch = samples("right", "wrong", "fail", "gone", lengths=[1] * 4)
    options = {CosineLength: {"max_length": 100}, LengthBudget: {"budget": 100}}.get(kind, {})
    component = kind(checker=Marked(), **options)
    scores = run_component(component, batch, Context())
    assert [score.status for score in scores] == ["ok", "wrong", "timeout", "infra"]
    assert [score.value for score in scores][2:] == [component.floor, None]


def test_cosine_values_that_let_a_wrong_answer_win_are_refused():
    with pytest.raises(PresetError, match="Set both correct values"):
        CosineLength(checker=Marked(), max_length=10, correct_long=-0.7)
    with pytest.raises(PresetError, match="max_length"):
        load("math-cosine", max_length=0)


def test_kimi_length_ranks_within_each_group():
    # lengths 100, 150, 300: 0.5 - 0/200, 0.5 - 50/200, 0.5 - 200/200; wrong ones get at most 0
    words = ["right", "right", "right", "wrong", "wrong", "right", "right"]
    batch = samples(*words, lengths=[100, 150, 300, 100, 300, 1, 2], prompts=["a"] * 5 + ["b"] * 2)
    assert values(KimiLength(checker=Marked()), batch) == [0.5, 0.25, -0.5, 0.0, -0.5, 0.5, -0.5]
    assert values(KimiLength(checker=Marked()), samples("right", "wrong", lengths=[5, 5])) == [0.0, 0.0]


def test_a_shared_verdict_is_asked_for_once():
    marked = Marked()
    checker = Shared(component=marked)
    batch = samples("right", "wrong", lengths=[1, 2])
    assert values(checker, batch) == [1.0, 0.0]
    assert values(KimiLength(checker=checker), batch) == [0.5, -0.5]
    assert marked.asked == 2
    assert pickle.loads(pickle.dumps(Shared(component=RepetitionPenalty()))).low == -1.0


def test_soft_overlong_is_a_ramp_before_the_maximum():
    # L = 100, c = 20: 80 -> 0; 85 -> (100 - 20 - 85)/20 = -0.25; 100 -> -1; 101 -> -1
    batch = samples(*["right"] * 5, lengths=[0, 80, 85, 100, 101])
    assert values(SoftOverlong(max_length=100, cache=20), batch) == [0.0, 0.0, -0.25, -1.0, -1.0]
    with pytest.raises(PresetError, match="0 < cache <= max_length"):
        SoftOverlong(max_length=10, cache=20)


def test_length_budget_takes_the_rows_own_and_says_when_there_is_none():
    cells = [10, "10", "many", True, [], float("nan"), -1, 0, 10**400, None]
    batch = samples(*["right"] * len(cells), lengths=[10] * len(cells), budget=cells)
    scores = run_component(LengthBudget(checker=Marked()), batch, Context())
    assert [(score.status, score.value) for score in scores] == [("ok", 0.5)] * 2 + [("error", 0.0)] * 8
    assert "give a positive number" in scores[-1].info["reason"]


def test_repeated_share_counts_ngrams():
    # a b a b a: 4 bigrams, 2 distinct -> 1 - 2/4 = 0.5; trigrams aba bab aba: 1 - 2/3
    assert repeated_share(list("ababa"), 2) == 0.5
    assert repeated_share(list("ababa"), 3) == pytest.approx(1 / 3)
    assert repeated_share(list("abcde"), 2) == 0.0
    assert repeated_share(list("ab"), 3) == repeated_share([], 1) == 0.0


def test_repetition_takes_tokens_words_or_characters():
    [tokens] = build_samples(["?"], ["a a a"], [[1, 2, 3]])
    [words, chinese, none] = build_samples(["?"] * 3, ["The the cat", "重复" * 50, ""])
    assert items_of(tokens)[1] == "tokens"
    assert list(items_of(words)[0]) == ["the", "the", "cat"]
    assert items_of(chinese)[1] == "characters"
    assert values(RepetitionPenalty(ngram=1), [tokens, words, none]) == pytest.approx([0.0, -1 / 3, 0.0])


@pytest.mark.parametrize("pattern", ["a ", " ", "a", "abcdefghi ", "\x00", "<answer>", "重"])
def test_repetition_in_a_megabyte_of_anything_is_found_quickly(pattern):
    batch = build_samples(["?"], [pattern * (1_000_000 // len(pattern))])
    start = time.process_time()
    [score] = run_component(RepetitionPenalty(), batch, Context())
    assert time.process_time() - start < 0.2
    assert score.value is not None
    assert -1.0 <= score.value <= 0.0


def test_ranges_hold_what_components_give():
    for component in (
        CosineLength(checker=Marked(), max_length=100, exceeded=-2.0),
        KimiLength(checker=Marked()),
        LengthBudget(checker=Marked(), budget=50),
        SoftOverlong(max_length=100, cache=20),
        RepetitionPenalty(ngram=2),
    ):
        batch = samples(*["right", "wrong"] * 6, lengths=[0, 1, 50, 99, 100, 101, 200, 5, 5, 1000, 10_000, 3])
        for value in values(component, batch):
            assert component.low <= value <= component.high
            assert not math.isnan(value)
