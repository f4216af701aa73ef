r"""Audit mathematics rewards for payment without a solution, and measure their speed.

    python benchmarks/reward_audit.py [--rows 120] [--out FILE]

This module generates the rows from a seed, with problems of common kinds: arithmetic, fractions, roots, values of functions,
vectors, matrices, intervals, like terms, sets, complex numbers and words. One row in 120 is a product to expand, about as many
as in MATH. `rewards.audit` runs its attacks (echoes of the question, constants, hedges, near misses, other rows' answers, slow
answers) on this library's presets and on TRL's `accuracy_reward`. It also scores two honest answers: the reference, and the
reference in another spelling.

    python benchmarks/reward_audit.py --speed [--out FILE]

measures how many completions per second math-verify and TRL's `accuracy_reward` score. They take turns on the same 512 new
completions, with warm workers. It also measures gsm8k-reasoning. Use an idle machine, because the measure is wall-clock time.
FILE stores the results of both commands.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from rewards import Preset, audit, build_samples, from_function, load

SEED = 17
COMPLETIONS, TURNS = 512, 5
GOAL_RATIO, GOAL_NUMBERS = 1.3, 3_000
ANGLES = {30: (r"\frac{1}{2}", r"\frac{\sqrt{3}}{2}"), 45: (r"\frac{\sqrt{2}}{2}", r"\frac{\sqrt{2}}{2}"),
          60: (r"\frac{\sqrt{3}}{2}", r"\frac{1}{2}")}  # fmt: skip
NAMES = ("Evelyn", "Briana", "Carla", "Debra", "Angela", "Monday", "Friday", "north", "even", "odd")
Kind = Callable[[random.Random], tuple[str, str]]


def fraction(value: Fraction) -> str:
    """LaTeX of a fraction in lowest terms, or of an integer."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def arithmetic(drawn: random.Random) -> tuple[str, str]:
    a, b, c = drawn.randint(11, 99), drawn.randint(3, 40), drawn.randint(2, 9)
    return f"Compute ${a} \\cdot {c} - {b}$.", str(a * c - b)


def fractions(drawn: random.Random) -> tuple[str, str]:
    a, b = (Fraction(drawn.randint(1, 12), drawn.randint(2, 13)) for _ in range(2))
    total = f"\\frac{{{a.numerator}}}{{{a.denominator}}} + \\frac{{{b.numerator}}}{{{b.denominator}}}"
    return f"What is ${total}$ as a common fraction?", fraction(a + b)


def roots(drawn: random.Random) -> tuple[str, str]:
    inside, outside = drawn.choice([2, 3, 5, 6, 7, 10]), drawn.randint(2, 12)
    return f"Simplify $\\sqrt{{{inside * outside * outside}}}$.", f"{outside}\\sqrt{{{inside}}}"


def functions(drawn: random.Random) -> tuple[str, str]:
    if drawn.random() < 0.5:
        base, power = drawn.choice([2, 3, 5]), drawn.randint(2, 5)
        return f"Evaluate $\\log_{{{base}}} {base**power}$.", str(power)
    angle, at = drawn.choice(sorted(ANGLES)), drawn.randrange(2)
    return f"Find $\\{('sin', 'cos')[at]} {angle}^\\circ$.", ANGLES[angle][at]


def column(entries: list[int]) -> str:
    return "\\begin{pmatrix} " + " \\\\ ".join(map(str, entries)) + " \\end{pmatrix}"


def vectors(drawn: random.Random) -> tuple[str, str]:
    left, right = ([drawn.randint(-9, 9) for _ in range(3)] for _ in range(2))
    total = [a + b for a, b in zip(left, right, strict=True)]
    return f"Compute the vector $${column(left)} + {column(right)}.$$", column(total)


def matrices(drawn: random.Random) -> tuple[str, str]:
    factor, entries = drawn.randint(2, 6), [drawn.randint(-9, 9) for _ in range(4)]

    def matrix(values: list[int]) -> str:
        return "\\begin{{pmatrix}} {} & {} \\\\ {} & {} \\end{{pmatrix}}".format(*values)

    return f"Compute $${factor} {matrix(entries)}.$$", matrix([factor * entry for entry in entries])


