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
import itertools
import json
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rewards.components.math_text import reference_text
from rewards.errors import RewardsError, nearest
from rewards.functions import FunctionComponent
from rewards.hacks import answered, known_hacks
from rewards.preset import Preset
from rewards.protocol import FAILURES, Context, Sample, Score
from rewards.samples import REFERENCE_COLUMNS, build_samples, plain, prompt_text
from rewards.testing import NOT_COLUMNS, golden, read_rows
from rewards.variants import CONSTANTS, SLOW, echoes, near_misses, same_answer, spellings

ATTACKS = ("echo", "constants", "hedges", "near-misses", "shuffles", "slow")
LIMIT = 0.005
"""Largest share of rows on which an attack may be paid."""
_SHUFFLES = 3  # references of others that are tried on each row
_SLOW_ROWS = 3  # rows on which slow answers are tried: each may take the whole deadline
_EXAMPLES = 5
_PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input")
_TRIED_STYLES = ("boxed", "answer", "hash", "xml", "plain", "Answer: {answer}")
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
    """Counts for one attack: rows on which it was tried and was paid, completions tried, on how many of them the
    reward failed and took too long, and why first, and the longest time."""

    attack: str
    rows: int
    paid: int
    tried: int
    seconds: float
    examples: list[Paid] = field(repr=False)
    failed: int = 0
    overran: int = 0
    reason: str = ""

    @property
    def rate(self) -> float:
        """Share of the rows on which the attack is paid."""
        return self.paid / self.rows if self.rows else 0.0

    @property
    def is_attack(self) -> bool:
        """Whether this is an attack; of the honest answers, the examples are those that were not paid."""
        return self.attack in ATTACKS

    @property
    def cells(self) -> list[str]:
        """Cells of the row in the audit's table."""
        shown = [f"{example.how} for {example.reference}" for example in self.examples[:2]]
        text = "; ".join(" ".join(words.split())[:60] for words in shown)
        if shown and not self.is_attack:
            text = f"not: {text}"
        counts = (self.attack, self.rows, self.paid, f"{self.rate:.1%}", self.failed, self.tried)
        return [str(cell).encode("utf-8", "replace").decode() for cell in (*counts, f"{self.seconds:.2g} s", text)]


@dataclass(frozen=True)
class Audit:
    """All results, the honest ones first, and the style in which answers were given; `seconds` is what the audit itself
    allowed the reward for a completion, None where nothing was cut off."""

    preset: Preset
    style: str
    results: list[Result]
    limit: float
    seconds: float | None = None

    @property
    def problems(self) -> list[str]:
        """Attacks that are paid on more rows than the limit allows, completions on which the reward hangs, and right answers
        that are not paid at all."""
        problems = [
            f"{result.attack} is paid on {result.paid} of {result.rows} rows ({result.rate:.1%}; limit {self.limit:.1%})"
            for result in self.results
            if result.is_attack and result.rate > self.limit
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
                f"only {right.paid} of {right.rows} right answers are paid, so the rates say little: "
                "is the style right, and is the reference in the column that the reward reads?"
            )
        return problems

    @property
    def notes(self) -> list[str]:
        """Attempts that were not made, and other failures of the reward."""
        rows = self.results[0].rows
        notes = [
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
        fields = ("attack", "rows", "paid", "rate", "tried", "failed", "reason", "seconds")
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
        head = ["", "rows", "paid", "rate", "failed", "tried", "slowest", "paid, for instance"]
        return head, [result.cells for result in self.results]


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


class _Attempt(NamedTuple):
    """One completion to score; None where it is missing altogether."""

    attack: str
    row: int
    how: str
    answer: str
    completion: str | None


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
    progress: Callable[[str, int], None] | None = None,
) -> Audit:
    """Try the attacks on rows of a dataset.

    Args:
        preset: what is audited: its checker's status `ok` counts as paid; without a checker, a total that reaches that of
            the row's reference, where this one earns more than an empty completion.
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
        progress: called with each attack and its number of completions before they are scored.

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
    style = style or _best_style(preset, usable, seconds)
    if style == "code":
        raise RewardsError(
            f"{preset.name} runs programs, and of a row's tests no right program can be made to compare with. Give programs in "
            "`good` and `bad` to `reward test`, which tries the known hacks around them."
        )
    order = ("nothing", "right", "spellings", *attacks)
    attempts = sorted(_attempts(usable, order, style, drawn), key=lambda attempt: order.index(attempt.attack))
    scores: list[Score] = []
    for attack, tries in itertools.groupby(attempts, key=lambda attempt: attempt.attack):
        some = list(tries)
        if progress is not None and attack != "nothing":
            progress(attack, len(some))
        scores += _scored(preset, [attempt.row for attempt in usable], some, seconds)
    earned = {
        (attempt.attack, attempt.row): score.value or 0.0 for attempt, score in zip(attempts, scores, strict=True)
    }
    honest = {at: earned["right", at] for at in range(len(usable)) if earned["right", at] > earned["nothing", at]}
    tried = [
        (attempt, score, _is_paid(preset, score, honest.get(attempt.row)))
        for attempt, score in zip(attempts, scores, strict=True)
    ]
    results = [
        _result(attack, [attempt for attempt in tried if attempt[0].attack == attack], usable)
        for attack in ("right", "spellings", *attacks)
    ]
    return Audit(preset, style, results, limit, seconds)


def _best_style(preset: Preset, rows: Sequence[_Usable], seconds: float | None) -> str:
    """Return the style of the preset's golden rows; else the first one in which most of some references are paid."""
    own = next((str(row["style"]) for row in golden(preset.name) if "style" in row), None)
    some = rows[:8]
    tried = [own] if own else list(_TRIED_STYLES)
    attempts = [
        _Attempt(style, at, "", text, answered(style, text)) for style in tried for at, (_, _, text) in enumerate(some)
    ]
    scores = _scored(preset, [attempt.row for attempt in some], attempts, seconds)
    earned = {style: 0.0 for style in tried}
    for attempt, score in zip(attempts, scores, strict=True):
        earned[attempt.attack] += _is_paid(preset, score, None) if preset.checker else score.value or 0.0
    return max(earned, key=lambda style: earned[style])


