import pytest

from rewards import Context, PresetError, build_samples
from rewards.components.languages import LanguageConsistency, language_of, script_share
from rewards.evaluation import run_component


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
