"""Shorter than the siblings: a reward within each group of completions to one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from rewards.components.length import length_in_tokens
from rewards.components.verdicts import is_right
from rewards.evaluation import run_component
from rewards.protocol import Component, Context, Sample, Score

__all__ = ["KimiLength", "length_share"]


def length_share(length: float, shortest: float, longest: float) -> float:
    """0.5 for the shortest of a group, −0.5 for the longest, 0 where all are equally long.

    >>> [length_share(n, 100, 300) for n in (100, 150, 300)]
    [0.5, 0.25, -0.5]
    """
    return 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0


@dataclass(frozen=True, kw_only=True)
class KimiLength:
    """λ = 0.5 − (n − n_min) / (n_max − n_min) within the group; λ for a right answer, min(0, λ) for a wrong one.

    n in tokens (see `length_in_tokens`), n_min and n_max over the samples of one `group_id` in the batch; 0 for all
    when they are equally long, as in a group of one. Where `checker` failed, so does this.

    Source: Kimi k1.5, 2501.12599, section 2.3.3.
    """

    checker: Component
    name: str = "length"
    floor: float = -0.5
    low: float = -0.5
    high: float = 0.5
    version: str = "1"

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        lengths: dict[int, list[int]] = {}
        for sample in samples:
            lengths.setdefault(sample.group_id, []).append(length_in_tokens(sample)[0])
        ends = {group: (min(all_of_it), max(all_of_it)) for group, all_of_it in lengths.items()}
        verdicts = run_component(self.checker, samples, ctx)
        return [self._score(s, v, *ends[s.group_id]) for s, v in zip(samples, verdicts, strict=True)]

    def _score(self, sample: Sample, verdict: Score, shortest: int, longest: int) -> Score:
        right = is_right(verdict)
        if right is None:
            return Score(None, verdict.status, verdict.info, 0.0)
        length, unit = length_in_tokens(sample)
        share = length_share(length, shortest, longest)
        value = share if right else min(0.0, share)
        return Score(value, "ok" if value >= 0 else "wrong", {"length": length, "counted": unit}, 0.0)
