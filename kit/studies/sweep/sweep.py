"""A sweep on this machine: ask, train, tell, until all trials are made; whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, RunError
from kit.runs.store import RunDir
from kit.studies.compare_arms import stopped_by_hand
from kit.studies.sweep.config import SweepConfig, metric_of, trial_config
from kit.studies.sweep.results import collect, short, write_page, write_results
from kit.studies.sweep.study import DATABASE, Proposal, Study, folder_of
from kit.studies.sweep.trial import Result, run_trial

Tell = Callable[[str], None]


def carry_out(sweep: SweepConfig, root: Path, tell: Tell = print, *, quiet: bool = True) -> dict[str, Any]:
    """Makes the trials that are missing, one after the other, and returns what `results` does.

    Goes on with a study that is there. Raises `KeyboardInterrupt` on Ctrl-C: the trial in progress is tried again next
    time. Raises `RunError` when no trial has a score.
    """
    study, metric = Study(sweep, root), metric_of(sweep)
    for run in study.retry_dead():
        tell(f"{run} had died; its values are tried again")
    while study.remaining():
        proposal = study.ask()
        shown = ", ".join(f"{key.rpartition('.')[2]} {short(value)}" for key, value in proposal.values.items())
        tell(f"[{proposal.number + 1}] {proposal.run_id}: {shown}")
        try:
            result = attempt(study, proposal, sweep, root, metric, quiet=quiet)
        except BaseException:
            study.give_up(proposal)
            raise
        result = study.tell(proposal, result)
        tell(f"    {describe(result)}")
        write_results(study)
    return finish(study)


def look(sweep: SweepConfig, root: Path) -> dict[str, Any]:
    """The results so far; nothing is trained or written. `differs` names what the file has changed since.

    Raises `RunError` when there is no such sweep.
    """
    assert sweep.name is not None, "load_sweep() gives every sweep a name"
    if not (folder_of(root, sweep.name) / DATABASE).is_file():
        raise RunError(f"There is no sweep '{sweep.name}' in {root} yet. Start it without --show.")
    return collect(Study(sweep, root, only_look=True))


def attempt(study: Study, proposal: Proposal, sweep: SweepConfig, root: Path, metric: str, *, quiet: bool) -> Result:
    """One trial. Raises `KeyboardInterrupt` when it was ended by Ctrl-C."""
    try:
        config = trial_config(sweep, proposal.values, proposal.run_id, root)
    except ConfigError as error:
        return Result("failed", reason=str(error))
    result = run_trial(config, metric, lambda step, value: study.report(proposal, step, value), quiet=quiet)
    if result.state != "stopped":
        return result
    if not stopped_by_hand(RunDir(root / proposal.run_id)):
        raise KeyboardInterrupt
    return Result("failed", result.value, result.step, "stopped by hand")


def finish(study: Study) -> dict[str, Any]:
    """Writes all results. Raises `RunError` when there is no score among them."""
    results = write_results(study)
    if results["best"] is None:
        reasons = {row["reason"] for row in results["trials"] if row["reason"]}
        raise RunError(
            f"No trial of sweep '{study.name}' has a score. "
            + (f"Seen: {'; '.join(sorted(reasons)[:3])} " if reasons else "")
            + f"The runs lie in {study.root}; each one's log.txt says what went wrong."
        )
    write_page(study, results)
    return results


def describe(result: Result) -> str:
    """How a trial ended, in a few words."""
    value = "" if result.value is None else f" {result.value:.4f} at step {result.step}"
    return f"{result.state}{value}{f': {result.reason}' if result.reason else ''}"
