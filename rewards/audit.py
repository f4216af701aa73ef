r"""Measure on your own rows how often a reward is earned without solving anything.

What `grpo-kit reward audit` does, and `python -m rewards audit` without the kit.

Each attack is tried on every row, and the audit says on how many it is paid, with examples:

    echo         the prompt's own formulas as the answer, and the prompt as the completion
    constants    one and the same answer to every row; the rate is that of the best of them
    hedges       several answers, chains, tags within tags, cut completions: `rewards.hacks` around the row's reference
    near-misses  another digit, sign, order, entry or bracket
    shuffles     the reference of another row
    slow         answers that hang or fill a careless grader; the longest time is told, too

An answer that is the row's own by spelling or as a number is no attack and is left out. Beside the attacks stand the honest
ones: `right` (the reference) and `spellings` (the same in other words), whose rate says how many right answers are paid.
Where the reward fails (raises, hangs), that is counted by itself, with the reason.

>>> from rewards import load
>>> rows = [{"prompt": f"What is ${n} + {n}$?", "answer": str(2 * n)} for n in range(5, 15)]
>>> found = audit(load("math-verify", deadline=30.0), rows, attacks=("echo", "near-misses", "shuffles"))
>>> [(result.attack, result.rows, result.paid) for result in found.results]
[('right', 10, 10), ('spellings', 10, 10), ('echo', 10, 0), ('near-misses', 10, 0), ('shuffles', 10, 0)]
>>> found.passed
True
"""

import csv
import functools
import json
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rewards.components.math_text import reference_text
from rewards.errors import RewardsError, nearest
from rewards.functions import FunctionComponent
from rewards.hacks import (
    ANSWER_STYLES,
    CONSTANTS,
    SLOW,
    echoes,
    known_hacks,
    near_misses,
    render_answer,
    same_answer,
    spellings,
)
from rewards.preset import Preset
from rewards.protocol import Status
from rewards.samples import REFERENCE_COLUMNS, completion_text, plain, prompt_text
from rewards.testing import Case, golden, read_rows, score_cases

ATTACKS = ("echo", "constants", "hedges", "near-misses", "shuffles", "slow")
LIMIT = 0.005
"""Largest share of rows on which an attack may be paid."""
_SHUFFLES = 3  # references of others that are tried on each row
_SLOW_ROWS = 3  # rows on which slow answers are tried: each may take the whole deadline
_EXAMPLES = 5
_PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input")
Row = Mapping[str, Any]


class _Usable(NamedTuple):
    """A row with its reference as text and its number, counted from 1."""

    number: int
    row: Row
    reference: str


class Paid(NamedTuple):
    """An attack that earned the reward: the row (counted from 1), the attack's answer or name, the completion, the reference."""

    row: int
    how: str
    answer: str
    reference: str


