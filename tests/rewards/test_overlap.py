import pytest

from rewards import PresetError, build_samples, load

REFERENCE = "The council closed the old bridge after the flood."


def evaluate(*texts, reference=REFERENCE, **params):
    size = len(texts)
    return load("text-overlap", **params).score(build_samples(["p"] * size, list(texts), reference=[reference] * size))


def test_chrf_of_a_small_case_by_hand():
    # "abcd" against "abce": n-grams 1..4 share 3/4, 2/3, 1/2, 0/1 of each side; the orders 5 and 6 have none.
    # precision = recall = (3/4 + 2/3 + 1/2 + 0) / 4 = 23/48, and so is F.
    assert evaluate("abcd", reference="abce").totals == [pytest.approx(23 / 48)]


def test_the_best_of_several_references_counts_in_any_script():
    assert evaluate("a dry summer", "狗在花园里", reference=[REFERENCE, "a dry summer", "狗在花园里"]).totals == [
        1.0,
        1.0,
    ]


def test_several_answers_in_one_earn_nothing():
    # 50 characters: 1.6 x 50 + 20 = 100 at most
    evaluation = evaluate(f"{REFERENCE} {REFERENCE}", REFERENCE, "")
    assert evaluation.statuses["overlap"] == ["wrong", "ok", "format"]
    assert evaluation.totals == [0.0, 1.0, 0.0]
    assert evaluation.infos["overlap"][0]["reason"] == "101 characters, over 100"


@pytest.mark.parametrize("reference", [None, "", {}, [], [None], "x" * 20_001])
def test_references_that_are_no_text_are_errors(reference):
    assert evaluate("a", reference=reference).statuses["overlap"] == ["error"]


@pytest.mark.parametrize("params", [{"correct_at": 0.0}, {"correct_at": 2.0}, {"max_ratio": 0.5}])
def test_thresholds_that_make_no_sense_are_refused(params):
    with pytest.raises(PresetError, match="Pass"):
        load("text-overlap", **params)
