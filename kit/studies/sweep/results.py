"""What a sweep leaves: table.json, best.yaml and sweep.html, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config import load_config
from kit.errors import KitError
from kit.report import charts, html
from kit.report.page import Section, page
from kit.runs.files import to_json, write_atomic
from kit.studies.sweep.study import Study

TABLE, BEST, PAGE = "table.json", "best.yaml", "sweep.html"


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
    path = study.folder / PAGE
    head, rows = table(results)
    best = results["best"]
    figures = [("held-out score", f"{best['value']:.4f}"), ("run", best["run"])]
    figures += [(key, short(value)) for key, value in best["params"].items()]
    drawn, importances = (
        [charts.lines(history(results), "Score by trial", "trial", "held-out score")],
        study.importances(),
    )
    if importances:
        shares = list(importances.items())
        drawn.append(charts.bars(shares, "Importance: share of the variance explained (fANOVA)"))
    sections = [
        Section("Best", html.join([html.tiles(figures), html.paragraph(html.code(_command(study)))])),
        Section("Trials", html.join([html.grid(drawn), *_notes(study, importances), html.table(head, rows)])),
    ]
    if (study.folder / BEST).is_file():
        sections.append(Section("Best configuration", html.pre((study.folder / BEST).read_text(encoding="utf-8"))))
    subtitle = f"{len(results['trials'])} trials, {study.sweep.sampler.name} sampler, pruner {study.sweep.pruner.name}"
    write_atomic(path, page(f"Sweep {study.name}", sections, subtitle=subtitle))
    return path


def history(results: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The score of each complete trial, and the best so far."""
    scores = [(float(row["trial"]), row["value"]) for row in results["trials"] if row["state"] == "complete"]
    best = [(number, max(value for _, value in scores[: place + 1])) for place, (number, _) in enumerate(scores)]
    return {"trial": scores, "best so far": best}


def _notes(study: Study, importances: Mapping[str, float]) -> list[str]:
    notes = [
        "The best of many trials looks better than it is: the luckiest score wins. Before believing it, train it and the "
        "baseline with other seeds: grpo-kit compare."
    ]
    if not importances:
        notes.append("Importances need two keys, four complete trials with different scores, and scikit-learn.")
    return [html.paragraph(note, "note") for note in notes]


def _command(study: Study) -> str:
    return f"grpo-kit train {study.folder / BEST}"


def short(value: Any) -> str:
    """A value for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
