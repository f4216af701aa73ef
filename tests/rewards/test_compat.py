"""rewards.compat has TRL's own functions, or their equals where TRL is not installed; of the others, no known bugs."""

import doctest
import pickle
import random
import sys
import time
from types import SimpleNamespace

import pytest

from rewards import RewardsError, compat, from_functions

TRLS = {"accuracy_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward"}
LAYOUT = "<think>\nsix dozens\n</think>\n<answer>\n72\n</answer>"
HOSTILE = [None, "", "\x00", "\ud800", "</think>", [], [{"role": "assistant", "content": None}], [None], 7, {}]


def conversational(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def milliseconds(function, *arguments, **columns):
    start = time.process_time()
    function(*arguments, **columns)
    return 1000 * (time.process_time() - start)


@pytest.fixture
def without_trl(monkeypatch):
    def none():
        raise ImportError("no TRL here")

    monkeypatch.setattr(compat, "_trl", none)


# --- equal to TRL ----------------------------------------------------------------------------------------------------


def test_where_trl_is_installed_its_functions_are_the_ones():
    from trl import rewards as theirs

    assert all(getattr(compat, name) is getattr(theirs, name) for name in TRLS)
    assert set(compat.OURS) == TRLS
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        compat.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize(
    ("solution", "completion"),
    [
        (r"\frac{1}{3}", r"\boxed{\frac{1}{3}}"),
        (r"\frac{1}{3}", r"\boxed{\frac{1}{2}}"),
        ("63/400", r"so \boxed{\frac{63}{400}}."),
        ("7", "The answer is $7$"),
        ("7", "answer is 7"),
        ("7", r"\boxed{7} or rather \boxed{8}"),
        ("7", r"\boxed{8=7}"),
        ("$x^2+2x+1$", r"\boxed{(x+1)^2}"),
        ("forty two", r"\boxed{42}"),
        ("Answer is forty two.", "Answer is forty two."),
        ("", r"\boxed{7}"),
        ("3", r"<think>\boxed{2}</think> \boxed{3}"),
        ("3", r"<think>\boxed{3}</think> \boxed{2}"),
        ("3", r"<think>\boxed{3}"),
        ("forty two", r"<think>work</think>\boxed{42}"),
        ("3", r"work [end] \boxed{3}"),
    ],
)
def test_without_trl_answers_are_judged_as_by_trl(without_trl, solution, completion):
    from trl import rewards as theirs

    given = conversational(completion), [solution]
    assert compat.accuracy_reward(*given, extra=[1]) == theirs.accuracy_reward(*given)
    for ends in (None, ["[end]", "</think>"]):
        expected = theirs.reasoning_accuracy_reward(*given, reasoning_delimiters=ends)
        assert compat.reasoning_accuracy_reward(*given, reasoning_delimiters=ends, extra=[1]) == expected


def test_cosine_is_that_of_trl_beyond_the_maximum_too():
    from trl.rewards import get_cosine_scaled_reward

    completions, solutions = conversational(*[r"\boxed{3}", r"\boxed{4}"] * 5), ["3"] * 10
    ids = [[1] * n for n in (0, 0, 25, 25, 50, 50, 100, 100, 170, 170)]
    expected = get_cosine_scaled_reward(max_len=100)(completions, solutions, ids)
    assert compat.get_cosine_scaled_reward(max_len=100)(completions, solutions, ids) == pytest.approx(expected)
    # half of max_len: cos(π/2) = 0, so 0.5 + 0.5 · 0.5 · (1 + 0) = 0.75, and -0.5 + 0.5 · (-0.5) = -0.75
    assert expected[4:6] == [pytest.approx(0.75), pytest.approx(-0.75)]


def test_repetition_is_that_of_trl():
    from trl.rewards import get_repetition_penalty_reward

    generator = random.Random(0)
    ids = [[generator.randrange(5) for _ in range(n)] for n in (0, 1, 2, 3, 4, 50, 400)]
    for size, penalty in ((1, -1.0), (2, -0.5), (3, -1.0), (3, 0.0)):
        theirs, ours = (f(size, penalty) for f in (get_repetition_penalty_reward, compat.get_repetition_penalty_reward))
        assert ours(completion_ids=ids) == ours(ids) == pytest.approx(theirs(ids))


def test_repetition_takes_ids_or_completions_first_and_what_a_trainer_passes_beside_them():
    reward = compat.get_repetition_penalty_reward(2, -1.0)
    beside = {"prompts": ["x"], "completions": [[{"content": "a b c d"}]]}
    assert reward([[5, 5, 5, 5, 5]], **beside) == reward(completion_ids=[[5, 5, 5, 5, 5]], **beside) == [-0.75]
    assert reward(conversational("a b A b a"), prompts=["x"]) == [-0.5]


def test_repetition_counts_words_without_ids_as_open_r1_does():
    # "a b a b a": ab ba ab ba, 2 of 4 distinct -> -(1 - 2/4); case does not matter
    assert compat.get_repetition_penalty_reward(2, -1.0)(conversational("a b A b a", "a b", "a", "")) == [-0.5, 0, 0, 0]


def test_soft_overlong_is_that_of_trl(without_trl):
    from trl.rewards import get_soft_overlong_punishment

    ids = [[1] * n for n in range(0, 130)]
    for maximum, cache in ((100, 20), (100, 100), (50, 0)):
        expected = get_soft_overlong_punishment(maximum, cache)(ids)
        assert compat.get_soft_overlong_punishment(maximum, cache)(completion_ids=ids) == pytest.approx(expected)


def test_think_format_is_that_of_trl(without_trl):
    from trl.rewards import think_format_reward

    texts = [
        "<think>This is my reasoning.</think>This is my answer.",
        "<think>\nlines\n\nof it\n</think>\nAnswer",
        "<think>\nno end\nAnswer",
        "no beginning</think>Answer",
        "<think>a<think>b</think>Answer",
        "<think>a</think>b<think>c",
        " <think>a</think>b",
        "",
        "<think></think>\nThis is my answer.",
        "<think>a</think>",
        "<think>a</think>b</think>c",
    ]
    given = conversational(*texts)
    assert compat.think_format_reward(given) == think_format_reward(given) == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1]


