"""Check that a reward pays right answers more than wrong ones and known attacks, as `grpo-kit reward test` does.

All keys of a row are dataset columns, except for these optional ones:

    prompt       a string or a list of messages
    good         completions with a right answer: a string, a list of messages, or a list of those
    bad          completions with a wrong answer
    completion   completions to score and print, without a judgement
    style        form of an answer in a completion: a name of `rewards.attacks.STYLES` or a text with `{answer}` in it
    right, wrong a right and a wrong answer, which become a good and a bad completion and the known attacks, in this style;
                 without them, the attacks contain the first good and the first bad completion

The golden rows of the presets in `rewards/golden/` are examples.

>>> report = check(load("gsm8k-hash"), [{"prompt": "6 x 12?", "answer": "72", "style": "hash", "right": "72"}])
>>> report.passed, [case.total for case in report.cases if case.kind == "good"]
(True, [1.1])
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from rewards.attacks import ANSWER_STYLES, known_attacks, render_answer
from rewards.components.math_text import reference_text
from rewards.errors import RewardsError, UnknownPresetError
from rewards.functions import FunctionComponent, from_function
from rewards.preset import Preset
from rewards.presets import load, names
from rewards.protocol import FAILURES, Status
from rewards.samples import REFERENCE_COLUMNS, build_samples, completion_text, plain, prompt_text

Row: TypeAlias = Mapping[str, Any]
NOT_COLUMNS = frozenset({"prompt", "good", "bad", "completion", "style", "right", "wrong"})
_GOLDEN = Path(__file__).parent / "golden"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    """A completion and its scores.

    `kind` is good, bad, completion, attack, or a name of `rewards.audit.ATTACKS`. `name` is the name of the attack, its answer,
    or the beginning of the completion. `seconds` is the time of all components.
    """

    row: int
    kind: str
    name: str
    completion: Any = field(repr=False)
    total: float | None = None
    values: Mapping[str, float | None] = field(default_factory=dict)
    statuses: Mapping[str, Status] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the reward failed to score the completion."""
        return any(status in FAILURES for status in self.statuses.values())

    @property
    def reason(self) -> str:
        """The first reason of a component; empty if there is none."""
        return next(iter(self.reasons.values()), "")


