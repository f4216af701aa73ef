"""`reward:` what is rewarded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from kit.config.sections.base import Section


class RewardFunction(Section):
    """A reward function of yours."""

    path: str
    """`file.py:function` or `package.module:function`, with TRL's calling convention."""
    weight: float = 1.0
    """Factor on its value in the weighted sum."""


class RewardConfig(Section):
    """What is rewarded: a preset, your functions, or both."""

    preset: str | None = "reasoning-gym"
    """Name of a preset of `rewards` (`grpo-kit reward list`), or null when `functions` says everything. Left out beside
    `functions` it is null."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the preset."""
    functions: list[RewardFunction] = Field(default_factory=list)
    """Reward functions added to the preset, or used alone."""
    max_failure_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The run stops when, over 5 steps in a row, more than this share of scores are errors or timeouts."""

    @model_validator(mode="before")
    @classmethod
    def _functions_alone(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("functions") and "preset" not in tree:
            return {**tree, "preset": None}
        return tree

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> RewardConfig:
        if self.preset is None and not self.functions:
            raise ValueError("nothing is rewarded: set reward.preset to a name, or list reward.functions")
        return self
