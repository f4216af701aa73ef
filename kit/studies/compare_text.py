"""A comparison of runs that exist, its table for the terminal, and the files that it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.errors import ConfigError
from kit.runs.files import to_json, write_atomic
from kit.runs.store import RUN_ID
from kit.studies.compare import compare_runs
from kit.studies.compare_page import comparison_page, interval

FOLDER = "comparisons"


def compare_and_file(what: Sequence[str], root: Path, name: str | None, **how: Any) -> tuple[dict[str, Any], Path]:
    """Compares runs by id (`a b`, or `a-s0,a-s1 b-s0,b-s1`), files comparison.json, and names its folder."""
    if len(what) == 1 and "," not in what[0]:
        raise ConfigError(
            f"There is nothing to compare '{what[0]}' with. Name a second run, or, if it is a configuration, what to change: "
            f"grpo-kit compare {what[0]} --change section.key=value"
        )
    lists = any("," in word for word in what)
    runs = [[part for part in word.split(",") if part] for word in what] if lists else list(what)
    result = compare_runs(runs, root, **how)
    plain = name or "-vs-".join(arm["name"] for arm in result["arms"])[:64].rstrip("-")
    if not RUN_ID.fullmatch(plain):
        raise ConfigError(f"--name {plain}: 1 to 64 lower-case letters, digits and dashes, and no dash at either end.")
    folder = root / FOLDER / plain
    write_atomic(folder / "comparison.json", to_json(result, indent=2) + "\n")
    return result, folder


def file_page(result: Mapping[str, Any], folder: Path) -> Path:
    """Writes comparison.html."""
    path = folder / "comparison.html"
    write_atomic(path, comparison_page(result))
    return path


def table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the score that decides, then what else was measured; each arm beside its difference."""
    first, *others = [arm["name"] for arm in result["arms"]]
    head = ["", first, *(cell for other in others for cell in (other, "difference"))]
    estimates = {each["arm"]: each["difference"] for each in result["comparisons"]}
    scores = {arm["name"]: arm["value"] for arm in result["arms"]}
    rows = [_row(str(result["metric"]).replace("_", " "), scores, estimates, first, others)]
    return head, rows + [
        _row(row["name"].replace("_", " "), row["arms"], row["differences"], first, others)
        for row in result["quantities"]
    ]


def _row(
    name: str, values: Mapping[str, float], differences: Mapping[str, Any], first: str, others: Sequence[str]
) -> list[str]:
    cells = [name, f"{values[first]:.4g}"]
    for other in others:
        cells += [f"{values[other]:.4g}", interval(differences[other])]
    return cells
