"""Presets for open-ended answers, which a language model grades one by one or ranks within their group."""

from typing import Any

from rewards.components.judge import (
    DEFAULT_CRITERIA,
    DEFAULT_RUBRIC,
    JudgeOptions,
    JudgeRanking,
    JudgeRubric,
    parse_rubric,
)
from rewards.parameters import with_options
from rewards.preset import Preset


@with_options(JudgeOptions)
def judge_rubric(
    *,
    rubric: Any = None,
    rubric_column: str | None = None,
    scale: int = 10,
    threshold: float = 0.7,
    max_chars: int = 20_000,
    options: JudgeOptions,
) -> Preset:
    """Answers that a judge behind an OpenAI-compatible endpoint grades against a rubric.

    Formula: sum of weight x points / scale over the rubric's items, divided by the sum of the weights. The default
    rubric is correctness 0.6, completeness 0.25, clarity 0.15. Each answer is graded alone, at temperature 0; equal
    answers to one prompt are graded once.
    Range: [0, 1]; None without a verdict (status `infra`: no connection, refusals, timeouts, unreadable replies, the
    budget is used up), which excludes the completion instead of scoring it 0.
    Checker: judge, `ok` if the value is at least `threshold`.
    Columns: none required; the judge reads `reference`, `answer`, `solution` or `ground_truth` if the row has one;
    `rubric_column` names a column with a rubric per row.
    Source: judges and their biases 2306.05685; rubrics as rewards 2507.17746; answers with an opening and no content
    2507.08794; separation of data and instructions 2403.14720.
    Attacks: an answer with instructions to the judge, or one that closes its own quotation: it is quoted between lines with
    a key that is derived from its content, and the verdict must repeat the key; texts with known instructions to a grader
    are rejected unsent. An answer that contains a verdict: it cannot know the key. Length and confident tone, which judges
    favour: the instructions tell the judge to ignore them and `max_chars` limits the length, but a bias remains: watch the
    length, and add `length-target`. Position: answers are not compared, and items have the order of the rubric. Reasoning
    that argues with the judge: the judge reads only the text after `</think>`. Blank texts, loops, `Solution:` and echoes
    of the prompt: rejected unsent. An answer that prevents its grading: too long is `format` and not `infra`, and TRL
    counts None as 0 if the group has scores. A judge of the policy's model family prefers its style: use another one.

    Args:
        rubric: {name: description}, or a list of {name, description, weight}.
        rubric_column: column with a rubric per row, in either form or as JSON; rows without one are `not_applicable`.
        scale: the most points for an item.
        threshold: smallest value of a correct answer.
        max_chars: longer answers are `format` and not sent.
        options: see `JudgeOptions`.

    If the judge cannot be reached, the completion is excluded; a blank completion is not sent:

    >>> from rewards import build_samples, load
    >>> preset = load("judge-rubric", base_url="http://127.0.0.1:9/v1", model="judge", retries=0)
    >>> evaluation = preset.score(build_samples(["Why is the sky blue?"] * 2, ["Rayleigh scattering.", " "]))
    >>> evaluation.statuses["judge"], evaluation.totals
    (['infra', 'format'], [None, 0.0])
    """
    component = JudgeRubric(
        rubric=DEFAULT_RUBRIC if rubric is None else parse_rubric(rubric),
        rubric_column=rubric_column,
        scale=scale,
        threshold=threshold,
        max_chars=max_chars,
        options=options,
    )
    return Preset([(component, 1.0)], checker="judge")


@with_options(JudgeOptions)
def judge_ranking(*, criteria: str | None = None, max_chars: int = 8_000, options: JudgeOptions) -> Preset:
    """Completions of a group that a judge behind an OpenAI-compatible endpoint ranks.

    Formula: the share of the group's other answers that rank below an answer, ties counting half, as the mean over two orders
    of presentation, one drawn at random and its reverse. 0.5 if the group has one distinct answer; 0 for a completion without
    readable text.
    Range: [0, 1]; None for all completions of a group without a complete verdict (status `infra`).
    Checker: none: a value compares an answer with its group, and does not say whether it is right.
    Columns: none required; the judge reads `reference`, `answer`, `solution` or `ground_truth` if the row has one.
    Source: judges compare more reliably than they grade, and favour a position, 2306.05685; the mean over orders
    2305.17926; separation of data and instructions 2403.14720.
    Attacks: an answer with instructions to the judge, or one that closes its own quotation: it is quoted between lines with a
    key that is derived from all answers, and the verdict must repeat the key; texts with known instructions to a grader are
    rejected unsent. Position: the judge also ranks the reversed order. Copies of a good answer: equal answers are ranked once.
    Length and confident tone, which judges favour: the instructions tell the judge to ignore them and `max_chars` limits the
    length, but a bias remains: watch the length, and add `length-target`. An answer that prevents the ranking: no completion
    of its group then has a score. A group of poor answers only: the best one gets the same advantage as a good answer, so add
    a reward for correctness if possible.

    Args:
        criteria: what makes an answer better than another, in sentences; None for truth, completeness and clarity.
        max_chars: longer answers are `format` and not sent.
        options: see `JudgeOptions`.

    If the judge cannot be reached, the group is excluded; a group with one distinct answer needs no judge:

    >>> from rewards import build_samples, load
    >>> preset = load("judge-ranking", base_url="http://127.0.0.1:9/v1", model="judge", retries=0)
    >>> prompts = ["Why is the sky blue?"] * 2 + ["And the sea?"] * 2
    >>> evaluation = preset.score(build_samples(prompts, ["Rayleigh scattering.", "It is not.", "Water absorbs red.", " "]))
    >>> evaluation.statuses["judge"], evaluation.totals
    (['infra', 'infra', 'ok', 'format'], [None, None, 0.5, 0.0])
    """
    component = JudgeRanking(
        criteria=DEFAULT_CRITERIA if criteria is None else criteria, max_chars=max_chars, options=options
    )
    return Preset([(component, 1.0)])
