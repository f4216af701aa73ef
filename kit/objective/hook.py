"""A hook: a factory, its hyper-parameters, and the pure function that the factory makes from them.

Hyper-parameters come from the factory's signature (name, type, default) and are checked when they are set. The result of a
user's own hook is checked at every call: its shape, finite values, a gradient, unchanged inputs. The kit's own hooks are
checked by tests instead, because each check at run time waits for the device.
"""

from __future__ import annotations

import functools
import inspect
import math
import traceback
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kit.errors import ConfigError, KitError, ObjectiveError
from kit.objective.batch import REWARD_FIELDS, TOKEN_FIELDS, RewardBatch, TokenBatch, fields_where
from kit.objective.schedules import Controller, Schedule, is_schedule, parse_schedule
from kit.registry import did_you_mean

# --- hyper-parameters -------------------------------------------------------------------------------------------------

_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class HyperParameter:
    """A parameter of a hook's factory. `required` says that it has no default."""

    name: str
    annotation: Any
    default: Any
    required: bool

    @property
    def schedulable(self) -> bool:
        """Whether it may follow a schedule, as floats may."""
        return float in _alternatives(self.annotation)

    def coerce(self, value: Any, owner: str, origin: str = "") -> Any:
        """Convert `value` to the declared type or to a `Schedule`. Raises `ConfigError` with hook, key and value.

        `origin` says in the message where the value comes from.
        """
        if self.schedulable and is_schedule(value):
            return parse_schedule(value)
        if is_schedule(value) and str not in _alternatives(self.annotation):
            raise ConfigError(f"{owner}: {self.name} cannot follow {value!r}; annotate it as float for a schedule.")
        if self.annotation is _EMPTY or self.annotation is Any:
            return value
        for kind in _alternatives(self.annotation):
            fits, result = _fit(value, kind)
            if fits:
                return result
        raise ConfigError(f"{owner}: {self.name} must be {_spell(self.annotation)}, got {value!r}{origin}.")


def discover(factory: Callable[..., Any], skip: int = 0) -> dict[str, HyperParameter]:
    """The hyper-parameters of `factory` in order, without its first `skip` parameters.

    A parameter without annotation is a float if its default is one.
    """
    parameters = list(signature(factory).parameters.values())[skip:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    kinds = {p.name: float if p.annotation is _EMPTY and isinstance(p.default, float) else p.annotation for p in named}
    return {p.name: HyperParameter(p.name, kinds[p.name], p.default, p.default is _EMPTY) for p in named}


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, with resolved annotations if possible. Raises `ConfigError` for a C function without one."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{function!r} has no Python signature; wrap it in a function of the batch.") from None


