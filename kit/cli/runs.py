"""The verbs about runs: `ps`, `logs`, `stop`, `resume`, and what they have learned: `eval`, `report`, `compare`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.cli.options import AsJson, Checkpoint, Detach, Root, RunId, print_json, print_plain, print_table
from kit.runs.files import duration

if TYPE_CHECKING:
    from kit.runs.store import RunDir

POLL_SECONDS = 0.25
SHOWN = 20
"""Ended runs that `ps` lists unless told otherwise; live ones are always listed."""


def ps(
    root: Root = Path("runs"),
    number: Annotated[
        int | None, typer.Option("-n", min=1, metavar="N", help=f"The latest N; else live ones and the latest {SHOWN}.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs, the latest first: state, step, reward, time left."""
    from kit.runs.store import ALIVE, RunStore

    runs = RunStore(root).statuses()
    chosen = [
        {"id": run.id, "reward": run.last_reward()} | status
        for index, (run, status) in enumerate(runs)
        if index < (number or SHOWN) or (number is None and status["state"] in ALIVE)
    ]
    if as_json:
        print_json(chosen)
        return
    if not runs:
        typer.echo(f"No runs in {root} yet. Start one with: grpo-kit quickstart")
        return
    rows = []
    for status in chosen:
        step, total, eta = (status.get(key) for key in ("step", "total_steps", "eta_seconds"))
        progress = "-" if step is None else f"{step}/{total}" if total else str(step)
        reward = "-" if status["reward"] is None else f"{status['reward']:.3f}"
        rows.append([status["id"], status["state"], progress, reward, "-" if eta is None else duration(eta)])
    print_plain(["run", "state", "step", "reward", "time left"], rows)
    if len(rows) < len(runs):
        typer.echo(f"{len(runs) - len(rows)} earlier runs: grpo-kit ps -n {len(runs)}")


def logs(
    run_id: RunId,
    root: Root = Path("runs"),
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
    number: Annotated[int, typer.Option("-n", "--lines", min=0, metavar="N", help="Lines to begin with.")] = 40,
) -> None:
    """Show what a run has printed and logged, crashes included."""
    from kit.runs.files import Log
    from kit.runs.store import RunStore

    run = RunStore(root).open(run_id)
    if not follow:
        text = Log(run.log).tail(number)
        _write(text)
        if not text and number:
            typer.echo(f"Its log is empty. {ending(run)}", err=True)
        return
    for text in added_text(run, number):
        _write(text)
    typer.echo(ending(run), err=True)


def added_text(run: RunDir, lines: int, sleep: Callable[[float], Any] = time.sleep) -> Iterator[str]:
    """The last lines of the run's log, then whatever is added to it, until the run has ended and all is told.

    A log that was replaced or cut is read from its start. Raises `RunError` when it cannot be read.
    """
    from kit.runs.files import Log
    from kit.runs.store import ALIVE

    log = Log(run.log)
    yield log.tail(lines)
    while True:
        ended = run.settled()["state"] not in ALIVE  # asked before reading: the last words come before the end
        yield log.added()
        if ended:
            return
        sleep(POLL_SECONDS)


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def ending(run: RunDir) -> str:
    """`Run 'a' is stopped at step 7/80: control/stop. Go on with: grpo-kit resume a`."""
    status = run.settled()
    step, total, reason = (status.get(key) for key in ("step", "total_steps", "reason"))
    at = "" if step is None else f" at step {step}/{total}" if total else f" at step {step}"
    why = f": {reason}" if reason else ""
    hint = ""
    if status["state"] not in ("finished", "queued", "starting", "running") and run.config.is_file():
        how = "Go on with" if run.last_checkpoint is not None else "Start it again from the beginning with"
        hint = f" {how}: grpo-kit resume {run.id}{run.root_option}"
    refused = f" It was refused to go on: {status['refused']}" if status.get("refused") else ""
    return f"Run '{run.id}' is {status['state']}{at}{why}.{refused}{hint}"