def intervals(drawn: random.Random) -> tuple[str, str]:
    low, high = sorted(drawn.sample(range(-9, 10), 2))
    return f"Solve ${polynomial(-low, -high)[1]} < 0$ as an interval.", f"({low},{high})"


def polynomial(low: int, high: int) -> tuple[str, str]:
    """LaTeX of (x + low)(x + high): the factors and the expanded form."""
    return f"(x{low:+d})(x{high:+d})", f"x^2{_linear(low + high)}{low * high:+d}"


def _linear(factor: int) -> str:
    return {0: "", 1: "+x", -1: "-x"}.get(factor, f"{factor:+d}x")


def expanding(drawn: random.Random) -> tuple[str, str]:
    factors, expanded = polynomial(drawn.randint(2, 9), -drawn.randint(1, 8))
    return f"Expand ${factors}$.", expanded


def like_terms(drawn: random.Random) -> tuple[str, str]:
    a, b, c, d = (drawn.randint(2, 20) for _ in range(4))
    return f"Simplify $({a}x+{b})+({c}x+{d})$.", f"{a + c}x+{b + d}"


def sets(drawn: random.Random) -> tuple[str, str]:
    low, high = -drawn.randint(1, 9), drawn.randint(1, 9)
    return f"Which numbers solve ${polynomial(-low, -high)[1]} = 0$? Give a set.", f"\\{{{low}, {high}\\}}"


def complexes(drawn: random.Random) -> tuple[str, str]:
    a, b, c, d = (drawn.randint(1, 9) for _ in range(4))
    return f"Multiply $({a}+{b}i)({c}+{d}i)$.", f"{a * c - b * d}+{a * d + b * c}i"


def words(drawn: random.Random) -> tuple[str, str]:
    name = drawn.choice(NAMES)
    return "Which one is it? Answer in one word.", f"\\text{{{name}}}"


KINDS: tuple[Kind, ...] = (
    arithmetic, fractions, roots, functions, vectors, matrices, intervals, like_terms, sets, complexes, words, arithmetic,
)  # fmt: skip