def complete(known: Mapping[str, HyperParameter], values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """All hyper-parameters with their values from `values` or their defaults, checked by the annotations.

    Raises `ConfigError` for an unknown key (with the nearest known one), a missing key, and a value of the wrong type.
    """
    for key in values:
        if key not in known:
            names = ", ".join(known) or "no hyper-parameters"
            raise ConfigError(f"{owner} has no hyper-parameter '{key}'.{did_you_mean(key, known)} It has: {names}.")
    missing = [name for name, parameter in known.items() if parameter.required and name not in values]
    if missing:
        raise ConfigError(f"{owner} needs a value for {', '.join(missing)}.")
    return {
        name: parameter.coerce(values[name], owner)
        if name in values
        else parameter.coerce(parameter.default, owner, ", its default")
        for name, parameter in known.items()
    }


def check_range(
    owner: str,
    name: str,
    value: float,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    finite: bool = False,
) -> None:
    """Raise `ConfigError` unless `low <= value < high`, or `low < value < high` if `open_low`.

    Without `high`, inf is valid unless `finite`.
    """
    if finite and math.isinf(value):
        raise ConfigError(f"{owner}: {name} must be finite, got {value!r}.")
    above = value > low if open_low else value >= low
    below = value < high or math.isinf(high)
    if not (above and below):
        upper = "" if math.isinf(high) else f" < {high:g}"
        lower = f"{low:g} {'<' if open_low else '<='} "
        raise ConfigError(f"{owner}: {name} must satisfy {lower}{name}{upper}, got {value!r}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    if kind is type(None):
        return value is None, None
    if kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        return fits, float(value) if fits else None
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind), value
    if isinstance(kind, type) and kind is not Schedule:
        return isinstance(value, kind), value
    return True, value  # an unknown type, which the factory checks itself


def _spell(annotation: Any) -> str:
    def name_of(kind: Any) -> str:
        if typing.get_origin(kind) is Literal:
            return "one of " + ", ".join(map(str, typing.get_args(kind)))
        names = {float: "a number or a schedule", int: "a whole number", bool: "true or false", type(None): "null"}
        return names.get(kind, getattr(kind, "__name__", str(kind)))

    return " or ".join(name_of(kind) for kind in _alternatives(annotation))


# --- the costs of needs -----------------------------------------------------------------------------------------------

ENTROPY_IN_LOSS = "one more matrix product per vocabulary tile in the scorer, for its gradient"


def remedy(need: str) -> str:
    """The message for a batch without this field: what is missing, and what to do."""
    return {**REWARD_FIELDS, **TOKEN_FIELDS}[need].remedy


def costs(needs: Collection[str], *, entropy_in_loss: bool = False) -> dict[str, str]:
    """The cost of each need, in alphabetical order. `entropy_in_loss` says that a term of the loss uses the entropy."""
    by_need = {need: {**REWARD_FIELDS, **TOKEN_FIELDS}[need].cost for need in sorted(needs)}
    if "entropy" in by_need and entropy_in_loss:
        by_need["entropy"] = ENTROPY_IN_LOSS
    return by_need


# --- the hook ---------------------------------------------------------------------------------------------------------

HookFunction = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class HookFactory:
    """An entry of a registry. Calling it with hyper-parameters makes a `Hook`."""

    kind: str  # "clip", "weight", ...
    name: str  # as in YAML
    build: Callable[..., HookFunction]
    hyperparameters: Mapping[str, HyperParameter]
    needs: frozenset[str] = frozenset()
    formula: str = ""  # for documentation; {name} is replaced by a hyper-parameter
    filled: bool = False  # whether its output is 0 at padding without masking
    on_policy: bool = False  # whether it is valid only on policy, because it has no ratio
    row_separable: bool = False  # whether a completion's gradient depends on no other completion's log-probabilities
    zero_at_zero_advantage: bool = False  # whether a completion with advantages 0 has loss 0 and gradient 0
    source: str = ""  # a paper, or the option of TRL to which it is equal
    custom: bool = False  # a user's own hook, whose outputs are checked at every call
    importable: bool = True  # False for a lambda or closure, which cannot be written to YAML

    def __call__(self, *args: Any, **kwargs: Any) -> Hook:
        """Make a hook with these hyper-parameters. Raises `ConfigError` for an unknown, missing or invalid one."""
        names = list(self.hyperparameters)
        if len(args) > len(names):
            raise ConfigError(f"{self.title} takes {len(names)} hyper-parameters, got {len(args)}.")
        twice = set(names[: len(args)]) & set(kwargs)
        if twice:
            raise ConfigError(f"{self.title}: {', '.join(sorted(twice))} is set twice.")
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        return Hook(self, complete(self.hyperparameters, values, self.title))

    @property
    def title(self) -> str:
        """Kind and name for messages: `clip 'ppo_clip'`."""
        return f"{self.kind} '{self.name}'"


class Hook:
    """A hook with its hyper-parameters, which may be schedules. It is called like its pure function."""

    def __init__(self, factory: HookFactory, values: Mapping[str, Any]) -> None:
        self.factory = factory
        self.values = dict(values)
        self._function = self._build({})
        for key, value in self.values.items():  # check that schedules stay in the valid range
            if isinstance(value, Schedule) and key != "coef" and "" in self.stateful():
                raise ConfigError(
                    f"{self.title} has state, so {key} cannot follow a schedule: a new function is made for every value, "
                    "without the state. Compute the schedule inside the hook, from batch.step."
                )
            if isinstance(value, Controller) and key != "coef":
                raise ConfigError(f"{self.title}: {value.name} controls a regularizer's coef, not {key}.")
            for extreme in value.extremes if isinstance(value, Schedule) else (value,):
                if key == "coef":
                    check_range(self.title, "coef", extreme, 0.0, finite=True)
                elif isinstance(value, Schedule):
                    self._build({key: extreme})
        self.needs = factory.needs | check_needs(attribute(self._function, "needs", ()), factory.kind, factory.title)

    @property
    def kind(self) -> str:
        return self.factory.kind

    @property
    def on_policy(self) -> bool:
        """Whether it is valid only on policy, by its registration or its function's attribute `on_policy`."""
        return self.factory.on_policy or bool(attribute(self._function, "on_policy", False))

    @property
    def row_separable(self) -> bool:
        """Whether the gradient of a completion depends on no other completion's log-probabilities, entropies or full KL.

        Declared by registration or the function's attribute; never true with state, which further calls would change.
        """
        separable = self.factory.row_separable or bool(attribute(self._function, "row_separable", False))
        return separable and "" not in self.stateful()

    @property
    def zero_at_zero_advantage(self) -> bool:
        """Whether completions with advantages 0 have loss and gradient 0, by registration or the function's attribute."""
        return self.factory.zero_at_zero_advantage or bool(attribute(self._function, "zero_at_zero_advantage", False))

    @property
    def name(self) -> str:
        return self.factory.name

    @property
    def title(self) -> str:
        return self.factory.title

    @property
    def short_name(self) -> str:
        """The name of its metrics; for `file.py:function` the name of the function."""
        return self.name.rpartition(":")[2]

    def at(self, step: int) -> HookFunction:
        """The pure function at an optimiser step, with all schedules evaluated."""
        scheduled = {k: v(step) for k, v in self.values.items() if isinstance(v, Schedule) and k != "coef"}
        return self._build(scheduled) if scheduled else self._function

    def __call__(self, *args: Any) -> Tensor:
        """Call the pure function at the step of the batch, which is the first argument."""
        return self.at(getattr(args[0], "step", 0))(*args)

    def coef_at(self, step: int) -> float:
        """A regularizer's coefficient at an optimiser step."""
        coef = self.values["coef"]
        return float(coef(step) if isinstance(coef, Schedule) else coef)

    def to_spec(self) -> dict[str, Any]:
        """The hook as `{"name": ..., **hyper-parameters}`. Raises `ConfigError` for a lambda or closure."""
        if not self.factory.importable:
            raise ConfigError(
                f"{self.title} cannot be written to YAML: it is defined inside another function. "
                f"Move it to the top level of a file and name it 'file.py:{self.short_name}'."
            )
        return {"name": self.name, **{key: _plain(value) for key, value in self.values.items()}}

    def describe(self) -> str:
        """The hook as a call with its hyper-parameters, and its formula if it has one."""
        shown = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in self.values.items()}
        call = f"{self.name}({', '.join(f'{k}={v}' for k, v in shown.items())})"
        return f"{call}  {self.factory.formula.format(**shown)}".rstrip()

    def stateful(self) -> dict[str, Any]:
        """Objects with state (`state_dict` and `load_state_dict`) of this hook, by a stable key."""
        parts = {"": underlying(self._function), **self.values}
        methods = ("state_dict", "load_state_dict")
        return {key: part for key, part in parts.items() if all(hasattr(part, method) for method in methods)}

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


