import pytest

from rewards import PresetError, build_samples, load

REFERENCE = "Der Hund schläft heute den ganzen Tag im Garten."


def evaluate(*texts, reference=REFERENCE, target="de", **params):
    size = len(texts)
    columns = {"reference": [reference] * size, "target_language": [target] * size}
    return load("translate", **params).score(build_samples(["p"] * size, list(texts), **columns))


def test_chrf_of_a_small_case_by_hand():
    # "abcd" against "abce": n-grams 1..4 share 3/4, 2/3, 1/2, 0/1 of each side; the orders 5 and 6 have none.
    # precision = recall = (3/4 + 2/3 + 1/2 + 0) / 4 = 23/48, and so is F.
    evaluation = evaluate("abcd", reference="abce", language_weight=0)
    assert evaluation.values["chrf"] == [pytest.approx(23 / 48)]


def test_translations_into_the_language_are_compared_and_others_are_not():
    close, other, source = (
        "Der Hund schläft den ganzen Tag im Garten.",
        "Morgen wird es regnen.",
        "The dog sleeps today.",
    )
    evaluation = evaluate(REFERENCE, close, other, source, "")
    assert evaluation.statuses["chrf"] == ["ok", "ok", "wrong", "wrong", "format"]
    assert evaluation.totals[0] == 1.1
    assert 0.9 < evaluation.totals[1] < 1.1
    assert 0.1 < evaluation.totals[2] < 0.5
    assert evaluation.totals[3:] == [0.0, 0.0]
    assert evaluation.infos["chrf"][3]["reason"] == "gated by language"


def test_several_translations_in_one_earn_nothing():
    # 1.6 x 48 + 20 = 96.8 characters at most
    assert evaluate(f"{REFERENCE} {REFERENCE} {REFERENCE}").values["chrf"] == [0.0]


def test_short_references_leave_the_language_out():
    evaluation = evaluate("42", "41", reference="42")
    assert evaluation.statuses["language"] == ["not_applicable"] * 2
    assert evaluation.totals[0] == 1.0
    assert evaluation.statuses["chrf"] == ["ok", "wrong"]


def test_the_best_of_several_references_counts():
    assert evaluate("Morgen wird es regnen.", reference=[REFERENCE, "Morgen wird es regnen."]).statuses["chrf"] == [
        "ok"
    ]


@pytest.mark.parametrize("reference", [None, "", 7, [], "x" * 20_001])
def test_references_that_are_no_text_are_errors(reference):
    evaluation = evaluate("a", reference=reference, language_weight=0)
    assert evaluation.statuses["chrf"] == ["error"]


def test_chrf_plus_plus_and_bad_parameters():
    assert evaluate(REFERENCE, word_order=2).values["chrf"] == [pytest.approx(1.0)]
    for params in ({"word_order": 3}, {"correct_at": 2.0}, {"max_ratio": 0.0}):
        with pytest.raises(PresetError, match="Give"):
            load("translate", **params)
