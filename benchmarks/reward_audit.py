r"""What maths rewards pay for that solves nothing, and how fast they are.

    python benchmarks/reward_audit.py [--rows 120] [--out FILE]

The rows are made here, by seed, in kinds that problem sets have: arithmetic, fractions, roots, values of functions, vectors,
matrices, intervals, like terms, sets, complex numbers, words, and one in 120 a product to expand, about as many as in MATH. On
them `rewards.audit` tries echoes of the question, constants, hedges, near misses, other rows' answers and slow ones on this
library's presets and on TRL's `accuracy_reward`, and two honest ones: the reference, and the reference in other words.

    python benchmarks/reward_audit.py --speed [--out FILE]

measures instead how many of the same 512 completions a second math-verify scores, and TRL's `accuracy_reward`, in turns,
workers warm, no completion twice; and gsm8k-reasoning. By the clock: run it where nothing else runs. FILE keeps both.
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
    """In lowest terms, as a whole number where it is one."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def arithmetic(drawn: random.Random) -> tuple[str, str]:
    a, b, c = drawn.randint(11, 99), drawn.randint(3, 40), drawn.randint(2, 9)
    return f"Compute ${a} \\cdot {c} - {b}$.", str(a * c - b)


def fractions(drawn: random.Random) -> tuple[str, str]:
    one, other = (Fraction(drawn.randint(1, 12), drawn.randint(2, 13)) for _ in range(2))
    left = f"\\frac{{{one.numerator}}}{{{one.denominator}}} + \\frac{{{other.numerator}}}{{{other.denominator}}}"
    return f"What is ${left}$ as a common fraction?", fraction(one + other)


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
    one, other = ([drawn.randint(-9, 9) for _ in range(3)] for _ in range(2))
    total = [a + b for a, b in zip(one, other, strict=True)]
    return f"Compute the vector $${column(one)} + {column(other)}.$$", column(total)


def matrices(drawn: random.Random) -> tuple[str, str]:
    factor, entries = drawn.randint(2, 6), [drawn.randint(-9, 9) for _ in range(4)]

    def shown(values: list[int]) -> str:
        return "\\begin{{pmatrix}} {} & {} \\\\ {} & {} \\end{{pmatrix}}".format(*values)

    return f"Compute $${factor} {shown(entries)}.$$", shown([factor * entry for entry in entries])


def intervals(drawn: random.Random) -> tuple[str, str]:
    low, high = sorted(drawn.sample(range(-9, 10), 2))
    return f"Solve ${polynomial(-low, -high)[1]} < 0$ as an interval.", f"({low},{high})"


def polynomial(low: int, high: int) -> tuple[str, str]:
    """The factors and the expanded form of (x + low)(x + high)."""
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


