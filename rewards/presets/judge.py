"""Open-ended answers, judged by a language model: graded one by one, or ranked within their group."""

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
    """Answers graded point by point against a rubric, by a judge behind an OpenAI-compatible endpoint.

    Formula: sum of weight x points / scale over the rubric's items, divided by the sum of the weights. The default
    rubric is correctness 0.6, completeness 0.25, clarity 0.15. Each answer is graded alone, at temperature 0; equal
    answers to one prompt are graded once.
    Range: [0, 1]; None where there is no verdict (status `infra`: no connection, refusals, time, unreadable replies,
    a spent budget), which excludes the completion instead of scoring it 0.
    Checker: judge, `ok` from `threshold` on.
    Columns: none needed; `reference`, `answer`, `solution` or `ground_truth` is shown to the judge when it is there;
    `rubric_column` names a column with a rubric of the row's own.
    Source: judges and their biases 2306.05685; rubrics as rewards 2507.17746; answers that open and say nothing
    2507.08794; data set off from instructions 2403.14720.
    Hacks: an answer that gives orders to the judge or closes its own quotation: it stands between lines with a key made
    from its own content, and the verdict must repeat that key; pleas that are known are refused unasked. An answer that
    brings its own verdict: it cannot know the key. Length and confident tone, which judges favour: the instructions say
    they are no merit and `max_chars` caps them, but a bias remains: watch the length, and add `length-target`. Position:
    there is none, as answers are not compared; the order of the items is that of the rubric. Reasoning that argues with
    the judge: it sees only what follows `</think>`. Blank texts, loops, `Solution:` and echoes of the prompt: refused
    unasked. Breaking the judge on purpose, so as not to be graded: too long is `format` and not `infra`, and TRL counts
    None beside scored siblings as 0. A judge of the policy's own family prefers its style: use another one.

    Args:
        rubric: {name: description}, or a list of {name, description, weight}.
        rubric_column: column with the row's own rubric, in either form or as JSON; rows without are `not_applicable`.
        scale: points for full marks on one item.
        threshold: value from which an answer counts as correct.
        max_chars: longer answers are `format` and not sent.
        options: see `JudgeOptions`.

    A judge that cannot be reached excludes the completion; a blank one is not sent at all:

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
def judge_ranking(
    *,
    criteria: str | None = None,
    max_chars: int = 8_000,
    options: JudgeOptions,
) -> Preset:
    """The completions of a group ranked against one another, by a judge behind an OpenAI-compatible endpoint.

    Formula: the share of the group's other answers that an answer is better than, equals counting half, as the mean over
    two orders in which they are shown, one drawn at random and its reverse. 0.5 where the group holds
    one distinct answer; 0 for what is no text to judge.
    Range: [0, 1]; None for a whole group on which the judge gives no complete verdict (status `infra`).
    Checker: none: a value says how an answer compares within its group, and nothing of whether it is right.
    Columns: none needed; `reference`, `answer`, `solution` or `ground_truth` is shown to the judge when it is there.
    Source: comparing is easier for judges than grading, and they favour a position, 2306.05685; the mean over orders
    2305.17926; data set off from instructions 2403.14720.
    Hacks: an answer that gives orders to the judge or closes its own quotation: it stands between lines with a key made from
    all the data, and the verdict must repeat that key; pleas that are known are refused unasked. Position: each order is shown
    reversed, too. Copies of one good answer do not crowd others out: equal answers are shown once. Length and confident tone,
    which judges favour: the instructions say they are no merit and `max_chars` caps them, but a bias remains: watch the
    length, and add `length-target`. Breaking the judge: the whole group is then without a score, which earns nothing. A group
    of nothing but poor answers still has a best one: the advantage is the same as if it were good, so add a reward for being
    right where there is one.

    Args:
        criteria: what makes one answer better than another, in a sentence or several; None for truth, completeness, clarity.
        max_chars: longer answers are `format` and not sent.
        options: see `JudgeOptions`.

    A judge that cannot be reached excludes the group; a group of one answer needs none:

    >>> from rewards import build_samples, load
    >>> preset = load("judge-ranking", base_url="http://127.0.0.1:9/v1", model="judge", retries=0)
    >>> prompts = ["Why is the sky blue?"] * 2 + ["And the sea?"] * 2
    >>> evaluation = preset.score(build_samples(prompts, ["Rayleigh scattering.", "It is not.", "Water absorbs red.", " "]))
    >>> evaluation.statuses["judge"], evaluation.totals
    (['infra', 'infra', 'ok', 'format'], [None, None, 0.5, 0.0])
    """
    component = JudgeRanking(
        criteria=DEFAULT_CRITERIA if criteria is None else criteria,
        max_chars=max_chars,
        options=options,
    )
    return Preset([(component, 1.0)])
