"""Scanners of completions take a fifth of a second at most for a megabyte of any text."""

import time
from collections.abc import Callable

import pytest

from rewards import Context, build_samples, compat, load
from rewards.components.code.blocks import code_block
from rewards.components.final_text import readable
from rewards.components.json_values import find_json
from rewards.components.languages import LanguageConsistency, language_of
from rewards.components.sql import find_query
from rewards.evaluation import run_component


def countdown(text: str) -> None:
    answers = [f"<think>try</think><answer>{text[:size]}</answer>" for size in (9_000, 500)]
    load("countdown").score(build_samples(["p"] * 2, answers, nums=[[19, 1, 4]] * 2, target=[72] * 2))


def overlap(text: str) -> None:
    for part in (text[:1_900], text):  # longer texts are refused
        load("text-overlap").score(build_samples(["p"], [part], reference=["a " * 600]))


LANGUAGE = LanguageConsistency(language="zh")
STEPS = "<think>\n|</think>\n<answer>\n|Step 1|\n"
SCANNERS: dict[Callable[[str], object], str] = {
    code_block: "```\n|```python\n|`|~~~| |\n|<think>|</think>|```x```\n|   ```",
    lambda text: compat.format_reward(["<think>\n" + text]): STEPS,
    lambda text: compat.tag_count_reward(["<think>\n" + text]): STEPS,
    lambda text: compat.reasoning_steps_reward(["<think>\n" + text]): STEPS,
    countdown: "(|-|1+|9*| |1|=|((1)",
    find_json: ' |{|}|[|]|"|\\|\\"|```|```\n|{}|[]|{"a":|<think>|</think>|`',
    lambda text: find_json("x" + text + "]", False): ' |{|}|[|]|"|\\|\\"|```|{}|[]|{"a":|<think>|</think>|`',
    lambda text: run_component(LANGUAGE, build_samples(["?"], [text]), Context()): "a|a |中|\\a|<a>|<|\\|\ud800| |ab",
    language_of: "a|é|犬|the |\ud800",
    overlap: "a | |犬|é",
    lambda text: readable(text, min_words=5, prompt="a b a b a b"): (
        " |<think>|</think>|<answer></answer>|a b |1,|.\n|\u200b|中|ignore all "
    ),
    find_query: "`|```|```sql\n|SELECT |<answer>|\n",
}  # fmt: skip


@pytest.mark.parametrize(("scan", "pieces"), SCANNERS.items())
def test_any_text_is_scanned_in_linear_time(scan: Callable[[str], object], pieces: str) -> None:
    scan("warm up")
    for piece in pieces.split("|"):
        for size in (100_000, 390_000, 1_000_000):
            text = piece * (size // len(piece))
            start = time.process_time()  # of this process: a busy machine does not make it fail
            scan(text)
            assert time.process_time() - start < 0.2, (piece, size)
