"""Every task of the reasoning-gym package, scored by its own verifier."""

from rewards.components.reasoning_gym import ReasoningGymAccuracy
from rewards.components.tags import TagCount, ThinkAnswerFormat
from rewards.preset import Preset, Weighted

__all__ = ["reasoning_gym"]


def reasoning_gym(*, format_weight: float = 0.2, tag_weight: float = 0.0, strict: bool = True) -> Preset:
    """Procedurally generated tasks of reasoning-gym, answered as `<think>…</think><answer>…</answer>`.

    Formula: accuracy + 0.2 format (+ tag_weight tags).
    accuracy is the task's `score_answer` on the content of the last `<answer>` after `</think>`;
    format is 1 for one think block and one answer block, both filled, and nothing else;
    tags is a quarter for each of the four tags that appears exactly once.
    Range: [0, 1.2].
    Checker: accuracy, `ok` for a full score of 1 only.
    Columns: `task`, the dataset's name in reasoning-gym; `entry`, the generated entry {question, answer, metadata} as a
    JSON string.
    Source: reasoning-gym (2505.24760).
    Hacks: text that contains the answer, to which most tasks give partial credit: 0 while `strict`. Code as an answer,
    which some verifiers evaluate: those get only plain arithmetic, algebra and literals, any other answer is wrong. A
    task whose verifier takes every answer (game_of_life_halting), the beginning of one (coin_flip) or `nan` (complex_arithmetic):
    corrected here; a test screens all tasks for constants that are right.

    Args:
        format_weight: weight of the layout; 0 leaves it out.
        tag_weight: weight of the tag count; 0 leaves it out.
        strict: a task's partial credit for a wrong answer counts as 0; False keeps it.

    >>> import json
    >>> from rewards import build_samples, load
    >>> entry = json.dumps({"question": "60 + 12 =", "answer": "72", "metadata": {}})
    >>> samples = build_samples(
    ...     ["60 + 12 ="] * 2,
    ...     ["<think>72</think><answer>72</answer>", "<think>72</think><answer>It is 72</answer>"],
    ...     task=["chain_sum"] * 2,
    ...     entry=[entry] * 2,
    ... )
    >>> load("reasoning-gym").score(samples).totals
    [1.2, 0.2]
    >>> load("reasoning-gym", strict=False).score(samples).values["accuracy"]
    [1.0, 0.25]
    """
    components = [Weighted(ReasoningGymAccuracy(strict=strict), 1.0)]
    if format_weight:
        components.append(Weighted(ThinkAnswerFormat(), format_weight))
    if tag_weight:
        components.append(Weighted(TagCount(), tag_weight))
    return Preset(components, name="reasoning-gym", checker="accuracy")