# --- open-r1's, by their arithmetic ----------------------------------------------------------------------------------


def test_format_wants_open_r1s_line_breaks():
    assert compat.format_reward(conversational(LAYOUT, LAYOUT + "\n", LAYOUT.replace("\n", ""))) == [1.0, 1.0, 0.0]
    assert compat.format_reward([LAYOUT.replace("six", "line\n\nline")]) == [1.0]


def test_tags_count_a_quarter_each():
    texts = [LAYOUT, LAYOUT + LAYOUT, "<think>\n", "<think>", "<think>\na\n</think>\n<answer>\n"]
    # the fourth has no line break behind the tag; the fifth lacks `\n<answer>\n` because its line break is spent
    assert compat.tag_count_reward(texts) == [1.0, 0.0, 0.25, 0.0, 0.75]


def test_steps_count_a_third_each():
    texts = ["First, a. Second, b. Finally, c.", "Step 1: a\nStep 22: b", "x\n- a", "nothing", "\n*a\n*b\n*c\n*d"]
    assert compat.reasoning_steps_reward(texts) == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0, 1.0])


def test_length_follows_kimi():
    ids = [[1] * n for n in (100, 150, 300, 100, 300)]
    texts = [r"\boxed{3}"] * 3 + [r"\boxed{4}"] * 2
    # right: 0.5 - (n - 100)/200 = 0.5, 0.25, -0.5; wrong: min(0, 0.5), min(0, -0.5)
    assert compat.len_reward(texts, ["3"] * 5, completion_ids=ids) == [0.5, 0.25, -0.5, 0.0, -0.5]
    assert compat.len_reward([r"\boxed{3}"] * 2, ["3"] * 2) == [0.0, 0.0]


def test_code_format_wants_a_block_of_the_language():
    code = "<think>\nwork\n</think>\n<answer>\nSee:\n```python\nprint(72)\n```\n</answer>"
    reward = compat.get_code_format_reward("python")
    texts = [code, LAYOUT, code.replace("\n```\n", "\n"), code + "junk", code.replace("python", "rust")]
    assert reward(conversational(*texts)) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert reward(texts[-1:], language=["rust"]) == [1.0]


# --- known bugs that are not repeated --------------------------------------------------------------------------------


def test_format_refuses_junk_second_blocks_and_blanks():
    texts = [LAYOUT + "\nor 73", LAYOUT.replace("six", "</think>\n<think>"), LAYOUT.replace("72", "")]
    assert compat.format_reward(texts) == [0.0, 0.0, 0.0]


def test_numbered_lists_count_beyond_the_first_line():
    assert compat.reasoning_steps_reward(["1. a\n2. b\n3. c"]) == [1.0]


def test_lengths_are_compared_within_a_prompt():
    ids = [[1] * n for n in (10, 20, 1000, 2000)]
    columns = {"prompts": ["p", "p", "q", "q"], "completion_ids": ids}
    # each prompt has its own shortest (0.5) and longest (-0.5); over the whole batch the first two would be near 0.5
    assert compat.len_reward([r"\boxed{3}"] * 4, ["3"] * 4, **columns) == [0.5, -0.5, 0.5, -0.5]