def stop(
    run_id: RunId,
    root: Root = Path("runs"),
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Before it is made to end; by default it is waited for."),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the step; what came after the last checkpoint is lost.")
    ] = False,
) -> None:
    """Let a run finish its step, save and end. Make it end if it does not."""
    from kit.runs.stopping import stop as stopping
    from kit.runs.stopping import what_is_saved
    from kit.runs.store import ALIVE, RunStore

    run = RunStore(root).open(run_id)
    status = run.status()
    if status["state"] not in ALIVE:
        typer.echo(f"There is nothing to stop. {ending(run)}")
        return
    typer.echo(f"Stopping '{run_id}'." if now else f"Stopping '{run_id}': {what_is_saved(status)}.")
    stopping(run, timeout=timeout, now=now, on_message=typer.echo)
    last = run.checkpoints[-1:]
    typer.echo(ending(run) + (f"\nIts last checkpoint is {last[0]}" if last else ""))
    if run.status()["state"] in ALIVE:
        raise typer.Exit(1)


def resume(
    run_id: RunId,
    root: Root = Path("runs"),
    force: Annotated[
        bool, typer.Option("--force", help="Also where data, configuration or packages changed; it is recorded.")
    ] = False,
    detach: Detach = False,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Most changes need --force."),
    ] = None,
) -> None:
    """Go on with a run that was stopped, killed or failed.

    From its last whole checkpoint, or from the beginning where there is none.
    """
    from kit.launch import relaunch
    from kit.runs.store import RunStore

    run = RunStore(root).open(run_id)
    where = run.where_resumed()
    outcome = relaunch(run_id, root, force=force, detached=detach, overrides=override or [])
    if outcome.error is not None and not outcome.shown:
        typer.echo(f"error: {outcome.error}", err=True)
    elif detach:
        typer.echo(f"Run '{run_id}' {where}.")
        say_detached(run)
    raise typer.Exit(outcome.code)


def say_detached(run: RunDir, *, err: bool = False) -> None:
    """Says how to follow and stop a run that goes on by itself."""
    follow, stop_it = (f"grpo-kit {verb} {run.id}{run.root_option}" for verb in ("logs -f", "stop"))
    typer.echo(f"Follow it: {follow}    Stop it: {stop_it}", err=err)


def evaluate(
    run_id: RunId,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Override evaluation.* or generation.* keys."),
    ] = None,
    checkpoint: Checkpoint = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="The scores are filed as eval/NAME.json.")] = "again",
    as_json: AsJson = False,
    root: Root = Path("runs"),
) -> None:
    """Score a run on its held-out problems again."""
    from kit.api import Run
    from kit.evaluation.results import weights_of
    from kit.runs.store import RunStore

    weights_of(RunStore(root).open(run_id), checkpoint)  # an answer at once where there is nothing to score
    run = Run(run_id, root)
    result = run.evaluate(checkpoint=checkpoint, name=name, changes=override or [], progress=not as_json)
    if as_json:
        print_json(result)


def report(
    run_id: RunId,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to; else report.html in the run.")
    ] = None,
    no_completions: Annotated[
        bool, typer.Option("--no-completions", help="Leave out samples, which hold rows of the data.")
    ] = False,
    root: Root = Path("runs"),
) -> None:
    """Write RUN_ID's report, one HTML file. It has scores, curves, samples, and how to do it again."""
    from kit.api import Run

    typer.echo(Run(run_id, root).report(output, completions=not no_completions))


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
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare eval/NAME.json of each run, not the last one.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder that holds the runs; else CONFIG's, or runs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: better, worse or luck. With CONFIG and --change they are made first."""
    from kit.studies.arms import carry_out, make_plan
    from kit.studies.compare import compare_and_file, file_page, table

    how = {"metric": metric, "evaluation": evaluation}
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
        print_json(result)
        return
    print_table(*table(result))
    for line in [
        *(f"Warning: {warning}" for warning in result["warnings"]),
        *(each["text"] for each in result["comparisons"]),
        *(f"Note: {note}" for note in result["notes"]),
    ]:
        typer.echo(line)
    typer.echo(f"\n{page}\n{folder / 'comparison.json'}")


def _silent(_: str) -> None:
    """Says nothing."""
