import time

import pytest

from rewards import PresetError, build_samples, load
from rewards.components.overlap import split_words

REFERENCE = "the council closed the old bridge after the flood"  # 9 words


def evaluate(*texts, reference=REFERENCE, **params):
    size = len(texts)
    return load("summarize", **params).score(build_samples(["p"] * size, list(texts), reference=[reference] * size))


def test_rouge_is_the_f1_of_the_longest_common_subsequence():
    texts = [REFERENCE, "The council closed the bridge.", "the flood closed the bridge", "nothing of it"]
    # 1; 5 shared of 5 and 9: 10/14; "the closed the bridge" 4: 8/14; 0
    expected = [1.0, pytest.approx(10 / 14), pytest.approx(8 / 14), 0.0]
    evaluation = evaluate(*texts, stem=False)
    assert evaluation.values["rouge"] == expected
    assert evaluation.statuses["rouge"] == ["ok", "ok", "ok", "wrong"]


def test_stems_are_compared_unless_turned_off():
    assert evaluate("councils closing bridges floods").values["rouge"] == [pytest.approx(2 * 4 / 13)]
    assert evaluate("councils closing bridges floods", stem=False).values["rouge"] == [0.0]


def test_the_length_band_falls_in_proportion():
    # least 0.6 x 9 = 5.4, most 1.3 x 9 = 11.7: 3 words 3/5.4, 6 and 11 words 1, 13 words 11.7/13
    texts = ["w " * n for n in (3, 6, 11, 13)]
    expected = [pytest.approx(3 / 5.4), 1.0, 1.0, pytest.approx(11.7 / 13)]
    assert evaluate(*texts).values["length"] == expected
    # 10 to 20 words: 5/10, 1, 20/40
    texts = ["w " * n for n in (5, 10, 40)]
    assert evaluate(*texts, min_words=10, max_words=20).values["length"] == [0.5, 1.0, 0.5]


def test_several_summaries_in_one_earn_nothing():
    # 1.6 x 9 = 14.4 words at most
    evaluation = evaluate(f"{REFERENCE} and more of what nobody asked", f"{REFERENCE} or it stayed open")
    assert evaluation.values["rouge"] == [0.0, pytest.approx(18 / 22)]
    assert "over 14.4" in evaluation.infos["rouge"][0]["reason"]


def test_the_best_of_several_references_counts():
    assert evaluate("a dry summer", reference=[REFERENCE, "a dry summer"]).values["rouge"] == [1.0]


def test_scripts_without_spaces_are_read():
    assert split_words("犬は3匹, naïve café") == ["犬", "は", "3", "匹", "naïve", "café"]
    # 4 of 5 and 5 characters: 8/10
    assert evaluate("狗在花园里", reference="狗在公园里").values["rouge"] == [pytest.approx(0.8)]
    assert evaluate("Кошка спит", reference="Кошка спит дома").values["rouge"] == [pytest.approx(0.8)]


@pytest.mark.parametrize("reference", [None, "", "?!", {}, [], [None], "w " * 601])
def test_references_that_are_no_text_are_errors(reference):
    assert evaluate("a", reference=reference).statuses["rouge"] == ["error"]


def test_bands_and_thresholds_that_make_no_sense_are_refused():
    for params in ({"correct_at": 0.0}, {"max_ratio": 0.5}, {"min_words": 9, "max_words": 3}, {"min_words": 0}):
        with pytest.raises(PresetError, match="Give"):
            load("summarize", **params)


@pytest.mark.parametrize("piece", ["a ", " ", "犬", "a", ".", "\u00e9", "_"])
def test_long_texts_take_little_time(piece):
    preset = load("summarize")
    evaluate("warm")
    for size in (1_000_000, 390_000, 1_900):
        samples = build_samples(["p"], [piece * (size // len(piece))], reference=["a " * 600])
        start = time.process_time()
        preset.score(samples)
        assert time.process_time() - start < 0.4


GERMAN = "Der Hund schläft heute den ganzen Tag im Garten."


def translated(*texts, reference=GERMAN, target="de", **params):
    size = len(texts)
    columns = {"reference": [reference] * size, "target_language": [target] * size}
    return load("translate", **params).score(build_samples(["p"] * size, list(texts), **columns))


def test_chrf_of_a_small_case_by_hand():
    # "abcd" against "abce": n-grams 1..4 share 3/4, 2/3, 1/2, 0/1 of each side; the orders 5 and 6 have none.
    # precision = recall = (3/4 + 2/3 + 1/2 + 0) / 4 = 23/48, and so is F.
    evaluation = translated("abcd", reference="abce", language_weight=0)
    assert evaluation.values["chrf"] == [pytest.approx(23 / 48)]


def test_translations_into_the_language_are_compared_and_others_are_not():
    close, other, source = (
        "Der Hund schläft den ganzen Tag im Garten.",
        "Morgen wird es regnen.",
        "The dog sleeps today.",
    )
    evaluation = translated(GERMAN, close, other, source, "")
    assert evaluation.statuses["chrf"] == ["ok", "ok", "wrong", "wrong", "format"]
    assert evaluation.totals[0] == 1.1
    assert 0.9 < evaluation.totals[1] < 1.1
    assert 0.1 < evaluation.totals[2] < 0.5
    assert evaluation.totals[3:] == [0.0, 0.0]
    assert evaluation.infos["chrf"][3]["reason"] == "gated by language"


def test_short_references_leave_the_language_out():
    evaluation = translated("42", "41", reference="42")
    assert evaluation.statuses["language"] == ["not_applicable"] * 2
    assert evaluation.totals[0] == 1.0
    assert evaluation.statuses["chrf"] == ["ok", "wrong"]


@pytest.mark.parametrize("reference", [None, "", {}, [], "x" * 20_001])
def test_translations_that_are_no_text_are_errors(reference):
    evaluation = translated("a", reference=reference, language_weight=0)
    assert evaluation.statuses["chrf"] == ["error"]


def test_chrf_plus_plus_and_bad_parameters():
    assert translated(GERMAN, word_order=2).values["chrf"] == [pytest.approx(1.0)]
    for params in ({"word_order": 3}, {"correct_at": 2.0}, {"max_ratio": 0.0}):
        with pytest.raises(PresetError, match="Give"):
            load("translate", **params)