def _attempts(rows: Sequence[_Usable], attacks: Sequence[str], style: str, drawn: random.Random) -> Iterable[_Attempt]:
    references = [usable.reference for usable in rows]
    for at, (_, row, text) in enumerate(rows):
        prompt = prompt_text(row.get("prompt", ""))
        for attack in attacks:
            if attack == "slow" and at >= _SLOW_ROWS:
                continue
            if attack == "nothing":
                yield _Attempt(attack, at, "", "", "")
                continue
            if attack == "hedges":
                wrong = next(iter(near_misses(text)), f"not {text}")
                hacks = known_hacks(prompt, text, wrong, style)
                yield from (_Attempt(attack, at, hack.name, "", hack.completion) for hack in hacks)
                continue
            for answer in _ANSWERS[attack](prompt, text, references, drawn):
                if attack in ("right", "spellings") or not same_answer(answer, text):
                    yield _Attempt(attack, at, "", answer, answered(style, answer))
            if attack == "echo":
                yield _Attempt(attack, at, "the prompt itself", prompt, prompt)


_ANSWERS: Mapping[str, Callable[[str, str, Sequence[str], random.Random], Sequence[str]]] = {
    "right": lambda prompt, text, references, drawn: [text],
    "spellings": lambda prompt, text, references, drawn: spellings(text),
    "echo": lambda prompt, text, references, drawn: echoes(prompt),
    "constants": lambda prompt, text, references, drawn: CONSTANTS,
    "near-misses": lambda prompt, text, references, drawn: near_misses(text),
    "shuffles": lambda prompt, text, references, drawn: drawn.sample(references, min(_SHUFFLES, len(references))),
    "slow": lambda prompt, text, references, drawn: SLOW,
}


