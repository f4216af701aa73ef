"""Completions that begin inside a thinking block, because the prompt or the chat template opened it."""

import pytest

from rewards import build_samples, load
from rewards.protocol import Sample

PROGRAM = "```python\nprint(72)\n```"
# preset -> (columns, an answer that is right outside the thinking)
CASES = {
    "gsm8k-reasoning": ({"answer": "72"}, "<answer>72</answer>"),
    "gsm8k-hash": ({"answer": "72"}, "\n#### 72"),
    "qa-short": ({"answer": "Paris"}, "<answer>Paris</answer>"),
    "mcq-letter": ({"answer": "C"}, "<answer>C</answer>"),
    "math-verify": ({"answer": "72"}, "\\boxed{72}"),
    "countdown": ({"nums": [70, 2], "target": 72}, "<answer>70 + 2</answer>"),
    "classification-label": ({"answer": "spam"}, "<answer>spam</answer>"),
    "code-stdio": ({"reference": [{"input": "", "output": "72"}]}, f"\n{PROGRAM}\n"),
}


def correct(preset, prompt, completion, columns, **options):
    loaded = load(preset, **options)
    return loaded.is_correct(build_samples([prompt], [completion], **{k: [v] for k, v in columns.items()}))[0]


@pytest.mark.parametrize("preset", CASES)
def test_an_answer_within_thinking_that_the_prompt_opened_is_none(preset):
    columns, answer = CASES[preset]
    assert correct(preset, "q", f"hm {answer}", columns)
    assert not correct(preset, "q<think>\n", f"hm {answer}", columns)
    assert correct(preset, "q<think>\n", f"hm</think>{answer}", columns)
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"}]
    assert not correct(preset, conversation, [{"role": "assistant", "content": f"hm {answer}"}], columns)
    # The preset knows that the template opens it.
    options = {"thinking_opened": True}
    assert not correct(preset, conversation[:1], f"hm {answer}", columns, **options)
    assert correct(preset, conversation[:1], f"hm</think>{answer}", columns, **options)
    assert correct(preset, conversation[:1], f"<think>hm</think>{answer}", columns, **options)  # opened again


def test_the_layout_counts_the_tag_that_was_there_before():
    preset = load("gsm8k-reasoning", thinking_opened=True)
    good = build_samples(["q"], ["hm</think><answer>72</answer>"], answer=["72"])
    assert preset.score(good).values == {"accuracy": [1.0], "format": [1.0], "tags": [1.0]}
    assert load("gsm8k-reasoning").score(good).values["format"] == [0.0]


def test_an_explicit_thinking_flag_overrides_the_prompt():
    columns, answer = CASES["qa-short"]
    assert correct("qa-short", "what does <think>", answer, columns, thinking_opened=False)


def test_functions_of_ones_own_get_the_text_as_it_came():
    sample = Sample(0, 0, "q<think>", None, "hm</think>72")
    assert (sample.text, sample.full_text) == ("hm</think>72", "<think>hm</think>72")
    assert sample.once(lambda text: text) == sample.full_text
