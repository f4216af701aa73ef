"""Hyper-parameters that follow the optimiser step, as `linear(0.1, 0.0, 100)`, or a measured mean.

Any float hyper-parameter, and any regularizer's `coef`, may be a schedule, given as an object, as a dict
`{"schedule": "linear", "start": 0.1, "end": 0.0, "steps": 100}` or as the string `"linear(0.1, 0.0, 100)"`, with or without
parameter names. A `coef` may also be a controller. It receives a mean after every optimiser step (`Objective.observe`) and
sets the coefficient of the next one:

    regularizers:
      - {name: kl, coef: "adaptive_kl(target=0.05, horizon=10000)"}
      - {name: entropy_bonus, coef: "adaptive_entropy(target=0.2)"}
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kit.errors import ConfigError
from kit.registry import Registry, did_you_mean

schedules: Registry[type[Schedule]] = Registry("schedule")


@dataclass(frozen=True)
class Schedule(ABC):
    """A number that is a function of the optimiser step. Subclasses are frozen dataclasses of their parameters."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The value at `step` (optimiser steps, from 0)."""

    @property
    @abstractmethod
    def extremes(self) -> tuple[float, ...]:
        """The bounds of the schedule. They must lie in the range of the hyper-parameter."""

    def to_spec(self) -> dict[str, Any]:
        """A plain dict, which `parse_schedule` reads."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return {"schedule": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}}

    def __str__(self) -> str:
        values = list(self.to_spec().values())[1:]
        return f"{self.name}({', '.join(str(value) for value in values)})"


@dataclass(frozen=True)
class _Ramp(Schedule):
    """From `start` at step 0 to `end` at step `steps`, then constant."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check(self, "start", "end")
        for name in ("start", "end"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"{self.name}: steps must be a whole number of optimiser steps >= 1, got {self.steps!r}.")

    @property
    def extremes(self) -> tuple[float, ...]:
        return (self.start, self.end)

    def _progress(self, step: int) -> float:
        return min(max(step / self.steps, 0.0), 1.0)


@schedules.register("linear")
@dataclass(frozen=True)
class Linear(_Ramp):
    """A straight line from `start` at step 0 to `end` at step `steps`, then constant."""

    name: ClassVar[str] = "linear"

    def __call__(self, step: int) -> float:
        progress = self._progress(step)
        return self.start * (1.0 - progress) + self.end * progress


@schedules.register("cosine")
@dataclass(frozen=True)
class Cosine(_Ramp):
    """Half a cosine wave from `start` at step 0 to `end` at step `steps`, then constant."""

    name: ClassVar[str] = "cosine"

    def __call__(self, step: int) -> float:
        share = 0.5 * (1.0 + math.cos(math.pi * self._progress(step)))
        return self.start * share + self.end * (1.0 - share)


