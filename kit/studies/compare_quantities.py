"""What else differs between the arms of a comparison: other scores, length, entropy, KL, time, memory, configuration."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kit.errors import ConfigError
from kit.runs.curves import Point, downsample
from kit.studies.compare_scores import (
    GPU_MEMORY,
    MEMORY,
    QUANTITIES,
    TOTAL_TIME,
    Arms,
    RunScores,
    matrix,
    same_seeds,
)
from kit.studies.paired import block_bootstrap, difference, scalar_difference

NOT_THE_METHOD = {("run", key) for key in ("id", "root", "seed", "threads", "report_to", "save_completions")}
NOT_THE_METHOD |= {("run", key) for key in ("save_every", "keep_checkpoints")}
MOST_POINTS = 200
SAMPLING = ("top_p", "top_k", "min_p")
"""Keys of `generation` that greedy completions do not ask."""


def compare_settings(arms: Arms, metric: str) -> list[str]:
    """Warnings of what weakens the verdict: unequal seeds, steps, runs that did not finish, evaluations of other lengths."""
    runs = [run for runs_of in arms.values() for run in runs_of]
    seeds = [sorted(run.seed for run in runs_of) for runs_of in arms.values()]
    notes = generation_differences(arms, metric)
    if any(other != seeds[0] for other in seeds):
        notes.append("The arms have different seeds, so runs are not paired by seed; problems are.")
    steps = sorted({run.step for run in runs})
    if len(steps) > 1:
        notes.append(f"The scores are of different steps ({', '.join(map(str, steps))}).")
    if unfinished := [f"{run.id} ({run.state})" for run in runs if run.state != "finished"]:
        notes.append(f"Not every run finished: {', '.join(unfinished)}.")
    return notes


def generation_differences(arms: Arms, metric: str) -> list[str]:
    """Warnings of evaluations that generated differently because the arms' configurations do.

    Raises `ConfigError` where it is not for the configurations: then evaluations were made anew with other settings.
    """
    runs = [run for runs_of in arms.values() for run in runs_of]
    warnings = []
    for key in dict.fromkeys(key for run in runs for key in run.generation):
        seen = {str(run.generation.get(key)) for run in runs}
        if len(seen) < 2 or (metric.startswith("greedy") and key in SAMPLING):
            continue
        if any(run.generation.get(key) != run.config.get("generation", {}).get(key) for run in runs):
            raise ConfigError(
                f"The runs were scored with different generation.{key}: {', '.join(sorted(seen))}. Evaluate them again with the "
                f"same (grpo-kit eval RUN -o generation.{key}=...), and compare with --evaluation again."
            )
        warnings.append(
            f"The arms' own generation.{key} differs ({', '.join(sorted(seen))}), and held-out completions were made with it: "
            f"the difference holds that, too. To measure alike: grpo-kit eval RUN -o generation.{key}=..., for every run, and "
            "--evaluation again."
        )
    return warnings


def not_comparable(baseline: Sequence[RunScores], arm: Sequence[RunScores]) -> str | None:
    """Why there can be no verdict on these runs; None where there can."""
    if len({run.data_hash for run in (*baseline, *arm)}) < 2:
        return None
    return (
        "the runs were trained on different data, so that problems held out from one may have been trained on by another, and "
        "nothing on record excludes it. Train all arms with the same data section"
    )


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
        if before.keys() == after.keys():  # else it would not be the difference of the two values beside it
            found = block_bootstrap([after[step] - before[step] for step in sorted(before)])
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
