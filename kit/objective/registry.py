"""One registry for each kind of hook. It builds a `Hook` from a name, an import path, a dict or a callable.

Your own hook can stand in place of a name: as `file.py:function`, as `package.module:function`, or as a Python callable.
It has one of two forms, which are distinguished by the parameters without a default:

1. the pure function itself: the first parameter is the batch; the others have defaults and are its hyper-parameters

       def my_clip(batch, power=2.0):
           return -batch.advantages * batch.ratio**power

2. a factory: every parameter has a default (or is keyword-only), and it returns the pure function

       def my_clip(power: float = 2.0):
           def function(batch):
               return -batch.advantages * batch.ratio**power
           return function

A reduction's pure function takes `(per_token, mask, scale)` instead of the batch. If a hook needs more than the current
and old log-probabilities, an attribute of the function lists the fields, `my_clip.needs = {"ref_logps"}`. Two further
attributes save work, `my_clip.row_separable = True` and `my_clip.zero_at_zero_advantage = True` (see
`kit.objective.objective`); both are False by default.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from kit.errors import ConfigError
from kit.objective.hook import (
    Hook,
    HookFactory,
    HookFunction,
    HyperParameter,
    attribute,
    check_needs,
    discover,
    signature,
)
from kit.registry import Registry, did_you_mean, import_object, is_import_path

Entry = str | Mapping[str, Any] | Hook | HookFactory | Callable[..., Any]


class HookRegistry(Registry[HookFactory]):
    """Hook factories of one kind by name, also as attributes: `clips.ppo_clip(eps_high=0.28)` is a `Hook`."""

    def __init__(self, kind: str, arguments: tuple[str, ...] = ("batch",), *, scaled: bool = False) -> None:
        super().__init__(kind)
        self.arguments = arguments  # of the pure function
        self.scaled = scaled  # whether hooks of this kind have a coefficient

    def register(
        self, name: str, *, needs: Collection[str] = (), coef: float = 1.0, **properties: Any
    ) -> Callable[[Callable[..., HookFunction]], HookFactory]:
        """Return a decorator that registers a factory as `name`.

        `needs` lists required fields of the batch, and `coef` is the default coefficient of a regularizer. `properties` are
        fields of `HookFactory`: `formula`, `source`, `filled`, `on_policy`, `row_separable`, `zero_at_zero_advantage`. If
        `needs` or the last two depend on a hyper-parameter, they may be attributes of the returned function instead.
        Raises `ConfigError` if the name is taken or a need is unknown.
        """

        def add(build: Callable[..., HookFunction]) -> HookFactory:
            title = f"{self.kind} '{name}'"
            parameters, needed = self._parameters(build, 0, coef, title), check_needs(needs, self.kind, title)
            factory = HookFactory(self.kind, name, build, parameters, needed, **properties)
            return super(HookRegistry, self).register(name)(factory)

        return add

    def __getattr__(self, name: str) -> HookFactory:
        items: dict[str, HookFactory] = self.__dict__.get("_items", {})
        if name in items:
            return items[name]
        raise AttributeError(f"No {self.__dict__.get('kind')} is called '{name}'.{did_you_mean(name, items)}")

    def build(self, entry: Entry, base: Path | None = None) -> Hook:
        """Build a hook from a name, an import path, a dict `{"name": ..., **hyper-parameters}` or a callable.

        A relative file is resolved against `base`. Raises `ConfigError` with the nearest valid name.
        """
        if isinstance(entry, Hook):
            if entry.kind != self.kind:
                raise ConfigError(f"{entry.title} is no {self.kind}. Pass a {self.kind} here.")
            return entry
        values: dict[str, Any] = {}
        target: Any = entry
        if isinstance(entry, Mapping):
            values = {str(key): value for key, value in entry.items()}
            if "name" not in values:
                space = " YAML needs a space after `name:`." if any("name:" in key for key in values) else ""
                raise ConfigError(f"A {self.kind} needs a name, got {values}.{space} Known: {', '.join(self)}.")
            target = values.pop("name")
        path = target if isinstance(target, str) else _import_path(target)
        if isinstance(target, str):
            target = import_object(target, base=base) if is_import_path(target) else self[target]
        elif not callable(target):
            raise ConfigError(f"A {self.kind} is a name, a dict or a callable, got {target!r}.")
        if not isinstance(target, HookFactory):
            name = path or str(getattr(target, "__name__", type(target).__name__))
            target = self._custom(target, name, importable=path is not None)
        elif target.kind != self.kind:
            raise ConfigError(f"{target.title} is no {self.kind}. Pass a {self.kind} here.")
        hook: Hook = target(**values)
        return hook

    def _custom(self, target: Any, name: str, *, importable: bool) -> HookFactory:
        title = f"{self.kind} '{name}'"
        if not callable(target):
            raise ConfigError(f"{title} is {type(target).__name__}, not a function.")
        if (declared := attribute(target, "kind", self.kind)) != self.kind:
            raise ConfigError(f"'{name}' declares kind = '{declared}', so it cannot be used as a {self.kind}.")
        if isinstance(target, Hook):
            raise ConfigError(
                f"{title} is a hook whose hyper-parameters are set already. Pass the name {target.name} instead."
            )
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positionals = [p for p in signature(target).parameters.values() if p.kind in positional]
        required = [p.name for p in positionals if p.default is p.empty]
        needs = check_needs(attribute(target, "needs", ()), self.kind, title)
        if len(required) == len(self.arguments):
            build: Callable[..., HookFunction] = functools.partial(functools.partial, target)
            parameters = self._parameters(target, len(required), 1.0, title)
        elif not required:
            build, parameters = target, self._parameters(target, 0, 1.0, title)
        else:
            raise ConfigError(
                f"{title} has the parameters without default ({', '.join(required)}). Expected either a function of "
                f"({', '.join(self.arguments)}), or a factory whose parameters all have defaults."
            )
        return HookFactory(self.kind, name, build, parameters, needs, custom=True, importable=importable)

    def _parameters(self, target: Callable[..., Any], skip: int, coef: float, title: str) -> dict[str, HyperParameter]:
        parameters = discover(target, skip)
        reserved = {"name", "coef"} if self.scaled else {"name"}
        if reserved & set(parameters):
            word = min(reserved & set(parameters))
            raise ConfigError(f"{title}: the kit uses the name '{word}' itself. Rename the parameter.")
        return parameters | ({"coef": HyperParameter("coef", float, coef, False)} if self.scaled else {})


def _import_path(target: Any) -> str | None:
    """`package.module:name` or `file.py:name` from which a callable can be imported again, or None."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    holder = sys.modules.get(module) if module else None
    if holder is None or name is None or getattr(holder, name, None) is not target:
        return None
    if module != "__main__" and not str(module).startswith("user_file_"):
        return f"{module}:{name}"
    file = getattr(holder, "__file__", None)
    return f"{file}:{name}" if file else None
