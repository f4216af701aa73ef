import time

import pytest

from rewards import PresetError, build_samples, load
from rewards.components.answers import chosen_letter
from rewards.hacks import answered, known_hacks

PROMPT = "Capital of France? A) Rome B) Oslo C) Paris D) Bern. Answer in <answer></answer>."


def statuses(*completions, reference="C", **params):
    size = len(completions)
    samples = build_samples([PROMPT] * size, list(completions), answer=[reference] * size)
    return load("mcq-letter", **params).score(samples).statuses["accuracy"]


@pytest.mark.parametrize(
    "answer",
    [
        "C",
        "c",
        "(C)",
        "[C]",
        "C.",
        "C)",
        "**C**",
        "C. Paris",
        "(C) Paris",
        "C: Paris",
        "Option C",
        r"\text{C}",
        "$C$",
        " C ",
    ],
)
def test_one_letter_in_any_dress_is_a_choice(answer):
    assert chosen_letter(answer, "ABCD") == "C"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Cat",
        "C or D",
        "C, D",
        "C D",
        "A B C D",
        "(C) or (D)",
        "E",
        "Paris",
        "C. or D.",
        "3",
        "neither C",
        "C" * 501,
    ],
)
def test_several_letters_or_none_are_no_choice(answer):
    assert chosen_letter(answer, "ABCD") is None


@pytest.mark.parametrize(
    "completion",
    ["<answer>C</answer>", r"\boxed{C}", r"\boxed{\text{C}}", "Answer: C", "#### C", "**Answer:** C. Paris"],
)
def test_the_right_letter_is_right_wherever_it_stands(completion):
    assert statuses(completion) == ["ok"]


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


@pytest.mark.parametrize("style", ["answer", "boxed", "Answer: {answer}"])
def test_no_known_hack_is_right(style):
    hacks = [hack.completion for hack in known_hacks(PROMPT, "C", "B", style)]
    assert statuses(answered(style, "C"), answered(style, "B")) == ["ok", "wrong"]
    assert set(statuses(*hacks)) <= {"wrong", "format"}


def test_answers_of_anything_are_read_quickly():
    for pattern in ("C", "(", " ", "*", "A ", "C) ", "or ", "\n", r"\text{", "$"):
        start = time.process_time()
        statuses(f"<answer>{pattern * 9_000}</answer>", "Answer: " + pattern * 900)
        assert time.process_time() - start < 0.2, pattern


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("C", True),
        ("C.", True),
        ("**C**", True),
        ("So the correct answer is C.", True),
        ("The best answer is C", True),
        ("<answer>C - Paris</answer>", True),
        ("<answer>C is correct</answer>", True),
        ("<answer>C. Vitamin B</answer>", True),
        ("<answer>C. Vitamin B or D</answer>", False),
        ("<answer>C is correct and so is D</answer>", False),
        ("B", False),
        ("Could be C, could be D", False),
        ("A cat", False),
    ],
)
def test_letters_as_people_write_them(completion, right):
    given = {"answer": ["C"], "choices": [["Vitamin A", "Vitamin D", "Vitamin B", "Zinc"]]}
    assert load("mcq-letter").is_correct(build_samples(["?"], [completion], **given)) == [right]
