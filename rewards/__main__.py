"""Command line of the library: `grpo-rewards`, `python -m rewards`, or `grpo-kit reward` with the kit.

python -m rewards list
python -m rewards show math-verify
python -m rewards test gsm8k-reasoning
python -m rewards audit math-verify --data rows.jsonl
python -m rewards audit my_rewards.py:compute_score --data train.parquet --json
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import rewards
from rewards import Preset, testing
from rewards.audit import ATTACKS, LIMIT, audit, read_data
from rewards.errors import RewardsError
from rewards.functions import FunctionComponent

PAID, MISTAKE = 1, 2  # exit codes
_SHOWN = 3  # notes or problems of a kind that are printed
_WORDS = {"true": True, "false": False, "null": None}


DataReader: TypeAlias = Callable[[Path | None, str | None, str | None], list[dict[str, Any]]]
"""Reads the rows of a file; further arguments: columns of prompt and reference. None means the run's own rows and columns."""
Reader: TypeAlias = Callable[[str, list[str]], tuple[Preset, DataReader] | None]
"""Returns the reward of a NAME with overrides and the reader of its data, or None for a NAME that it does not know."""


def main(
    arguments: Sequence[str] | None = None, program: str = "grpo-rewards", read: Reader = lambda name, overrides: None
) -> int:
    """Run the command line and return the exit code: 0 success, 1 the reward pays an attack, 2 a user error.

    Args:
        read: tried before presets and functions to resolve NAME; `grpo-kit` passes one that reads run configurations.
    """
    options = parser(program).parse_args(arguments)
    options.read = read
    try:
        return int({"list": _list, "show": _show, "test": _test, "audit": _audit}[options.verb](options))
    except RewardsError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE


def parser(program: str = "grpo-rewards") -> argparse.ArgumentParser:
    """Return the argument parser with all verbs."""
    top = argparse.ArgumentParser(prog=program, description="List, show, test and audit rewards.")
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="all presets, and what each one rewards")
    show_verb = verbs.add_parser("show", help="formula, range, columns, source, attacks and components of a preset")
    show_verb.add_argument("name", metavar="PRESET")
    test_verb = verbs.add_parser(
        "test",
        help="score right answers, wrong answers and known attacks",
        description="Exit code 1 if an attack or a wrong answer scores as high as a right one. A row of --data has "
        "prompt, dataset columns, and completions (one or a list) in good, bad or, to score without a judgement, completion. "
        "With right, wrong and style (answer, boxed, hash, code, ... or a text with {answer}), the attacks use these answers "
        "in this style. See rewards/testing.py, and rewards/golden for examples.",
    )
    formats = ".jsonl, .json, .csv or .parquet"
    test_verb.add_argument(
        "--data", type=Path, metavar="FILE", help=f"rows: {formats}; default: the preset's golden rows"
    )
    audit_verb = verbs.add_parser(
        "audit",
        help="count the rows of a dataset on which attacks are paid",
        description="Tries echoes of the question, constants, hedges, near misses, references of other rows and slow answers. "
        "Exit code 1 if an attack is paid on a larger share of the rows than the limit.",
    )
    add = audit_verb.add_argument
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help=f"rows: {formats}; default of a run.yaml: its training rows",
    )
    add("--prompt", metavar="COLUMN", help="column with the prompt; default: the run's, else prompt, question, ...")
    add("--reference", metavar="COLUMN", help="column with the reference, for example reward_model.ground_truth")
    add("--attack", action="append", metavar="NAME", help=f"one of {', '.join(ATTACKS)} (all); may be repeated")
    add("--style", help="form of an answer: boxed, answer, hash, ... or a text with {answer}")
    add("--rows", type=int, default=200, metavar="N", help="the most rows to audit, sampled at random (200)")
    add("--limit", type=float, default=LIMIT, metavar="SHARE", help=f"largest share of paid rows ({LIMIT})")
    add("--seconds", type=float, default=10.0, help="time limit of your function per completion (10); 0: none")
    add("--seed", type=int, default=0, help="seed of the random draws")
    add("--json", action="store_true", help="print all rates and examples as JSON")
    for verb in (test_verb, audit_verb):
        verb.add_argument(
            "name",
            metavar="NAME",
            help="a preset, a function of TRL's, verl's or EasyR1's convention as file.py:function, or, with the kit, a run.yaml",
        )
    for verb in (show_verb, test_verb, audit_verb):
        verb.add_argument(
            "-o", "--override", action="append", default=[], metavar="KEY=VALUE", help="parameter of the preset"
        )
    return top


def _list(options: argparse.Namespace) -> int:
    summaries = [rewards.describe(name).partition("\n\n")[2].strip().partition("\n\n")[0] for name in rewards.names()]
    _print_table(
        ["preset", "what it rewards"],
        [[name, " ".join(text.split())] for name, text in zip(rewards.names(), summaries, strict=True)],
    )
    return 0


