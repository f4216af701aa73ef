"""A hook: a factory, the hyper-parameters it was given, and the pure function that it makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kit.errors import ConfigError, KitError
from kit.objective.hyperparameters import HyperParameter, check_range, complete
from kit.objective.schedules import Controller, Schedule
from kit.registry import did_you_mean

HookFunction = Callable[..., Tensor]

TOKEN_REMEDIES: Mapping[str, str] = {
    "ref_logps": "the run has no reference policy. Set model.reference: base",
    "full_kl": "the run has no reference policy. Set model.reference: base",
    "sampler_logps": "the generation engine reported no log-probabilities. Generate with an engine that does",
    "entropy": "the batch carries no entropy. Let the trainer compute it",
    "rewards": "the batch carries no rewards. Let the trainer fill in TokenBatch.rewards",
    "all_lengths": "the batch does not know the lengths of its generation batch. Fill in TokenBatch.all_lengths",
    "truncated": "the batch does not say which completions were cut. Fill in TokenBatch.truncated",
    "weight_norm": "the model has no LoRA weights. Set model.lora",
}
REWARD_REMEDIES: Mapping[str, str] = {
    "components": "the rewards come without their components. Pass RewardBatch.components",
    "lengths": "the completions come without their lengths. Pass RewardBatch.lengths",
    "greedy_rewards": "no greedy completion was scored. Let the trainer make one for each prompt",
    "token_rewards": "the rewards are not laid out over tokens. Pass RewardBatch.token_rewards and mask",
    "values": "there is no value head. Let the trainer make one, or pass RewardBatch.values and mask",
}
REMEDIES: Mapping[str, str] = {**TOKEN_REMEDIES, **REWARD_REMEDIES}
"""What a hook may need of a `TokenBatch`, or an advantage of a `RewardBatch`, and what to do when the run lacks it."""


@dataclass(frozen=True, eq=False)
class HookFactory:
    """What a registry holds under a name. Calling it with hyper-parameters gives a `Hook`."""

    kind: str  # "clip", "weight", ...
    name: str  # as in YAML
    build: Callable[..., HookFunction]
    hyperparameters: Mapping[str, HyperParameter]
    needs: frozenset[str] = frozenset()
    formula: str = ""  # for people; {name} stands for a hyper-parameter
    filled: bool = False  # whether its output is 0 at padding, so that it need not be masked
    on_policy: bool = False  # whether it is right for the policy that generated only, as it has no ratio
    row_separable: bool = False  # whether a completion's gradient depends on no other completion's log-probabilities
    zero_at_zero_advantage: bool = False  # whether a completion with advantages 0 has loss 0 and gradient 0
    source: str = ""  # where it comes from: paper, or the option of TRL that it equals
    hints: Mapping[str, str] = field(default_factory=dict)  # what to say to a hyper-parameter that it cannot have
    custom: bool = False  # the user's own: its outputs are checked at every call
    importable: bool = True  # False for a lambda or closure: it works, but cannot be written to YAML

    def __call__(self, *args: Any, **kwargs: Any) -> Hook:
        """The hook with these hyper-parameters. Raises `ConfigError` on an unknown, missing or invalid one."""
        names = list(self.hyperparameters)
        if len(args) > len(names):
            raise ConfigError(f"{self.title} takes {len(names)} hyper-parameters, got {len(args)}.")
        twice = set(names[: len(args)]) & set(kwargs)
        if twice:
            raise ConfigError(f"{self.title}: {', '.join(sorted(twice))} is given twice.")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return Hook(self, complete(self.hyperparameters, given, self.title, self.hints))

    @property
    def title(self) -> str:
        """For messages: `clip 'ppo_clip'`."""
        return f"{self.kind} '{self.name}'"


class Hook:
    """A hook with its hyper-parameters, some of which may be schedules. Called like the pure function that it makes."""

    def __init__(self, factory: HookFactory, values: Mapping[str, Any]) -> None:
        self.factory = factory
        self.values = dict(values)
        self._function = self._build({})
        self._check_extremes()
        self._check_state()
        self.needs = factory.needs | check_needs(attribute(self._function, "needs", ()), factory.kind, factory.title)

    @property
    def kind(self) -> str:
        return self.factory.kind

    @property
    def on_policy(self) -> bool:
        """Whether it is right only for the policy that generated: registered so, or its function says `on_policy`."""
        return self.factory.on_policy or bool(attribute(self._function, "on_policy", False))

    @property
    def row_separable(self) -> bool:
        """Whether the gradient of a completion depends on no other completion's log-probabilities, entropies or full KL.

        Registered so, or its function says `row_separable`; never with state, which more calls would change.
        """
        said = self.factory.row_separable or bool(attribute(self._function, "row_separable", False))
        return said and "" not in self.stateful()

    @property
    def zero_at_zero_advantage(self) -> bool:
        """Whether completions whose advantages are all 0 have loss 0 and gradient 0: registered so, or said likewise."""
        return self.factory.zero_at_zero_advantage or bool(attribute(self._function, "zero_at_zero_advantage", False))

    @property
    def name(self) -> str:
        return self.factory.name

    @property
    def title(self) -> str:
        return self.factory.title

    @property
    def short_name(self) -> str:
        """Name under which its metrics are logged: the function's name for `file.py:function`."""
        return self.name.rpartition(":")[2]

    def at(self, step: int) -> HookFunction:
        """The pure function at an optimiser step, with every schedule evaluated."""
        scheduled = {k: v(step) for k, v in self.values.items() if isinstance(v, Schedule) and k != "coef"}
        return self._build(scheduled) if scheduled else self._function

    def __call__(self, *args: Any) -> Tensor:
        """The pure function at the step of the batch, which is the first argument."""
        return self.at(getattr(args[0], "step", 0))(*args)

    def coef_at(self, step: int) -> float:
        """A regularizer's coefficient at an optimiser step."""
        coef = self.values["coef"]
        return float(coef(step) if isinstance(coef, Schedule) else coef)

    def to_spec(self) -> dict[str, Any]:
        """`{"name": ..., **hyper-parameters}`, plain and complete. Raises `ConfigError` for a lambda or closure."""
        if not self.factory.importable:
            raise ConfigError(
                f"{self.title} cannot be written down: it is defined inside another function. "
                f"Put it at the top level of a file and name it 'file.py:{self.short_name}'."
            )
        return {"name": self.name, **{key: _plain(value) for key, value in self.values.items()}}

    def describe(self) -> str:
        """Its formula with the hyper-parameters filled in, or its call."""
        shown = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in self.values.items()}
        call = f"{self.name}({', '.join(f'{k}={v}' for k, v in shown.items())})"
        return f"{call}  {self.factory.formula.format(**shown)}".rstrip()

    def stateful(self) -> dict[str, Any]:
        """Whatever of it keeps state between steps (has `state_dict` and `load_state_dict`), by a stable key."""
        parts = {"": underlying(self._function), **self.values}
        keeps = ("state_dict", "load_state_dict")
        return {key: part for key, part in parts.items() if all(hasattr(part, method) for method in keeps)}

    def _build(self, scheduled: Mapping[str, float]) -> HookFunction:
        values = {k: v for k, v in self.values.items() if k != "coef"} | dict(scheduled)
        start = {k: v(0) if isinstance(v, Schedule) else v for k, v in values.items()}
        try:
            function = self.factory.build(**start)
        except KitError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.title} refused its hyper-parameters {start}: {error}") from error
        if not callable(function):
            raise ConfigError(
                f"{self.title} returned {type(function).__name__}, not a function. A hook is either a function of the "
                f"batch, or a factory whose parameters all have defaults and that returns one."
            )
        return function

    def _check_state(self) -> None:
        """Refuse a schedule on a function with state: it is built anew at every step, and would forget."""
        scheduled = [key for key, value in self.values.items() if isinstance(value, Schedule) and key != "coef"]
        if scheduled and "" in self.stateful():
            raise ConfigError(
                f"{self.title} keeps state, so {scheduled[0]} cannot follow a schedule: the function is built anew for every "
                "value and would forget. Compute the schedule inside the hook, from batch.step."
            )

    def _check_extremes(self) -> None:
        """Refuse a schedule that would leave the valid range at some later step, and a controller without a term."""
        for key, value in self.values.items():
            if isinstance(value, Controller) and key != "coef":
                raise ConfigError(f"{self.title}: {value.name} controls a regularizer's coef, not {key}.")
            extremes = value.extremes if isinstance(value, Schedule) else (value,)
            for extreme in extremes:
                if key == "coef":
                    check_range(self.title, "coef", extreme, 0.0, finite=True)
                elif isinstance(value, Schedule):
                    self._build({key: extreme})


def check_needs(needs: Collection[str], kind: str, title: str) -> frozenset[str]:
    """`needs` as a set. Raises `ConfigError` for a need that no batch given to hooks of this kind has."""
    if isinstance(needs, str):
        needs = {needs}
    known = REWARD_REMEDIES if kind == "advantage" else TOKEN_REMEDIES
    for need in needs:
        if need not in known:
            raise ConfigError(
                f"{title} declares a need for '{need}'.{did_you_mean(need, known)} Known: {', '.join(known)}."
            )
    return frozenset(needs)


def attribute(function: Any, name: str, default: Any = None) -> Any:
    """An attribute of a function, looked for also below `functools.partial`."""
    return getattr(underlying(function), name, default)


def underlying(function: Any) -> Any:
    """The function below `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.to_spec()
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
