"""Functions of `rewards.compat` that compare answers, alone or scaled by length."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewards._compat.shared import Completions, LogExtra, lengths, within
from rewards.components.cosine import cosine_between
from rewards.components.kimi_length import length_share
from rewards.errors import RewardsError
from rewards.evaluation import run_component
from rewards.extract import MAX_CHARS
from rewards.protocol import Context
from rewards.samples import build_samples, completion_text

__all__ = [
    "CosineScaledReward",
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "len_reward",
    "reasoning_accuracy_reward",
]

_ANCHOR = re.compile(r"\banswer(?: is)?:?(?:\*\*)?(?: is)?:?\s{0,5}(\$\$|\$|\\\(|\\\[)", re.IGNORECASE)
_CLOSING = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}


@within(0.0, 1.0)
def accuracy_reward(
    completions: Completions, solution: Sequence[Any], log_extra: LogExtra | None = None, **kwargs: Any
) -> list[float | None]:
    r"""1.0 where the answer in `\boxed{…}`, or in `$…$` behind the word answer, equals the solution, else 0.0 (TRL, open-r1).

    None where the solution cannot be read. Equality is that of the preset `math-verify`.

    Different from both: only what follows the last `</think>` counts; a box that is opened again and not closed is no
    answer; every side of an equation must be equal (`8=7` is not 7) and tiny numbers are compared by size; solutions
    may be plain letters, times of day, or numbers with units and separators. From open-r1: an unreadable solution is
    None and not 1.0.

    >>> accuracy_reward([r"\boxed{\frac{2}{6}}", r"The answer is $\frac{1}{2}$"], [r"\frac{1}{3}", r"\frac{1}{3}"])
    [1.0, 0.0]
    """
    texts = [completion_text(completion) for completion in completions]
    return _judged([_as_box(text) for text in texts], solution, log_extra)


@within(0.0, 1.0)
def reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""`accuracy_reward` of what follows the last of `reasoning_delimiters`; 0.0 where none is there (TRL).

    Different from TRL: as for `accuracy_reward`; of several delimiters the one that comes last counts, not the first of
    the list that is there; and where the solution cannot be read the value is None even if no delimiter is there.

    >>> good = r"<think>\boxed{2}</think>\boxed{3}"
    >>> reasoning_accuracy_reward([good, r"\boxed{3}"], ["3", "3"])
    [1.0, 0.0]
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    answers = []
    for text in map(completion_text, completions):
        ends = [at + len(each) for each in delimiters if (at := text.rfind(each)) >= 0]
        answers.append(_as_box(text[max(ends) :]) if ends else "")
    return _judged(answers, solution, log_extra)


@within(-0.5, 0.5)
def len_reward(completions: Completions, solution: Sequence[Any], **kwargs: Any) -> list[float | None]:
    r"""Kimi k1.5's length reward (2501.12599, 2.3.3), from 0.5 for the shortest to -0.5 for the longest (open-r1).

    λ = 0.5 - (length - shortest) / (longest - shortest) for correct answers, min(0, λ) for wrong ones, 0.0 where all are
    of one length.

    Different from open-r1: lengths are compared within the completions of one prompt, as in the paper, where `prompts`
    are given (trainers do), not over the whole batch; lengths are tokens where `completion_ids` are given, else
    characters; an unreadable solution is None and counts for no one's shortest and longest.

    >>> len_reward([r"\boxed{3}", r"It is \boxed{3}", r"Well, it is \boxed{4}"], ["3", "3", "3"])
    [0.5, 0.0, -0.5]
    """
    correct = accuracy_reward(completions, solution)
    sizes = lengths(completions, kwargs.get("completion_ids"))
    prompts = kwargs.get("prompts") or [""] * len(completions)
    rewards: list[float | None] = [None] * len(completions)
    start = 0
    for end in range(1, len(completions) + 1):
        if end < len(completions) and prompts[end] == prompts[start]:
            continue
        group = [at for at in range(start, end) if correct[at] is not None]
        shortest, longest = min((sizes[at] for at in group), default=0), max((sizes[at] for at in group), default=0)
        for at in group:
            scaled = length_share(sizes[at], shortest, longest)
            rewards[at] = scaled if correct[at] else min(0.0, scaled)
        start = end
    return rewards


def get_cosine_scaled_reward(
    max_len: int = 1000,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> "CosineScaledReward":
    r"""Correctness scaled by length along half a cosine (2502.03373, C.1): shorter is better when correct, worse when wrong.

    low + (high - low) / 2 · (1 + cos(π · length / max_len)); (low, high) is (min_value_correct, max_value_correct), or
    (max_value_wrong, min_value_wrong). None where the solution cannot be read.

    Different from both: as for `accuracy_reward`. From open-r1: beyond `max_len` the value stays that of `max_len`, where
    the cosine would climb again; lengths are tokens where `completion_ids` are given, else characters; an unreadable
    solution is None and not 1.0; `max_len` is the first argument, as in TRL: call it by keyword.

    Raises:
        RewardsError: `max_len` is not positive, as when open-r1's order of arguments was used.

    >>> reward = get_cosine_scaled_reward(max_len=100)
    >>> reward([r"\boxed{3}", r"\boxed{4}"], ["3", "3"], completion_ids=[[1] * 50, [1] * 500])
    [0.75, -0.5]
    """
    if not max_len > 0:
        raise RewardsError(f"max_len is {max_len}. Give the length in tokens by keyword: max_len=1000.")
    return CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


@dataclass(frozen=True)
class CosineScaledReward:
    """See `get_cosine_scaled_reward`."""

    max_len: float
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float
    __name__ = "cosine_scaled_reward"

    @property
    def low(self) -> float:
        return min(self.min_value_wrong, self.max_value_wrong, self.min_value_correct, self.max_value_correct)

    @property
    def high(self) -> float:
        return max(self.min_value_wrong, self.max_value_wrong, self.min_value_correct, self.max_value_correct)

    def __call__(
        self,
        completions: Completions,
        solution: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """The scaled value of each completion."""
        correct = accuracy_reward(completions, solution)
        sizes = lengths(completions, completion_ids)
        return [
            None if right is None else self._value(bool(right), length)
            for right, length in zip(correct, sizes, strict=True)
        ]

    def _value(self, right: bool, length: int) -> float:
        low, high = (
            (self.min_value_correct, self.max_value_correct) if right else (self.max_value_wrong, self.min_value_wrong)
        )
        return cosine_between(length, self.max_len, at_zero=high, at_max=low)


def _judged(texts: Sequence[str], solution: Sequence[Any], log_extra: LogExtra | None) -> list[float | None]:
    """1.0, 0.0, or None for unusable solutions; what was compared goes to the trainer's table of completions."""
    from rewards.components.math_text import reference_text
    from rewards.components.math_verify import MathVerify
    from rewards.components.packages import require

    require("math-verify", "math_verify", "'math-verify>=0.9,<0.10'")
    samples = build_samples([""] * len(texts), texts, reference=list(solution))
    scores = run_component(MathVerify(final_form=False), samples, Context())
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [reference_text(each) or "[unparseable]" for each in solution])
        log_extra("answer_parsed", [str(score.info.get("extracted", "[unparseable]")) for score in scores])
    unusable = [str(score.info.get("reason", "")).startswith("reference") for score in scores]
    return [
        None if score.value is None or bad else float(score.status == "ok")
        for score, bad in zip(scores, unusable, strict=True)
    ]


def _as_box(text: str) -> str:
    r"""The text, or `\boxed{…}` of the last `$…$` behind the word answer where there is no box."""
    if "\\boxed{" in text or len(text) > MAX_CHARS:
        return text
    tail = text.rpartition("</think>")[2]
    anchors = list(_ANCHOR.finditer(tail))
    if not anchors or tail.rfind("<think>") >= 0:
        return text
    begin, closing = anchors[-1].end(), _CLOSING[anchors[-1][1]]
    end = tail.find(closing, begin)
    return f"\\boxed{{{tail[begin:end]}}}" if end >= 0 else text
