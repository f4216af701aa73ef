"""Short answers: a few words, a letter, a label; overlap with a reference; languages."""

import pytest
from reward_parts import answered

from rewards import Context, PresetError, build_samples, load
from rewards.components.answers import chosen_letter, exact_match, gold_answers, is_hedged, normalise, token_f1
from rewards.components.languages import LanguageConsistency, language_of, script_share
from rewards.evaluation import run_component


def evaluate_qa(*answers, reference, **params):
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
    evaluation = evaluate_qa(
        "La tour Eiffel", "Eiffel", "the Eiffel tower", reference=["Eiffel Tower", "La tour Eiffel"]
    )
    assert evaluation.values["accuracy"] == [1.0, 0.0, 1.0]
    # 2 x 1 / (1 + 2)
    assert evaluation.values["f1"] == [1.0, pytest.approx(2 / 3), 1.0]


@pytest.mark.parametrize("answer", ["-72", "7.2", "7 2", "72 or 73", "720", "72=72", "seventy-two", "(72, 73)"])
def test_numbers_that_normalisation_would_make_equal_are_wrong(answer):
    evaluation = evaluate_qa(answer, reference="72")
    assert evaluation.values["accuracy"] == [0.0]
    assert evaluation.values["f1"] == [0.0]


def test_numbers_are_compared_by_value():
    assert evaluate_qa("72.00", "$72", "72 apples", reference=72).values["accuracy"] == [1.0, 1.0, 1.0]


HEDGED = [
    "Paris or London", "London, Paris", "Paris/London", "Paris; London", "Paris=London", "maybe Paris",
    "Paris and London", "either Paris", "Paris\nLondon", "the capital of France is known to be the city of Paris",
]  # fmt: skip


@pytest.mark.parametrize("answer", HEDGED)
def test_hedged_answers_earn_no_overlap(answer):
    assert is_hedged(answer, ["Paris"])
    evaluation = evaluate_qa(answer, reference="Paris")
    assert evaluation.values["accuracy"] == [0.0]
    assert evaluation.values["f1"] == [0.0]


def test_right_words_in_another_order_are_not_quite_right():
    evaluation = evaluate_qa("Texas Paris", reference="Paris Texas")
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
    evaluation = evaluate_qa("Paris", "", reference=reference)
    assert evaluation.statuses["accuracy"] == ["error", "error"]


def test_unanswerable_questions_expect_the_phrase_that_is_set():
    evaluation = evaluate_qa("Unanswerable.", "Paris", reference={"text": []}, no_answer="unanswerable")
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
        ("4 PM", "4 AM", False), ("4 PM", "4 pm.", True), ("5 March", "5 April", False),
        ("50 Cent", "50 Shades", False), ("3 Doors Down", "3 dogs", False), ("20th Century Fox", "20", False),
        ("1984", "1984 BC", False), ("72", "72 apples", True), ("$5", "5 dollars", True), ("-5", "5", False),
        ("5", "-5", False), ("C++", "C", False), ("C#", "C", False), ("C++", "c++.", True),
        ("well-known", "wellknown", True),
    ],
)  # fmt: skip
def test_a_gold_that_begins_with_a_number_is_more_than_the_number(gold, answer, same):
    assert exact_match(answer, gold) is same


PROMPT = "Capital of France? A) Rome B) Oslo C) Paris D) Bern. Answer in <answer></answer>."


def statuses(*completions, reference="C", **params):
    size = len(completions)
    samples = build_samples([PROMPT] * size, list(completions), answer=[reference] * size)
    return load("mcq-letter", **params).score(samples).statuses["accuracy"]


@pytest.mark.parametrize(
    "answer",
    [
        "C", "c", "(C)", "[C]", "C.", "C)", "**C**", "C. Paris", "(C) Paris", "C: Paris", "Option C", r"\text{C}",
        "$C$", " C ",
    ],
)  # fmt: skip
def test_one_letter_in_any_dress_is_a_choice(answer):
    assert chosen_letter(answer, "ABCD") == "C"


@pytest.mark.parametrize(
    "answer",
    [
        "", "Cat", "C or D", "C, D", "C D", "A B C D", "(C) or (D)", "E", "Paris", "C. or D.", "3", "neither C",
        "C" * 501,
    ],
)  # fmt: skip
def test_several_letters_or_none_are_no_choice(answer):
    assert chosen_letter(answer, "ABCD") is None


def test_the_wrong_letter_is_wrong_and_no_answer_is_format():
    assert statuses("<answer>B</answer>", "Paris", "<answer>C") == ["wrong", "format", "format"]


@pytest.mark.parametrize("reference", ["C", "(C)", "C. Paris", 2, 2.0, "2"])
def test_references_are_letters_or_positions(reference):
    assert statuses("<answer>C</answer>", "<answer>B</answer>", reference=reference) == ["ok", "wrong"]


@pytest.mark.parametrize("reference", [None, True, 7, -1, "", "E", "C or D", [], 2.5, "77", 4.0])
def test_unusable_references_are_errors(reference):
    assert statuses("<answer>C</answer>", reference=reference) == ["error"]


