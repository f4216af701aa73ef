import time

import pytest

from rewards import PresetError, build_samples
from rewards.components.languages import LanguageConsistency, script_share
from rewards.evaluation import run_component
from rewards.protocol import Context


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


@pytest.mark.parametrize("pattern", ["a", "a ", "中", "\\a", "<a>", "<", "\\", "\ud800", " ", "ab"])
def test_a_megabyte_of_anything_is_looked_through_quickly(pattern):
    text = pattern * (1_000_000 // len(pattern))
    for language in ("en", "zh"):
        start = time.process_time()
        run_component(LanguageConsistency(language=language), build_samples(["?"], [text]), Context())
        run_component(LanguageConsistency(language=language), build_samples(["?"], [text[:399_999]]), Context())
        assert time.process_time() - start < 0.2, pattern
