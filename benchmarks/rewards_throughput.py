"""Speed of the reward library: `python benchmarks/rewards_throughput.py [--out FILE] [--quick]`.

What it measures, and the limits it holds, on two cores:

- import rewards: at most 0.1 s, median of fresh processes
- presets that only look at the layout: at least 50,000 completions of 1 kB a second
- math-verify, workers warm, no two answers alike: at least 250 completions/s on two workers, and 1.7 times one worker
- code-stdio: at least 100 programs/s
- 1 MB of text made to be slow (spaces, tags, braces, nested boxes, ...): every extractor and every preset under 0.2 s

Work of one process is timed by its CPU time, work of several by the clock, so run it where nothing else runs. Exits with 1
if a limit is missed. Presets that need parameters, models or servers are left out of the last.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import rewards
from rewards import Preset, Weighted, build_samples, extract
from rewards.components.tags import HashFormat, TagCount, ThinkAnswerFormat
from rewards.errors import RewardsError
from rewards.testing import golden

SLOW = {
    "spaces": " ",
    "line breaks": "\n",
    "think tags": "<think>",
    "closed think tags": "</think>",
    "answer tags": "<answer>",
    "answers": "<answer>1</answer>",
    "open braces": "{",
    "closed braces": "}",
    "nested boxes": "\\boxed{",
    "boxes": "\\boxed{1}",
    "backslashes": "\\",
    "hashes": "#",
    "hash lines": "\n#### 1",
    "fences": "\n```python\n",
    "brackets": "[",
    "quotes": '"',
    "JSON": '{"a": [',
    "digits": "1",
    "dots": "1.",
    "answer lines": "\nAnswer: $",
    "tool calls": "<tool_call>{",
    "left angles": "<",
    "one line of words": "so the answer is ",
}


class Measure(NamedTuple):
    """One number, its limit (at least, or at most where `most`), and what was run."""

    name: str
    value: float
    unit: str
    limit: float
    most: bool
    note: str = ""

    @property
    def held(self) -> bool:
        """Whether the limit is kept."""
        return self.value <= self.limit if self.most else self.value >= self.limit


def import_time(repeats: int) -> Measure:
    """Seconds that `import rewards` takes in a fresh interpreter."""
    code = "import time; t = time.process_time(); import rewards; print(time.process_time() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(repeats)
    ]
    return Measure("import rewards", statistics.median(runs), "s", 0.1, True)


def formats(size: int, repeats: int) -> Iterator[Measure]:
    """Completions a second through TRL's calling convention, every text another."""
    filler = "we add the numbers of both and take one half of it " * 20
    tagged = [f"<think>{at} {filler[:960]}</think><answer>72</answer>" for at in range(size)]
    hashed = [f"{at} {filler[:1000]}\n#### 72" for at in range(size)]
    cases: list[tuple[str, list[Any], list[str]]] = [
        ("think/answer format", [ThinkAnswerFormat()], tagged),
        ("tag count", [TagCount()], tagged),
        ("format + tag count", [ThinkAnswerFormat(), TagCount()], tagged),
        ("hash format", [HashFormat()], hashed),
    ]
    for name, components, texts in cases:
        preset = Preset([Weighted(component, 1.0) for component in components], name=name)
        speeds = []
        for _ in range(repeats):
            functions = preset.trl()
            start = time.process_time()
            for function in functions:
                values = function(prompts=["p"] * size, completions=texts, completion_ids=None)
                assert values[0] == 1.0, (name, values[0])
            speeds.append(size / (time.process_time() - start))
        note = f"{len(texts[0])} characters, one core"
        yield Measure(name, statistics.median(speeds), "completions/s", 50_000, False, note)


def maths(size: int) -> Iterator[Measure]:
    """Completions a second with one and with two warm workers: algebra alone, and with as many whole numbers."""
    speeds = {}
    for workers in (1, 2):
        start_workers(workers)
        preset = rewards.load("math-verify")
        score_maths(preset, 64, offset=10**6 * workers + 900_000, algebra=True)  # starts the workers
        for at, algebra in enumerate((True, False)):
            start = time.perf_counter()
            score_maths(preset, size, offset=10**6 * workers + at * 400_000, algebra=algebra)
            speeds[workers, algebra] = size / (time.perf_counter() - start)
    note = "fractions, roots, polynomials, intervals and as many whole numbers; half of them right"
    yield Measure("math-verify, 2 workers", speeds[2, False], "completions/s", 250, False, note)
    note = f"algebra only: {speeds[1, True]:.0f}/s and {speeds[2, True]:.0f}/s"
    yield Measure("math-verify, 2 workers against 1", speeds[2, True] / speeds[1, True], "times", 1.7, False, note)


