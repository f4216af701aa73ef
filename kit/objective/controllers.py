"""Coefficients that react to what was measured: `adaptive_kl`, `adaptive_entropy`.

    regularizers:
      - {name: kl, coef: "adaptive_kl(target=0.05, horizon=10000)"}
      - {name: entropy_bonus, coef: "adaptive_entropy(target=0.2)"}

They are told the mean of every optimiser step (`Objective.observe`) and answer from the next one on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kit.errors import ConfigError
from kit.objective.schedules import Controller, schedules

ERROR_BOUND = 0.2
"""`adaptive_kl` takes a relative error for no more than this, as in arXiv 1909.08593."""

LEAST_FACTOR = 0.5
"""`adaptive_kl` at most halves the coefficient in a step: at 0, where a short horizon would bring it, it would stay."""


@schedules.register("adaptive_kl")
@dataclass(frozen=True)
class AdaptiveKL(Controller):
    """Steers the KL to the reference towards `target` by multiplying the coefficient after every step.

    coef <- coef * (1 + clip(KL / target - 1, -0.2, 0.2) * completions / horizon), at least half

    Args: target (nats), horizon (completions), start (the first coefficient). Source: Ziegler et al., arXiv 1909.08593.
    """

    target: float
    horizon: float = 10_000
    start: float = 0.1
    name: ClassVar[str] = "adaptive_kl"
    _state: dict[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        _check(self, positive=("target", "horizon", "start"))
        self.reset()

    def __call__(self, step: int) -> float:
        return self._state["coef"]

    @property
    def extremes(self) -> tuple[float, ...]:
        return (self.start,)

    def observe(self, mean: float, completions: int) -> None:
        if not math.isfinite(mean):
            return
        error = min(max(mean / self.target - 1.0, -ERROR_BOUND), ERROR_BOUND)
        self._state["coef"] *= max(1.0 + error * completions / self.horizon, LEAST_FACTOR)

    def reset(self) -> None:
        self._state["coef"] = self.start

    def state_dict(self) -> dict[str, float]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        _restore(self, self._state, state)


@schedules.register("adaptive_entropy")
@dataclass(frozen=True)
class AdaptiveEntropy(Controller):
    """Keeps the policy's entropy at `target` or above: for `entropy_bonus`.

    After a step whose mean entropy was at or below `target` the coefficient rises by `delta` and is applied in the next
    step; otherwise it falls by `delta` and the next step goes without. It stays in [`min`, `max`]; in the first step
    there is no bonus.

    Args: target (nats), delta, min, max, start (the first coefficient, `min` if left out).
    Source: Skywork-OR1, arXiv 2505.22312, as TRL computes it (`use_adaptive_entropy`).
    """

    target: float
    delta: float = 0.005
    min: float = 0.0
    max: float = 1.0
    start: float | None = None
    name: ClassVar[str] = "adaptive_entropy"
    observes: ClassVar[str] = "entropy"
    _state: dict[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        _check(self, positive=("delta",), not_negative=("target", "min", "max"))
        start = self.min if self.start is None else self.start
        if not self.min <= start <= self.max:
            raise ConfigError(
                f"{self.name}: min <= start <= max must hold, got min={self.min}, start={start}, max={self.max}."
            )
        self.reset()

    def __call__(self, step: int) -> float:
        return self._state["coef"] if self._state["apply"] else 0.0

    @property
    def extremes(self) -> tuple[float, ...]:
        return (0.0, self.max)

    def observe(self, mean: float, completions: int) -> None:
        if not math.isfinite(mean):
            return
        low = mean <= self.target
        coef = self._state["coef"] + (self.delta if low else -self.delta)
        self._state.update(coef=min(max(coef, self.min), self.max), apply=float(low))

    def reset(self) -> None:
        self._state.update(coef=self.min if self.start is None else self.start, apply=0.0)

    def state_dict(self) -> dict[str, float]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        _restore(self, self._state, state)


def _check(controller: Controller, positive: tuple[str, ...] = (), not_negative: tuple[str, ...] = ()) -> None:
    for key in (*positive, *not_negative):
        value = getattr(controller, key)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not usable or value < 0 or (value == 0 and key in positive):
            bound = "positive" if key in positive else "not negative"
            raise ConfigError(f"{controller.name}: {key} must be a finite number and {bound}, got {value!r}.")


def _restore(controller: Controller, state: dict[str, float], saved: Mapping[str, float]) -> None:
    if set(saved) != set(state):
        raise ConfigError(f"The saved state of {controller.name} has {sorted(saved)}, expected {sorted(state)}.")
    state.update({key: float(value) for key, value in saved.items()})
