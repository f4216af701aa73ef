"""Check that a reward distinguishes honest answers from wrong ones and known hacks, as `grpo-kit reward test` does.

Rows are JSON objects, one a line. All of their keys are dataset columns, except for these, each of them optional:

    prompt       a string or a list of messages
    good         completions that deserve the reward: a string, a list of messages, or a list of those
    bad          honest completions with a wrong answer
    completion   completions to score and show, without a verdict
    style        how answers stand in completions: a name of `rewards.hacks.STYLES` or a text with `{answer}` in it
    right, wrong answers from which, with the style, another good and bad completion and the known hacks are made;
                 without them the hacks are made of the first good and the first bad completion as they stand

The rows of the presets themselves are in `rewards/golden/`, and serve as examples.

>>> report = check(load("gsm8k-hash"), [{"prompt": "6 x 12?", "answer": "72", "style": "hash", "right": "72"}])
>>> report.passed, [case.total for case in report.cases if case.kind == "good"]
(True, [1.1])
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from rewards.components.math_text import reference_text
from rewards.errors import RewardsError, UnknownPresetError
from rewards.functions import from_function
from rewards.hacks import ANSWER_STYLES, known_hacks, render_answer
from rewards.preset import Preset
from rewards.presets import load, names
from rewards.protocol import FAILURES, Status
from rewards.samples import REFERENCE_COLUMNS, build_samples, completion_text, prompt_text

Row: TypeAlias = Mapping[str, Any]
NOT_COLUMNS = frozenset({"prompt", "good", "bad", "completion", "style", "right", "wrong"})
_GOLDEN = Path(__file__).parent / "golden"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    """A completion and its scores.

    `kind` is good, bad, completion, hack, or an attack of `rewards.audit`; `name` the hack's, the attack's answer, or the
    beginning of the completion; `seconds` the time that all components took.
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
        """Whether the reward failed to score it."""
        return any(status in FAILURES for status in self.statuses.values())

    @property
    def reason(self) -> str:
        """The first component's reason; empty where none gives one."""
        return next(iter(self.reasons.values()), "")


@dataclass(frozen=True)
class Report:
    """All cases, the reward's `problems`, and further `notes`."""

    preset: Preset
    cases: list[Case]
    problems: list[str]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether no hack and no wrong answer reaches an honest right one."""
        return not self.problems


def target(name_or_path: str, **params: Any) -> Preset:
    """Return a preset by name (`NAME` or `preset:NAME`), or one around the reward function at `file.py:function`.

    Raises:
        RewardsError: neither; or parameters for a function.
    """
    name_or_path = name_or_path.removeprefix("preset:")
    if name_or_path in names() or ":" not in name_or_path:
        try:
            return load(name_or_path, **params)
        except UnknownPresetError:
            if not name_or_path.endswith(".py"):
                raise
            raise RewardsError(
                f"{name_or_path!r} names a file; name the function in it: {name_or_path}:FUNCTION."
            ) from None
    component, weight = from_function(name_or_path)
    if params:
        raise RewardsError(f"{name_or_path} is a function and takes no parameters, but {', '.join(params)} is given.")
    return Preset([(component, weight)], name=name_or_path)


def golden(name: str) -> list[dict[str, Any]]:
    """Return the golden rows of a preset; none for functions and presets of your own."""
    file = _GOLDEN / f"{name}.jsonl"
    return read_rows(file) if name in names() and file.is_file() else []


def read_rows(file: str | Path) -> list[dict[str, Any]]:
    """Read rows of a JSON Lines file.

    Raises:
        RewardsError: no such file, or a line that is no JSON object.
    """
    path = Path(file)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as failure:
        raise RewardsError(f"{file} cannot be read: {failure}. Give a JSON Lines file: one object a line.") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as failure:
            raise RewardsError(f"{file}, line {number} is no JSON: {failure}.") from None
        if not isinstance(row, dict):
            raise RewardsError(f"{file}, line {number} is no JSON object. Write {{'prompt': ..., 'good': [...], ...}}.")
        rows.append(row)
    return rows


def check(preset: Preset, rows: Iterable[Row], *, hacks: bool = True) -> Report:
    """Score every row's completions and the known hacks around them; a row's completions form one group.

    Problems are: a reward that fails on a good completion, which is then all that is said of the row; a bad completion
    or a hack whose total reaches the lowest of the row's good ones; a good one that the preset's checker does not take
    for correct, or a bad one or a hack that it does.

    Raises:
        RewardsError: there are no rows, or a row holds no completions or a style that does not exist.
    """
    cases: list[Case] = []
    problems: list[str] = []
    notes: list[str] = []
    rows = list(rows)
    for number, row in enumerate(rows, start=1):
        made = _cases(number, row, hacks)
        scored = score_cases(preset, [row] * len(made), made)
        cases += scored
        problems += _problems(preset, number, scored)
        if not any(case.failed for case in scored if case.kind == "good"):
            failing = (case for case in scored if case.kind == "hack" and case.failed)
            notes += [
                f"Row {number}: the hack '{case.name}' makes the reward fail. {case.reason}".strip() for case in failing
            ]
    if not cases:
        raise RewardsError("There are no rows to score. Give rows with a prompt and completions in `good` and `bad`.")
    good = [case for case in cases if case.kind == "good"]
    if preset.checker and good and all(case.statuses[preset.checker] == "format" for case in good):
        notes += _style_notes(preset, rows)
    if not good:
        notes.append("No row has a good completion, so there is nothing to compare with. Give some in `good`.")
    return Report(preset, cases, problems, notes)


def _style_notes(preset: Preset, rows: Sequence[Row]) -> list[str]:
    """Return a note with the first style in which the reward accepts the right answer of every row; none if there is none."""
    answers = [row.get("right") or next((row[name] for name in REFERENCE_COLUMNS if name in row), None) for row in rows]
    texts = [reference_text(answer) or "" for answer in answers]
    for style in ANSWER_STYLES:
        cases = [
            Case(0, "good", style, _shaped(row, render_answer(style, t))) for row, t in zip(rows, texts, strict=True)
        ]
        if all(case.statuses[preset.checker or ""] == "ok" for case in score_cases(preset, rows, cases)):
            return [
                "No good completion holds an answer where the reward looks for it. It accepts every right answer in the "
                f"style '{style}', such as {render_answer(style, texts[0])!r}."
            ]
    return []


def _cases(number: int, row: Row, hacks: bool) -> list[Case]:
    """Return the row's own completions, and the hacks around them."""
    completions: dict[str, list[Any]] = {}
    for kind, answer in (("good", "right"), ("bad", "wrong"), ("completion", "")):
        completions[kind] = list(_completions(row.get(kind)))
        if "style" in row and isinstance(row.get(answer), str):
            completions[kind].append(_shaped(row, render_answer(row["style"], row[answer])))
    cases = [Case(number, kind, _title(each), each) for kind, some in completions.items() for each in some]
    if not cases:
        raise RewardsError(f"Row {number} has no completions. Give some in `good`, `bad` or `completion`.")
    good, bad = ([completion_text(each) for each in completions[kind]] for kind in ("good", "bad"))
    right = row.get("right", good[0] if good else None)
    if not hacks or not isinstance(right, str):
        return cases
    wrong = row.get("wrong", bad[0] if bad else "something else")
    style = row.get("style", "plain") if "right" in row or row.get("style") == "prose" else "plain"
    known = known_hacks(prompt_text(row.get("prompt", "")), right, str(wrong), style)
    return cases + [Case(number, "hack", hack.name, _shaped(row, hack.completion)) for hack in known]


