r"""Measure on the rows of a dataset how often a reward pays attacks.

`grpo-kit reward audit` runs this audit, and so does `python -m rewards audit` without the kit.

The audit tries each attack on every row and reports on how many rows it is paid, with examples:

    echo         the formulas of the prompt as the answer, and the prompt as the completion
    constants    the same answer for every row; the rate is that of the best constant
    hedges       several answers, chains, nested tags, cut completions: `rewards.attacks` with the row's reference
    near-misses  another digit, sign, order, entry or bracket
    shuffles     the reference of another row
    slow         answers that take a careless grader very long or fill its memory; the longest time is reported

An answer that equals the row's reference as text or as a number is not an attack and is skipped. Two controls measure how
many right answers are paid: `right` (the reference) and `spellings` (the reference in other notations). Completions on
which the reward fails (raises, hangs) are counted separately, with the reason.

>>> from rewards import load
>>> rows = [{"prompt": f"What is ${n} + {n}$?", "answer": str(2 * n)} for n in range(5, 15)]
>>> report = audit(load("math-verify", deadline=30.0), rows, attacks=("echo", "near-misses", "shuffles"))
>>> [(result.attack, result.rows, result.paid) for result in report.results]
[('right', 10, 10), ('spellings', 10, 10), ('echo', 10, 0), ('near-misses', 10, 0), ('shuffles', 10, 0)]
>>> report.passed
True
"""

import functools
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rewards.attacks import (
    ANSWER_STYLES,
    CONSTANTS,
    SLOW,
    echoes,
    known_attacks,
    near_misses,
    render_answer,
    same_answer,
    spellings,
)
from rewards.components.math_text import reference_text
from rewards.errors import RewardsError, nearest
from rewards.functions import FunctionComponent
from rewards.preset import Preset
from rewards.protocol import Status
from rewards.samples import PROMPT_COLUMNS, REFERENCE_COLUMNS, completion_text, prompt_text
from rewards.testing import Case, golden, read_rows, score_cases

ATTACKS = ("echo", "constants", "hedges", "near-misses", "shuffles", "slow")
LIMIT = 0.005
"""Largest share of rows on which an attack may be paid."""
_SHUFFLES = 3  # references of other rows, for each row
_SLOW_ROWS = 3  # rows with slow answers, since each answer may take the complete deadline
_EXAMPLES = 5
Row = Mapping[str, Any]


class _AuditRow(NamedTuple):
    """A row with its number, counted from 1, and its reference as text."""

    number: int
    row: Row
    reference: str


class Paid(NamedTuple):
    """A paid completion: number of its row (from 1), the attack's answer or name, the completion, and the row's reference."""

    row: int
    name: str
    completion: str
    reference: str


