"""`evaluation:` the held-out score before, during and after."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from kit.config.sections.base import Section


class EvaluationConfig(Section):
    """Held-out score: greedy accuracy, and pass@1, pass@k and maj@k from sampled completions."""

    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every so many optimiser steps; 0: not in between."""
    prompts: Annotated[int, Field(ge=1)] = 200
    """Held-out problems used, at most."""
    k: Annotated[int, Field(ge=1, le=256)] = 4
    """Sampled completions a problem for pass@1 and pass@k (unbiased estimator, arXiv 2107.03374)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of those samples."""
    seed: int = 0
    """Seed of those samples."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Completions generated at once."""
    checker: str | None = None
    """Preset of `rewards` that says what is right, apart from what is trained on. Null: the checker that the training
    preset names, if it names one."""
    metric: Literal["auto", "greedy_accuracy", "pass@1", "pass@k", "maj@k", "greedy_reward"] = "auto"
    """The score by which the best checkpoint is chosen, training stopped early and the alarm raised. `auto`: greedy
    accuracy where something says what is right, else the greedy reward."""
    keep_best: bool = True
    """Keep the checkpoint with the best score, besides the last ones. Needs `every`."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop early after so many evaluations in a row without a better score. Null: never."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much better a score must be to count as better, in its own unit."""
    alarm: Literal["off", "warn", "stop", "rollback"] = "warn"
    """What to do when the training reward rises while the held-out score falls (reward hacking): only say so, stop the
    run, or stop it with the weights of its best checkpoint."""

    @field_validator("alarm", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false