@pytest.mark.parametrize("letters", ["", "A", "AA", "abc", "ÄB"])
def test_unusable_letters_are_refused(letters):
    with pytest.raises(PresetError, match="different capital letters"):
        load("mcq-letter", letters=letters)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("C", True), ("C.", True), ("**C**", True), ("So the correct answer is C.", True),
        ("The best answer is C", True), ("<answer>C - Paris</answer>", True), ("<answer>C is correct</answer>", True),
        ("<answer>C. Vitamin B</answer>", True), ("<answer>C. Vitamin B or D</answer>", False),
        ("<answer>C is correct and so is D</answer>", False), ("B", False), ("Could be C, could be D", False),
        ("A cat", False),
    ],
)  # fmt: skip
def test_choice_letters_are_read_in_common_forms(completion, right):
    columns = {"answer": ["C"], "choices": [["Vitamin A", "Vitamin D", "Vitamin B", "Zinc"]]}
    assert load("mcq-letter").is_correct(build_samples(["?"], [completion], **columns)) == [right]


LABELS = ["positive", "negative", "not_sure"]


def evaluate_labels(*answers, reference="positive", columns=None, **params):
    completions = [answered(answer) for answer in answers]
    size = len(answers)
    extra = {name: [value] * size for name, value in (columns or {}).items()}
    samples = build_samples(["p"] * size, completions, reference=[reference] * size, **extra)
    return load("classification-label", **{"labels": LABELS, **params}).score(samples)


def test_the_whole_answer_must_be_the_label():
    answers = ["positive", "Positive.", '"POSITIVE"', "**positive**", "negative", "positive or negative"]
    evaluation = evaluate_labels(*answers, "It is positive", "not positive", "positively", "positive negative")
    # right 1 + 0.1, another label 0.1, anything else 0
    assert evaluation.totals == [1.1, 1.1, 1.1, 1.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert evaluation.statuses["accuracy"] == ["ok"] * 4 + ["wrong"] + ["format"] * 5


def test_underscores_and_hyphens_are_spaces():
    assert evaluate_labels("Not sure", "not-sure", reference="not_sure").values["accuracy"] == [1.0, 1.0]


def test_indices_name_labels():
    assert evaluate_labels("negative", "1", reference=1).statuses["accuracy"] == ["ok", "format"]


def test_rows_may_bring_their_own_labels():
    for labels in (["sport", "politics"], '["sport", "politics"]'):
        evaluation = evaluate_labels("sport", "positive", reference="sport", columns={"labels": labels})
        assert evaluation.statuses["accuracy"] == ["ok", "format"]


def test_without_known_labels_only_the_reference_is_compared():
    evaluation = evaluate_labels("sport", "cooking", reference="sport", labels=[])
    assert evaluation.statuses["accuracy"] == ["ok", "wrong"]


@pytest.mark.parametrize("reference", [None, "", "...", 3, -1, True, 1.0, ["positive"], "neutral"])
def test_references_that_are_no_label_are_errors(reference):
    assert evaluate_labels("positive", reference=reference).statuses["accuracy"] == ["error"]


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


def test_share_of_letters_of_the_script():
    assert script_share("Plain English.", "en") == 1.0
    assert script_share("Привет, world", "ru") == pytest.approx(6 / 11)  # 6 Cyrillic letters, 5 Latin
    assert script_share("全部中文", "zh") == 1.0
    assert script_share("ひらがなと漢字", "ja") == 1.0
    assert script_share("wie schön", "de") == 1.0
    assert script_share("english 中文", "en") == pytest.approx(7 / 9)


def test_formulas_and_tags_are_no_prose():
    assert script_share(r"<think>设 x = \frac{a}{b}</think>", "zh") == 1.0
    assert script_share(r"\frac{1}{2} = 0.5", "en") is None


def test_no_letters_is_format_and_a_mixture_is_partial():
    batch = build_samples(["?"] * 3, ["English words", "english 中文", "1 + 1 = 2"])
    scores = run_component(LanguageConsistency(), batch, Context())
    assert [score.status for score in scores] == ["ok", "wrong", "format"]
    assert [score.value for score in scores] == pytest.approx([1.0, 7 / 9, 0.0])


def test_unknown_languages_are_refused():
    with pytest.raises(PresetError, match="No script is known"):
        LanguageConsistency(language="english")


SENTENCES = {
    "en": "The dog sleeps in the garden all day today.",
    "de": "Der Hund schläft heute den ganzen Tag im Garten.",
    "fr": "Le chien dort toute la journée dans le jardin aujourd'hui.",
    "es": "El perro duerme hoy todo el día en el jardín de la casa.",
    "zh": "今天狗整天都在花园里睡觉。",
    "ja": "犬は今日一日中庭で寝ています。",
    "ko": "개는 오늘 하루 종일 정원에서 자고 있습니다.",
    "ar": "ينام الكلب طوال اليوم في الحديقة.",
    "hi": "कुत्ता आज पूरे दिन बगीचे में सोता है।",
    "tr": "Köpek bugün bütün gün bahçede uyuyor.",
}


@pytest.mark.parametrize(("code", "sentence"), SENTENCES.items())
def test_languages_are_told_apart_in_any_case(code, sentence):
    assert language_of(sentence) == language_of(sentence.upper()) == code


@pytest.mark.parametrize("text", ["", " ", "123 + 4", "\x00", "\ud800", "🙂🙂", "$x^2$ ="[-1]])
def test_text_without_letters_has_no_language(text):
    assert language_of(text) == "und"
