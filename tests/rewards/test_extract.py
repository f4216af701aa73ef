import time

import pytest
from pairwise import rest_in_matrix

from rewards.extract import (
    MAX_ANSWER_CHARS,
    MAX_CHARS,
    any_answer,
    boxed_answer,
    final_text,
    hash_answer,
    line_answer,
    plain_answer,
    tagged_answer,
    tags_problem,
)

ANSWERS = {
    tagged_answer: [
        ("<answer>7</answer>", "7"), ("<think>a</think>\n<answer>\n 7 \n</answer>\n", "7"),
        ("<think>I will write <answer>5</answer> first</think><answer>7</answer>", "7"),
        ("no think </think> <answer>7</answer>", "7"), ("<answer>a < b > c</answer>", "a < b > c"),
        ("<answer>line one\nline two</answer>", "line one\nline two"),
    ],
    boxed_answer: [
        (r"\boxed{7}", "7"), (r"\boxed{1} then \boxed{2}.", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"<think>\boxed{5}</think> \boxed{7}", "7"), (r"\boxed{a\\}", r"a\\"),
        (r"\(\boxed{1}\) and \(\boxed{-2}\).", "1, -2"),
        (r"$x = \boxed{3}$ or $x = \boxed{\frac{2}{5}}$", r"3, \frac{2}{5}"),
        (r"\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}", "(2, 2), (6, 2)"),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1, 2, 3"), (r"first \boxed{2}. So \boxed{1} and \boxed{2}", "1, 2"),
        (r"\boxed{7} and \boxed{8} and \boxed{7}", "7, 8"), (r"\boxed{1} papers and \boxed{2} bins", "1, 2"),
        (r"$\boxed{1}$ apples or $\boxed{2}$ pears", "1, 2"), (r"\boxed{3} from this and so \boxed{4}", "4"),
        (r"\boxed{} and \boxed{7}", "7"), (r"$\boxed{1}\boxed{2}$", "1, 2"),
        (r"\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}", "(3, 3), (1, 1)"),
        (r"\boxed{6} and, as I have said above already at some length and for good reasons, then also \boxed{7}", "7"),
    ],
    line_answer: [
        ("so\nAnswer: 72", "72"), ("**Final Answer:** $72$", "$72$"), ("### The final answer is 72.", "72"),
        ("Therefore, the answer is: 72\n\n", "72"), ("<think>Answer: 5</think>\nAnswer: 72", "72"),
        ("Answer: 72\nAnswer: 72", "72"), ("So the answer is 6.\nAnswer: 6", "6"),
        ("The answer is $6$ apples.\n\n**Answer: 6**", "6"), ("Answer:\n6", "6"), ("**Answer:**\n\n  6\n", "6"),
        ("Answer:\n$$\n6\n$$", "$$\n6\n$$"), ("Answer:\nThe answer is 6.", "6"),
    ],
    final_text: [(" a ", "a"), ("<think>a</think>b<think>c</think> d", "d"), ("a</think>b", "b")],
    any_answer: [
        (r"so \boxed{7}.", "7"), ("<answer>7</answer>", "7"), ("#### 7", "7"), ("Answer: 7", "7"),
        (r"<answer>It is \boxed{7}</answer>", "7"), (r"Answer: $\boxed{7}$", "7"),
        ("Answer: 7\n<answer>7</answer>", "7"), ("so $\\boxed{7}$\nAnswer: $7$", "7"),
        ("so $\\boxed{7}$\n\nFinal answer: 7 apples.", "7"),
    ],
    hash_answer: [
        ("#### 72", "72"), ("a\nb\n  #### 72 \n\n", "72"), ("<think>#### 5</think>\n#### 72", "72"), ("####72", "72"),
        ("</think>#### 72", "72"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("scan", "text", "answer"), [(scan, *row) for scan, rows in ANSWERS.items() for row in rows])
def test_each_layout_has_its_answer(scan, text: str, answer: str) -> None:
    assert scan(text).value == answer


REASONS = {
    final_text: [
        ("<think>a", "unterminated_think"), ("a</think>b<think>c", "unterminated_think"),
        ("<think>a</think> \u200b\x00\n", "blank"), ("a" * (MAX_CHARS + 1), "too_long"),
    ],
    plain_answer: [(text, "stray_tag") for text in ("<answer>a</answer>", "a<answer>", "<think>b</think></think>a </answer>")],
    tagged_answer: [
        ("", "missing"), ("the answer is 7", "missing"), ("<answer>7", "unterminated"),
        ("<answer>7</answer><answer>8", "unterminated"), ("<answer>7</answer> <answer>8</answer>", "duplicated_tag"),
        ("<answer><answer>7</answer></answer>", "duplicated_tag"), ("<answer>7</answer></answer>", "duplicated_tag"),
        ("<answer></answer>", "blank"), ("<answer> \n\t</answer>", "blank"),
        ("<answer>\x00 \x00\u200b</answer>", "blank"), ("<answer>7</answer>\njunk", "text_after_answer"),
        ("<think>still going <answer>7</answer>", "unterminated_think"),
        ("<think>a</think><think>b <answer>7</answer>", "unterminated_think"),
        ("<answer>7</answer></think>", "missing"),
        ("<answer>" + "7" * (MAX_ANSWER_CHARS + 1) + "</answer>", "too_long"),
        ("<answer>7</answer>" + " " * MAX_CHARS, "too_long"),
    ],
    boxed_answer: [
        ("7", "missing"), (r"\boxed{7} and \boxed{8", "unterminated"), (r"\boxed{\frac{1}{2}", "unterminated"),
        (r"\boxed{7\}", "unterminated"), (r"\boxed{ }", "blank"), (r"<think>\boxed{7}", "unterminated_think"),
        (r"<think>\boxed{7}</think>", "missing"), (r"\boxed{" + "7" * (MAX_ANSWER_CHARS + 100) + "}", "too_long"),
    ],
    line_answer: [
        ("72", "missing"), ("my answer: 72", "missing"), ("Answers 72", "missing"), ("Answer:", "blank"),
        ("Answer: **.**", "blank"), ("Answer: 7\nAnswer: 8", "duplicated_line"),
        ("Answer: 7\nor 8", "text_after_answer"), ("Answer:\n7\nor 8", "text_after_answer"),
        ("So the answer is 7x.\nAnswer: 7", "duplicated_line"),
        ("So the answer is 72.\nAnswer: 7", "duplicated_line"),
    ],
    any_answer: [
        ("7", "missing"), (r"\boxed{8} <answer>7</answer>", "several_answers"),
        ("#### 7\n<answer>8</answer>", "several_answers"), ("#### 7\nor maybe 8", "text_after_answer"),
        (r"<answer>7</answer> \boxed{8", "unterminated"), (r"\boxed{7} <answer>", "unterminated"),
        (r"\boxed{7} \boxed{8}", "duplicated_box"), (r"<think> \boxed{7}", "unterminated_think"),
    ],
    hash_answer: [
        ("72", "missing"), ("so #### 72", "missing"), ("##### 72", "missing"), ("### 72", "missing"),
        ("####", "blank"), ("#### 7\n#### 8", "duplicated_tag"), ("#### 7\nor 8", "text_after_answer"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("scan", "text", "reason"), [(scan, *row) for scan, rows in REASONS.items() for row in rows])
def test_each_layout_says_why_there_is_no_answer(scan, text: str, reason: str) -> None:
    assert scan(text) == (None, reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\boxed{8}, then \boxed{7}", "duplicated_box"), (r"\boxed{7} \boxed{72}", "duplicated_box"),
        (r"\boxed{8} = \boxed{7}", "duplicated_box"), (r"\boxed{8} \boxed{7} and \boxed{72}", "duplicated_box"),
        (r"\boxed{\boxed{7}}", "duplicated_box"), (r"\boxed{7} and \boxed{7}", None),
        (r"<think>\boxed{8}</think>\boxed{7}", None), (r"\fbox{8} \boxed{7}", "duplicated_box"),
    ],
)  # fmt: skip
def test_strict_boxed_answer_refuses_boxes_that_differ(text: str, reason: str | None) -> None:
    assert boxed_answer(text, True).reason == reason
    assert boxed_answer(text, False).value in ("7", "72", "7, 72")


LAYOUT = "<think>a</think><answer>b</answer>"
BROKEN = [
    "", "<answer>b</answer>", f"{LAYOUT}junk", f"{LAYOUT}\njunk", f"hello {LAYOUT}", "<think>a</think> so <answer>b</answer>",
    f"<think>a</think>{LAYOUT}", f"{LAYOUT}<answer>b</answer>", "<answer>b</answer><think>a</think>",
    "<think>a<answer>b</answer></think>", "<think> </think><answer>b</answer>", "<think>a</think><answer> </answer>",
    "<think>a</think><answer>\x00</answer>", "a</think><answer>b</answer>",
]  # fmt: skip


def test_a_layout_is_two_filled_blocks_and_nothing_else() -> None:
    good = [LAYOUT, " \n<think>\nline 1\nline 2\n</think>\n\n<answer>\nb\n</answer>", f"{LAYOUT}\n\n"]
    assert [text for text in good if tags_problem(text) is not None] == []
    assert [text for text in BROKEN if tags_problem(text) is None] == []
    other = "<reasoning>\na\n</reasoning>\n<answer>\nb\n</answer>\n"
    assert tags_problem(other, "reasoning") is None
    assert tags_problem(other) == "<think> appears 0 times"


def test_answers_inside_an_open_reasoning_block_do_not_count() -> None:
    assert tagged_answer("<reasoning>maybe <answer>7</answer>").reason == "unterminated_think"


def test_a_lenient_scanner_takes_the_last_answer_and_none_before_an_open_tag() -> None:
    assert tagged_answer("<answer>7</answer><answer>8</answer> done", False).value == "8"
    assert tagged_answer("<answer>7</answer><answer>8", False).value is None
    assert line_answer("Answer: 7\nAnswer: 8\nbye", False).value == "8"
    assert hash_answer("#### 7\n#### 8\nbye", False).value == "8"


PATTERNS = [
    "<", "<answer>", "</answer>", "<answer></answer>", "<think>", "</think>", "<think></think><answer></answer>",
    " ", "\n", "{", "}", "\\", "\\boxed{", "\\boxed{}", "\\boxed{{", "#", "####", "#### ", "#### a ", "#### 7\n", " #",
    "\x00", "\ud800", "7", "\\frac{", "<answer>7</answer>\n", "\\boxed{7}", "Answer: 7\n", "answer", "*", "the ",
    "\\fbox{\\boxed{",
]  # fmt: skip
SCANNERS = [tagged_answer, boxed_answer, hash_answer, line_answer, any_answer, tags_problem]


@pytest.mark.parametrize("prefix", rest_in_matrix(2, ["", "</think>", "<answer>", "\\boxed{", "#### "]))
def test_scanning_a_megabyte_of_anything_is_quick(prefix: str) -> None:
    for pattern in PATTERNS:
        for size in (MAX_CHARS - len(prefix), 1_000_000):
            text = prefix + pattern * (size // len(pattern))
            for scanner in SCANNERS:
                start = time.process_time()  # of this process: a busy machine does not make it fail
                scanner(text)
                assert time.process_time() - start < 0.2, (scanner.__name__, pattern, size)
            boxed_answer(text, True)