def test_solutions_that_cannot_be_read_are_none_and_count_as_correct_for_lengths(without_trl):
    for solution in (None, "", [], object(), float("nan"), "forty two"):
        assert compat.accuracy_reward([r"\boxed{7}"], [solution]) == [None]
        assert compat.get_cosine_scaled_reward(100)([r"\boxed{7}"], [solution]) == [None]
        # as in open-r1: no word on the answer, so no penalty for the shorter one
        assert compat.len_reward([r"\boxed{7}", r"It is \boxed{7}"], [solution] * 2) == [0.5, -0.5]


def test_a_hanging_answer_costs_itself_only(without_trl, monkeypatch):
    monkeypatch.setattr(compat.answers, "_SECONDS", 0.6)
    tower = r"\boxed{\dfrac{5^{5^{5^{5^5}}-4}-5}{16}}"
    start = time.perf_counter()
    assert compat.accuracy_reward([r"\boxed{7}", tower, r"\boxed{7}"], ["7"] * 3) == [1.0, 0.0, 1.0]
    assert time.perf_counter() - start < 30  # 0.6 s for the tower; workers may have to start first


def test_open_r1s_order_of_arguments_is_told_apart():
    with pytest.raises(RewardsError, match="by keyword"):
        compat.get_cosine_scaled_reward(-1.0, -0.5, 0.5, 1.0, 1000)
    with pytest.raises(ValueError, match="should not be positive"):
        compat.get_repetition_penalty_reward(3, 1.0)
    with pytest.raises(ValueError, match="completion_ids"):
        compat.get_repetition_penalty_reward(3, -1.0, language="fr")


def test_chinese_words_are_found_by_jieba(monkeypatch):
    with pytest.raises(RewardsError, match="pip install jieba"):
        compat.get_repetition_penalty_reward(2, -1.0, language="zh")
    jieba = SimpleNamespace(cut=lambda text: iter(text), __spec__=object())
    monkeypatch.setitem(sys.modules, "jieba", jieba)
    # 这这这这: three pairs of which one is distinct -> -(1 - 1/3)
    reward = compat.get_repetition_penalty_reward(2, -1.0, language="zh")
    assert reward(conversational("这这这这")) == [pytest.approx(-2 / 3)]


# --- code ------------------------------------------------------------------------------------------------------------

TESTS = {"language": "python", "test_cases": [{"input": "2", "output": "4\n6"}, {"input": "5", "output": "10\n12"}]}


def fenced(program):
    return [{"role": "assistant", "content": f"```python\n{program}\n```"}]


def test_code_earns_the_share_of_tests_that_pass():
    right = "n = int(input())\nprint(2 * n)\nprint(2 * n + 2)"
    completions = [fenced(right), fenced("print(4)\nprint(6)"), fenced("print(0)"), right]
    columns = {"verification_info": [TESTS] * 4, "num_parallel": 2, "provider_type": "e2b"}
    assert compat.code_reward(completions, **columns) == [1.0, 0.5, 0.0, 0.0]
    assert compat.binary_code_reward(completions, **columns) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("program", ["print(int(input()) * 2)", "", "import sys\nsys.exit(0)", "print()"])
def test_a_prefix_of_the_expected_output_does_not_pass(program):
    assert compat.code_reward([fenced(program)], verification_info=[TESTS]) == [0.0]


def test_code_rows_that_cannot_be_judged_are_none():
    rows = [TESTS | {"language": "rust"}, {"test_cases": []}, None, TESTS]
    assert compat.code_reward([fenced("print(1)")] * 4, verification_info=rows) == [None, None, None, 0.0]
    with pytest.raises(RewardsError, match="verification_info"):
        compat.code_reward([fenced("print(1)")])
    with pytest.raises(RewardsError, match="several languages"):
        compat.code_reward([fenced("")] * 4, enforce_same_language=True, verification_info=rows)
    assert compat.code_reward(HOSTILE, verification_info=[TESTS] * len(HOSTILE)) == [0.0] * len(HOSTILE)


# --- all of them -----------------------------------------------------------------------------------------------------


def every_function():
    made = {name: compat.OURS.get(name) or getattr(compat, name) for name in compat.__all__}
    made["get_cosine_scaled_reward"] = compat.get_cosine_scaled_reward(max_len=100)
    made["get_repetition_penalty_reward"] = compat.get_repetition_penalty_reward()
    made["get_soft_overlong_punishment"] = made["get_soft_overlong_punishment"](100, 20)
    made["get_code_format_reward"] = compat.get_code_format_reward()
    return {name: made[name] for name in made if "code_reward" not in name}


