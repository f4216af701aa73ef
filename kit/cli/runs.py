"""Verbs for runs: `ps`, `logs`, `stop`, `resume`, and for their results: `eval`, `report`, `compare`."""

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
"""Runs that `ps` lists by default, in addition to all live ones."""


def ps(
    root: Root = Path("runs"),
    number: Annotated[
        int | None, typer.Option("-n", min=1, metavar="N", help=f"The latest N. Default: live ones and {SHOWN} more.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs, latest first, with state, step, reward and time left."""
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
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log until the run ends.")] = False,
    number: Annotated[int, typer.Option("-n", "--lines", min=0, metavar="N", help="Last lines to show.")] = 40,
) -> None:
    """Show the output and the log of a run, including crashes."""
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
    """Yield the last lines of the run's log, then everything that is appended until the run has ended.

    A log that was replaced or truncated is read from its start. Raises `RunError` if it cannot be read.
    """
    from kit.runs.files import Log
    from kit.runs.store import ALIVE

    log = Log(run.log)
    yield log.tail(lines)
    while True:
        ended = run.settled()["state"] not in ALIVE  # check before reading, so that the last lines are not missed
        yield log.added()
        if ended:
            return
        sleep(POLL_SECONDS)


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def ending(run: RunDir) -> str:
    """`Run 'a' is stopped at step 7/80 on request. Continue with: grpo-kit resume a`."""
    status = run.settled()
    step, total, reason = (status.get(key) for key in ("step", "total_steps", "reason"))
    position = "" if step is None else f" at step {step}/{total}" if total else f" at step {step}"
    because = " on request" if reason == "control/stop" else f": {reason}" if reason else ""
    hint = ""
    if status["state"] not in ("finished", "queued", "starting", "running") and run.config.is_file():
        advice = "Continue with" if run.last_checkpoint is not None else "Start it again from the beginning with"
        hint = f" {advice}: grpo-kit resume {run.id}{run.root_option}"
    refused = f" Resuming was refused: {status['refused']}" if status.get("refused") else ""
    return f"Run '{run.id}' is {status['state']}{position}{because}.{refused}{hint}"


def stop(
    run_id: RunId,
    root: Root = Path("runs"),
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Terminate it after this time. Default: wait.")
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the step; steps after the last checkpoint may be lost.")
    ] = False,
) -> None:
    """Let a run finish its step, save a checkpoint and end. With --timeout, terminate it if it does not."""
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
        bool, typer.Option("--force", help="Also if data, configuration or packages changed; recorded.")
    ] = False,
    detach: Detach = False,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change a key; most changes need --force."),
    ] = None,
) -> None:
    """Continue a run that was stopped, was killed or failed.

    It starts from the last complete checkpoint, or from the beginning if there is none.
    """
    from kit.launch import relaunch
    from kit.runs.store import RunStore

    run = RunStore(root).open(run_id)
    origin = run.where_resumed()
    outcome = relaunch(run_id, root, force=force, detached=detach, overrides=override or [])
    if outcome.error is not None and not outcome.shown:
        typer.echo(f"error: {outcome.error}", err=True)
    elif detach:
        typer.echo(f"Run '{run_id}' {origin}.")
        say_detached(run)
    raise typer.Exit(outcome.code)


def say_detached(run: RunDir, *, err: bool = False) -> None:
    """Print how to follow and stop a detached run."""
    follow, end = (f"grpo-kit {verb} {run.id}{run.root_option}" for verb in ("logs -f", "stop"))
    typer.echo(f"Follow it: {follow}    Stop it: {end}", err=err)


def evaluate(
    run_id: RunId,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Override evaluation.* or generation.* keys."),
    ] = None,
    checkpoint: Checkpoint = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Write eval/NAME.json.")] = "again",
    as_json: AsJson = False,
    root: Root = Path("runs"),
) -> None:
    """Score a run on its held-out problems again."""
    from kit.api import Run
    from kit.evaluation.results import weights_of
    from kit.runs.store import RunStore

    weights_of(RunStore(root).open(run_id), checkpoint)  # raises at once if there are no weights
    run = Run(run_id, root)
    result = run.evaluate(checkpoint=checkpoint, name=name, changes=override or [], progress=not as_json)
    if as_json:
        print_json(result)


def report(
    run_id: RunId,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File. Default: RUN/report.html.")
    ] = None,
    no_completions: Annotated[
        bool, typer.Option("--no-completions", help="Leave out samples, which contain rows of the data.")
    ] = False,
    root: Root = Path("runs"),
) -> None:
    """Write a report of RUN_ID as one HTML file with scores, curves, samples, and commands that repeat it."""
    from kit.api import Run

    typer.echo(Run(run_id, root).report(output, completions=not no_completions))


def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... | CONFIG", help="Runs (seeds of one arm: a-s0,a-s1), or a YAML file with --change."
        ),
    ],
    change: Annotated[
        list[str] | None,
        typer.Option(metavar="[ARM:]KEY=VALUE[,...]", help="An arm: CONFIG with these changes. May be repeated."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N|A,B,...", help="With CONFIG: number of seeds, or seeds.")] = "3",
    steps: Annotated[int | None, typer.Option(min=1, help="With CONFIG: optimiser steps of each arm.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", metavar="KEY=VALUE", help="With CONFIG: for all arms.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the comparison and its runs.")] = None,
    metric: Annotated[str | None, typer.Option(metavar="SCORE", help="Score to compare, e.g. pass@1.")] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare eval/NAME.json of each run, not the last.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the runs. Default: that of CONFIG, or runs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: better, worse, or not distinguishable. With CONFIG and --change, train them first."""
    from kit.studies.arms import carry_out, make_plan
    from kit.studies.compare import compare_and_file, file_page, table

    settings = {"metric": metric, "evaluation": evaluation}
    if change:
        if len(sources) != 1:
            raise typer.BadParameter("--change expects exactly one CONFIG")
        plan = make_plan(
            sources[0], change, seeds=seeds, steps=steps, overrides=override or [], root=root, name=name, metric=metric
        )
        try:
            result, folder = (
                carry_out(plan, (lambda _: None) if as_json else typer.echo, quiet=as_json, **settings),
                plan.folder,
            )
        except KeyboardInterrupt:
            typer.echo("Stopped. To continue, run the same command again; finished runs are kept.", err=True)
            raise
    else:
        result, folder = compare_and_file(sources, root or Path("runs"), name, **settings)
    page = file_page(result, folder)
    if as_json:
        print_json(result)
        return
    print_table(*table(result))
    for line in [
        *(f"Warning: {warning}" for warning in result["warnings"]),
        *(comparison["text"] for comparison in result["comparisons"]),
        *(f"Note: {note}" for note in result["notes"]),
    ]:
        typer.echo(line)
    typer.echo(f"\n{page}\n{folder / 'comparison.json'}")