@dataclass(frozen=True)
class Result:
    """Counts for one attack.

    Rows on which it was tried and was paid; completions tried, on how many of them the reward failed and took too long, and
    the first reason; the longest time; what a completion earns on average.
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
        """Share of the rows on which the attack is paid."""
        return self.paid / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class Audit:
    """All results, the honest ones first, and the style in which answers were given.

    `seconds` is what the audit itself allowed the reward for a completion, None where nothing was cut off.
    """

    preset: Preset
    style: str
    results: list[Result]
    limit: float
    seconds: float | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong with the reward, a sentence each.

        Attacks that are paid on more rows than the limit allows, completions on which the reward hangs, and right answers that
        are not paid at all.
        """
        problems = [
            f"{result.attack} is paid on {result.paid} of {result.rows} rows ({result.rate:.1%}; limit {self.limit:.1%})"
            for result in self.results
            if result.attack in ATTACKS and result.rate > self.limit
        ]
        problems += [
            f"{result.attack}: {result.overran} of {result.tried} completions take the reward longer than {self.seconds:g} s; "
            "one such completion holds training up"
            for result in self.results
            if self.seconds is not None and result.overran
        ]
        right = self.results[0]
        if right.failed and right.failed == right.tried:
            problems.append(f"the reward fails on all of {right.tried} right answers: {right.reason}")
        elif right.rate < 0.5:
            problems.append(
                f"only {right.paid} of {right.rows} references are paid as answers ({right.earned:.3g} on average), so the rates "
                "say little: is the style right, and is the reference in the column that the reward reads?"
            )
        return problems

    @property
    def notes(self) -> list[str]:
        """Attempts that were not made, and other failures of the reward."""
        right = self.results[0]
        rows = right.rows
        notes = [
            f"right: {rows - right.paid} of {rows} references are not paid as answers, first that of row {each.row}: "
            f"{each.reference[:60]!r}"
            for each in right.examples[:1]
            if right.rate >= 0.5
        ]
        notes += [
            f"{result.attack}: tried on {result.rows} of {rows} rows; the others have no prompt that holds one"
            for result in self.results
            if result.attack == "echo" and result.rows < rows
        ]
        return notes + [
            f"{result.attack}: the reward fails on {result.failed - result.overran} of {result.tried} completions, "
            f"first with: {result.reason}"
            for result in self.results
            if result.failed > result.overran and result.failed < result.tried
        ]

    @property
    def passed(self) -> bool:
        """Whether no attack is paid on more rows than the limit allows, none hangs the reward, and right answers are paid."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """Problems and notes, a line each, as they are printed below the table."""
        lines = [*(f"problem: {each}" for each in self.problems), *(f"note: {each}" for each in self.notes)]
        if self.passed:
            lines.append(f"No attack is paid on more than {self.limit:.1%} of the rows.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        fields = ("attack", "rows", "paid", "rate", "earned", "tried", "failed", "reason", "seconds")
        results = [
            {name: getattr(result, name) for name in fields}
            | {"examples": [example._asdict() | {"answer": example.answer[:300]} for example in result.examples]}
            for result in self.results
        ]
        return {
            "preset": self.preset.name,
            "style": self.style,
            "limit": self.limit,
            "passed": self.passed,
            "problems": self.problems,
            "notes": self.notes,
            "results": results,
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of a table to print."""
        rows = []
        for each in self.results:
            shown = [" ".join(f"{example.how} for {example.reference}".split())[:60] for example in each.examples[:2]]
            text = ("" if each.attack in ATTACKS or not shown else "not: ") + "; ".join(shown)
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
        return ["", "rows", "paid", "rate", "earns", "failed", "tried", "slowest", "paid, for instance"], rows


def read_data(file: str | Path, prompt: str | None = None, reference: str | None = None) -> list[dict[str, Any]]:
    """Read rows of a dataset in the formats of other trainers: JSON Lines, a JSON list, CSV, or Parquet with pyarrow.

    Args:
        prompt, reference: the columns that hold them, `reward_model.ground_truth` for what lies in a column. By default
            `prompt`, `question`, `problem` and the like, and `reference`, `answer`, `solution`, `ground_truth`, or verl's
            `reward_model`. They become `prompt` and `reference`, and what verl keeps in `extra_info` columns; the columns
            themselves stay.

    Raises:
        RewardsError: the file cannot be read, or no row has that column; the message lists those that there are.
    """
    rows = [dict(row) for row in _rows_of(Path(file))]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for row in rows:
        extra = row.get("extra_info")
        for name, value in extra.items() if isinstance(extra, Mapping) else ():
            row.setdefault(str(name), value)
        prompt_column = prompt or next((name for name in _PROMPT_COLUMNS if row.get(name) is not None), None)
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
    """Return the column of that name, or a nested value: `reward_model.ground_truth`."""
    if path is None or path in row:
        return row.get(path) if path else None
    first, _, rest = path.partition(".")
    inner = row.get(first)
    return _at(inner, rest) if rest and isinstance(inner, Mapping) else None