def check_needs(needs: Collection[str], kind: str, title: str) -> frozenset[str]:
    """`needs` as a set. Raises `ConfigError` for a field that batches for this kind of hook do not have."""
    if isinstance(needs, str):
        needs = {needs}
    known = REWARD_FIELDS if kind == "advantage" else TOKEN_FIELDS
    for need in needs:
        if need not in known:
            raise ConfigError(
                f"{title} needs the unknown field '{need}'.{did_you_mean(need, known)} Known: {', '.join(known)}."
            )
    return frozenset(needs)


def attribute(function: Any, name: str, default: Any = None) -> Any:
    """An attribute of a function, also below `functools.partial`."""
    return getattr(underlying(function), name, default)


def report_of(hook: Hook, name: str, batch: TokenBatch) -> Mapping[str, Tensor]:
    """Call `function.NAME(batch)` of the hook's function with the hyper-parameters that it accepts; {} if there is none.

    Raises `ObjectiveError` if it raises, or returns anything but a dict of tensors (B, T), (B, 1) or ().
    """
    function = hook.at(batch.step)
    report = attribute(function, name)
    if report is None:
        return {}
    values = function.keywords if isinstance(function, functools.partial) else {}
    accepted = signature(report).parameters if values else {}
    title, rows = f"{hook.short_name}.{name} of {hook.title}", len(batch.mask)
    try:
        out = report(batch, **{key: value for key, value in values.items() if key in accepted})
    except Exception as error:
        raise ObjectiveError(f"{title} raised {type(error).__name__}: {error}.") from error
    shapes = {(), (rows, 1), tuple(batch.mask.shape)}
    for key, value in out.items() if isinstance(out, Mapping) else [("", out)]:
        if not key or not isinstance(value, Tensor) or tuple(value.shape) not in shapes:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise ObjectiveError(
                f"{title} returned {type(value).__name__}{shape}{f' for {key}' if key else ''}. Expected a dict of tensors "
                f"(B, T), (B, 1) or (), here with B = {rows} and T = {batch.mask.shape[1]}."
            )
    return dict(out)


