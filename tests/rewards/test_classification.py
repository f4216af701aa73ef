import pytest
from reward_parts import answered

from rewards import PresetError, build_samples, load

LABELS = ["positive", "negative", "not_sure"]


def evaluate(*answers, reference="positive", columns=None, **params):
    completions = [answered(answer) for answer in answers]
    size = len(answers)
    extra = {name: [value] * size for name, value in (columns or {}).items()}
    samples = build_samples(["p"] * size, completions, reference=[reference] * size, **extra)
    return load("classification-label", **{"labels": LABELS, **params}).score(samples)


def test_the_whole_answer_must_be_the_label():
    answers = ["positive", "Positive.", '"POSITIVE"', "**positive**", "negative", "positive or negative"]
    evaluation = evaluate(*answers, "It is positive", "not positive", "positively", "positive negative")
    # right 1 + 0.1, another label 0.1, anything else 0
    assert evaluation.totals == [1.1, 1.1, 1.1, 1.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert evaluation.statuses["accuracy"] == ["ok"] * 4 + ["wrong"] + ["format"] * 5


def test_underscores_and_hyphens_are_spaces():
    assert evaluate("Not sure", "not-sure", reference="not_sure").values["accuracy"] == [1.0, 1.0]


def test_indices_name_labels():
    assert evaluate("negative", "1", reference=1).statuses["accuracy"] == ["ok", "format"]


def test_rows_may_bring_their_own_labels():
    for labels in (["sport", "politics"], '["sport", "politics"]'):
        evaluation = evaluate("sport", "positive", reference="sport", columns={"labels": labels})
        assert evaluation.statuses["accuracy"] == ["ok", "format"]


def test_without_known_labels_only_the_reference_is_compared():
    evaluation = evaluate("sport", "cooking", reference="sport", labels=[])
    assert evaluation.statuses["accuracy"] == ["ok", "wrong"]


@pytest.mark.parametrize("reference", [None, "", "...", 3, -1, True, 1.0, ["positive"], "neutral"])
def test_references_that_are_no_label_are_errors(reference):
    assert evaluate("positive", reference=reference).statuses["accuracy"] == ["error"]


def test_labels_that_are_the_same_are_refused():
    for labels in (["a", "A."], ["a", " "]):
        with pytest.raises(PresetError, match="different names"):
            load("classification-label", labels=labels)


def test_minus_one_is_not_one():
    preset = load("classification-label", labels=["-1", "0", "1"])
    samples = build_samples(
        ["?"] * 4, [f"<answer>{text}</answer>" for text in ("-1", "1", "− 1", "0")], answer=["-1"] * 4
    )
    assert preset.is_correct(samples) == [True, False, True, False]
