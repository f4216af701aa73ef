"""`selection:` fewer wasted rollouts: which prompts are rolled out, and which completions are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

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


REMOVED = {
    "curriculum": ("prompts drawn by their pass rate", "greso"),
    "early_abort": ("groups left unfinished once decided", "greso"),
    "replay": ("earlier groups in the place of flat ones", "dynamic_sampling"),
}
"""Methods that went in 0.1.0: what they did, and the method that comes nearest. docs/selection.md says why, with figures."""


class SelectionConfig(Section):
    """Fewer wasted rollouts: methods that can be combined, each off by default. Text without tools, one process."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Dynamic sampling (DAPO, arXiv 2503.14476): {max_rounds, token_budget}, or null."""
    greso: GresoConfig | None = None
    """Selective rollouts (GRESO, arXiv 2506.02177): {explore, step, easy_target, hard_target}, or null."""
    pods: PodsConfig | None = None
    """Down-sampling by variance of reward (PODS, arXiv 2504.13818): {keep}, or null."""
    cppo: CppoConfig | None = None
    """Pruning by size of advantage (CPPO, arXiv 2503.22342): {keep}, or null."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, given: Any) -> Any:
        """Saved runs spell out every key, so that `replay: null` is read and dropped; a method that is on is refused."""
        if not isinstance(given, Mapping):
            return given
        for name, (what, nearest) in REMOVED.items():
            if given.get(name) is not None:
                raise ValueError(
                    f"{name} ({what}) was removed in 0.1.0: measured against plain GRPO it took as many generated tokens to "
                    f"the same score. Take the key out, or set it to null; what comes nearest is {nearest}. The figures are "
                    "in docs/selection.md"
                )
        return {key: value for key, value in given.items() if key not in REMOVED}

    @property
    def methods(self) -> list[str]:
        """Names of those that are on."""
        return [name for name in type(self).model_fields if getattr(self, name) is not None]