@dataclass(frozen=True)
class Report:
    """All cases, the `problems` of the reward, and further `notes`, one sentence each."""

    preset: Preset
    cases: list[Case]
    problems: list[str]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether no attack and no wrong answer scores as high as a right answer."""
        return not self.problems


def target(name_or_path: str, **params: Any) -> Preset:
    """Return the preset NAME (also `preset:NAME`), or a preset of the reward function at `file.py:function`.

    Raises:
        RewardsError: no such preset or function, or `params` for a function.
    """
    name_or_path = name_or_path.removeprefix("preset:")
    if name_or_path in names() or ":" not in name_or_path:
        try:
            return load(name_or_path, **params)
        except UnknownPresetError:
            if not name_or_path.endswith(".py"):
                raise
            raise RewardsError(f"{name_or_path!r} is a file. Name a function in it: {name_or_path}:FUNCTION.") from None
    component, weight = from_function(name_or_path)
    if params:
        raise RewardsError(f"{name_or_path} is a function and has no parameters. Remove {', '.join(params)}.")
    return Preset([(component, weight)], name=name_or_path)


def golden(name: str) -> list[dict[str, Any]]:
    """Return the golden rows of a preset of the library; an empty list for other names."""
    file = _GOLDEN / f"{name}.jsonl"
    return read_rows(file) if name in names() and file.is_file() else []


def read_rows(file: str | Path) -> list[dict[str, Any]]:
    """Read rows of a file: JSON Lines, a JSON list, CSV, or Parquet with pyarrow.

    Raises:
        RewardsError: the file cannot be read, or a line is not a JSON object.
    """
    path = Path(file)
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as stream:
                return list(csv.DictReader(stream))
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return [plain(row) for row in parquet.read_table(path).to_pylist()]
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else []
    except ImportError:
        raise RewardsError(
            f"{file} is Parquet, which needs pyarrow. Run: pip install pyarrow, or pass JSON Lines."
        ) from None
    except (OSError, ValueError, csv.Error) as failure:
        raise RewardsError(f"{file} cannot be read: {failure}. Pass a JSON Lines file: one object per line.") from None
    if rows and all(isinstance(row, dict) for row in rows):
        return rows
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as failure:
            raise RewardsError(f"{file}, line {number} is not JSON: {failure}.") from None
        if not isinstance(row, dict):
            raise RewardsError(
                f"{file}, line {number} is not a JSON object. Write {{'prompt': ..., 'good': [...], ...}}."
            )
        rows.append(row)
    return rows


def check(preset: Preset, rows: Iterable[Row], *, attacks: bool = True) -> Report:
    """Score the completions of every row and the known attacks on it; the completions of a row form one group.

    Problems are: the reward fails on a good completion (then the row has no other problem); the total of a bad completion or
    an attack reaches the lowest total of the good ones; the checker rejects a good completion, or accepts one of the others.

    Raises:
        RewardsError: there are no rows, a row has no completions, or its style does not exist.
    """
    cases: list[Case] = []
    problems: list[str] = []
    notes: list[str] = []
    rows = list(rows)
    for number, row in enumerate(rows, start=1):
        row_cases = _cases(number, row, attacks)
        scored = score_cases(preset, [row] * len(row_cases), row_cases)
        cases += scored
        problems += _problems(preset, number, scored)
        if not any(case.failed for case in scored if case.kind == "good"):
            failing = (case for case in scored if case.kind == "attack" and case.failed)
            notes += [
                f"Row {number}: the reward fails on the attack '{case.name}'. {case.reason}".strip() for case in failing
            ]
    if not cases:
        raise RewardsError("There are no rows to score. Pass rows with a prompt and completions in `good` and `bad`.")
    good = [case for case in cases if case.kind == "good"]
    if preset.checker and good and all(case.statuses[preset.checker] == "format" for case in good):
        notes += _style_notes(preset, rows)
    if not good:
        notes.append("No row has a good completion to compare with. Add right answers in `good`.")
    return Report(preset, cases, problems, notes)


def _style_notes(preset: Preset, rows: Sequence[Row]) -> list[str]:
    """Return a note with the first style in which the reward accepts every right answer; an empty list without one."""
    answers = [row.get("right") or next((row[name] for name in REFERENCE_COLUMNS if name in row), None) for row in rows]
    texts = [reference_text(answer) or "" for answer in answers]
    for style in ANSWER_STYLES:
        cases = [Case(0, "good", style, render_answer(style, text)) for text in texts]
        if all(case.statuses[preset.checker or ""] == "ok" for case in score_cases(preset, rows, cases)):
            return [
                "No good completion has the answer in the place that the reward reads. It accepts every right answer in the "
                f"style '{style}', such as {render_answer(style, texts[0])!r}."
            ]
    return []


def _cases(number: int, row: Row, attacks: bool) -> list[Case]:
    """Return the completions of the row and the known attacks on it."""
    completions: dict[str, list[Any]] = {}
    for kind, answer in (("good", "right"), ("bad", "wrong"), ("completion", "")):
        completions[kind] = list(_completions(row.get(kind)))
        if "style" in row and isinstance(row.get(answer), str):
            completions[kind].append(render_answer(row["style"], row[answer]))
    cases = [Case(number, kind, _title(each), each) for kind, entries in completions.items() for each in entries]
    if not cases:
        raise RewardsError(f"Row {number} has no completions. Add some in `good`, `bad` or `completion`.")
    good, bad = ([completion_text(each) for each in completions[kind]] for kind in ("good", "bad"))
    right = row.get("right", good[0] if good else None)
    if not attacks or not isinstance(right, str):
        return cases
    wrong = row.get("wrong") or next((text for text in bad if text.strip()), "something else")
    style = row.get("style", "plain") if "right" in row or row.get("style") == "prose" else "plain"
    known = known_attacks(prompt_text(row.get("prompt", "")), right, str(wrong), style)
    return cases + [Case(number, "attack", attack.name, attack.completion) for attack in known]


def score_cases(preset: Preset, rows: Sequence[Row], cases: Sequence[Case]) -> list[Case]:
    """Return the cases with their scores.

    The cases form one batch. If the reward fails on all of them, or a function on some, halves of the batch are scored
    separately, so that a completion on which a function raises does not affect the others.

    Args:
        rows: the dataset row of each case, with the columns that the reward reads.
    """
    names = dict.fromkeys(str(name) for row in rows for name in row if name not in NOT_COLUMNS)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    prompts = [row.get("prompt", "") for row in rows]
    completions = [  # as a trainer passes them: messages for a prompt of messages
        [{"role": "assistant", "content": case.completion}]
        if isinstance(prompt, list) and not isinstance(case.completion, list)
        else case.completion
        for case, prompt in zip(cases, prompts, strict=True)
    ]
    evaluation = preset.score(build_samples(prompts, completions, **columns))
    scored = [
        replace(
            case,
            total=evaluation.totals[at],
            values={name: column[at] for name, column in evaluation.values.items()},
            statuses={name: column[at] for name, column in evaluation.statuses.items()},
            reasons={
                name: str(column[at]["reason"]) for name, column in evaluation.infos.items() if column[at].get("reason")
            },
            seconds=sum(column[at] for column in evaluation.latencies.values()),
        )
        for at, case in enumerate(cases)
    ]
    alone = all(case.failed for case in scored) or any(
        isinstance(each, FunctionComponent) for each, _ in preset.components
    )
    if len(cases) > 1 and alone and any(case.failed for case in scored):
        half = len(cases) // 2
        return [*score_cases(preset, rows[:half], cases[:half]), *score_cases(preset, rows[half:], cases[half:])]
    return scored


def _problems(preset: Preset, number: int, cases: Sequence[Case]) -> list[str]:
    good = [case for case in cases if case.kind == "good"]
    if not good:
        return []
    failed = [case for case in good if case.failed]
    if failed:  # without a total of the good ones, there is no comparison
        reason = next(filter(None, (case.reason for case in failed)), "no reason given")
        return [f"Row {number}: the reward failed on {len(failed)} of {len(good)} good completions: {reason}"]
    problems = [f"Row {number}: good completion '{case.name}' got no score." for case in good if case.total is None]
    lowest = min((case.total for case in good if case.total is not None), default=None)
    for case in cases:
        label = {"good": "good completion", "bad": "bad completion", "attack": "attack"}.get(case.kind)
        if label is None:
            continue
        correct = preset.checker is not None and case.statuses[preset.checker] == "ok"
        if case.kind == "good":
            if preset.checker is not None and not correct:
                problems.append(f"Row {number}: good completion '{case.name}' is not correct for {preset.checker}.")
        elif lowest is not None and case.total is not None and case.total >= lowest - _ROUNDING:
            problems.append(f"Row {number}: {label} '{case.name}' scores {case.total:g}, a right answer {lowest:g}.")
        elif correct:
            problems.append(f"Row {number}: {label} '{case.name}' is correct for {preset.checker}.")
    return problems


def _completions(value: Any) -> list[Any]:
    """Return the completions of a row's entry: one completion or a list; a list of messages is one completion."""
    if value is None:
        return []
    if isinstance(value, list) and not (value and isinstance(value[0], Mapping)):
        return value
    return [value]


def _title(completion: Any, limit: int = 48) -> str:
    text = " ".join(completion_text(completion)[: 10 * limit].split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