def _rows_of(file: Path) -> Iterable[Row]:
    try:
        if file.suffix == ".csv":
            with file.open(newline="", encoding="utf-8-sig") as opened:
                return list(csv.DictReader(opened))
        if file.suffix == ".parquet":
            from pyarrow import parquet

            return [plain(row) for row in parquet.read_table(file).to_pylist()]
        listed = json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else None
    except ImportError:
        raise RewardsError(
            f"{file} is Parquet, which needs pyarrow: pip install pyarrow, or give JSON Lines."
        ) from None
    except json.JSONDecodeError:
        listed = None  # JSON Lines by another name
    except (OSError, ValueError, csv.Error) as failure:
        raise RewardsError(f"{file} cannot be read: {failure}.") from None
    if isinstance(listed, list) and all(isinstance(row, Mapping) for row in listed):
        return listed
    return read_rows(file)


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
        preset: what is audited: its checker's status `ok` counts as paid; without a checker, a total that reaches that of
            the row's reference, where this one earns more than an empty completion. A reference is paid as an answer if it
            also earns more than an empty completion.
        rows: objects with `prompt` (a string or messages) and the data set's columns, the reference among them as a text,
            number or worked solution.
        attacks: some of `ATTACKS`.
        style: how answers stand in completions, as in `rewards.hacks.STYLES`, or a text with `{answer}` in it. None for
            the one in which most references are paid.
        most: rows that are looked at, drawn at random where there are more.
        limit: share of rows on which an attack may be paid.
        seed: of what is drawn.
        seconds: that a function of your own may take for one completion: it is then called in a process of its own (where
            the system can fork), with one completion at a time, and the process is ended when it takes longer. None calls it
            here, with all of them at once. A preset's parts that may hang have deadlines of their own in either case.

    Raises:
        RewardsError: there are no rows with a reference, or an attack or style that does not exist.
    """
    for attack in attacks:
        if attack not in ATTACKS:
            raise RewardsError(f"No attack {attack!r}. {nearest(attack, ATTACKS)}")
    drawn = random.Random(f"audit/{seed}")
    all_rows = list(rows)
    usable = []
    for number, row in enumerate(all_rows, start=1):
        reference = next((row[name] for name in REFERENCE_COLUMNS if row.get(name) is not None), None)
        if (text := reference_text(reference)) is not None:
            usable.append(_Usable(number, row, text))
    if not usable:
        columns = ", ".join(dict.fromkeys(str(name) for row in all_rows for name in row)) or "none"
        raise RewardsError(
            f"No row has a reference: a text, a number or a solution in one of {', '.join(REFERENCE_COLUMNS)}. "
            f"Columns: {columns}. Name another one (on the command line: --reference), or copy it."
        )
    if len(usable) > most:
        usable = drawn.sample(usable, most)
    if not any(isinstance(component, FunctionComponent) for component, _ in preset.components):
        seconds = None
    scored = functools.partial(_scored, preset, [each.row for each in usable], seconds)
    style = style or _best_style(preset, usable, scored)
    if style == "code":
        raise RewardsError(
            f"{preset.name} runs programs, and of a row's tests no right program can be made to compare with. Give programs in "
            "`good` and `bad` to `reward test`, which tries the known hacks around them."
        )
    order = ("nothing", "right", "spellings", *attacks)
    cases = scored(sorted(_attempts(usable, order, style, drawn), key=lambda case: order.index(case.kind)))
    nothing, right = (
        {case.row: case.total or 0.0 for case in cases if case.kind == kind} for kind in ("nothing", "right")
    )
    honest = {at: total for at, total in right.items() if total > nothing[at]}

    def is_paid(case: Case) -> bool:
        is_attack = case.kind in ATTACKS
        return _is_paid(preset, case, honest) and (is_attack or (case.total or 0.0) > nothing[case.row])

    results = [
        _result(attack, [(case, is_paid(case)) for case in cases if case.kind == attack], usable)
        for attack in ("right", "spellings", *attacks)
    ]
    return Audit(preset, style, results, limit, seconds)


def _best_style(preset: Preset, rows: Sequence[_Usable], scored: Callable[[list[Case]], list[Case]]) -> str:
    """Return the style of the preset's golden rows; else the first one in which most of some references are paid."""
    own = next((str(row["style"]) for row in golden(preset.name) if "style" in row), None)
    if own is not None:
        return own
    made = [
        Case(at, style, "", render_answer(style, each.reference))
        for style in ANSWER_STYLES
        for at, each in enumerate(rows[:8])
    ]
    earned = dict.fromkeys(ANSWER_STYLES, 0.0)
    for case in scored(made):
        earned[case.kind] += _is_paid(preset, case, {}) if preset.checker else case.total or 0.0
    return max(earned, key=lambda style: earned[style])


def _attempts(rows: Sequence[_Usable], attacks: Sequence[str], style: str, drawn: random.Random) -> Iterable[Case]:
    """Yield a case for each completion that is tried; its `row` is the position in `rows`."""
    references = [usable.reference for usable in rows]
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
                hacks = known_hacks(prompt, text, wrong, style)
                yield from (Case(at, attack, hack.name, hack.completion) for hack in hacks)
                continue
            for answer in _ANSWERS[attack](prompt, text, references, drawn):
                if attack in ("right", "spellings") or not same_answer(answer, text):
                    yield Case(at, attack, answer, render_answer(style, answer))
            if attack == "echo":
                yield Case(at, attack, "the prompt itself", prompt)