def underlying(function: Any) -> Any:
    """The function below `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.to_spec()
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


# --- checks of a user's own hook --------------------------------------------------------------------------------------


def require_needs(hook: Hook, batch: TokenBatch | RewardBatch) -> None:
    """Raise `ObjectiveError` if the batch lacks a field that the hook needs."""
    for need in sorted(hook.needs):
        if getattr(batch, need, None) is None:
            raise ObjectiveError(f"{hook.short_name} needs {need}, but {remedy(need)}, or remove the {hook.kind}.")


def call_on_tokens(hook: Hook, batch: TokenBatch) -> Tensor:
    """The per-token output (B, T) of a hook. That of a user's own hook is checked, and 0 at padding. Raises `ObjectiveError`.

    A regularizer may also return a scalar (): a penalty on the batch instead of on tokens.
    """
    if not hook.factory.custom:
        return hook(batch)
    batch = batch.shielded
    shapes: list[tuple[int | str, ...]] = [tuple(batch.mask.shape)]
    sources: list[Tensor | None] = []
    if hook.kind == "clip":
        sources = [batch.logps]
    elif hook.kind == "regularizer":  # its gradient may reach the log-probabilities, or another field
        shapes.append(())
        sources = [getattr(batch, name) for name in fields_where(gradient=True) & hook.needs] or [batch.logps]
    return checked(hook, lambda: hook(batch), vars(batch), shapes, sources=sources, mask=batch.mask)


def checked(
    hook: Hook,
    call: Callable[[], Any],
    inputs: Mapping[str, Any],
    shapes: Collection[tuple[int | str, ...]],
    *,
    sources: Collection[Tensor | None] = (),
    mask: Tensor | None = None,
) -> Tensor:
    """Call a hook's function and check the result, which is set to 0 outside of `mask`.

    `mask` has one dimension less if each row is one value. In the valid `shapes`, a name such as "T" means any number.

    Raises `ObjectiveError` if the function raises, edits an input in place, or returns no tensor, one of another shape, one
    without gradient although one of `sources` has one, or one that is not finite.
    """
    versions = {
        name: value._version for name, value in inputs.items() if isinstance(value, Tensor) and not value.is_inference()
    }
    try:
        out = call()
    except ObjectiveError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        absent = [name for name, value in inputs.items() if value is None]
        raise ObjectiveError(
            f"{hook.title} raised {type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}). "
            f"It declares needs={sorted(hook.needs)}. Fields that no hook needs are None in the batch, now: {', '.join(absent)}. "
            f'To get a field, set {hook.short_name}.needs = {{"..."}}.'
        ) from error
    edited = [name for name, version in versions.items() if inputs[name]._version != version]
    if edited:
        raise ObjectiveError(f"{hook.title} edited {', '.join(edited)} in place. Return a new tensor instead.")
    if not isinstance(out, Tensor):
        hint = " If it is a factory, give its parameters defaults." if callable(out) else ""
        raise ObjectiveError(f"{hook.title} returned {type(out).__name__}, expected a tensor.{hint}")
    fitting = [shape for shape in shapes if len(shape) == out.dim()]
    if not any(all(isinstance(n, str) or n == m for n, m in zip(shape, out.shape, strict=True)) for shape in fitting):
        hint = ""
        if out.dim() == 2 and out.shape[-1] == 1:
            single = any(len(shape) == 1 for shape in shapes)
            hint = " Use .squeeze(1)." if single else " Use .expand(-1, T) on a value per sequence."
        expected = " or ".join(str(shape).replace("'", "") for shape in shapes)
        raise ObjectiveError(f"{hook.title} returned shape {tuple(out.shape)}, expected {expected}.{hint}")
    has_gradient = any(source is not None and source.requires_grad for source in sources)
    if torch.is_grad_enabled() and has_gradient and not out.requires_grad:
        hint = " To log a regularizer only, set coef: 0." if hook.kind == "regularizer" else ""
        raise ObjectiveError(
            f"{hook.title} returned a tensor without gradient, so nothing would be learned. "
            f"Compute it from {'per_token' if hook.kind == 'reduction' else 'batch.logps'} without .detach(), .item() or "
            f"torch.no_grad().{hint}"
        )
    if mask is not None and out.dim():
        out = torch.where(mask if mask.dim() == out.dim() else mask[:, None], out, torch.zeros_like(out))
    if not torch.isfinite(out).all():
        of_tokens = [name for name in inputs if name in {"logps", "old_logps", "advantages", "ref_logps", "entropy"}]
        broken = [name for name in of_tokens if inputs[name] is not None and not torch.isfinite(inputs[name]).all()]
        if broken:
            raise ObjectiveError(
                f"{hook.title} returned NaN or infinity, because the batch has some in {', '.join(broken)}."
            )
        if hook.kind == "advantage":
            hint = "A reward may be NaN: exclude it from means and deviations, with batch.scorable or nanmean."
            raise ObjectiveError(f"{hook.title} returned NaN or infinity. {hint} Bound denominators away from 0.")
        raise ObjectiveError(
            f"{hook.title} returned NaN or infinity for a finite batch. Bound denominators and exponents: batch.ratio, "
            "batch.sequence_ratio and kit.objective.batch.bounded_exp stay finite."
        )
    return out