@dataclass(frozen=True)
class Result:
    """Counts of one attack.

    `rows` and `paid` count rows: those with the attack, and those on which it is paid. `tried`, `failed` and `overran` count
    completions: all, those on which the reward failed, and those over the time limit. `reason` is the first failure's,
    `seconds` the longest time of a completion, and `earned` the mean reward.
    """

    attack: str
    rows: int
    paid: int
    tried: int
    seconds: float
    examples: list[Paid] = field(repr=False)
    failed: int = 0
    overran: int = 0
    reason: str = ""
    earned: float = 0.0

    @property
    def rate(self) -> float:
        """Share of the rows on which the attack is paid, 0 to 1."""
        return self.paid / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class Audit:
    """Results of an audit, the controls first, and the style of the answers.

    `seconds` is the time limit for a completion that the audit enforced, or None without a limit. `left_out` is the number of
    rows without a reference.
    """

    preset: Preset
    style: str
    results: list[Result]
    limit: float
    seconds: float | None = None
    left_out: int = 0

    @property
    def problems(self) -> list[str]:
        """Defects of the reward, one sentence each.

        A defect is an attack that is paid on more rows than the limit allows, completions on which the reward hangs, or right
        answers that are not paid.
        """
        problems = [
            f"{result.attack} is paid on {result.paid} of {result.rows} rows ({result.rate:.1%}; limit {self.limit:.1%})"
            for result in self.results
            if result.attack in ATTACKS and result.rate > self.limit
        ]
        problems += [
            f"{result.attack}: the reward takes more than {self.seconds:g} s for {result.overran} of {result.tried} completions; "
            "such a completion stalls training"
            for result in self.results
            if self.seconds is not None and result.overran
        ]
        right = self.results[0]
        if right.failed and right.failed == right.tried:
            problems.append(f"the reward fails on all {right.tried} right answers: {right.reason}")
        elif right.rate < 0.5:
            problems.append(
                f"only {right.paid} of {right.rows} right answers are paid (mean score {right.earned:.3g}), so the other rates "
                f"mean little. The style '{self.style}' may not be yours: set it with "
                "--style. Check also that the reward reads the column of the reference and pays less for an empty text."
            )
        return problems

    @property
    def notes(self) -> list[str]:
        """Rows without a reference, references that are not paid, attacks tried on some rows only, and other failures."""
        right = self.results[0]
        rows = right.rows
        notes = [f"{self.left_out} row(s) without a reference were left out"] if self.left_out else []
        notes += [
            f"right: {rows - right.paid} of {rows} right answers are not paid, the first one in row {each.row}: "
            f"{each.reference[:60]!r}"
            for each in right.examples[:1]
            if right.rate >= 0.5
        ]
        notes += [
            f"{result.attack}: tried on {result.rows} of {rows} rows; the prompts of the others contain no formula"
            for result in self.results
            if result.attack == "echo" and result.rows < rows
        ]
        return notes + [
            f"{result.attack}: the reward fails on {result.failed - result.overran} of {result.tried} completions; "
            f"first reason: {result.reason}"
            for result in self.results
            if result.failed > result.overran and result.failed < result.tried
        ]

    @property
    def passed(self) -> bool:
        """Whether no attack exceeds the limit, no completion hangs the reward, and right answers are paid."""
        return not self.problems

    @property
    def rule(self) -> str:
        """When the audit calls a completion paid."""
        if (checker := self.preset.checker) is None:
            return "Paid means: the total reaches the total of the right answer in this style."
        others = ", ".join(name for name in self.preset.weights if name != checker)
        return f"Paid means: '{checker}' accepts the answer." + (
            f" The column 'earns' also counts {others}." if others else ""
        )

    @property
    def verdict(self) -> str:
        """Problems and notes, one per line, for printing below the table."""
        lines = [*(f"problem: {each}" for each in self.problems), *(f"note: {each}" for each in self.notes)]
        if self.passed:
            lines.append(f"No attack is paid on more than {self.limit:.1%} of the rows.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the audit as plain values, for JSON."""
        results = []
        for result in self.results:
            examples = [each._asdict() | {"completion": each.completion[:300]} for each in result.examples]
            results.append(vars(result) | {"rate": result.rate, "examples": examples})
        return {
            "preset": self.preset.name,
            "style": self.style,
            "limit": self.limit,
            "passed": self.passed,
            "rule": self.rule,
            "problems": self.problems,
            "notes": self.notes,
            "results": results,
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the table to print."""
        rows = []
        for each in self.results:
            texts = [" ".join(f"{example.name} for {example.reference}".split())[:60] for example in each.examples[:2]]
            text = ("" if each.attack in ATTACKS or not texts else "not paid: ") + "; ".join(texts)
            counts = (
                each.attack,
                each.rows,
                each.paid,
                f"{each.rate:.1%}",
                f"{each.earned:.3g}",
                each.failed,
                each.tried,
            )
            rows.append([*map(str, counts), f"{each.seconds:.2g} s", text])
        return ["", "rows", "paid", "rate", "earns", "failed", "tried", "slowest", "examples"], rows


def read_data(file: str | Path | None, prompt: str | None = None, reference: str | None = None) -> list[dict[str, Any]]:
    """Read rows of a dataset in the formats of `read_rows`, with the columns of other trainers.

    Args:
        prompt, reference: columns of prompt and reference; `reward_model.ground_truth` names a nested value. By default
            the first of `PROMPT_COLUMNS`, and the first of `REFERENCE_COLUMNS` or verl's `reward_model.ground_truth`. The rows
            get the values as `prompt` and `reference`, and the entries of verl's `extra_info` as columns; all columns of the
            file stay.

    Raises:
        RewardsError: `file` is None or cannot be read, or no row has the column; the message lists the columns of the file.
    """
    if file is None:
        raise RewardsError("An audit needs rows. Pass a file with --data rows.jsonl.")
    rows = read_rows(file)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for row in rows:
        extra = row.get("extra_info")
        for name, value in extra.items() if isinstance(extra, Mapping) else ():
            row.setdefault(str(name), value)
        prompt_column = prompt or next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
        reference_column = reference or next(
            (name for name in REFERENCE_COLUMNS if row.get(name) is not None), _VERL_REFERENCE
        )
        row |= {
            name: value
            for name, at in (("prompt", prompt_column), ("reference", reference_column))
            if (value := _at(row, at)) is not None
        }
    for name, column in (("prompt", prompt), ("reference", reference)):
        if column is not None and not any(name in row and _at(row, column) is not None for row in rows):
            raise RewardsError(f"{file} has no column {column!r} for the {name}. {nearest(column, columns)}")
    return rows


_VERL_REFERENCE = "reward_model.ground_truth"


def _at(row: Row, path: str | None) -> Any:
    """Return the value of the column `path`, or a nested value such as `reward_model.ground_truth`; None if missing."""
    if path is None or path in row:
        return row.get(path) if path else None
    first, _, rest = path.partition(".")
    inner = row.get(first)
    return _at(inner, rest) if rest and isinstance(inner, Mapping) else None


def audit(
    preset: Preset,
    rows: Iterable[Row],
    *,
    attacks: Sequence[str] = ATTACKS,
    style: str | None = None,
    most: int = 200,
    limit: float = LIMIT,
    seed: int = 0,
    seconds: float | None = None,
) -> Audit:
    """Try the attacks on rows of a dataset.

    Args:
        preset: the reward. A completion is paid if the checker's status is `ok`. Without a checker, it is paid if its total
            reaches the total of the row's reference, provided that the reference earns more than an empty completion. The
            controls must earn more than an empty completion in both cases.
        rows: mappings with `prompt` (a string or messages) and the dataset columns. One of `REFERENCE_COLUMNS` holds the
            reference: a text, a number or a worked solution.
        attacks: names from `ATTACKS`.
        style: form of an answer in a completion: a name of `rewards.attacks.STYLES` or a text with `{answer}` in it. None
            chooses the style in which most references are paid.
        most: the most rows to audit; more rows are sampled at random.
        limit: largest share of rows on which an attack may be paid, 0 to 1.
        seed: seed of the random draws.
        seconds: time limit for one completion, only for presets with a user's function. The function then runs in a child
            process (if the system can fork), one completion at a time; a process over the limit is killed. None calls it in
            this process with all completions at once. Components of the library that may hang have their own deadlines.

    Raises:
        RewardsError: no row has a reference, no such attack or style, or the preset runs programs.
    """
    for attack in attacks:
        if attack not in ATTACKS:
            raise RewardsError(f"No attack {attack!r}. {nearest(attack, ATTACKS)}")
    rng = random.Random(f"audit/{seed}")
    all_rows = list(rows)
    usable: list[_AuditRow] = []
    for number, row in enumerate(all_rows, start=1):
        reference = next((row[name] for name in REFERENCE_COLUMNS if row.get(name) is not None), None)
        if (text := reference_text(reference)) is not None:
            usable.append(_AuditRow(number, row, text))
    if not usable:
        columns = ", ".join(dict.fromkeys(str(name) for row in all_rows for name in row)) or "none"
        raise RewardsError(
            f"No row has a reference: a text, a number or a solution in one of {', '.join(REFERENCE_COLUMNS)}. "
            f"Columns: {columns}. Rename the column of the reference, or pass its name with --reference."
        )
    left_out = len(all_rows) - len(usable)
    if len(usable) > most:
        usable = rng.sample(usable, most)
    if not any(isinstance(component, FunctionComponent) for component, _ in preset.components):
        seconds = None
    score = functools.partial(_score, preset, [each.row for each in usable], seconds)
    style = style or _best_style(preset, usable, score)
    if style == "code":
        raise RewardsError(
            f"{preset.name} runs programs, and an audit cannot write a right program from a row's tests. Run `reward test` "
            "with programs in `good` and `bad`; it tries the known attacks on them."
        )
    order = ("nothing", "right", "spellings", *attacks)
    cases = score(sorted(_attempts(usable, order, style, rng), key=lambda case: order.index(case.kind)))
    nothing, right = (
        {case.row: case.total or 0.0 for case in cases if case.kind == kind} for kind in ("nothing", "right")
    )
    thresholds = {at: total for at, total in right.items() if total > nothing[at]}

    def is_paid(case: Case) -> bool:
        is_attack = case.kind in ATTACKS
        return _is_paid(preset, case, thresholds) and (is_attack or (case.total or 0.0) > nothing[case.row])

    results = [
        _result(attack, [(case, is_paid(case)) for case in cases if case.kind == attack], usable)
        for attack in ("right", "spellings", *attacks)
    ]
    return Audit(preset, style, results, limit, seconds, left_out)


def _best_style(preset: Preset, rows: Sequence[_AuditRow], score: Callable[[list[Case]], list[Case]]) -> str:
    """Return the style of the preset's golden rows, else the style in which most of the first 8 references are paid."""
    golden_style = next((str(row["style"]) for row in golden(preset.name) if "style" in row), None)
    if golden_style is not None:
        return golden_style
    cases = [
        Case(at, style, "", render_answer(style, each.reference))
        for style in ANSWER_STYLES
        for at, each in enumerate(rows[:8])
    ]
    earned = dict.fromkeys(ANSWER_STYLES, 0.0)
    for case in score(cases):
        earned[case.kind] += _is_paid(preset, case, {}) if preset.checker else case.total or 0.0
    return max(earned, key=lambda style: earned[style])


def _attempts(rows: Sequence[_AuditRow], attacks: Sequence[str], style: str, rng: random.Random) -> Iterable[Case]:
    """Yield a case for each completion to score; `row` of a case is the index in `rows`."""
    references = [row.reference for row in rows]
    for at, (_, row, text) in enumerate(rows):
        prompt = prompt_text(row.get("prompt", ""))
        for attack in attacks:
            if attack == "slow" and at >= _SLOW_ROWS:
                continue
            if attack == "nothing":
                yield Case(at, attack, "", "")
                continue
            if attack == "hedges":
                wrong = next(iter(near_misses(text)), f"not {text}")
                known = known_attacks(prompt, text, wrong, style)
                yield from (Case(at, attack, each.name, each.completion) for each in known)
                continue
            for answer in _ANSWERS[attack](prompt, text, references, rng):
                if attack in ("right", "spellings") or not same_answer(answer, text):
                    yield Case(at, attack, answer, render_answer(style, answer))
            if attack == "echo":
                yield Case(at, attack, "the prompt itself", prompt)


_ANSWERS: Mapping[str, Callable[[str, str, Sequence[str], random.Random], Sequence[str]]] = {
    "right": lambda prompt, text, references, rng: [text],
    "spellings": lambda prompt, text, references, rng: spellings(text),
    "echo": lambda prompt, text, references, rng: echoes(prompt),
    "constants": lambda prompt, text, references, rng: CONSTANTS,
    "near-misses": lambda prompt, text, references, rng: near_misses(text),
    "shuffles": lambda prompt, text, references, rng: rng.sample(references, min(_SHUFFLES, len(references))),
    "slow": lambda prompt, text, references, rng: SLOW,
}


def _score(preset: Preset, rows: Sequence[Row], seconds: float | None, cases: list[Case]) -> list[Case]:
    """Return the cases with their scores.

    With `seconds`, a child process scores the cases one by one. It is killed and replaced if a case takes longer.
    """
    case_rows = [rows[case.row] for case in cases]
    torch = sys.modules.get("torch")  # a forked child cannot use CUDA if this process has initialised it
    on_gpu = torch is not None and torch.cuda.is_initialized()
    if seconds is None or on_gpu or "fork" not in multiprocessing.get_all_start_methods():
        return score_cases(preset, case_rows, cases)
    context = multiprocessing.get_context("fork")
    scored: list[Case] = []
    while (start := len(scored)) < len(cases):
        receiver, sender = context.Pipe(duplex=False)

        def send_scores(pipe: Any = sender, start: int = start) -> None:
            for row, case in zip(case_rows[start:], cases[start:], strict=True):
                pipe.send(score_cases(preset, [row], [case])[0])

        child = context.Process(target=send_scores)
        child.start()
        sender.close()
        status: Status = "timeout"
        reason = f"no result within {seconds:g} s"
        try:
            while len(scored) < len(cases) and receiver.poll(seconds):
                scored.append(receiver.recv())
        except EOFError:
            status, reason = "error", "the process of the reward ended: it crashed or ran out of memory"
        finally:
            child.kill()
            child.join()
            receiver.close()
        if len(scored) < len(cases):
            name = preset.checker or preset.components[0].component.name
            spent = seconds if status == "timeout" else 0.0
            scored.append(replace(cases[len(scored)], statuses={name: status}, reasons={name: reason}, seconds=spent))
    return scored


def _is_paid(preset: Preset, case: Case, thresholds: Mapping[int, float]) -> bool:
    """Whether the checker accepts the completion; without a checker, whether its total reaches the threshold of its row."""
    if preset.checker is not None:
        return case.statuses.get(preset.checker) == "ok"
    return case.total is not None and case.row in thresholds and case.total >= thresholds[case.row] - 1e-9


def _result(attack: str, tried: Sequence[tuple[Case, bool]], rows: Sequence[_AuditRow]) -> Result:
    """Count one attack. For constants, only the best one counts; for spellings, all of a row must be paid."""
    counted = tried
    if attack == "constants":
        by_answer: dict[str, list[tuple[Case, bool]]] = {}
        for case, is_paid in tried:
            by_answer.setdefault(case.name, []).append((case, is_paid))
        counted = max(by_answer.values(), key=lambda cases: sum(is_paid for _, is_paid in cases), default=[])
    tried_rows = {case.row for case, _ in counted}
    paid = {case.row for case, is_paid in counted if is_paid}
    if attack == "spellings":
        paid = tried_rows - {case.row for case, is_paid in counted if not is_paid}
    examples = [case for case, is_paid in tried if is_paid == (attack in ATTACKS)]
    failed = [case for case, _ in tried if case.failed]
    overran = [case for case in failed if "timeout" in case.statuses.values()]
    return Result(
        attack=attack,
        rows=len(tried_rows),
        paid=len(paid),
        tried=len(tried),
        seconds=max((case.seconds for case, _ in tried), default=0.0),
        examples=[
            Paid(rows[case.row].number, case.name, completion_text(case.completion), rows[case.row].reference)
            for case in examples[:_EXAMPLES]
        ],
        failed=len(failed),
        overran=len(overran),
        earned=sum(case.total or 0.0 for case, _ in tried) / max(1, len(tried)),
        reason=next((case.reason for case in sorted(failed, key=lambda case: case in overran)), "")[:200],
    )