def score_cases(preset: Preset, rows: Sequence[Row], cases: Sequence[Case]) -> list[Case]:
    """Return the cases with their scores.

    They are scored in one batch; where the reward fails on all of it, in halves, so that one completion at which a function
    raises costs only itself.

    Args:
        rows: the row of each case, whose columns the reward reads.
    """
    names = dict.fromkeys(str(name) for row in rows for name in row if name not in NOT_COLUMNS)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    prompts = [row.get("prompt", "") for row in rows]
    evaluation = preset.score(build_samples(prompts, [case.completion for case in cases], **columns))
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
    if len(cases) > 1 and all(case.failed for case in scored):
        half = len(cases) // 2
        return [*score_cases(preset, rows[:half], cases[:half]), *score_cases(preset, rows[half:], cases[half:])]
    return scored


def _problems(preset: Preset, number: int, cases: Sequence[Case]) -> list[str]:
    good = [case for case in cases if case.kind == "good"]
    if not good:
        return []
    failed = [case for case in good if case.failed]
    if failed:  # nothing can be said of what a hack earns beside it
        why = next(filter(None, (case.reason for case in failed)), "no reason given")
        return [f"Row {number}: the reward failed on {len(failed)} of {len(good)} good completions: {why}"]
    problems = [f"Row {number}: good completion '{case.name}' got no score." for case in good if case.total is None]
    lowest = min((case.total for case in good if case.total is not None), default=None)
    for case in cases:
        what = {"good": "good completion", "bad": "bad completion", "hack": "hack"}.get(case.kind)
        if what is None:
            continue
        correct = preset.checker is not None and case.statuses[preset.checker] == "ok"
        if case.kind == "good":
            if preset.checker is not None and not correct:
                problems.append(f"Row {number}: good completion '{case.name}' is not correct for {preset.checker}.")
        elif lowest is not None and case.total is not None and case.total >= lowest - _ROUNDING:
            problems.append(f"Row {number}: {what} '{case.name}' scores {case.total:g}, an honest answer {lowest:g}.")
        elif correct:
            problems.append(f"Row {number}: {what} '{case.name}' is correct for {preset.checker}.")
    return problems


def _completions(value: Any) -> list[Any]:
    """Return a list of completions from one completion or a list; a list of messages is one completion."""
    if value is None:
        return []
    if isinstance(value, list) and not (value and isinstance(value[0], Mapping)):
        return value
    return [value]


def _shaped(row: Row, text: str | None) -> Any:
    """Return `text` in the shape of the row's completions: a message if they are conversational."""
    sample = next((c for key in ("good", "bad", "completion") for c in _completions(row.get(key))), row.get("prompt"))
    return [{"role": "assistant", "content": text}] if isinstance(sample, list) else text


def _title(completion: Any, limit: int = 48) -> str:
    text = " ".join(completion_text(completion)[: 10 * limit].split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
