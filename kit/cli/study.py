"""Verbs that judge what runs have learned: `eval`, `report`, `compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="A run; `grpo-kit ps` lists them.")],
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Override evaluation.* or generation.* keys."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="best|last|STEP", help="Weights to score; left out: the run's result.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="The scores are filed as eval/NAME.json.")] = "again",
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON, and nothing else.")] = False,
    root: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
) -> None:
    """Score a run on its held-out problems again."""
    from kit.api.run import Run
    from kit.evaluation.selection import weights_of
    from kit.runs.store import RunStore

    weights_of(RunStore(root).open(run_id), checkpoint)  # an answer at once where there is nothing to score
    run = Run(run_id, root)
    result = run.evaluate(checkpoint=checkpoint, name=name, changes=override or [], progress=not as_json)
    if as_json:
        typer.echo(json.dumps(result))


def report(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="A run; `grpo-kit ps` lists them.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to; else report.html in the run.")
    ] = None,
    root: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
) -> None:
    """Write RUN_ID's report, one HTML file. It has scores, curves, samples, and how to do it again."""
    from kit.api.run import Run

    typer.echo(Run(run_id, root).report(output))


def compare(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... | CONFIG", help="Runs (seeds of one arm: a-s0,a-s1); or a YAML file with --change."
        ),
    ],
    change: Annotated[
        list[str] | None,
        typer.Option(metavar="[ARM:]KEY=VALUE[,...]", help="Another arm of CONFIG: what it changes. Repeatable."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N|A,B,...", help="With CONFIG: so many seeds, or these.")] = "3",
    steps: Annotated[int | None, typer.Option(min=1, help="With CONFIG: optimiser steps of every arm.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", metavar="KEY=VALUE", help="With CONFIG: for every arm.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the comparison and its runs.")] = None,
    metric: Annotated[str | None, typer.Option(metavar="SCORE", help="The score that decides, e.g. pass@1.")] = None,
    effect: Annotated[float | None, typer.Option(help="The difference that matters, for the seeds needed.")] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare eval/NAME.json of each run, not the last one.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder that holds the runs; else CONFIG's, or runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Compare runs: better, worse or luck. With CONFIG and --change they are made first."""
    from kit.cli.tables import print_table
    from kit.runs.files import to_json
    from kit.studies.arms import carry_out, make_plan
    from kit.studies.compare import compare_and_file, file_page, table

    how = {"metric": metric, "effect": effect, "evaluation": evaluation}
    if change:
        if len(what) != 1:
            raise typer.BadParameter("with --change exactly one CONFIG is compared with its own changes")
        plan = make_plan(
            what[0], change, seeds=seeds, steps=steps, overrides=override or [], root=root, name=name, metric=metric
        )
        try:
            result, folder = carry_out(plan, _silent if as_json else typer.echo, quiet=as_json, **how), plan.folder
        except KeyboardInterrupt:
            typer.echo(
                "Stopped. Give the same command again: finished runs are kept, and it goes on from here.", err=True
            )
            raise
    else:
        result, folder = compare_and_file(what, root or Path("runs"), name, **how)
    page = file_page(result, folder)
    if as_json:
        typer.echo(to_json(result))
        return
    print_table(*table(result))
    for line in [
        *(f"Warning: {warning}" for warning in result["warnings"]),
        *(each["text"] for each in result["comparisons"]),
        *(f"Note: {note}" for note in result["notes"]),
    ]:
        typer.echo(line)
    typer.echo(f"\n{page}\n{folder / 'comparison.json'}")


def sweep(
    path: Annotated[Path, typer.Argument(metavar="SWEEP.YAML", help="What is searched; see docs/sweep.md.")],
    show: Annotated[bool, typer.Option("--show", help="Only show the table of what is there.")] = False,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials in all, in place of the file's.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: local, auto, or its address (ray://host:10001)."),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder that holds the runs; else the configuration's.")] = None,
    progress: Annotated[bool, typer.Option("--progress", help="Show what each trial prints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Search over any keys of a configuration with Optuna. Given again, it goes on where it was."""
    from kit.cli.tables import print_table
    from kit.runs.files import to_json
    from kit.studies.sweep import carry_out, look, table
    from kit.studies.sweep_config import base_config, load_sweep

    wanted = load_sweep(path, only_look=show)
    wanted.trials = trials or wanted.trials
    folder, tell = root or Path(base_config(wanted).run.root), _silent if as_json else typer.echo
    if show:
        results = look(wanted, folder)
    elif ray is not None:
        from kit.studies.sweep_ray import carry_out_on_ray

        results = carry_out_on_ray(wanted, folder, ray, tell)
    else:
        results = carry_out(wanted, folder, tell, quiet=as_json or not progress)
    if as_json:
        typer.echo(to_json(results))
        return
    print_table(*table(results))
    if results["differs"]:
        typer.echo(f"Note: {path} differs by now from the sweep shown: {', '.join(results['differs'])}.")
    if results["best"] is not None:
        place = Path(results["folder"])
        typer.echo(f"Best: {results['best']['run']}. Train it again: grpo-kit train {place / 'best.yaml'}")
        typer.echo(f"{place / 'sweep.html'}")


def _silent(_: str) -> None:
    """Says nothing."""