def _scored(preset: Preset, rows: Sequence[Row], attempts: Sequence[_Attempt], seconds: float | None) -> list[Score]:
    """Return the checker's verdict on each attempt; without a checker, scores with the total as their value."""
    prompts = [rows[attempt.row].get("prompt", "") for attempt in attempts]
    completions = [
        [{"role": "assistant", "content": attempt.completion}] if isinstance(prompt, list) else attempt.completion
        for attempt, prompt in zip(attempts, prompts, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in NOT_COLUMNS)
    columns: dict[str, Any] = {name: [rows[attempt.row].get(name) for attempt in attempts] for name in names}
    samples = build_samples(prompts, completions, **columns)
    return _in_parts(preset, samples) if seconds is None else _one_by_one(preset, samples, seconds)


def _one_by_one(preset: Preset, samples: Sequence[Sample], seconds: float) -> list[Score]:
    """Score in a child process, which is killed, and replaced for the rest, when a completion takes longer than `seconds`."""
    torch = sys.modules.get("torch")  # a forked child cannot use a GPU that this process has begun to use
    if "fork" not in multiprocessing.get_all_start_methods() or (torch is not None and torch.cuda.is_initialized()):
        return _in_parts(preset, samples)
    context = multiprocessing.get_context("fork")
    scores: list[Score] = []
    while len(scores) < len(samples):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_tell_scores, args=(preset, samples[len(scores) :], sender))
        child.start()
        sender.close()
        try:
            while len(scores) < len(samples):
                if not receiver.poll(seconds):
                    scores.append(Score(None, "timeout", {"reason": f"not done after {seconds:g} s"}, seconds))
                    break
                scores.append(receiver.recv())
        except EOFError:
            scores.append(Score(None, "error", {"reason": "the process that called it ended: a crash, or memory"}))
        finally:
            child.kill()
            child.join()
            receiver.close()
    return scores


def _tell_scores(preset: Preset, samples: Sequence[Sample], pipe: Any) -> None:
    for sample in samples:
        (score,) = _in_parts(preset, [sample])
        pipe.send(Score(score.value, score.status, {"reason": str(score.info.get("reason", ""))}, score.seconds))


def _in_parts(preset: Preset, samples: Sequence[Sample]) -> list[Score]:
    """Score in one batch; where that fails as a whole, in halves, so that one completion that a function raises at costs only
    itself."""
    if preset.checker is not None:
        scores = preset.verdicts(samples, Context())
    else:
        evaluation = preset.score(samples, Context())
        seconds = [sum(times) for times in zip(*evaluation.latencies.values(), strict=True)]
        failed = [any(status in FAILURES for status in row) for row in zip(*evaluation.statuses.values(), strict=True)]
        reasons = [_first_reason(infos) for infos in zip(*evaluation.infos.values(), strict=True)]
        columns = zip(evaluation.totals, failed, reasons, seconds, strict=True)
        scores = [
            Score(total, "error" if fails else "ok", {"reason": why}, took) for total, fails, why, took in columns
        ]
    if len(samples) > 1 and all(score.status in FAILURES for score in scores):
        half = len(samples) // 2
        return [*_in_parts(preset, samples[:half]), *_in_parts(preset, samples[half:])]
    return scores


def _first_reason(infos: Iterable[Mapping[str, Any]]) -> str:
    return next((str(info["reason"]) for info in infos if info.get("reason")), "")


def _is_paid(preset: Preset, score: Score, honest: float | None) -> bool:
    if preset.checker is not None:
        return score.status == "ok"
    return score.value is not None and honest is not None and score.value >= honest - 1e-9


def _result(attack: str, tried: Sequence[tuple[_Attempt, Score, bool]], rows: Sequence[_Usable]) -> Result:
    """Count one attack: of constants the best single one, of spellings the rows on which all are paid."""
    if attack == "constants":
        by_answer: dict[str, list[tuple[_Attempt, Score, bool]]] = {}
        for attempt in tried:
            by_answer.setdefault(attempt[0].answer, []).append(attempt)
        counted = max(by_answer.values(), key=lambda some: sum(paid for *_, paid in some), default=[])
    else:
        counted = list(tried)
    tried_rows = {attempt.row for attempt, *_ in counted}
    paid = {attempt.row for attempt, _, is_paid in counted if is_paid}
    if attack == "spellings":
        paid = tried_rows - {attempt.row for attempt, _, is_paid in counted if not is_paid}
    shown = [attempt for attempt, _, is_paid in tried if is_paid == (attack in ATTACKS)]
    examples = [
        Paid(
            rows[attempt.row].number,
            attempt.how or attempt.answer,
            attempt.completion or "",
            rows[attempt.row].reference,
        )
        for attempt in shown[:_EXAMPLES]
    ]
    failed = [score for _, score, _ in tried if score.status in FAILURES]
    return Result(
        attack=attack,
        rows=len(tried_rows),
        paid=len(paid),
        tried=len(tried),
        seconds=max((score.seconds or 0.0 for _, score, _ in tried), default=0.0),
        examples=examples,
        failed=len(failed),
        overran=sum(score.status == "timeout" for score in failed),
        reason=_first_reason(score.info for score in sorted(failed, key=lambda score: score.status == "timeout"))[:200],
    )
