import pytest
from reward_parts import answered

from rewards import PresetError, build_samples, load
from rewards.components.answers import exact_match, gold_answers, is_hedged, normalise, token_f1


def evaluate(*answers, reference, **params):
    completions = [answered(answer) for answer in answers]
    samples = build_samples(["p"] * len(answers), completions, reference=[reference] * len(answers))
    return load("qa-short", **params).score(samples)


def test_normalisation_is_that_of_squad():
    assert normalise("The  Eiffel-Tower, a “landmark”!") == "eiffeltower landmark"
    assert exact_match("the Beatles.", "Beatles")
    assert not exact_match("Theodore", "odore")


def test_f1_counts_shared_words():
    # shared: eiffel, tower; 3 + 2 words: 2 x 2 / 5
    assert token_f1("tall Eiffel Tower", "Eiffel Tower") == pytest.approx(0.8)
    # bags: "no no" and "no" share one: 2 x 1 / 3
    assert token_f1("no no", "no") == pytest.approx(2 / 3)
    assert token_f1("Paris", "London") == 0.0


def test_the_best_of_several_accepted_answers_counts():
    evaluation = evaluate("La tour Eiffel", "Eiffel", "the Eiffel tower", reference=["Eiffel Tower", "La tour Eiffel"])
    assert evaluation.values["accuracy"] == [1.0, 0.0, 1.0]
    # 2 x 1 / (1 + 2)
    assert evaluation.values["f1"] == [1.0, pytest.approx(2 / 3), 1.0]


@pytest.mark.parametrize("answer", ["-72", "7.2", "7 2", "72 or 73", "720", "72=72", "seventy-two", "(72, 73)"])
def test_numbers_that_normalisation_would_make_equal_are_wrong(answer):
    evaluation = evaluate(answer, reference="72")
    assert evaluation.values["accuracy"] == [0.0]
    assert evaluation.values["f1"] == [0.0]


def test_numbers_are_compared_by_value():
    assert evaluate("72.00", "$72", "72 apples", reference=72).values["accuracy"] == [1.0, 1.0, 1.0]


HEDGED = [
    "Paris or London", "London, Paris", "Paris/London", "Paris; London", "Paris=London", "maybe Paris",
    "Paris and London", "either Paris", "Paris\nLondon", "the capital of France is known to be the city of Paris",
]  # fmt: skip


@pytest.mark.parametrize("answer", HEDGED)
def test_hedged_answers_earn_no_overlap(answer):
    assert is_hedged(answer, ["Paris"])
    evaluation = evaluate(answer, reference="Paris")
    assert evaluation.values["accuracy"] == [0.0]
    assert evaluation.values["f1"] == [0.0]


def test_what_an_accepted_answer_says_itself_is_no_hedge():
    for gold in ("Simon and Garfunkel", "Paris, Texas", "AC/DC", "Either/Or"):
        assert evaluate(gold, reference=gold).statuses["accuracy"] == ["ok"]
    assert evaluate("Simon and Paul", reference="Simon and Garfunkel").values["f1"] == [pytest.approx(2 / 3)]


def test_right_words_in_another_order_are_not_quite_right():
    evaluation = evaluate("Texas Paris", reference="Paris Texas")
    assert evaluation.statuses["f1"] == ["wrong"]
    assert evaluation.values["f1"] == [0.99]


def test_references_come_in_many_shapes():
    assert gold_answers("Paris") == ["Paris"]
    assert gold_answers('["Paris", "City of Paris"]') == ["Paris", "City of Paris"]
    assert gold_answers({"text": ["Paris", "Paris"], "answer_start": [3, 9]}) == ["Paris"]
    assert gold_answers({"value": "Paris", "aliases": ["Paname"]}) == ["Paris", "Paname"]
    assert gold_answers(7) == ["7"]
    assert gold_answers("[not json") == ["[not json"]


@pytest.mark.parametrize("reference", [None, "", " ", [], {}, [None], True, {"text": []}, object()])
def test_references_without_an_answer_are_errors(reference):
    evaluation = evaluate("Paris", "", reference=reference)
    assert evaluation.statuses["accuracy"] == ["error", "error"]


def test_unanswerable_questions_expect_the_phrase_that_is_set():
    evaluation = evaluate("Unanswerable.", "Paris", reference={"text": []}, no_answer="unanswerable")
    assert evaluation.statuses["accuracy"] == ["ok", "wrong"]


def test_answers_of_articles_and_punctuation_alone_are_compared_as_they_are():
    assert exact_match("The", "the")
    assert not exact_match("a", "the")
    assert not exact_match("?", "!")


def test_other_styles_and_parameters():
    samples = build_samples(["p"] * 2, ["<think>?</think>\nParis", "It is Paris"], reference=["Paris"] * 2)
    assert load("qa-short", style="text").is_correct(samples) == [True, False]
    with pytest.raises(PresetError, match="Did you mean 'answer'"):
        load("qa-short", style="answr")


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("4 PM", "4 AM", False),
        ("4 PM", "4 pm.", True),
        ("5 March", "5 April", False),
        ("50 Cent", "50 Shades", False),
        ("3 Doors Down", "3 dogs", False),
        ("20th Century Fox", "20", False),
        ("1984", "1984 BC", False),
        ("72", "72 apples", True),
        ("$5", "5 dollars", True),
        ("-5", "5", False),
        ("5", "-5", False),
        ("C++", "C", False),
        ("C#", "C", False),
        ("C++", "c++.", True),
        ("well-known", "wellknown", True),
    ],
)
def test_a_gold_that_begins_with_a_number_is_more_than_the_number(gold, answer, same):
    assert exact_match(answer, gold) is same