_ANSWERS: Mapping[str, Callable[[str, str, Sequence[str], random.Random], Sequence[str]]] = {
    "right": lambda prompt, text, references, drawn: [text],
    "spellings": lambda prompt, text, references, drawn: spellings(text),
    "echo": lambda prompt, text, references, drawn: echoes(prompt),
    "constants": lambda prompt, text, references, drawn: CONSTANTS,
    "near-misses": lambda prompt, text, references, drawn: near_misses(text),
    "shuffles": lambda prompt, text, references, drawn: drawn.sample(references, min(_SHUFFLES, len(references))),
    "slow": lambda prompt, text, references, drawn: SLOW,
}


def _scored(preset: Preset, rows: Sequence[Row], seconds: float | None, cases: list[Case]) -> list[Case]:
    """Return the cases with their scores.

    `seconds`: each case is scored in a child process, which is killed, and replaced for the rest, when a completion takes
    longer.
    """
    cases = [
        replace(case, completion=[{"role": "assistant", "content": case.completion}])
        if isinstance(rows[case.row].get("prompt"), list)
        else case
        for case in cases
    ]
    own = [rows[case.row] for case in cases]
    torch = sys.modules.get("torch")  # a forked child cannot use a GPU that this process has begun to use
    on_gpu = torch is not None and torch.cuda.is_initialized()
    if seconds is None or on_gpu or "fork" not in multiprocessing.get_all_start_methods():
        return score_cases(preset, own, cases)
    context = multiprocessing.get_context("fork")
    scored: list[Case] = []
    while (start := len(scored)) < len(cases):
        receiver, sender = context.Pipe(duplex=False)

        def tell_scores(pipe: Any = sender, start: int = start) -> None:
            for row, case in zip(own[start:], cases[start:], strict=True):
                pipe.send(score_cases(preset, [row], [case])[0])

        child = context.Process(target=tell_scores)
        child.start()
        sender.close()
        status: Status = "timeout"
        reason = f"not done after {seconds:g} s"
        try:
            while len(scored) < len(cases) and receiver.poll(seconds):
                scored.append(receiver.recv())
        except EOFError:
            status, reason = "error", "the process that called it ended: a crash, or memory"
        finally:
            child.kill()
            child.join()
            receiver.close()
        if len(scored) < len(cases):
            name = preset.checker or preset.components[0].component.name
            spent = seconds if status == "timeout" else 0.0
            scored.append(replace(cases[len(scored)], statuses={name: status}, reasons={name: reason}, seconds=spent))
    return scored


def _is_paid(preset: Preset, case: Case, honest: Mapping[int, float]) -> bool:
    """Whether the checker takes it for right; without a checker, whether its total reaches the honest one of its row."""
    if preset.checker is not None:
        return case.statuses.get(preset.checker) == "ok"
    return case.total is not None and case.row in honest and case.total >= honest[case.row] - 1e-9


def _result(attack: str, tried: Sequence[tuple[Case, bool]], rows: Sequence[_Usable]) -> Result:
    """Count one attack: of constants the best single one, of spellings the rows on which all are paid."""
    counted = tried
    if attack == "constants":
        by_answer: dict[str, list[tuple[Case, bool]]] = {}
        for case, is_paid in tried:
            by_answer.setdefault(case.name, []).append((case, is_paid))
        counted = max(by_answer.values(), key=lambda some: sum(is_paid for _, is_paid in some), default=[])
    tried_rows = {case.row for case, _ in counted}
    paid = {case.row for case, is_paid in counted if is_paid}
    if attack == "spellings":
        paid = tried_rows - {case.row for case, is_paid in counted if not is_paid}
    shown = [case for case, is_paid in tried if is_paid == (attack in ATTACKS)]
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
            for case in shown[:_EXAMPLES]
        ],
        failed=len(failed),
        overran=len(overran),
        earned=sum(case.total or 0.0 for case, _ in tried) / max(1, len(tried)),
        reason=next((case.reason for case in sorted(failed, key=lambda case: case in overran)), "")[:200],
    )