def made(count: int, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Rows as a conversational data set has them: prompt (messages), and a solution with the reference in a box."""
    drawn = random.Random(seed)
    for at in range(count):
        question, reference = (expanding if at % 120 == 60 else KINDS[at % len(KINDS)])(drawn)
        yield {"prompt": [{"role": "user", "content": question}], "solution": f"It is $\\boxed{{{reference}}}$."}


def without_prompt(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """math-verify that is not told the question: what working out does alone."""
    samples = build_samples([""] * len(completions), completions, reference=solution)
    return [float(score.status == "ok") for score in load("math-verify").verdicts(samples)]


def trl_accuracy(completions: list[Any], solution: list[str], **_: Any) -> list[float | None]:
    from trl.rewards import accuracy_reward

    given = [[{**message, "content": message["content"] or ""} for message in completion] for completion in completions]
    return list(accuracy_reward(given, solution))


def graders() -> Iterator[Preset]:
    """This library's maths presets, and TRL's function."""
    yield from map(load, ("math-verify", "math-dapo", "r1-zero"))
    yield load("math-verify", lenient=True)
    yield Preset([(from_function(without_prompt)[0], 1.0)], name="math-verify, prompt not known")
    yield Preset([(from_function(trl_accuracy)[0], 1.0)], name="TRL accuracy_reward")


def audits(rows: int) -> Iterator[dict[str, Any]]:
    """Every grader on the same rows; slow answers are left out of TRL's, which hangs on them for a minute each."""
    data = list(made(rows))
    for preset in graders():
        own = preset.name.startswith("TRL")
        attacks = tuple(attack for attack in audit.ATTACKS if not (own and attack in ("slow", "hedges")))
        name = f"{preset.name}, lenient" if getattr(preset.components[0].component, "lenient", False) else preset.name
        found = audit.audit(preset, data, attacks=attacks, most=rows, style="answer" if name == "r1-zero" else "boxed")
        print(f"\n{name}\n| attack | rows | paid | rate |\n|---|---|---|---|")
        for result in found.results:
            print(f"| {result.attack} | {result.rows} | {result.paid} | {result.rate:.1%} |", flush=True)
        results = [{k: v for k, v in one.items() if k != "seconds"} for one in found.as_dict()["results"]]
        for one in results:
            one["rate"], one["examples"] = float(f"{one['rate']:.4g}"), [e["how"][:80] for e in one["examples"][:3]]
        yield {"grader": name, "results": results}


def completions(count: int, seed: int) -> tuple[list[str], list[str]]:
    """As a model writes them, a good half right: some reasoning of 1 kB, then a box; and their references."""
    drawn = random.Random(seed)
    rows = list(made(count, seed))
    texts, references = [], [row["solution"] for row in rows]
    for at, row in enumerate(rows):
        reference = audit.reference_text(row["solution"]) or ""
        near = audit.near_misses(reference)
        answer = reference if at % 5 < 3 or not near else drawn.choice(near)
        filler = f"Step {at}: we add both sides, take one half of it, and check the result once more. " * 12
        texts.append(f"{filler}\nThus the answer is $\\boxed{{{answer}}}$.")
    return texts, references


def speed() -> dict[str, Any]:
    """Completions a second, medians over turns: each turn scores 512 that nobody has seen, first with one, then the other."""
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
    found: dict[str, Any] = {name: float(f"{statistics.median(rate):.4g}") for name, rate in rates.items()}
    found["ratio"] = float(f"{found['math-verify'] / found['TRL accuracy_reward']:.3g}")
    found["gsm8k-reasoning"] = float(f"{len(numbers) / (time.perf_counter() - start):.4g}")
    found["turns"] = {name: [float(f"{one:.4g}") for one in rate] for name, rate in rates.items()}
    for name in ("math-verify", "TRL accuracy_reward", "ratio", "gsm8k-reasoning"):
        print(f"{name}: {found[name]:g}")
    return found


def table(found: dict[str, Any]) -> str:
    """The audits as docs/audit.md shows them: of how many rows in a hundred each is paid."""
    names = ("right", *audit.ATTACKS)
    lines = ["| grader | right answers | " + " | ".join(audit.ATTACKS) + " |", "|---" * (len(names) + 1) + "|"]
    for one in found["audits"]:
        rates = {result["attack"]: f"{100 * result['rate']:.3g} %" for result in one["results"]}
        lines.append(f"| {one['grader']} | " + " | ".join(rates.get(name, "-") for name in names) + " |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What it ran on."""
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
    """Audits or measures, prints, and adds to the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--speed", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if arguments.out and arguments.out.is_file():
        found = json.loads(arguments.out.read_text())
    if arguments.speed:
        found["speed"] = speed() | {"machine": machine()}
        held = found["speed"]["ratio"] >= GOAL_RATIO and found["speed"]["gsm8k-reasoning"] >= GOAL_NUMBERS
    else:
        found |= {"rows": arguments.rows, "audits": list(audits(arguments.rows)), "machine": machine()}
        ours = [one for one in found["audits"] if not one["grader"].startswith(("TRL", "math-verify, "))]
        held = all(
            result["rate"] <= audit.LIMIT
            for one in ours
            for result in one["results"]
            if result["attack"] in audit.ATTACKS
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