def test_names_are_complete_and_sorted():
    assert compat.__all__ == sorted(compat.__all__)
    wanted = {"accuracy_reward", "format_reward", "tag_count_reward", "reasoning_steps_reward", "len_reward"}
    wanted |= {"get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"}
    wanted |= {"code_reward", "get_code_format_reward", "think_format_reward", "reasoning_accuracy_reward"}
    assert wanted <= set(compat.__all__)
    from trl import rewards as theirs

    assert {name for name in theirs.__all__ if not name.endswith("_rewards")} <= set(compat.__all__)


@pytest.mark.parametrize("name", sorted(every_function()))
def test_hostile_completions_get_the_lowest_value_and_nothing_raises(name):
    reward = every_function()[name]
    columns = {
        "answer": ["7"] * len(HOSTILE),
        "solution": ["7"] * len(HOSTILE),
        "completion_ids": [[] for _ in HOSTILE],
    }
    values = reward(completions=HOSTILE, prompts=["p"] * len(HOSTILE), **columns)
    assert len(values) == len(HOSTILE)
    assert all(value <= 0 for value in values)
    assert all(reward.low <= value <= reward.high for value in values)


@pytest.mark.parametrize("name", ["format_reward", "tag_count_reward", "reasoning_steps_reward", "think_format_reward"])
@pytest.mark.parametrize("piece", ["<think>\n", "</think>\n<answer>\n", "Step 1", "1", " ", "\n", "```python", "<"])
def test_a_megabyte_is_scanned_in_linear_time(name, piece):
    text = "<think>\n" + piece * (1_000_000 // len(piece))
    assert milliseconds(every_function()[name], [text]) < 200
    assert milliseconds(compat.get_code_format_reward(), [text]) < 200


def test_they_are_picklable_and_carry_trls_names(without_trl):
    from trl import rewards as theirs

    for name, reward in every_function().items():
        assert pickle.loads(pickle.dumps(reward)).__name__ == reward.__name__, name
    for name, given in (("get_cosine_scaled_reward", (100,)), ("get_soft_overlong_punishment", (100, 20))):
        assert getattr(compat, name)(*given).__name__ == getattr(theirs, name)(*given).__name__


def test_they_compose_into_a_preset_with_their_ranges():
    preset = from_functions([(compat.accuracy_reward, 1.0), (compat.format_reward, 0.2)], checker="accuracy_reward")
    assert (preset.components[1].component.low, preset.components[1].component.high) == (0.0, 1.0)


def test_what_was_compared_is_logged_as_by_trl(without_trl):
    from trl import rewards as theirs

    texts = [r"<think>work</think>\boxed{7}", "<think>work</think>none", r"\boxed{7}", r"<think>work</think>\boxed{7}"]
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        logged = [{}, {}]
        for module, log in zip((compat, theirs), logged, strict=True):
            getattr(module, name)(conversational(*texts), ["7", "$7$", "7", "seven"], log_extra=log.__setitem__)
        assert logged[0] == logged[1]


@pytest.mark.parametrize("module", [compat, compat.answers, compat.formats])
def test_examples_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_language_may_stand_in_json():
    tests = '{"language": "javascript", "test_cases": [{"input": "2", "output": "4"}]}'
    assert compat.code_reward(["```python\nprint(4)\n```"], verification_info=[tests]) == [None]


# --- the notebooks' five ------------------------------------------------------------------------------------------------

XML = "<reasoning>\n6 x 12\nis 72\n</reasoning>\n<answer>\n72\n</answer>"
FIVE = [
    compat.correctness_reward_func,
    compat.int_reward_func,
    compat.strict_format_reward_func,
    compat.soft_format_reward_func,
    compat.xmlcount_reward_func,
]


def test_the_notebooks_five_give_a_right_answer_all_they_have():
    given = {"prompts": ["6 x 12?"], "answer": ["72"]}
    assert [function(completions=conversational(XML), **given) for function in FIVE] == [
        [2.0],
        [0.5],
        [0.5],
        [0.5],
        [0.5],
    ]
    assert sum(function(completions=conversational("72"), **given)[0] for function in FIVE) == 0.0


def test_a_perfect_long_answer_without_a_newline_is_not_punished():
    # As published: 0.001 off for each character behind </answer>, counted twice where no newline follows: -1.55 for 2 kB.
    long = XML.replace("6 x 12", "6 x 12 " * 300)
    assert compat.xmlcount_reward_func([long]) == [0.5]


def test_the_notebooks_five_are_the_preset():
    from rewards import load

    preset = load("gsm8k-xml").trl()
    texts = [XML, XML.replace("72", "70"), XML.replace("\n", ""), XML + " or 73", "<answer>72</answer>", "72", ""]
    given = {"prompts": ["q"] * len(texts), "answer": ["72"] * len(texts)}
    for function, part, weight in zip(FIVE, preset, preset.reward_weights, strict=True):
        native = part(completions=texts, completion_ids=None, **given)
        assert function(completions=texts, **given) == [weight * value for value in native], function.__name__
