r"""How often can a reward be earned without solving anything, on rows of one's own? What `grpo-kit reward audit` does.

Each attack is tried on every row, and the audit says on how many it is paid, with examples:

    echo         the prompt's own formulas in the place of the answer, and the prompt as the completion
    constants    one and the same answer to every row; the rate is that of the best of them
    hedges       several answers, chains, tags within tags, cut completions: `rewards.hacks` around the row's reference
    near-misses  another digit, sign, order, entry or bracket
    shuffles     the reference of another row
    slow         answers that hang or fill a careless grader; the longest time is told, too

An answer that is the row's own by spelling or as a number is no attack and is left out. Beside the attacks stand the honest
ones: `right` (the reference) and `spellings` (the same in other words), whose rate says how many right answers are paid.

>>> from rewards import load
>>> rows = [{"prompt": f"What is ${n} + {n}$?", "answer": str(2 * n)} for n in range(5, 15)]
>>> found = audit(load("math-verify", deadline=30.0), rows, attacks=("echo", "near-misses", "shuffles"))
>>> [(result.attack, result.rows, result.paid) for result in found.results]
[('right', 10, 10), ('spellings', 10, 10), ('echo', 10, 0), ('near-misses', 10, 0), ('shuffles', 10, 0)]
>>> found.passed
True
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rewards.components.math_text import reference_text
from rewards.errors import RewardsError, nearest
from rewards.hacks import answered, known_hacks
from rewards.preset import Preset
from rewards.protocol import FAILURES, Context, Sample, Score
from rewards.samples import REFERENCE_COLUMNS, build_samples, prompt_text
from rewards.testing import NOT_COLUMNS, golden
from rewards.variants import CONSTANTS, SLOW, echoes, near_misses, same_answer, spellings

__all__ = ["ATTACKS", "LIMIT", "Audit", "Paid", "Result", "audit"]

ATTACKS = ("echo", "constants", "hedges", "near-misses", "shuffles", "slow")
LIMIT = 0.005
"""Share of rows on which an attack may be paid."""
_SHUFFLES = 3  # references of others that are tried on each row
_SLOW_ROWS = 3  # rows on which slow answers are tried: each may take the whole deadline
_EXAMPLES = 5
_TRIED_STYLES = ("boxed", "answer", "hash", "xml", "plain", "Answer: {answer}")
Row = Mapping[str, Any]


class _Usable(NamedTuple):
    """A row with its reference as text, and which row of all it is."""

    number: int
    row: Row
    reference: str


class Paid(NamedTuple):
    """An attack that earned the reward: on which row (counted from 1), how, and what the row's reference was."""

    row: int
    how: str
    answer: str
    reference: str


@dataclass(frozen=True)
class Result:
    """Of one attack: on how many rows it was tried and was paid, how many completions that were, and the longest time."""

    attack: str
    rows: int
    paid: int
    tried: int
    seconds: float
    examples: list[Paid] = field(repr=False)

    @property
    def rate(self) -> float:
        """Share of the rows."""
        return self.paid / self.rows if self.rows else 0.0

    @property
    def is_attack(self) -> bool:
        """Not one of the honest answers, whose examples are those that were not paid."""
        return self.attack in ATTACKS


@dataclass(frozen=True)
class Audit:
    """All results, the honest ones first, and the style in which answers were given."""

    preset: Preset
    style: str
    results: list[Result]
    limit: float

    @property
    def problems(self) -> list[str]:
        """Attacks that are paid on more rows than the limit allows; and right answers that are not paid at all."""
        found = [
            f"{result.attack} is paid on {result.paid} of {result.rows} rows ({result.rate:.1%}; limit {self.limit:.1%})"
            for result in self.results
            if result.is_attack and result.rate > self.limit
        ]
        right = self.results[0]
        if right.rate < 0.5:
            found.append(
                f"only {right.paid} of {right.rows} right answers are paid, so the rates say little: "
                "is the style right, and is the reference in the column that the reward reads?"
            )
        return found

    @property
    def passed(self) -> bool:
        """No attack is paid on more rows than the limit allows, and right answers are."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        results = [
            {
                **{name: getattr(one, name) for name in ("attack", "rows", "paid", "rate", "tried", "seconds")},
                "examples": [example._asdict() | {"answer": example.answer[:300]} for example in one.examples],
            }
            for one in self.results
        ]
        return {"preset": self.preset.name, "style": self.style, "problems": self.problems, "results": results}


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
) -> Audit:
    """Tries the attacks on rows of a data set.

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

    Raises:
        RewardsError: there are no rows with a reference, or an attack or style that does not exist.
    """
    for attack in attacks:
        if attack not in ATTACKS:
            raise RewardsError(f"No attack {attack!r}. {nearest(attack, ATTACKS)}")
    drawn = random.Random(f"audit/{seed}")
    numbered = enumerate(rows, start=1)
    usable = [_Usable(number, row, text) for number, row in numbered if (text := _reference(row)) is not None]
    if not usable:
        raise RewardsError(
            f"No row has a reference. Give rows with one of {', '.join(REFERENCE_COLUMNS)}: a text, a number or a solution."
        )
    if len(usable) > most:
        usable = drawn.sample(usable, most)
    style = style or _best_style(preset, usable)
    attempts = list(_attempts(usable, ("nothing", "right", "spellings", *attacks), style, drawn))
    scores = _scored(preset, [one.row for one in usable], attempts)
    earned = {(one.attack, one.row): score.value or 0.0 for one, score in zip(attempts, scores, strict=True)}
    honest = {at: earned["right", at] for at in range(len(usable)) if earned["right", at] > earned["nothing", at]}
    tried = [
        (one, score, _is_paid(preset, score, honest.get(one.row))) for one, score in zip(attempts, scores, strict=True)
    ]
    results = [
        _result(attack, [one for one in tried if one[0].attack == attack], usable)
        for attack in ("right", "spellings", *attacks)
    ]
    return Audit(preset, style, results, limit)


def _reference(row: Row) -> str | None:
    given = next((row[name] for name in REFERENCE_COLUMNS if row.get(name) is not None), None)
    return reference_text(given)


def _best_style(preset: Preset, rows: Sequence[_Usable]) -> str:
    """The preset's own, by its golden rows; else the one in which most of some references are paid, the first of equals."""
    own = next((str(row["style"]) for row in golden(preset.name) if "style" in row), None)
    some = rows[:8]
    tried = [own] if own else list(_TRIED_STYLES)
    attempts = [
        _Attempt(style, at, "", text, answered(style, text)) for style in tried for at, (_, _, text) in enumerate(some)
    ]
    scores = _scored(preset, [one.row for one in some], attempts)
    earned = {style: 0.0 for style in tried}
    for one, score in zip(attempts, scores, strict=True):
        earned[one.attack] += _is_paid(preset, score, None) if preset.checker else score.value or 0.0
    return max(earned, key=lambda style: earned[style])


