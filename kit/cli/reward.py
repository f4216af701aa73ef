"""The verbs of `grpo-kit reward`: list presets, show what one is made of, test one on hacks, audit one on own rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.cli.tables import print_table

if TYPE_CHECKING:
    from rewards.testing import Case, Report

HACKED = 1  # exit code of `test` and `audit` when the reward can be earned without solving the task

reward_app = typer.Typer(no_args_is_help=True, help="Reward presets.")

Parameters = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="A parameter of the preset, e.g. format_weight=0.1."),
]


@reward_app.command("list")
def reward_list() -> None:
    """List the reward presets."""
    import rewards

    print_table(["preset", "what it rewards"], [[name, _summary(rewards.describe(name))] for name in rewards.names()])


@reward_app.command("show")
def reward_show(
    name: Annotated[str, typer.Argument(help="A preset of `grpo-kit reward list`.")], override: Parameters = None
) -> None:
    """Show a preset: formula, range, columns, source, known hacks."""
    import rewards

    typer.echo(rewards.describe(name).strip() + "\n")
    try:
        preset = rewards.load(name, **_parameters(override))
    except rewards.RewardsError as error:
        if override:
            raise
        typer.echo(f"Its components cannot be shown: {error}")  # needs parameters, or a package that is not there
        return
    rows = [[c.name, f"{weight:g}", f"{c.low:g} to {c.high:g}"] for c, weight in preset.components]
    print_table(["component", "weight", "range"], rows)


@reward_app.command("test")
def reward_test(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A preset, or your own function as file.py:function.", show_default=False),
    ],
    data: Annotated[
        Path | None,
        typer.Option(metavar="ROWS.JSONL", help="Rows with prompt, dataset columns, and completions in good and bad."),
    ] = None,
    override: Parameters = None,
) -> None:
    """Score right answers, wrong ones and known hacks. Exit code 1 if a hack or a wrong answer reaches a right one.

    A row of --data is a JSON object: prompt, the dataset columns, and completions in `good`, `bad` or, without a
    verdict, `completion` (each one or a list). With `style` (answer, boxed, hash, code, ... or a text with {answer}),
    `right` and `wrong` hacks are made to fit; see rewards/testing.py and, for examples, rewards/golden.
    """
    from kit.errors import RewardError
    from rewards import testing

    preset = testing.target(name, **_parameters(override))
    rows = testing.read_rows(data) if data else testing.golden(name)
    if not rows:
        where = f"{data} is empty" if data else f"No rows come with '{name}'"
        raise RewardError(
            f'{where}. Give some with --data rows.jsonl, e.g. {{"prompt": "6 x 12?", "answer": "72", '
            '"style": "boxed", "right": "72", "wrong": "70"}'
        )
    report = testing.check(preset, rows)
    _print_report(report)
    if not report.passed:
        raise typer.Exit(HACKED)


@reward_app.command("audit")
def reward_audit(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PRESET", help="A preset, or your own function as file.py:function.", show_default=False
        ),
    ],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="Rows with a prompt and a reference: .jsonl, .json, .csv or .parquet.")
    ],
    prompt: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the prompt, if its name does not say so.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column with the reference; reward_model.ground_truth for verl's."),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only this attack; may be given more than once. All of them if it is not given."
        ),
    ] = None,
    style: Annotated[
        str | None,
        typer.Option(
            metavar="STYLE", help="How answers are written: boxed, answer, hash, ... or a text with {answer}."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Rows that are looked at, drawn at random.")] = 200,
    limit: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of rows on which an attack may be paid.")
    ] = 0.005,
    seconds: Annotated[
        float,
        typer.Option(metavar="S", help="What your own function may take for a completion; 0: any time, all at once."),
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object with every rate and example.")] = False,
    override: Parameters = None,
) -> None:
    """Try on your own rows what is paid without being solved.

    Echoes of the question, one constant for all rows, hedges, near misses, answers of other rows, answers that hang a
    grader. Prints on how many rows each is paid, with examples, and how many right answers are. Exit code 1 if an attack
    is paid on more rows than the limit allows. Your own function may be TRL's, verl's or EasyR1's; without the kit it is
    `python -m rewards audit`.
    """
    import json
    import sys

    from rewards import audit as auditing
    from rewards import testing
    from rewards.__main__ import print_attack

    report = auditing.audit(
        testing.target(name, **_parameters(override)),
        auditing.read_data(data, prompt, reference),
        attacks=tuple(attack or auditing.ATTACKS),
        style=style,
        most=rows,
        limit=limit,
        seed=seed,
        seconds=seconds or None,
        progress=print_attack if sys.stderr.isatty() else None,
    )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        typer.echo(f"{report.preset.name}: answers as {report.style}, {report.results[0].rows} rows")
        print_table(*report.table())
        typer.echo(report.verdict)
    if not report.passed:
        raise typer.Exit(HACKED)


def _print_report(report: Report) -> None:
    parts = list(report.preset.weights)
    head = ["row", "", "completion", "total", *parts, "why"]
    print_table(head, [_line(case, parts) for case in report.cases if case.kind != "hack"])
    hacks = [_line(case, parts) for case in _highest(report)]
    if hacks:
        print_table(["row", "", "hack", "total", *parts, "why"], hacks)
    for note in report.notes:
        typer.echo(f"note: {note}")
    for problem in report.problems:
        typer.echo(f"problem: {problem}")
    kinds = [case.kind for case in report.cases]
    counts = f"{kinds.count('good')} good, {kinds.count('bad')} bad, {kinds.count('hack')} hacks"
    if not report.passed:
        typer.echo(f"{len(report.problems)} problem(s) with {counts}.")
    elif "good" in kinds:
        typer.echo(f"No hack and no wrong answer reaches a right one: {counts}.")


def _highest(report: Report) -> list[Case]:
    """For each hack the row where it earned most, in the order of the list."""
    best: dict[str, Case] = {}
    for case in report.cases:
        if case.kind == "hack" and (case.name not in best or _total(case) > _total(best[case.name])):
            best[case.name] = case
    return list(best.values())


def _total(case: Case) -> float:
    return float("-inf") if case.total is None else case.total


def _line(case: Case, parts: list[str]) -> list[str]:
    cells = [f"{_number(case.values[part])} {case.statuses[part]}" for part in parts]
    why = "; ".join(dict.fromkeys(case.reasons.values()))
    printable = [text.encode("utf-8", "replace").decode() for text in (case.name, why[:80])]
    return [str(case.row), case.kind, printable[0], _number(case.total), *cells, printable[1]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _parameters(overrides: list[str] | None) -> dict[str, Any]:
    from kit.config.loading import apply_override

    parameters: dict[str, Any] = {}
    for override in overrides or []:
        apply_override(parameters, override)
    return parameters


def _summary(text: str) -> str:
    """The first paragraph below a signature, in one line."""
    return " ".join(text.partition("\n\n")[2].strip().partition("\n\n")[0].split())