def _show(options: argparse.Namespace) -> int:
    print(rewards.describe(options.name).strip() + "\n")
    try:
        preset = rewards.load(options.name, **_parameters(options))
    except RewardsError as error:
        if options.override:
            raise
        print(f"Its components cannot be shown: {error}")  # a required parameter, or a missing package
        return 0
    rows = [[part.name, f"{weight:g}", f"{part.low:g} to {part.high:g}"] for part, weight in preset.components]
    _print_table(["component", "weight", "range"], rows)
    return 0


def _test(options: argparse.Namespace) -> int:
    """Score the rows of a file, or the golden rows of a preset, and print the value and status of every component."""
    preset, read_rows = _target(options, lambda file, prompt, reference: testing.read_rows(file or ""))
    own = any(isinstance(component, FunctionComponent) for component, _ in preset.components)
    rows = read_rows(options.data, None, None) if options.data else [] if own else testing.golden(preset.name)
    if not rows:
        problem = f"{options.data} is empty" if options.data else f"No rows come with '{options.name}'"
        example = '{"prompt": "6 x 12?", "answer": "72", "style": "boxed", "right": "72", "wrong": "70"}'
        raise RewardsError(f"{problem}. Pass rows with --data rows.jsonl, for example {example}")
    report = testing.check(preset, rows)
    names = list(preset.weights)

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    def print_cases(label: str, cases: Sequence[testing.Case]) -> None:
        lines = [
            [str(case.row), case.kind, case.name, number(case.total)]
            + [f"{number(case.values[name])} {case.statuses[name]}" for name in names]
            + ["; ".join(dict.fromkeys(case.reasons.values()))[:80]]
            for case in cases
        ]
        if lines:
            _print_table(["row", "", label, "total", *names, "why"], lines)

    print_cases("completion", [case for case in report.cases if case.kind != "attack"])
    attacks = [case for case in report.cases if case.kind == "attack"]
    ranked = sorted(attacks, key=lambda case: float("inf") if case.total is None else -case.total)
    best = {case.name: case for case in reversed(ranked)}  # for each attack the row on which it earns most
    print_cases("attack", [best[name] for name in dict.fromkeys(case.name for case in attacks)])
    for label, texts in (("note", report.notes), ("problem", report.problems)):
        for line in _first_of_each_kind(texts):
            print(f"{label}: {line}")
    kinds = [case.kind for case in report.cases]
    counts = f"{kinds.count('good')} good, {kinds.count('bad')} bad, {kinds.count('attack')} attacks"
    if len(best) < len(attacks):
        print("The table has one row per attack: the dataset row on which it earns most.")
    if not report.passed:
        print(f"{len(report.problems)} problem(s) with {counts}.")
    elif "good" in kinds:
        print(f"No attack and no wrong answer scores as high as a right one: {counts}.")
    return 0 if report.passed else PAID


def _target(options: argparse.Namespace, read: DataReader) -> tuple[Preset, DataReader]:
    run: tuple[Preset, DataReader] | None = options.read(options.name, options.override)
    return run or (testing.target(options.name, **_parameters(options)), read)


def _first_of_each_kind(texts: Sequence[str]) -> Iterator[str]:
    """Yield the first `_SHOWN` texts of each kind and the number of further ones. A kind ignores numbers and quotations."""
    kinds: dict[str, list[str]] = {}
    for text in texts:
        kinds.setdefault(re.sub(r"'.*'|-?\d[\d.e+-]*", "", text), []).append(text)
    for group in kinds.values():
        yield from group[:_SHOWN]
        if len(group) > _SHOWN:
            yield f"... and {len(group) - _SHOWN} more like these"


def _audit(options: argparse.Namespace) -> int:
    preset, read = _target(options, read_data)
    report = audit(
        preset,
        read(options.data, options.prompt, options.reference),
        attacks=tuple(options.attack or ATTACKS),
        style=options.style,
        most=max(1, options.rows),
        limit=options.limit,
        seed=options.seed,
        seconds=options.seconds or None,
    )
    if options.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        print(
            f"{report.preset.name}, {report.results[0].rows} rows, answers in the style: {report.style}. {report.rule}"
        )
        _print_table(*report.table())
        print(report.verdict)
    return 0 if report.passed else PAID


def _print_table(head: list[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns. Lone surrogates, which some attacks contain, are replaced."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line.encode("utf-8", "replace").decode())


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Parse overrides such as `format_weight=0.1`; a value that is not a Python literal is text."""
    parameters: dict[str, Any] = {}
    for override in options.override:
        name, equals, value = override.partition("=")
        if not equals:
            raise RewardsError(f"{override!r} is not an override. Write KEY=VALUE, such as format_weight=0.1.")
        try:
            parameters[name] = _WORDS[value] if value in _WORDS else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parameters[name] = value
    return parameters


if __name__ == "__main__":
    sys.exit(main())
