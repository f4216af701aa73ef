"""A sweep on this machine: ask, train, tell, until all trials are made; whatever happens to one of them.

A trial is a normal run, watched for held-out scores while it trains, and asked to stop when it will not win. What a sweep
leaves: table.json, best.yaml and sweep.html, and the table on the terminal.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.config import RunConfig, load_config
from kit.errors import ConfigError, KitError, RunError
from kit.evaluation.results import course, metric_key, read_result, value_of
from kit.report import charts
from kit.report.page import page, piece
from kit.runs.files import to_json, write_atomic
from kit.runs.metrics import last_step, result_of, step_of
from kit.runs.store import RunDir
from kit.runs.worker import STOPPED
from kit.studies.arms import stopped_by_hand
from kit.studies.sweep_config import SweepConfig, metric_of, trial_config
from kit.studies.sweep_study import DATABASE, Proposal, Result, Study, folder_of

Tell = Callable[[str], None]
POLL_SECONDS = 0.5
Report = Callable[[int, float], bool]
"""Called with step and score; True asks for the trial to be ended."""
TABLE, BEST, PAGE = "table.json", "best.yaml", "sweep.html"


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


class Watch:
    """Reads the evaluations of a running trial as they appear and passes each to `report` once."""

    def __init__(self, run: RunDir, metric: str, report: Report) -> None:
        self.run, self.metric, self.report = run, metric, report
        self.seen = -1
        self.pruned = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"watch-{run.id}", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        with suppress(KitError):
            self.look()  # what came after the last look counts for the judgement of others

    def look(self) -> None:
        """Reports scores that are new, and asks the run to stop when `report` wants it to."""
        for result in course(self.run):
            value = score(result, self.metric)
            if result["step"] <= self.seen or value is None:
                continue
            self.seen = result["step"]
            unwanted = bool(self.seen) and self.report(self.seen, value)
            if unwanted and not self.pruned and not self._over.is_set():
                self.pruned = True
                self.run.write_text("control/stop", "pruned by the sweep\n")

    def _loop(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self.look()
            except KitError:  # the directory is not there yet, or a file is being looked at too early
                continue


def score(result: Any, metric: str) -> float | None:
    """The score that a sweep raises, of one evaluation."""
    return value_of(result, metric_key(metric, int(result.get("k") or 1), checked="greedy_accuracy" in result))


def run_trial(config: RunConfig, metric: str, report: Report, *, quiet: bool = True) -> Result:
    """Trains a trial to its end and says how it went; a trial that fails is a result, too."""
    from kit.api import launch as api

    run = RunDir(Path(config.run.root) / str(config.run.id))
    with Watch(run, metric, report) as watch:
        try:
            _, outcome = api.launch(config, quiet=quiet)
        except KitError as error:
            return Result("failed", reason=str(error))
    if outcome.error is not None:
        return Result("failed", reason=str(outcome.error))
    result = ended(run, metric)
    if outcome.code == STOPPED:
        return Result("pruned" if watch.pruned else "stopped", result.value, result.step)
    return result


def ended(run: RunDir, metric: str) -> Result:
    """How a run ended that nobody stopped, with the score of its result."""
    try:
        scores = final_scores(run)
    except RunError as error:
        return Result("failed", reason=str(error))
    step, value = int(scores.get("step") or 0), score(scores, metric)
    if value is None:
        return Result("failed", step=step, reason=f"run {run.id} ended without the held-out score '{metric}'")
    return Result("complete", value, step, yardstick=yardstick(scores))


def final_scores(run: RunDir) -> dict[str, Any]:
    """The evaluation of the run's result; empty where there is none. Raises `RunError` for a file that cannot be read."""
    paths = {path.stem: path for path in run.eval.glob("*.json") if step_of(path.stem, 0) is not None}
    evaluations = {name: read_result(path) for name, path in paths.items()}
    name = result_of(evaluations, last_step(run.metrics()))
    if name is None:
        return {}
    return {"step": step_of(name, last_step(run.metrics()))} | evaluations[name]


