"""The verbs of `grpo-kit model`: check whether an architecture trains, and print its support card."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.cli.tables import print_table

if TYPE_CHECKING:
    from kit.model_check.check import Card

model_app = typer.Typer(no_args_is_help=True, help="Models: what an architecture supports.")


@model_app.callback()
def options() -> None:
    """Verbs about models."""


@model_app.command("check")
def model_check(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or a model_type, e.g. qwen3.")],
    weights: Annotated[bool, typer.Option("--weights", help="Try its real weights, not a tiny random copy.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")] = False,
) -> None:
    """Try whether a model trains here. Exit code 1 where not.

    Tried are forward, padding, loss, LoRA, 4-bit, generation and a GRPO step.
    """
    from kit.model_check.check import check_model

    card = check_model(source, weights=weights, trust_remote_code=trust_remote_code)
    if as_json:
        typer.echo(json.dumps(card.as_dict(), indent=2))
    else:
        _show(card)
    if not card.trains:
        raise typer.Exit(1)


def _show(card: Card) -> None:
    typer.echo(f"{card.source}: {card.architecture} (model_type {card.model_type}); weights: {card.weights}")
    typer.echo(f"tokenizer: {card.tokenizer}")
    print_table(
        ["found", ""], [[name, _said(value)] for name, value in card.family.items() if value not in (None, [], {})]
    )
    print_table(["support", "", "why"], [list(finding) for finding in card.findings])
    typer.echo(verdict(card))


def verdict(card: Card) -> str:
    """The last line: whether it trains, and on what not."""
    if not card.trains:
        return "It does not train; see what is failing above, and docs/models.md."
    if card.fails_on_pictures:
        return "It trains on text; with pictures it does not: see vision above, and docs/models.md."
    return "It trains."


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(part)}" for name, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