def _attempts(rows: Sequence[_Usable], attacks: Sequence[str], style: str, drawn: random.Random) -> Iterable[_Attempt]:
    references = [one.reference for one in rows]
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


def _other_references(prompt: str, text: str, references: Sequence[str], drawn: random.Random) -> Sequence[str]:
    return drawn.sample(references, min(_SHUFFLES, len(references)))


_ANSWERS: Mapping[str, Callable[[str, str, Sequence[str], random.Random], Sequence[str]]] = {
    "right": lambda prompt, text, references, drawn: [text],
    "spellings": lambda prompt, text, references, drawn: spellings(text),
    "echo": lambda prompt, text, references, drawn: echoes(prompt),
    "constants": lambda prompt, text, references, drawn: CONSTANTS,
    "near-misses": lambda prompt, text, references, drawn: near_misses(text),
    "shuffles": _other_references,
    "slow": lambda prompt, text, references, drawn: SLOW,
}


def _scored(preset: Preset, rows: Sequence[Row], attempts: Sequence[_Attempt]) -> list[Score]:
    """The checker's verdict on each, or the total as the value where there is no checker."""
    prompts = [rows[one.row].get("prompt", "") for one in attempts]
    completions = [
        [{"role": "assistant", "content": one.completion}] if isinstance(prompt, list) else one.completion
        for one, prompt in zip(attempts, prompts, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in NOT_COLUMNS)
    columns: dict[str, Any] = {name: [rows[one.row].get(name) for one in attempts] for name in names}
    samples = build_samples(prompts, completions, **columns)
    return _in_parts(preset, samples)


def _in_parts(preset: Preset, samples: Sequence[Sample]) -> list[Score]:
    """In one batch; where that fails as a whole, in halves, so that one completion that a function raises at costs only
    itself."""
    if preset.checker is not None:
        scores = preset.verdicts(samples, Context())
    else:
        evaluation = preset.score(samples, Context())
        seconds = [sum(times) for times in zip(*evaluation.latencies.values(), strict=True)]
        failed = [any(status in FAILURES for status in row) for row in zip(*evaluation.statuses.values(), strict=True)]
        given = zip(evaluation.totals, failed, seconds, strict=True)
        scores = [Score(total, "error" if fails else "ok", {}, took) for total, fails, took in given]
    if len(samples) > 1 and all(score.status in FAILURES for score in scores):
        half = len(samples) // 2
        return [*_in_parts(preset, samples[:half]), *_in_parts(preset, samples[half:])]
    return scores


def _is_paid(preset: Preset, score: Score, honest: float | None) -> bool:
    if preset.checker is not None:
        return score.status == "ok"
    return score.value is not None and honest is not None and score.value >= honest - 1e-9


def _result(attack: str, tried: Sequence[tuple[_Attempt, Score, bool]], rows: Sequence[_Usable]) -> Result:
    """One attack's; of constants that of the best single one, of spellings the rows on which all are paid."""
    if attack == "constants":
        by_answer: dict[str, list[tuple[_Attempt, Score, bool]]] = {}
        for one in tried:
            by_answer.setdefault(one[0].answer, []).append(one)
        counted = max(by_answer.values(), key=lambda some: sum(paid for *_, paid in some), default=[])
    else:
        counted = list(tried)
    places = {one.row for one, *_ in counted}
    paid = {one.row for one, _, is_paid in counted if is_paid}
    if attack == "spellings":
        paid = places - {one.row for one, _, is_paid in counted if not is_paid}
    shown = [one for one, _, is_paid in tried if is_paid == (attack in ATTACKS)]
    examples = [
        Paid(rows[one.row].number, one.how or one.answer, one.completion or "", rows[one.row].reference)
        for one in shown[:_EXAMPLES]
    ]
    return Result(
        attack, len(places), len(paid), len(tried), max((s.seconds or 0.0 for _, s, _ in tried), default=0.0), examples
    )
