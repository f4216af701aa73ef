"""The verbs of `grpo-kit objective`: list recipes and hooks, show one with its costs, check one on random batches."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.cli.options import print_table

if TYPE_CHECKING:
    from kit.objective import Hook, Objective
    from kit.objective.registry import HookRegistry
    from kit.objective.schedules import Schedule

KINDS = ("advantage", "clip", "weight", "regularizer", "reduction")
CHANGING = ("schedule", "controller")
"""Kinds of values that change during a run: with the step, or with a measured value."""

objective_app = typer.Typer(no_args_is_help=True, help="Recipes and hooks of the loss.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A recipe, a hook, or file.py:function.", show_default=False)]
Kind = Annotated[
    str | None,
    typer.Option(metavar="KIND", help=f"{', '.join(KINDS)}. For your own: clip, unless function.kind is set."),
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
        str | None, typer.Option(metavar="KIND", help=f"Only this kind: {', '.join((*KINDS, *CHANGING))}.")
    ] = None,
) -> None:
    """List recipes, hooks, schedules and controllers."""
    from kit.objective.recipes import recipe, recipe_names
    from kit.objective.schedules import schedules

    rows = []
    for registry in _registries(kind, (*KINDS, *CHANGING)).values():
        for hook in map(registry.build, registry):
            settings, needs = _call({"name": ""} | hook.values)[1:-1], ", ".join(sorted(hook.needs))
            rows.append([hook.name, registry.kind, settings or "-", needs or "-", hook.factory.source or "-"])
    for name in schedules:
        if kind in (None, which := _kind_of(schedules[name])):
            settings = _call_of(schedules[name]).partition("(")[2].rstrip(")")
            summary = " ".join((inspect.getdoc(schedules[name]) or "").partition("\n\n")[0].split()).replace("`", "")
            rows.append([name, which, settings, "-", summary])
    if kind is None:
        parts = ("advantage", "clip", "reduction")
        print_table(["recipe", *parts], [[n, *(_call(recipe(n)[part]) for part in parts)] for n in recipe_names()])
    print_table(["hook", "kind", "hyper-parameters", "needs", "source"], rows)


@objective_app.command("show")
def objective_show(name: Name, kind: Kind = None, override: Settings = None) -> None:
    """Show a recipe or a hook: formula, settings, needs, costs."""
    import yaml

    from kit.objective import Objective
    from kit.objective.hook import costs

    selection = _find(name, kind, override or [])
    if isinstance(selection, type):
        controller = _kind_of(selection) == "controller"
        typer.echo(f"{_kind_of(selection)} {_call_of(selection)}\n\n{inspect.getdoc(selection)}\n")
        where = "any regularizer's coef" if controller else "any float hyper-parameter, and any regularizer's coef"
        typer.echo(f'Use it as the value of {where}, e.g. coef: "{_call_of(selection)}"')
    elif isinstance(selection, Objective):
        typer.echo(yaml.safe_dump({"objective": {"recipe": name} | selection.to_spec()}, sort_keys=False), nl=False)
        typer.echo("\nloss = reduction( Π weights · clip  +  Σ coef · regularizer )\n")
        typer.echo(selection.describe())
        typer.echo("\nAdditional fields and their costs, besides scoring by the policy:")
        cost_by_need = costs(selection.needs, entropy_in_loss=selection.needs_entropy_gradient)
        typer.echo("\n".join(f"  {need}: {cost}" for need, cost in cost_by_need.items()) or "  nothing")
        for registry in _registries(None).values():
            if name in registry:
                typer.echo(f"\nA hook has this name too: grpo-kit objective show {name} --kind {registry.kind}")
    else:
        for index, hook in enumerate(selection):
            typer.echo("" if index == 0 else "\n", nl=False)
            _show_hook(hook)


@objective_app.command("check")
def objective_check(name: Name, kind: Kind = None, override: Settings = None) -> None:
    """Check a hook, or all hooks of a recipe, on random batches. Nothing is trained."""
    from kit.errors import ConfigError, ObjectiveError
    from kit.objective import Objective
    from kit.objective.check import check_hook

    selection = _find(name, kind, override or [])
    if isinstance(selection, type):
        raise ConfigError(
            f"'{name}' is a {_kind_of(selection)}, not a hook: it is the value of a hyper-parameter. See: grpo-kit "
            f"objective show {name}"
        )
    if isinstance(selection, Objective):
        selection = [hook for _, hook in selection.hooks]
    failures = []
    for hook in selection:
        findings = check_hook(hook)
        typer.echo(f"{hook.kind} {_call({'name': hook.name} | hook.values)}")
        print_table(["check", "result", "detail"], [[f.name, f.result, f.detail] for f in findings])
        failed = [finding.name for finding in findings if not finding.passed]
        if failed:
            failures.append(f"{hook.title} failed {len(failed)} of {len(findings)} checks: {', '.join(failed)}.")
        if kind is None and hook.factory.custom and hook.kind == "clip" and failed:
            failures.append("It was checked as a clip. For another kind of hook, pass e.g. --kind regularizer.")
    if failures:
        raise ObjectiveError(" ".join(failures) + " The table above says what to change.")
    typer.echo("No check failed.")


def _find(name: str, kind: str | None, overrides: list[str]) -> type[Schedule] | Objective | list[Hook]:
    """Find the schedule, the recipe or the hooks of a name. Hooks of several kinds may share a name.

    Raises `ConfigError`.
    """
    from kit.config.loading import apply_override
    from kit.errors import ConfigError
    from kit.objective import Objective
    from kit.objective.hook import attribute
    from kit.objective.recipes import recipe_names
    from kit.objective.schedules import schedules
    from kit.registry import did_you_mean, import_object, is_import_path

    if kind is None and name in schedules:
        return schedules[name]
    is_recipe = kind is None and name in recipe_names()
    spec: dict[str, Any] = {"recipe" if is_recipe else "name": name}
    for override in overrides:
        apply_override(spec, override)
    if is_recipe:
        return Objective.from_spec(spec)
    by_kind = _registries(kind)
    if is_import_path(name):
        registries = list(_registries(kind or str(attribute(import_object(name), "kind", "clip"))).values())
    else:
        # With `kind`, its registry raises the error for an unknown name.
        registries = [registry for registry in by_kind.values() if name in registry or kind is not None]
    if name.endswith(".py"):
        raise ConfigError(f"'{name}' is a file. Add the function: {name}:FUNCTION.")
    if not registries:
        hint = did_you_mean(name, [*recipe_names(), *(hook for each in by_kind.values() for hook in each), *schedules])
        raise ConfigError(f"No recipe or hook is called '{name}'.{hint} See: grpo-kit objective list")
    return [registry.build(spec) for registry in registries]


def _registries(kind: str | None, known: Sequence[str] = KINDS) -> dict[str, HookRegistry]:
    """The registries by kind, or only that of `kind`. Raises `ConfigError` if `kind` is not in `known`."""
    from kit import objective
    from kit.errors import ConfigError
    from kit.registry import did_you_mean

    if kind is not None and kind not in known:
        raise ConfigError(f"'{kind}' is no kind of hook.{did_you_mean(kind, known)} Kinds: {', '.join(known)}.")
    return {each: getattr(objective, f"{each}s") for each in KINDS if kind in (None, each)}


def _kind_of(changing: type[Schedule]) -> str:
    from kit.objective.schedules import Controller

    return "controller" if issubclass(changing, Controller) else "schedule"


def _call_of(changing: type[Schedule]) -> str:
    """`adaptive_kl(target, horizon=10000, start=0.1)`."""
    import dataclasses

    fields = [field for field in dataclasses.fields(changing) if field.init]
    parts = [f.name if f.default is dataclasses.MISSING else f"{f.name}={_value(f.default)}" for f in fields]
    return f"{changing.name}({', '.join(parts)})"


def _show_hook(hook: Hook) -> None:
    import functools
    import re

    from kit.objective.hook import costs

    formula = re.sub(r"\{(\w+)\}", r"\1", hook.factory.formula)  # hyper-parameters by their names
    typer.echo(f"{hook.kind} {hook.name}" + (f": {formula}" if formula else ""))
    build: Any = hook.factory.build
    # A partial wraps the author's factory.
    author = build.args[0] if isinstance(build, functools.partial) and build.args else build
    typer.echo(f"\n{inspect.getdoc(author) or 'It has no docstring.'}\n")
    rows = [
        [p.name, _type(p.annotation), "required" if p.required else _value(p.default), _value(hook.values[p.name])]
        for p in hook.factory.hyperparameters.values()
    ]
    if rows:
        print_table(["hyper-parameter", "type", "default", "here"], rows)
    if hook.needs:
        typer.echo("It needs these fields, at this cost:")
        for need, cost in costs(hook.needs, entropy_in_loss=hook.kind in ("clip", "regularizer")).items():
            typer.echo(f"  {need}: {cost}")
    else:
        typer.echo("It needs no additional fields.")
    typer.echo(f"with these values: {hook.describe()}")
    typer.echo(f"source: {hook.factory.source or hook.name}")


def _type(annotation: Any) -> str:
    """`float`, `float or null`, `token or sequence`."""
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
    """A value as in YAML."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
