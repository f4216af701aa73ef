"""Command line of the library without the kit: `python -m rewards`, or `grpo-rewards` where that is installed.

python -m rewards list
python -m rewards show math-verify
python -m rewards audit math-verify --data rows.jsonl
python -m rewards audit my_rewards.py:compute_score --data train.parquet --json
"""

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from typing import Any

import rewards
from rewards.audit import ATTACKS, LIMIT, audit, read_data
from rewards.errors import RewardsError
from rewards.testing import target

PAID, MISTAKE = 1, 2  # exit codes
_WORDS = {"true": True, "false": False, "null": None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 done, 1 the audit found a problem, 2 a mistake in the arguments."""
    options = parser().parse_args(arguments)
    try:
        if options.verb == "audit":
            return _audit(options)
        if options.verb == "show":
            print(rewards.describe(options.name).strip())
        else:
            print("\n".join(rewards.names()))
        return 0
    except RewardsError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of all verbs."""
    top = argparse.ArgumentParser(prog="grpo-rewards", description="Rewards: what there is, and what can be fooled.")
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="names of the presets")
    verbs.add_parser("show", help="what a preset rewards").add_argument("name")
    audit_verb = verbs.add_parser(
        "audit",
        help="on how many of your rows a reward is paid without the problem being solved",
        description="Tries echoes of the question, constants, hedges, near misses, answers of other rows and slow answers. "
        "Exit code 1 if one is paid on more rows than the limit allows.",
    )
    add = audit_verb.add_argument
    add("name", metavar="PRESET", help="a preset, or your own function as file.py:function: TRL's, verl's, EasyR1's")
    add("--data", required=True, metavar="FILE", help="rows: .jsonl, .json, .csv or .parquet")
    add("--prompt", metavar="COLUMN", help="column with the prompt, if its name does not say so")
    add("--reference", metavar="COLUMN", help="column with the reference, reward_model.ground_truth for verl's")
    add("--attack", action="append", metavar="NAME", help=f"only this one of {', '.join(ATTACKS)}; may be repeated")
    add("--style", help="how answers are written: boxed, answer, hash, ... or a text with {answer}")
    add("--rows", type=int, default=200, metavar="N", help="rows that are looked at, drawn at random (200)")
    add("--limit", type=float, default=LIMIT, metavar="SHARE", help=f"of rows that may be paid ({LIMIT})")
    add("--seconds", type=float, default=10.0, help="that your function may take for a completion (10); 0: any")
    add("--seed", type=int, default=0, help="of what is drawn")
    add("--json", action="store_true", help="every rate and example as JSON")
    add("-o", "--override", action="append", default=[], metavar="KEY=VALUE", help="a parameter of the preset")
    return top


def _audit(options: argparse.Namespace) -> int:
    report = audit(
        target(options.name, **dict(map(_parameter, options.override))),
        read_data(options.data, options.prompt, options.reference),
        attacks=tuple(options.attack or ATTACKS),
        style=options.style,
        most=max(1, options.rows),
        limit=options.limit,
        seed=options.seed,
        seconds=options.seconds or None,
        progress=print_attack if sys.stderr.isatty() else None,
    )
    if options.json:
        print(json.dumps(report.as_dict(), indent=1))
        return 0 if report.passed else PAID
    head, rows = report.table()
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    print(f"{report.preset.name}: answers as {report.style}, {report.results[0].rows} rows")
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(report.verdict)
    return 0 if report.passed else PAID


def print_attack(attack: str, completions: int) -> None:
    """Print on stderr which attack is being tried."""
    print(f"{attack}: {completions:,} completions ...", file=sys.stderr)


def _parameter(override: str) -> tuple[str, Any]:
    """Parse `format_weight=0.1` into a name and a value; what is no Python literal is text."""
    name, equals, value = override.partition("=")
    if not equals:
        raise RewardsError(f"{override!r} is no parameter. Write KEY=VALUE, such as format_weight=0.1.")
    if value in _WORDS:
        return name, _WORDS[value]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
