import time

import pytest

from rewards import build_samples, load
from rewards.components.ifeval import CONSTRAINTS, follows, instructions_of

LONG = "The river is long and the bridge over it is old. People cross it every day on their way to work."
# instruction, arguments, responses that follow it, responses that do not
CASES = [
    ("keywords:existence", {"keywords": ["apple", "pear"]}, ["Apples and PEARS"], ["apples", "pear"]),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "at least"}, ["Sun, sun"], ["sun"]),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "less than"}, ["sun"], ["sun sun"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["category"], ["A cat.", "CAT", "cat-like"]),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
     ["Eel here"], ["Eel"]),
    ("language:response_language", {"language": "de"}, ["Der Hund schläft heute im Garten."], [LONG]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, [LONG, "A? B!"], ["One."]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["Mr. X is 3.5."], [LONG]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["a\n***\nb", "***\na\n***\nb"], ["a", "a***b***c"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, ["a***b***c"], ["a*** ***c"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["a b c"], ["a b", "... a b"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a b"], ["a b c"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
     ["a\n\nthen b", "a\n\n\"Then,\" b", "a\n\n\n\nthen"], ["a\n\nThenb", "then\n\na", "a\n\nthen\n\nb", "then"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[name] at [place]"], ["[name]", "[] [] x", "[a\nb] [c]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["a\n\nP.S. b", "a p. s. b"], ["a", "a P.S."]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a\nP.P.S b"], ["a\nP.S. b"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n* b", "- a\n  - b\ntext"], ["* a", "* a\n*\n*", "- a\n---\n- b\n- c", "**a**\n**b**"]),
    ("detectable_format:constrained_response", {},
     ["My answer is yes.", "I think: my answer is maybe."], ["yes", "My answer is yes. My answer is no."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*a* and **b**", "**a** **b**"], ["*a*", "** ** * * x", "*a\nb*"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb", "SECTION I: a SECTION II: b"],
     ["Section 1 a", "Section 1 Section 2", "Section 1 a Section 1 b", "sections a and b"]),
    ("detectable_format:json_format", {},
     ["{\"a\": 1}", "```json\n{\"a\": 1}\n```", "```\n[1]\n```"], ["It is {\"a\": 1}", "{a: 1}", "```json\n{\"a\": 1}"]),
    ("detectable_format:title", {}, ["<<My title>>\ntext"], ["<title> x", "<< >> x", "<<a\nb>>"]),
    ("combination:two_responses", {},
     ["a******b", "******\na\n******\nb"], ["a", "a******a", "a******b******c", "a******"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Name a  fruit."},
     ["name a fruit. Apple"], ["Apple", "Name a fruit.", "Name a fruit. !"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["So. THE END.", "\"So. The end.\""], ["The end. So."]),
    ("startend:quotation", {}, ["\"Hello.\"", "“Hello.”"], ["Hello", "\"\"", "\" \"", "\"Hello", "\""]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["NASA and ESA"], ["NASA and Esa"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"},
     ["NASA is"], ["NASA ESA"]),
    ("change_case:english_capital", {}, [LONG.upper()], [LONG, "DER HUND SCHLÄFT HEUTE IM GARTEN."]),
    ("change_case:english_lowercase", {}, [LONG.lower()], [LONG, "der hund schläft heute im garten."]),
    ("punctuation:no_comma", {}, ["a b"], ["a, b"]),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), CASES)
def test_each_instruction_tells_what_follows_it(instruction, arguments, good, bad):
    assert [follows(text, instruction, arguments) for text in good] == [True] * len(good)
    assert [follows(text, instruction, arguments) for text in bad] == [False] * len(bad)


def test_all_25_kinds_of_the_paper_are_there_and_tested():
    assert {case[0] for case in CASES} == set(CONSTRAINTS)
    assert len(CONSTRAINTS) == 25


@pytest.mark.parametrize(("instruction", "arguments"), {case[0]: case[1] for case in CASES}.items())
@pytest.mark.parametrize("response", ["", " \n", "\x00", "...", "***", "\u200b", "\ud800"])
def test_a_response_that_says_nothing_follows_nothing(instruction, arguments, response):
    assert not follows(response, instruction, arguments)


@pytest.mark.parametrize("piece", ["a", ".", '."', "**a", "<<", "section 1 ", "\n\n"])
def test_a_megabyte_of_anything_is_read_in_linear_time(piece):
    def seconds(size, instruction, arguments):
        start = time.process_time()
        evaluate("x" + piece * (size // len(piece)), ids=[instruction], kwargs=[arguments])
        return time.process_time() - start

    small, large = 125_000, (390_000, 1_000_000)
    for case in {case[0]: case[:2] for case in CASES}.values():
        a_piece = max(seconds(small, *case), 0.005) / small  # linear ones take 0.001 to 0.03; what is less is noise
        for size in large:  # a quadratic one takes 3 and 8 times as long per piece; one slow measurement is allowed
            assert any(seconds(size, *case) < 3 * size * a_piece for _ in range(3)), (case[0], size)


def evaluate(
    *texts, ids=("punctuation:no_comma", "startend:end_checker"), kwargs=({}, {"end_phrase": "bye"}), **params
):
    size = len(texts)
    columns = {"instruction_id_list": [ids] * size, "kwargs": [kwargs] * size}
    return load("ifeval", **params).score(build_samples(["p"] * size, list(texts), **columns))


def test_all_instructions_count():
    evaluation = evaluate("So bye", "So, bye", "So, hello", "<think>a, b</think>So bye")
    assert evaluation.values["accuracy"] == [1.0, 0.0, 0.0, 1.0]
    assert evaluation.statuses["accuracy"] == ["ok", "wrong", "wrong", "ok"]


def test_arguments_filled_by_arrow_and_json_text_are_read():
    filled = [{"end_phrase": None, "num_words": None}, {"end_phrase": "bye", "num_words": None}]
    assert evaluate("So bye", kwargs=filled).statuses["accuracy"] == ["ok"]
    ids, kwargs = '["startend:end_checker"]', '[{"end_phrase": "bye"}]'
    assert evaluate("So bye", ids=ids, kwargs=kwargs).statuses["accuracy"] == ["ok"]
    assert instructions_of("punctuation:no_comma", None) == [("punctuation:no_comma", {})]


@pytest.mark.parametrize(
    ("ids", "kwargs", "says"),
    [
        (None, None, "no instructions"), ([], [], "no instructions"),
        (["punctuation:no_coma"], [{}], "Did you mean 'punctuation:no_comma'"),
        (["punctuation:no_comma"], [{}, {}], "one object for each of the 1"),
        (["punctuation:no_comma"], [{"relation": 1}], "kwargs cannot be used"),
        (["startend:end_checker"], [{}], "kwargs cannot be used"),
        (["startend:end_checker"], [{"end_phrase": " "}], "kwargs cannot be used"),
        (["startend:end_checker"], ["x"], "not an object"),
        (["length_constraints:number_words"], [{"num_words": "x", "relation": "at least"}], "kwargs cannot be used"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "around"}], "not one of at least"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_are_errors(ids, kwargs, says):
    evaluation = evaluate("So bye", ids=ids, kwargs=kwargs)
    assert evaluation.statuses["accuracy"] == ["error"]
    assert says in evaluation.infos["accuracy"][0]["reason"]