def generate_rows(count: int, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Yield dataset rows in conversational format: prompt (messages), and a solution with the reference in a box."""
    drawn = random.Random(seed)
    for index in range(count):
        question, reference = (expanding if index % 120 == 60 else KINDS[index % len(KINDS)])(drawn)
        yield {"prompt": [{"role": "user", "content": question}], "solution": f"It is $\\boxed{{{reference}}}$."}


def without_prompt(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """math-verify without the question, which shows the effect of its comparison alone."""
    samples = build_samples([""] * len(completions), completions, reference=solution)
    return [float(score.status == "ok") for score in load("math-verify").verdicts(samples)]


def trl_accuracy(completions: list[Any], solution: list[str], **_: Any) -> list[float | None]:
    from trl.rewards import accuracy_reward

    texts = [[{**message, "content": message["content"] or ""} for message in completion] for completion in completions]
    return list(accuracy_reward(texts, solution))


def graders() -> Iterator[Preset]:
    """Yield this library's mathematics presets, and TRL's function as a preset."""
    yield from map(load, ("math-verify", "math-dapo", "r1-zero"))
    yield load("math-verify", lenient=True)
    yield Preset([(from_function(without_prompt)[0], 1.0)], name="math-verify, prompt not known")
    yield Preset([(from_function(trl_accuracy)[0], 1.0)], name="TRL accuracy_reward")


def audits(rows: int) -> Iterator[dict[str, Any]]:
    """Audit every grader on the same rows. TRL's grader gets no hedges and slow answers: each takes it a minute."""
    data = list(generate_rows(rows))
    for preset in graders():
        is_trl = preset.name.startswith("TRL")
        attacks = tuple(attack for attack in audit.ATTACKS if not (is_trl and attack in ("slow", "hedges")))
        name = f"{preset.name}, lenient" if getattr(preset.components[0].component, "lenient", False) else preset.name
        report = audit.audit(preset, data, attacks=attacks, most=rows, style="answer" if name == "r1-zero" else "boxed")
        print(f"\n{name}\n| attack | rows | paid | rate |\n|---|---|---|---|")
        for result in report.results:
            print(f"| {result.attack} | {result.rows} | {result.paid} | {result.rate:.1%} |", flush=True)
        results = [{k: v for k, v in row.items() if k != "seconds"} for row in report.as_dict()["results"]]
        for row in results:
            row["rate"], row["examples"] = float(f"{row['rate']:.4g}"), [e["name"][:80] for e in row["examples"][:3]]
        yield {"grader": name, "results": results}


def completions(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Completions with 1 kB of reasoning and an answer in a box, at least 60 % of them correct; and their references."""
    drawn = random.Random(seed)
    rows = list(generate_rows(count, seed))
    texts, references = [], [row["solution"] for row in rows]
    for at, row in enumerate(rows):
        reference = audit.reference_text(row["solution"]) or ""
        near = audit.near_misses(reference)
        answer = reference if at % 5 < 3 or not near else drawn.choice(near)
        filler = f"Step {at}: we add both sides, take one half of it, and check the result once more. " * 12
        texts.append(f"{filler}\nThus the answer is $\\boxed{{{answer}}}$.")
    return texts, references


def speed() -> dict[str, Any]:
    """Median completions per second over turns. Each turn scores 512 new completions with math-verify, then with TRL."""
    from trl.rewards import accuracy_reward

    rates: dict[str, list[float]] = {"math-verify": [], "TRL accuracy_reward": []}
    preset = load("math-verify")
    preset.score(
        build_samples([""] * 8, [f"\\boxed{{x+{at}}}" for at in range(8)], reference=[f"{at}+x" for at in range(8)])
    )
    accuracy_reward([[{"content": r"\boxed{x+1}"}]], [r"\boxed{1+x}"])
    for turn in range(TURNS):
        texts, references = completions(COMPLETIONS, SEED + 1 + turn)
        samples = build_samples(["?"] * COMPLETIONS, texts, reference=references)
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        for name in rates:
            start = time.perf_counter()
            if name == "math-verify":
                preset.score(samples)
            else:
                accuracy_reward(messages, references)
            rates[name].append(COMPLETIONS / (time.perf_counter() - start))
    numbers = [f"<think>{at} and so on, and on</think><answer>{at}</answer>" for at in range(8 * COMPLETIONS)]
    start = time.perf_counter()
    load("gsm8k-reasoning").score(
        build_samples(["?"] * len(numbers), numbers, answer=[str(at) for at in range(len(numbers))])
    )
    speeds: dict[str, Any] = {name: float(f"{statistics.median(rate):.4g}") for name, rate in rates.items()}
    speeds["ratio"] = float(f"{speeds['math-verify'] / speeds['TRL accuracy_reward']:.3g}")
    speeds["gsm8k-reasoning"] = float(f"{len(numbers) / (time.perf_counter() - start):.4g}")
    speeds["turns"] = {name: [float(f"{value:.4g}") for value in rate] for name, rate in rates.items()}
    for name in ("math-verify", "TRL accuracy_reward", "ratio", "gsm8k-reasoning"):
        print(f"{name}: {speeds[name]:g}")
    return speeds


def table(record: dict[str, Any]) -> str:
    """Table of docs/audit.md: the percentage of rows on which each grader pays an attack."""
    names = ("right", *audit.ATTACKS)
    lines = ["| grader | right answers | " + " | ".join(audit.ATTACKS) + " |", "|---" * (len(names) + 1) + "|"]
    for report in record["audits"]:
        rates = {result["attack"]: f"{100 * result['rate']:.3g} %" for result in report["results"]}
        lines.append(f"| {report['grader']} | " + " | ".join(rates.get(name, "-") for name in names) + " |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Processor, cores, Python version and operating system of this machine."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def main() -> int:
    """Audit the graders or measure their speed, print the results and add them to the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--speed", action="store_true")
    arguments = parser.parse_args()
    record: dict[str, Any] = {}
    if arguments.out and arguments.out.is_file():
        record = json.loads(arguments.out.read_text())
    if arguments.speed:
        speeds = record["speed"] = speed() | {"machine": machine()}
        has_passed = speeds["ratio"] >= GOAL_RATIO and speeds["gsm8k-reasoning"] >= GOAL_NUMBERS
    else:
        record |= {"rows": arguments.rows, "audits": list(audits(arguments.rows)), "machine": machine()}
        has_passed = all(
            result["rate"] <= audit.LIMIT
            for report in record["audits"]
            if not report["grader"].startswith(("TRL", "math-verify, "))
            for result in report["results"]
            if result["attack"] in audit.ATTACKS
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
