"""Which completions gave the same answer: the votes of maj@k (self-consistency, arXiv 2203.11171).

An answer is what the checker itself extracted. Where a checker says of no completion what it extracted, the answer is the
last one found by `rewards.extract.any_answer`, else the last line of the completion. Two answers are the same when
they are the same number (`1,000` and `1000.0`), or the same text apart from case, white space and a final full stop.
Whether they are right plays no part: the reference must not help to count the votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewards import Sample, Score

UNANSWERED = ("format", "error", "timeout", "infra", "not_applicable")
"""Verdicts without an answer of their own: such a completion has no vote unless the checker extracted something."""


def votes(samples: Sequence[Sample], scores: Sequence[Score]) -> list[str | None]:
    """The answer that each completion votes for, in a form that can be compared; None for no vote."""
    extracts = any(score.info.get("extracted") is not None for score in scores)
    return [_vote(sample, score, extracts) for sample, score in zip(samples, scores, strict=True)]


def _vote(sample: Sample, score: Score, extracts: bool) -> str | None:
    extracted = score.info.get("extracted")
    if extracted is not None:
        return normalised(str(extracted))
    if score.status in UNANSWERED:
        return None
    return None if extracts and score.status != "ok" else normalised(final_text(sample.text)) or None


def final_text(completion: str) -> str:
    """The final answer of a completion, or its last line that is not blank, or nothing."""
    from rewards.extract import any_answer

    found = any_answer(completion).value
    lines = [line for line in completion.splitlines() if line.strip()]
    return found if found is not None else lines[-1] if lines else ""


def normalised(answer: str) -> str:
    """A number as a fraction in lowest terms; any other text in lower case, white space collapsed, no final stop."""
    from rewards.numeric import parse_number

    number = parse_number(answer)
    return str(number) if number is not None else " ".join(answer.casefold().split()).removesuffix(".").rstrip()