def yardstick(scores: Mapping[str, Any]) -> dict[str, Any]:
    """What a trial was measured by: who says what is right, and on which problems. Empty where it does not say."""
    ids = (scores.get("per_problem") or {}).get("id")
    if not ids:
        return {}
    digest = hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]
    return {"checker": scores.get("checker"), "problems": len(ids), "hash": digest}


def write_results(study: Study) -> dict[str, Any]:
    """Writes table.json, and best.yaml once there is a best trial; returns what the table holds."""
    results = collect(study)
    write_atomic(study.folder / TABLE, to_json(results, indent=2) + "\n")
    if results["best"] is not None:
        write_best(study.root / results["best"]["run"] / "config.yaml", study.folder / BEST, results["best"])
    return results


def collect(study: Study) -> dict[str, Any]:
    """What the table holds; nothing is written."""
    rows, best = study.rows(), study.best_run()
    return {
        "kind": "sweep",
        "name": study.name,
        "folder": str(study.folder),
        "metric": study.sweep.metric,
        "best": next((row for row in rows if best is not None and row["run"] == best), None),
        "remaining": study.remaining(),
        "differs": study.differs,
        "trials": rows,
    }


def write_best(source: Path, target: Path, best: Mapping[str, Any]) -> None:
    """The best trial's whole configuration, without the trial's id, so that `grpo-kit train` makes another run of it."""
    try:
        config = load_config(source)
    except KitError:  # the run was removed: what was best once stays as it was written then
        return
    config.run.id = None
    lines = [f"# The best trial of a sweep: run {best['run']}, held-out score {best['value']:.4f}."]
    lines += [f"#   {key}: {value}" for key, value in best["params"].items()]
    write_atomic(target, "\n".join(lines) + "\n\n" + config.to_yaml())


def table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, the best first; then pruned ones by their last score, and failures."""
    keys = list(dict.fromkeys(key for row in results["trials"] for key in row["params"]))
    order = {"complete": 0, "pruned": 1, "running": 2, "failed": 3}
    ranked = sorted(results["trials"], key=lambda row: (order[row["state"]], -(row["value"] or 0.0), row["trial"]))
    rows = [
        [
            str(row["run"]),
            row["state"],
            "-" if row["value"] is None else f"{row['value']:.4f}",
            "-" if row["step"] is None else str(row["step"]),
            *(short(row["params"].get(key)) for key in keys),
            "-" if row["seconds"] is None else f"{row['seconds']:.0f} s",
            row["reason"].partition("\n")[0][:80],
        ]
        for row in ranked
    ]
    return ["run", "state", "score", "step", *keys, "time", "note"], rows


def write_page(study: Study, results: Mapping[str, Any]) -> Path:
    """Writes sweep.html: the best trial, how the score rose, which key mattered, all trials."""
    path, best, importances = study.folder / PAGE, results["best"], study.importances()
    figures = [("held-out score", f"{best['value']:.4f}"), ("run", best["run"])]
    figures += [(key, short(value)) for key, value in best["params"].items()]
    drawn = [charts.lines(history(results), "Score by trial", "trial", "held-out score")]
    if importances:
        drawn.append(charts.bars(list(importances.items()), "Importance: share of the variance explained (fANOVA)"))
    sections = [
        ("Best", piece("sweep.html", "best", figures, f"grpo-kit train {study.folder / BEST}")),
        ("Trials", piece("sweep.html", "trials", drawn, importances, *table(results))),
    ]
    if (study.folder / BEST).is_file():
        text = (study.folder / BEST).read_text(encoding="utf-8")
        sections.append(("Best configuration", piece("parts.html", "pre", text)))
    subtitle = f"{len(results['trials'])} trials, {study.sweep.sampler.name} sampler, pruner {study.sweep.pruner.name}"
    write_atomic(path, page(f"Sweep {study.name}", sections, subtitle=subtitle))
    return path


def history(results: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The score of each complete trial, and the best so far."""
    scores = [(float(row["trial"]), row["value"]) for row in results["trials"] if row["state"] == "complete"]
    best = [(number, max(value for _, value in scores[: place + 1])) for place, (number, _) in enumerate(scores)]
    return {"trial": scores, "best so far": best}


def short(value: Any) -> str:
    """A value for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
