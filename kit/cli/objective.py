"""The verbs of `grpo-kit objective`: list recipes and hooks, show one with its costs, check one on random batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.cli.tables import print_table

if TYPE_CHECKING:
    from kit.objective import Hook, Objective
    from kit.objective.registry import HookRegistry
    from kit.objective.schedules import Schedule

KINDS = ("advantage", "clip", "weight", "regularizer", "reduction")
CHANGING = ("schedule", "controller")
"""Kinds of what may stand for a number: by the step, or by what was measured."""

objective_app = typer.Typer(no_args_is_help=True, help="Recipes and hooks of the loss.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A recipe, a hook, or your own as file.py:function.", show_default=False)
]
Kind = Annotated[
    str | None,
    typer.Option(metavar="KIND", help=f"{', '.join(KINDS)}. Of your own: clip, unless function.kind is set."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--override", metavar="KEY=VALUE", help="A hyper-parameter; for a recipe e.g. clip.eps_high=0.3."
    ),
]


@objective_app.command("list")
def objective_list(
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help=f"One kind alone: {', '.join((*KINDS, *CHANGING))}.")
    ] = None,
) -> None:
    """List recipes, hooks, schedules and controllers."""
    from kit.objective.recipes import recipe, recipe_names

    if kind in CHANGING:
        _list_changing(kind)
        return
    registries = _registries(kind, (*KINDS, *CHANGING))
    if kind is None:
        parts = ("advantage", "clip", "reduction")
        print_table(["recipe", *parts], [[n, *(_call(recipe(n)[part]) for part in parts)] for n in recipe_names()])
    rows = []
    for registry in registries.values():
        for name in registry:
            hook = registry.build(name)
            needs = ", ".join(sorted(hook.needs)) or "-"
            rows.append(
                [name, registry.kind, _call({"name": ""} | hook.values)[1:-1] or "-", needs, hook.factory.source or "-"]
            )
    print_table(["hook", "kind", "hyper-parameters", "needs", "source"], rows)
    if kind is None:
        _list_changing()


@objective_app.command("show")
def objective_show(name: Name, kind: Kind = None, override: Settings = None) -> None:
    """Show one of them: formula, settings, needs, costs."""
    from kit.objective.recipes import recipe_names

    changing = _changing()
    if name in changing and kind in (None, _kind_of(changing[name])) and not override:
        _show_changing(changing[name])
        return
    if kind is None and name in recipe_names():
        _show_recipe(name, override or [])
        return
    for index, hook in enumerate(_hooks(name, kind, override or [])):
        typer.echo("" if index == 0 else "\n", nl=False)
        _show_hook(hook)


@objective_app.command("check")
def objective_check(name: Name, kind: Kind = None, override: Settings = None) -> None:
    """Try a hook, or all of a recipe, on random batches. Is it sound? Nothing is trained."""
    from kit.errors import ObjectiveError
    from kit.objective.check import check_hook
    from kit.objective.recipes import recipe_names

    if kind is None and name in recipe_names():
        objective = _recipe(name, override or [])
        hooks = [objective.advantage, objective.clip, *objective.weights, *objective.regularizers, objective.reduction]
    else:
        hooks = _hooks(name, kind, override or [])
    failures = []
    for hook in hooks:
        findings = check_hook(hook)
        typer.echo(f"{hook.kind} {_call({'name': hook.name} | hook.values)}")
        print_table(["check", "result", "what was found"], [[f.name, f.result, f.detail] for f in findings])
        failed = [finding.name for finding in findings if not finding.passed]
        if failed:
            failures.append(f"{hook.title} failed {len(failed)} of {len(findings)} checks: {', '.join(failed)}.")
    if failures:
        raise ObjectiveError(" ".join(failures) + " The table above says what to change.")
    typer.echo("No check failed.")


def _changing() -> dict[str, type[Schedule]]:
    """Schedules and controllers by name."""
    from kit.objective.schedules import schedules

    return {name: schedules[name] for name in schedules}


def _kind_of(changing: type[Schedule]) -> str:
    from kit.objective.schedules import Controller

    return "controller" if issubclass(changing, Controller) else "schedule"


def _list_changing(kind: str | None = None) -> None:
    """Schedules before controllers, or those of one kind."""
    classes = sorted(_changing().items(), key=lambda item: (CHANGING.index(_kind_of(item[1])), item[0]))
    rows = [
        [name, _kind_of(each), _call_of(each).partition("(")[2].rstrip(")"), _summary(each)]
        for name, each in classes
        if kind in (None, _kind_of(each))
    ]
    print_table(["schedule", "kind", "parameters", "what it is"], rows)


def _call_of(changing: type[Schedule]) -> str:
    """`adaptive_kl(target, horizon=10000, start=0.1)`."""
    import dataclasses

    fields = [field for field in dataclasses.fields(changing) if field.init]
    parts = [f.name if f.default is dataclasses.MISSING else f"{f.name}={_value(f.default)}" for f in fields]
    return f"{changing.name}({', '.join(parts)})"


def _summary(changing: type[Schedule]) -> str:
    """The first paragraph of its docstring, in one line."""
    import inspect

    return " ".join((inspect.getdoc(changing) or "").partition("\n\n")[0].split()).replace("`", "")


def _show_changing(changing: type[Schedule]) -> None:
    import inspect

    controller = _kind_of(changing) == "controller"
    typer.echo(f"{_kind_of(changing)} {_call_of(changing)}\n\n{inspect.getdoc(changing)}\n")
    where = "any regularizer's coef" if controller else "any float hyper-parameter, and any regularizer's coef"
    typer.echo(f'It may stand in the place of {where}, written as in coef: "{_call_of(changing)}"')


def _registries(kind: str | None, known: Sequence[str] = KINDS) -> dict[str, HookRegistry]:
    """The registries by kind, or the one that is asked for. Raises `ConfigError` for another word than those `known`."""
    from kit import objective
    from kit.errors import ConfigError
    from kit.registry import did_you_mean

    if kind is not None and kind not in known:
        raise ConfigError(f"'{kind}' is no kind of hook.{did_you_mean(kind, known)} Kinds: {', '.join(known)}.")
    return {each: getattr(objective, f"{each}s") for each in KINDS if kind in (None, each)}


def _hooks(name: str, kind: str | None, overrides: list[str]) -> list[Hook]:
    """The hooks meant by a name, with their hyper-parameters; several if kinds share it. Raises `ConfigError`."""
    from kit.config.loading import apply_override
    from kit.errors import ConfigError
    from kit.objective.hook import attribute
    from kit.objective.recipes import recipe_names
    from kit.registry import did_you_mean, import_object, is_import_path

    by_kind = _registries(kind)
    if is_import_path(name):
        own = kind or str(attribute(import_object(name), "kind", "clip"))
        registries = list(_registries(own).values())
    else:
        registries = [registry for registry in by_kind.values() if name in registry]
    if not registries:
        if name.endswith(".py"):
            raise ConfigError(f"'{name}' names a file; name the function in it, too: {name}:FUNCTION.")
        if kind is not None:
            registries = list(by_kind.values())  # which says what there is of this kind
        else:
            if name in _changing():
                raise ConfigError(
                    f"'{name}' is a {_kind_of(_changing()[name])} and no hook: it stands in the place of a hook's number. "
                    f"See: grpo-kit objective show {name}"
                )
            hooks = (hook for registry in by_kind.values() for hook in registry)
            hint = did_you_mean(name, [*recipe_names(), *hooks, *_changing()])
            raise ConfigError(f"No recipe or hook is called '{name}'.{hint} See: grpo-kit objective list")
    entry: dict[str, Any] = {"name": name}
    for override in overrides:
        apply_override(entry, override)
    return [registry.build(entry) for registry in registries]


def _recipe(name: str, overrides: list[str]) -> Objective:
    from kit.config.loading import apply_override
    from kit.errors import ConfigError
    from kit.objective import Objective
    from kit.objective.recipes import KEYS

    spec: dict[str, Any] = {"recipe": name}
    for override in overrides:
        apply_override(spec, override)
    try:
        return Objective.from_spec(spec)
    except ConfigError as error:
        kinds = _kinds_called(name)
        if not kinds or spec.keys() <= set(KEYS):
            raise
        options = " or ".join(f"--kind {kind}" for kind in kinds)
        raise ConfigError(f"{error} '{name}' is read as the recipe; {options} picks the hook of that name.") from None


def _kinds_called(name: str) -> list[str]:
    """Kinds of the hooks that have this name."""
    return [registry.kind for registry in _registries(None).values() if name in registry]


def _show_recipe(name: str, overrides: list[str]) -> None:
    import yaml

    from kit.objective.hook import costs

    objective = _recipe(name, overrides)
    typer.echo(yaml.safe_dump({"objective": {"recipe": name} | objective.to_spec()}, sort_keys=False), nl=False)
    typer.echo("\nloss = reduction( Π weights · clip  +  Σ coef · regularizer )\n")
    typer.echo(objective.describe())
    typer.echo("\nWhat it computes and costs, beyond the scoring of the policy:")
    cost_by_need = costs(objective.needs, entropy_in_loss=objective.needs_entropy_gradient)
    _list_costs(cost_by_need)
    for kind in _kinds_called(name):
        typer.echo(f"\nThere is a hook of that name, too: grpo-kit objective show {name} --kind {kind}")


def _show_hook(hook: Hook) -> None:
    import inspect
    import re

    from kit.objective.hook import costs

    formula = re.sub(r"\{(\w+)\}", r"\1", hook.factory.formula)  # hyper-parameters by their names
    typer.echo(f"{hook.kind} {hook.name}" + (f": {formula}" if formula else ""))
    typer.echo(f"\n{inspect.getdoc(_written(hook.factory.build)) or 'It has no docstring.'}\n")
    parameters = hook.factory.hyperparameters.values()
    if parameters:
        rows = [[p.name, _type(p.annotation), "required" if p.required else _value(p.default)] for p in parameters]
        values_here = [_value(hook.values[p.name]) for p in parameters]
        changed = any(value != row[2] for value, row in zip(values_here, rows, strict=True))
        head = ["hyper-parameter", "type", "default", *(["here"] if changed else [])]
        print_table(head, [[*row, *([value] if changed else [])] for row, value in zip(rows, values_here, strict=True)])
    if hook.needs:
        typer.echo("It needs, at the cost of:")
        _list_costs(costs(hook.needs, entropy_in_loss=hook.kind in ("clip", "regularizer")))
    else:
        typer.echo("It needs nothing beyond what every batch has.")
    typer.echo(f"with its values: {hook.describe()}")
    typer.echo(f"source: {hook.factory.source or hook.name}")


def _list_costs(cost_by_need: dict[str, str]) -> None:
    for need, cost in cost_by_need.items():
        typer.echo(f"  {need}: {cost}")
    if not cost_by_need:
        typer.echo("  nothing")


def _written(build: Any) -> Any:
    """The function that its author wrote, behind a factory made of it."""
    import functools

    return build.args[0] if isinstance(build, functools.partial) and build.args else build


def _type(annotation: Any) -> str:
    """`float`, `float or null`, `token or sequence`."""
    import inspect
    import types
    import typing

    if annotation is inspect.Parameter.empty or annotation is Any:
        return "any"
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_type(each) for each in typing.get_args(annotation))
    return "null" if annotation is type(None) else str(getattr(annotation, "__name__", annotation))


def _call(spec: dict[str, Any]) -> str:
    """A hook's spec as `ppo_clip(eps_low=0.2, eps_high=0.2)`."""
    values = ", ".join(f"{key}={_value(value)}" for key, value in spec.items() if key != "name")
    return f"{spec['name']}({values})" if values else str(spec["name"])


def _value(value: Any) -> str:
    """As one writes it in YAML."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