@dataclass(frozen=True)
class Controller(Schedule):
    """A coefficient with state, which changes after each optimiser step according to a mean of that step.

    `observes` names the mean: "term" is the unscaled mean of the regularizer whose `coef` it is, "entropy" the mean entropy
    of the policy. Checkpoints contain the state; `to_spec` returns the initial setting.
    """

    observes: ClassVar[str] = "term"
    _state: dict[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    @abstractmethod
    def initial(self) -> dict[str, float]:
        """The initial state."""

    @abstractmethod
    def observe(self, mean: float, completions: int) -> None:
        """Update the state with the mean of one optimiser step (nats) over this number of completions."""

    def reset(self) -> None:
        """Restore the initial state."""
        self._state.update(self.initial)

    def state_dict(self) -> dict[str, float]:
        """The current state as plain numbers."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict()`. Raises `ConfigError` if it is the state of another controller."""
        if set(state) != set(self._state):
            raise ConfigError(f"The saved state of {self.name} has {sorted(state)}, expected {sorted(self._state)}.")
        self._state.update({key: float(value) for key, value in state.items()})


def is_schedule(value: object) -> bool:
    """Whether a value is a schedule, or a dict or string that describes one."""
    if isinstance(value, Mapping):
        return "schedule" in value
    return isinstance(value, Schedule) or (isinstance(value, str) and _CALL.fullmatch(value.strip()) is not None)


def parse_schedule(value: Schedule | Mapping[str, Any] | str) -> Schedule:
    """Build a schedule from an object, a dict or a string. Raises `ConfigError`."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        fields = {str(key): field for key, field in value.items()}
        return _build(str(fields.pop("schedule", "")), (), fields)
    match = _CALL.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f"'{value}' is not a schedule. Write it as {_EXAMPLE}.")
    try:
        call = ast.parse(value.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        arguments = tuple(ast.literal_eval(argument) for argument in call.args)
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, AssertionError):
        raise ConfigError(f"'{value}': a schedule takes plain numbers, as in {_EXAMPLE}.") from None
    return _build(match["name"], arguments, named)


_CALL = re.compile(r"(?P<name>[A-Za-z_]\w*)\((?P<arguments>.*)\)")
_EXAMPLE = "'linear(0.1, 0.0, 100)' or 'linear(start=0.1, end=0.0, steps=100)'"


def _build(name: str, arguments: tuple[Any, ...], fields: Mapping[str, Any]) -> Schedule:
    if name not in schedules:
        raise ConfigError(
            f"No schedule is called '{name}'.{did_you_mean(name, schedules)} Known: {', '.join(schedules)}; adaptive ones only "
            "set a coef. For another one, compute the value in a hook from batch.step."
        )
    kind = schedules[name]
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    for key in fields:
        if key not in known:
            raise ConfigError(f"{name} has no '{key}'.{did_you_mean(key, known)} It takes: {', '.join(known)}.")
    try:
        return kind(*arguments, **fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} needs {', '.join(known)}: {str(error).rpartition('() ')[2]}") from None


# --- controllers ------------------------------------------------------------------------------------------------------

ERROR_BOUND = 0.2
"""Bound of the relative error in `adaptive_kl`, as in arXiv 1909.08593."""

LEAST_FACTOR = 0.5
"""`adaptive_kl` at most halves the coefficient in a step. A short horizon could set it to 0, where it would stay."""


@schedules.register("adaptive_kl")
@dataclass(frozen=True)
class AdaptiveKL(Controller):
    """Multiplies the coefficient after every step so that the KL to the reference approaches `target`.

    coef <- coef * (1 + clip(KL / target - 1, -0.2, 0.2) * completions / horizon), at least half

    Args: target (nats), horizon (completions), start (the first coefficient). Source: Ziegler et al., arXiv 1909.08593.
    """

    target: float
    horizon: float = 10_000
    start: float = 0.1
    name: ClassVar[str] = "adaptive_kl"

    def __post_init__(self) -> None:
        _check(self, "target", "horizon", "start", least=0.0, above=True)
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

    @property
    def initial(self) -> dict[str, float]:
        return {"coef": self.start}


@schedules.register("adaptive_entropy")
@dataclass(frozen=True)
class AdaptiveEntropy(Controller):
    """A coefficient for `entropy_bonus` that keeps the policy's entropy at `target` or above.

    After a step with mean entropy at or below `target` the coefficient rises by `delta` and applies to the next step.
    Otherwise it falls by `delta` and the next step has no bonus. It stays in [`min`, `max`]. The first step has no bonus.

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

    def __post_init__(self) -> None:
        _check(self, "delta", least=0.0, above=True)
        _check(self, "target", "min", "max", least=0.0)
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

    @property
    def initial(self) -> dict[str, float]:
        return {"coef": self.min if self.start is None else self.start, "apply": 0.0}


def _check(schedule: Schedule, *names: str, least: float = -math.inf, above: bool = False) -> None:
    """Raise `ConfigError` unless these fields are finite numbers >= `least`, or > `least` with `above`."""
    for name in names:
        value = getattr(schedule, name)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not usable or value < least or (above and value == least):
            bound = "" if least < 0 else " and positive" if above else " and not negative"
            raise ConfigError(f"{schedule.name}: {name} must be a finite number{bound}, got {value!r}.")
