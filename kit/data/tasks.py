"""Generated problems: `reasoning-gym:TASK` (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from kit.config import DataConfig
from kit.data.rows import Fault, Record, Source
from kit.errors import DataError
from kit.registry import did_you_mean
from rewards.components.reasoning_gym import factory

TRAIN_ROWS = 2000
"""Number of training rows if `data.limit` is null."""
COLUMNS = ["task", "prompt", "reference", "entry"]


def read_task(name: str, config: DataConfig) -> Source:
    """Different problems of a task: columns `task`, `prompt`, `reference`, `entry` (JSON of the complete entry).

    `config.limit` rows, or 2000 + `config.heldout`; fewer, with a note, if the task has fewer questions. The same
    seed and parameters give the same rows. Raises `DataError` for an unknown task or parameter.
    """
    gym = factory(name)
    if name not in gym.DATASETS:
        names = task_names()
        raise DataError(
            f"data.source: reasoning-gym has no task '{name}'.{did_you_mean(name, names)} All tasks: {', '.join(names)}."
        )

    fields = dataclasses.fields(gym.DATASETS[name][1])
    parameters = [field.name for field in fields if field.init and field.name not in ("seed", "size")]
    listed = ", ".join(parameters) or "no parameters"
    for key in config.task_params:
        if key not in parameters:
            own = {"seed": " Set data.seed instead.", "size": " Set data.limit instead."}.get(key, "")
            raise DataError(
                f"data.task_params: {name} has no parameter '{key}'.{own or did_you_mean(key, parameters)} Parameters: {listed}."
            )
    count = config.limit or TRAIN_ROWS + config.heldout
    # reasoning-gym uses seed + i for problem i. Spread seeds, so that the problems of seeds 0 and 1 do not overlap.
    digest = hashlib.sha256(f"reasoning-gym {config.seed}".encode()).hexdigest()
    seed = int(digest[:7], 16)  # below 2**28: numpy takes it
    try:
        dataset = gym.create_dataset(name, seed=seed, size=10 * count + 1000, **config.task_params)
    except Exception as error:  # tasks check their parameters with assert, or fail with any error
        raise DataError(
            f"data.task_params: {name} refuses {config.task_params}: {error or type(error).__name__}. "
            f"It takes {listed}."
        ) from error
    key = repr((name, config.task_params, seed, count))
    if key not in _KNOWN:
        _KNOWN.clear()
        _KNOWN[key] = _generate(dataset, name, count)
    records = [*_KNOWN[key]]
    notes = []
    if len(records) < count:
        notes.append(
            f"{name} has {len(records)} different questions with these parameters, fewer than {count}. "
            "Wider data.task_params give more."
        )
    details = {"task": {"name": name, "params": dict(config.task_params), "seed": seed}}
    return Source(records, COLUMNS, len(records), notes=notes, details=details)


def task_names() -> list[str]:
    """Names of all tasks."""
    return sorted(factory().DATASETS)


_KNOWN: dict[str, list[Record | Fault]] = {}
"""The rows of the last task: the page asks for them at each change of a key, and `countdown` takes half a minute."""


def _generate(dataset: Any, name: str, count: int) -> list[Record | Fault]:
    """Up to `count` records with different questions. Stops after many repeated questions in a row."""
    records: list[Record | Fault] = []
    questions: set[str] = set()
    repeats = 0
    for index in range(len(dataset)):
        try:
            entry = dataset[index]
        except Exception as error:
            raise DataError(
                f"reasoning-gym:{name} failed on its problem {index}: {type(error).__name__}: {error}. "
                "Other data.task_params or another data.seed may avoid it."
            ) from error
        if entry["question"] in questions:
            repeats += 1
            if repeats >= max(500, 2 * len(questions)):
                break
            continue
        repeats = 0
        questions.add(entry["question"])
        # Values that JSON does not support (keys other than text, sets, dates) become text.
        content = json.dumps(_text_keys(entry), ensure_ascii=False, default=str)
        values = {"task": name, "prompt": entry["question"], "reference": entry["answer"], "entry": content}
        records.append(Record(len(records) + 1, values))
        if len(records) == count:
            break
    return records


def _text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _text_keys(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_text_keys(item) for item in value]
    return value
