import pytest

from rewards.components.code.blocks import code_block


def test_the_last_block_marked_as_python_is_the_program():
    text = "```python\nfirst\n```\n```py\nsecond\n```\nprints\n```\n42\n```\n```text\nnot this\n```"
    assert code_block(text).value == "second\n"


def test_without_a_mark_the_last_unmarked_block_is():
    assert code_block("```\na\n```\n```\nb\n```\n```cpp\nc\n```").value == "b\n"


def test_blocks_inside_the_reasoning_do_not_count():
    assert code_block("<think>\n```python\nx\n```\n</think>\nnone").reason == "missing"
    assert code_block("<think>\n```python\nx\n```").reason == "unterminated_think"
    assert code_block("<think>a</think><answer>```python\nx\n```</answer>").value == "x\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing"),
        ("print(1)", "missing"),
        ("```cpp\nint main\n```", "missing"),
        ("```python\nprint(1)", "unterminated"),
        ("```python\nprint(1)\n```\n```python\nprint(2)", "unterminated"),
        ("```python\n\n```", "blank"),
        ("```python\n\x00\n```", None),
        ("```python\n" + "x" * 100_001 + "\n```", "too_long"),
        ("x" * 10_000_000, "too_long"),
        ("\ud800" * 10, "missing"),
    ],
)
def test_completions_without_a_program_say_why(text, reason):
    assert code_block(text).reason == reason


def test_fences_inside_a_longer_fence_and_carriage_returns():
    assert code_block("````python\n```\ninner\n```\n````").value == "```\ninner\n```\n"
    assert code_block("```python\r\nprint(1)\r\n```\r\n").value == "print(1)\r\n"
    assert code_block("~~~python\nprint(1)\n~~~").value == "print(1)\n"
    assert code_block("```{.python}\nprint(1)\n```").value == "print(1)\n"
    assert code_block("```python\ns = '''```'''\n```").value == "s = '''```'''\n"
