import time

import pytest

from rewards import Context, build_samples
from rewards.components.languages import TargetLanguage, language_code, language_of, language_probability

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
def test_languages_are_told_apart_in_any_case_and_every_time(code, sentence):
    first = language_of(sentence)
    assert first[0] == code
    assert first[1] > 0.5
    assert language_of(sentence.upper())[0] == code
    assert language_probability(sentence, code) == first[1]
    assert language_probability(sentence, "en" if code != "en" else "de") < 0.1


@pytest.mark.parametrize("text", ["", " ", "123 + 4", "\x00", "\ud800", "🙂🙂", "$x^2$ ="[-1]])
def test_text_without_letters_has_no_language(text):
    assert language_of(text) == ("und", 0.0)
    assert language_probability(text, "en") == 0.0


def test_names_of_languages():
    names = ["en", "EN", "en-US", "en_XX", "eng_Latn", "English", " english "]
    assert {language_code(name) for name in names} == {"en"}
    assert [language_code(name) for name in ("zh-Hans", "nb", "nno", "Chinese")] == ["zh", "no", "no", "zh"]


def test_a_megabyte_takes_no_time():
    language_of("warm")
    for piece in ("a", "é", "犬", "the ", "\ud800"):
        start = time.process_time()
        language_of(piece * (1_000_000 // len(piece)))
        assert time.process_time() - start < 0.2


def score(text, target="de", reference=SENTENCES["de"], **params):
    samples = build_samples(["p"], [text], reference=[reference], target_language=[target])
    return TargetLanguage(**params).score(samples, Context())[0]


def test_the_asked_language_is_checked():
    assert score("Die Katze sitzt auf der Matte.").status == "ok"
    assert score(SENTENCES["en"]).status == "wrong"
    assert score(SENTENCES["en"]).info["reason"] == "en instead of de"
    assert score("").status == "format"
    assert score("123").status == "wrong"


def test_a_reference_that_is_in_no_telling_language_excludes_the_prompt():
    for text in ("Berlin", SENTENCES["en"], ""):
        assert score(text, reference="42").status == "not_applicable"


@pytest.mark.parametrize("target", [None, "", "klingon", 7])
def test_unknown_languages_are_errors(target):
    assert score(SENTENCES["de"], target=target).status == "error"
    assert score(SENTENCES["de"], target=None, language="de").status == "ok"
