"""What else differs between the arms of a comparison: other scores, length, entropy, KL, time, memory, configuration."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kit.errors import ConfigError
from kit.evaluation.compare_scores import (
    GPU_MEMORY,
    MEMORY,
    QUANTITIES,
    TOTAL_TIME,
    Arms,
    matrix,
    same_seeds,
)
from kit.evaluation.paired import block_bootstrap, difference, scalar_difference
from kit.runs.curves import Point, downsample

NOT_THE_METHOD = {("run", key) for key in ("id", "root", "seed", "threads", "report_to", "save_completions")}
NOT_THE_METHOD |= {("run", key) for key in ("save_every", "keep_checkpoints")}
MOST_POINTS = 200


def compare_settings(arms: Arms) -> list[str]:
    """Notes on what weakens the comparison: unequal seeds, steps, data, runs that did not finish."""
    runs = [run for runs_of in arms.values() for run in runs_of]
    seeds = [sorted(run.seed for run in runs_of) for runs_of in arms.values()]
    notes = []
    if any(other != seeds[0] for other in seeds):
        notes.append("The arms have different seeds, so runs are not paired by seed; problems are.")
    steps = sorted({run.step for run in runs})
    if len(steps) > 1:
        notes.append(f"The scores are of different steps ({', '.join(map(str, steps))}).")
    if unfinished := [f"{run.id} ({run.state})" for run in runs if run.state != "finished"]:
        notes.append(f"Not every run finished: {', '.join(unfinished)}.")
    if len({run.data_hash for run in runs}) > 1:
        notes.append(
            "The runs were trained on different data: a problem held out in one may have been trained on in another."
        )
    if len(arms) > 1 and not config_differences(arms):
        notes.append("The arms have the same configuration: any difference is luck.")
    return notes


def compare_quantities(arms: Arms, metric: str) -> list[dict[str, Any]]:
    """Every quantity that all arms have, with the difference of each arm to the first and its 95 % interval if any.

    These intervals are not corrected for their number; the verdict rests on the one metric alone.
    """
    rows = [_scored(arms, name) for name in _shared_columns(arms) if name != metric]
    names = [(quantity.name, quantity.unit) for quantity in QUANTITIES]
    names += [(TOTAL_TIME, "seconds, sum of steps"), (MEMORY, "MiB, process"), (GPU_MEMORY, "MiB, torch")]
    rows += [_scalar(arms, name, unit) for name, unit in names]
    return [row for row in rows if row is not None]


def _shared_columns(arms: Arms) -> list[str]:
    runs = [run for runs_of in arms.values() for run in runs_of]
    return [name for name in runs[0].columns if all(name in run.columns for run in runs)]


def _scored(arms: Arms, name: str) -> dict[str, Any] | None:
    try:
        _, scores = matrix(arms, name)
    except ConfigError:  # too few problems that all runs have it for
        return None
    first, *others = scores
    paired = {other: same_seeds(arms[first], arms[other]) for other in others}
    found = {other: difference(scores[first], scores[other], paired_seeds=paired[other]) for other in others}
    return {
        "name": name,
        "unit": "tokens, greedy" if name == "held-out length" else "held-out score",
        "arms": {arm: float(values.mean()) for arm, values in scores.items()},
        "differences": {arm: {"value": d.value, "low": d.low, "high": d.high} for arm, d in found.items()},
    }


def _scalar(arms: Arms, name: str, unit: str) -> dict[str, Any] | None:
    values = {arm: [run.scalar(name) for run in runs] for arm, runs in arms.items()}
    known = {arm: [value for value in of_arm if value is not None] for arm, of_arm in values.items()}
    if any(len(known[arm]) < len(values[arm]) for arm in values):
        return None
    first, *others = arms
    return {
        "name": name,
        "unit": unit,
        "arms": {arm: statistics.fmean(of_arm) for arm, of_arm in known.items()},
        "differences": {other: _scalar_difference(arms, known, name, first, other) for other in others},
    }


def _scalar_difference(
    arms: Arms, known: Mapping[str, Sequence[float]], name: str, first: str, other: str
) -> dict[str, float | None]:
    """Over seeds where both arms have two; else over the steps of the two runs; a bare number where neither can be."""
    found: tuple[float, float, float] | None = None
    if min(len(known[first]), len(known[other])) > 1:
        paired = same_seeds(arms[first], arms[other])
        found = scalar_difference(known[first], known[other], paired=paired)
    elif len(known[first]) == len(known[other]) == 1:
        before, after = dict(arms[first][0].tail(name)), dict(arms[other][0].tail(name))
        found = block_bootstrap([after[step] - before[step] for step in sorted(before.keys() & after.keys())])
    if found is None:
        return {"value": statistics.fmean(known[other]) - statistics.fmean(known[first]), "low": None, "high": None}
    return dict(zip(("value", "low", "high"), found, strict=True))


def curves(arms: Arms, metric: str) -> dict[str, dict[str, list[Point]]]:
    """By quantity and arm the mean over seeds at each step that all of its runs have, at most 200 points."""
    heldout = f"held-out {metric.replace('_', ' ')}"
    drawn: dict[str, dict[str, list[Point]]] = {}
    for name in (heldout, *(quantity.name for quantity in QUANTITIES)):
        for arm, runs in arms.items():
            lines = [run.heldout.get(metric, []) if name == heldout else run.series.get(name, []) for run in runs]
            if means := _means([dict(line) for line in lines]):
                drawn.setdefault(name, {})[arm] = downsample(means, MOST_POINTS)
    return drawn


def _means(lines: Sequence[Mapping[float, float]]) -> list[Point]:
    steps = sorted(set.intersection(*map(set, lines)))
    return [(step, statistics.fmean(line[step] for line in lines)) for step in steps]


def method(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as flat keys, without what does not change what is learned: id, seed, folders, trackers."""
    return {".".join(path): value for path, value in _leaves(config) if path[:2] not in NOT_THE_METHOD}


def config_differences(arms: Arms) -> dict[str, dict[str, Any]]:
    """Keys in which the arms' configurations differ, with the value of each arm; null where an arm has no such key."""
    flat = {arm: method(runs[0].config) for arm, runs in arms.items()}
    keys = dict.fromkeys(key for tree in flat.values() for key in tree)
    return {
        key: {arm: tree.get(key) for arm, tree in flat.items()}
        for key in keys
        if any(tree.get(key) != next(iter(flat.values())).get(key) for tree in flat.values())
    }


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children: Any = ()
    if isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, list) and any(isinstance(item, (dict, list)) for item in node):
        children = enumerate(node)
    if not children:
        yield path, node
    for key, child in children:
        yield from _leaves(child, (*path, str(key)))