def score_maths(preset: Preset, size: int, offset: int, algebra: bool) -> None:
    """Scores answers that no cache knows, and checks the verdicts; with `algebra` all of them need SymPy."""
    texts, references = [], []
    for at in range(size):
        n = offset + at
        kinds = (
            (f"\\frac{{{2 * n}}}{{{4 * n + 2}}}", f"\\frac{{{n}}}{{{2 * n + 1}}}"),
            (f"\\frac{{{n}}}{{\\sqrt{{2}}}}", f"\\frac{{{n}\\sqrt{{2}}}}{{2}}"),
            (f"(x+{n})^2", f"x^2+{2 * n}x+{n * n}"),
            (f"[{n}, {n + 1})", f"[{n}, \\frac{{{2 * n + 2}}}{{2}})"),
            (f"{n}\\text{{ cm}}", str(n)),
            (f"{n:,}".replace(",", "\\,"), str(n)),
            (f"{n}.0", str(n)),
            (f"\\${n}", str(n)),
        )
        right, reference = kinds[at // 2 % (4 if algebra else 8)]
        wrong = f"{n}+y" if algebra or at // 2 % 8 < 4 else str(n + 1)
        texts.append(f"so it is \\boxed{{{right if at % 2 == 0 else wrong}}}")
        references.append(reference)
    evaluation = preset.score(build_samples(["p"] * size, texts, reference=references))
    accuracy = evaluation.values["accuracy"]
    misjudged = [texts[at] for at, value in enumerate(accuracy) if (value == 1.0) != (at % 2 == 0)]
    assert not misjudged, misjudged[:3]


def programs(size: int) -> Measure:
    """Programs a second, each with one input and output."""
    preset = rewards.load("code-stdio")
    texts = [f"```python\nn = int(input())\nprint(n + {at})\n```" for at in range(size)]
    tests = [[{"input": "1\n", "output": f"{at + 1}\n"}] for at in range(size)]
    preset.score(build_samples(["p"] * 4, [f"{text}\n " for text in texts[:4]], reference=tests[:4]))  # warm
    start = time.perf_counter()
    evaluation = preset.score(build_samples(["p"] * size, texts, reference=tests))
    speed = size / (time.perf_counter() - start)
    statuses = evaluation.statuses[preset.checker or next(iter(preset.weights))]
    assert set(statuses) == {"ok"}, (set(statuses), next(iter(evaluation.infos.values()))[0])
    from rewards import sandbox

    return Measure("code-stdio", speed, "programs/s", 100, False, f"sandbox level: {sandbox.level()}")


def slow_texts(whole: bool) -> dict[str, str]:
    """Name -> a megabyte of it; and, unless `whole`, as much as presets read at all, as they refuse longer texts."""
    sizes = {"1 MB": 1_000_000} if whole else {"1 MB": 1_000_000, "0.4 MB": extract.MAX_CHARS}
    return {f"{size} of {name}": piece * (sizes[size] // len(piece)) for size in sizes for name, piece in SLOW.items()}


def extractors() -> Iterator[Measure]:
    """Seconds of the slowest text, for every scanner and every preset, with and without the cap on characters."""
    scanners: dict[str, Callable[[str], Any]] = {
        name: getattr(extract, name)
        for name in vars(extract)
        if name in ("any_answer", "boxed_answer", "hash_answer", "line_answer", "tagged_answer", "think_answer_problem")
    }
    for name, scanner in scanners.items():
        yield slowest(f"extract.{name}", functools.partial(scanner, max_chars=2_000_000), time.process_time)
    for name in rewards.names():
        rows = golden(name)
        try:
            preset = rewards.load(name)
        except RewardsError:
            continue
        if not rows or needs_model(preset):
            continue
        own = ("prompt", "good", "bad", "completion", "style", "right", "wrong")
        columns = {key: [value] for key, value in rows[0].items() if key not in own}
        prompt = rows[0].get("prompt", "")

        def score(text: str, preset: Preset = preset, columns: dict[str, Any] = columns, prompt: Any = prompt) -> None:
            preset.score(build_samples([prompt], [text], **columns))

        score("warm up")
        yield slowest(f"preset {name}", score, time.perf_counter)


def slowest(name: str, run: Callable[[str], Any], clock: Callable[[], float]) -> Measure:
    """The text that takes longest: seconds, the best of three runs."""
    times = {}
    for text_name, text in slow_texts(whole=name.startswith("extract.")).items():
        runs = []
        for _ in range(3):
            start = clock()
            run(text)
            runs.append(clock() - start)
        times[text_name] = min(runs)
    worst = max(times, key=lambda text_name: times[text_name])
    return Measure(name, times[worst], "s", 0.2, True, worst)


def needs_model(preset: Preset) -> bool:
    """Whether a component is backed by a model or a server."""
    modules = {type(component).__module__.rpartition(".")[2] for component, _ in preset.components}
    return bool(modules & {"judge", "reward_model"})


def start_workers(workers: int) -> None:
    """Makes the shared pool one of so many workers."""
    from rewards.isolation import shared_pool

    pool = shared_pool()
    pool.close()
    pool.size = workers


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
    """Measures all of it, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, for a busy machine")
    arguments = parser.parse_args()
    quick = arguments.quick
    measures: list[Measure] = []
    print("| what | measured | limit | |\n|---|---|---|---|")
    sources: list[Iterator[Measure]] = [
        iter([import_time(3 if quick else 9)]),
        formats(5_000 if quick else 20_000, 3 if quick else 7),
    ]
    if "math-verify" in rewards.names():
        sources.append(maths(400 if quick else 2_000))
    if "code-stdio" in rewards.names():
        sources.append(iter([programs(40 if quick else 200)]))
    sources.append(extractors())
    for source in sources:
        for measure in source:
            measures.append(measure)
            value = f"{measure.value:,.0f}" if measure.value >= 100 else f"{measure.value:.3g}"
            bound = f"{'at most' if measure.most else 'at least'} {measure.limit:,g}"
            missed = "" if measure.held else " MISSED"
            print(f"| {measure.name} | {value} {measure.unit}{missed} | {bound} | {measure.note} |", flush=True)
    if arguments.out:
        rows = [measure._asdict() | {"value": float(f"{measure.value:.4g}")} for measure in measures]
        arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0 if all(measure.held for measure in measures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
