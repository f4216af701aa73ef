r"""Reward functions of open-r1 under their original names.

They take the arguments of the originals and return one number per completion. `trl.rewards` has the other functions of open-r1.
Prefer presets for training: they reject answers that these functions pay (`8=7` for 7, an answer copied from the prompt).

The docstring of each open-r1 function lists the differences from the original. All of them have these in common:

- Completions may be strings, lists of messages or None; of several messages the last one of the assistant is scored.
- No completion and no reference raises or hangs: a completion that cannot be scored gets the lowest value, and a comparison
  that takes over five seconds counts as wrong.
- Format checks scan the text once; the originals backtrack for seconds on some texts of a few kilobytes.

Presets replace the other functions: `code-stdio` is open-r1's `code_reward` (with `scoring="share"`) and
`binary_code_reward`, and reads the same column `verification_info`; `gsm8k-xml` replaces those of the GSM8K notebooks.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from rewards.components.math_verify import MathVerify
from rewards.evaluation import run_component
from rewards.extract import MAX_CHARS, tags_problem
from rewards.protocol import Context
from rewards.samples import build_samples, completion_text

__all__ = ["format_reward", "len_reward", "reasoning_steps_reward", "tag_count_reward"]

Completions: TypeAlias = Sequence[Any]

_SECONDS = 5.0  # deadline of one comparison
_STEPS = re.compile(r"Step \d++:|^\d++\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)


def format_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""Return 1.0 for `<think>\n…\n</think>\n<answer>\n…\n</answer>`, else 0.0 (open-r1).

    Differences from open-r1: text after `</answer>`, a repeated tag, and blank blocks score 0.0.

    >>> good = "<think>\n6 x 12\n</think>\n<answer>\n72\n</answer>"
    >>> format_reward([good, good + "\nor 73", good.replace("72", "")])
    [1.0, 0.0, 0.0]
    """
    return [
        float(
            text.startswith("<think>\n")
            and tags_problem(text) is None
            and "\n</think>\n<answer>\n" in text
            and "\n</answer>" in text
        )
        for text in map(completion_text, completions)
    ]


def tag_count_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""Return 0.25 for each of `<think>\n`, `\n</think>\n`, `\n<answer>\n` and `\n</answer>` that occurs once (open-r1).

    Equal to open-r1. Empty tags earn the reward, so give it a small weight compared with correctness.

    >>> tag_count_reward(["<think>\n6 x 12\n</think>\n<answer>\n72\n</answer>", "<think>\n6 x 12\n</think>\n", "72"])
    [1.0, 0.5, 0.0]
    """
    marks = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return [sum(text.count(mark) == 1 for mark in marks) / len(marks) for text in map(completion_text, completions)]


def reasoning_steps_reward(completions: Completions, **kwargs: Any) -> list[float]:
    r"""Return 1/3 for each marker of a step, at most 1.0 (open-r1).

    Markers are `Step 1:`, `1.` at the start of a line, lines that begin with `-` or `*`, and the words `First,`,
    `Second,`, `Next,` and `Finally,`.

    Difference from open-r1: a number counts at the start of every line, not only of the first line.

    >>> reasoning_steps_reward(["1. Six dozens.\n2. That is 72.", "Step 1: add\nStep 2: stop\nFinally, 72", "72"])
    [0.6666666666666666, 1.0, 0.0]
    """
    return [min(1.0, sum(1 for _ in _STEPS.finditer(completion_text(each)[:MAX_CHARS])) / 3) for each in completions]


def len_reward(completions: Completions, solution: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""Return Kimi k1.5's length reward (2501.12599, 2.3.3): 0.5 for the shortest to -0.5 for the longest completion (open-r1).

    λ = 0.5 - (length - shortest) / (longest - shortest) for correct answers, min(0, λ) for wrong ones, 0.0 if all lengths are
    equal. If the solution cannot be parsed, the answer counts as correct.

    Differences from open-r1: answers are compared as in the preset `math-verify` with `lenient=True` and `answer_in="any"`.
    Lengths (in tokens if `completion_ids` are passed, else in characters) are compared within a group, as in the paper, if
    `prompts` are passed (trainers do), instead of within the batch.

    >>> len_reward([r"\boxed{3}", r"It is \boxed{3}", r"Well, it is \boxed{4}"], ["3", "3", "3"])
    [0.5, 0.0, -0.5]
    """
    prompts = kwargs.get("prompts") or [""] * len(completions)
    samples = build_samples(prompts, completions, kwargs.get("completion_ids"), reference=solution)
    scores = run_component(MathVerify(answer_in="any", lenient=True, deadline=_SECONDS), samples, Context())
    sizes = [len(sample.text) if sample.n_tokens is None else sample.n_tokens for sample in samples]
    rewards = []
    for sample, score, size in zip(samples, scores, sizes, strict=True):
        group = [n for other, n in zip(samples, sizes, strict=True) if other.group_id == sample.group_id]
        shortest, longest = min(group), max(group)
        share = 0.5 - (size - shortest) / (longest - shortest) if longest > shortest else 0.0
        rewards.append(share if score.status in ("ok", "error", "infra") else min(0.0, share))
    return rewards


# Ranges of the functions; a preset checks its weights against them.
for _function in (format_reward, tag_count_reward, reasoning_steps_reward):
    vars(_function).update(low=0.0, high=1.0)
vars(len_reward).update(low=-0.5, high=0.5)
