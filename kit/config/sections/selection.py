"""`selection:` fewer wasted rollouts: which prompts are rolled out, and which completions are trained on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kit.config.sections.base import Section


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups whose completions all have one reward teach nothing, and are made
    again from fresh prompts. What is still flat in the end stays in the batch, as without it."""

    max_rounds: Annotated[int, Field(ge=2)] = 4
    """Rounds of generation a step may take, the first one included."""
    token_budget: Annotated[int, Field(ge=1)] | None = None
    """Completion tokens after which no further round of a step begins. Null: `max_rounds` alone decides."""


class GresoConfig(Section):
    """Selective rollouts (GRESO, arXiv 2506.02177): a prompt whose last z groups were flat is passed over with probability
    1 - explore^z, and a fresh one takes its place."""

    explore: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Base probability of rolling such a prompt out again, at the start of the run; easy and hard ones have one each."""
    step: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Change of these probabilities after each step; 0 keeps them as they are."""
    easy_target: Annotated[float, Field(ge=0, le=1)] = 0.083
    """Share of flat groups of high reward in a step, above which easy prompts are explored less, and below which more."""
    hard_target: Annotated[float, Field(ge=0, le=1)] = 0.167
    """Likewise for flat groups of low reward."""


class CurriculumConfig(Section):
    """Prompts of middling difficulty first (after arXiv 2504.03380): drawn with weight 4p(1-p), p the pass rate in memory."""

    candidates: Annotated[int, Field(ge=2)] = 4
    """Prompts looked at for each one that is rolled out: the sampler's own, and fresh ones."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Least weight of a prompt, so that every one is seen again."""


class EarlyAbortConfig(Section):
    """Early abort of decided groups: a group is begun with its first completions, and if these have one reward and the rest
    is likely to follow, the rest is not made."""

    first: Annotated[int, Field(ge=2)] = 4
    """Completions with which a group is begun."""
    confidence: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Least probability that the whole group is flat, given its beginning and the pass rate in memory."""


class PodsConfig(Section):
    """Down-sampling of rollouts (PODS, arXiv 2504.13818): of the completions of a prompt those are trained on whose rewards
    have the largest variance; advantages are made of these alone."""

    keep: Annotated[int, Field(ge=2)] = 4
    """Completions of a prompt that are trained on."""


class CppoConfig(Section):
    """Completion pruning (CPPO, arXiv 2503.22342): advantages are made of the whole group, and the completions with the
    largest ones, up or down, are trained on."""

    keep: Annotated[int, Field(ge=1)] = 4
    """Completions of a prompt that are trained on."""


class ReplayConfig(Section):
    """Replay of useful groups (after RePO, arXiv 2506.09340): groups that are flat give way to earlier ones that were not,
    corrected by the ratio to the policy that made them."""

    capacity: Annotated[int, Field(ge=1)] = 64
    """Groups kept."""
    max_age: Annotated[int, Field(ge=1)] = 8
    """Optimiser steps after which a group is dropped: the policy has moved too far."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest part of a batch that is replayed."""
    uses: Annotated[int, Field(ge=1)] = 1
    """Times a group is replayed, at most."""


class SelectionConfig(Section):
    """Fewer wasted rollouts: methods that can be combined, each off by default. Text without tools, one process."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Dynamic sampling (DAPO, arXiv 2503.14476): {max_rounds, token_budget}, or null."""
    greso: GresoConfig | None = None
    """Selective rollouts (GRESO, arXiv 2506.02177): {explore, step, easy_target, hard_target}, or null."""
    curriculum: CurriculumConfig | None = None
    """Prompts of middling difficulty first (after arXiv 2504.03380): {candidates, floor}, or null."""
    early_abort: EarlyAbortConfig | None = None
    """Groups that are decided early are not finished: {first, confidence}, or null."""
    pods: PodsConfig | None = None
    """Down-sampling by variance of reward (PODS, arXiv 2504.13818): {keep}, or null."""
    cppo: CppoConfig | None = None
    """Pruning by size of advantage (CPPO, arXiv 2503.22342): {keep}, or null."""
    replay: ReplayConfig | None = None
    """Replay of useful groups (after RePO, arXiv 2506.09340): {capacity, max_age, share, uses}, or null."""

    @property
    def methods(self) -> list[str]:
        """Names of those that are on."""
        return [name for name in type(self).model_fields if getattr(self, name) is not None]
