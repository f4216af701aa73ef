"""Calls of the model and time of generation with `generation.drafts`, by epoch, against the same run without.

    python benchmarks/drafts.py [--seeds 0 1 2] [--batches 8 128]

The quickstart's model on 24 prompts, which come back every epoch, so that the completions of the last epoch can serve as drafts.
A batch of 8 is one prompt a step. Runs without and with drafts alternate, and every second pair begins with drafts. Seconds are
by the clock and those of one thread in generation; runs that stand in the results are not made again. Results go to
benchmarks/results/drafts.json, the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/drafts.json", ROOT / "docs/performance.md"
BEGIN, END = "<!-- measured: benchmarks/drafts.py -->", "<!-- end of measured: drafts -->"
PROMPTS, GROUP, EPOCHS = 24, 8, 3
CALLS, PLAIN = "generation/model_calls", "generation/model_calls_without_drafts"
GENERATION, STEP = "seconds/generation", "step_time"


def run(batch: int, drafts: bool, seed: int, root: str) -> list[dict[str, float]]:
    """One run; a record an epoch, means over its steps, and medians of seconds."""
    import kit.train
    from kit.config import load_config
    from kit.trainer.generator import Generator

    turn, spent = Generator.turn, list[float]()

    def timed(self: Any, *given: Any, **named: Any) -> Any:
        begun = time.process_time()
        made = turn(self, *given, **named)
        spent.append(time.process_time() - begun)
        return made

    a_epoch = PROMPTS * GROUP // batch or 1
    config = load_config(
        "quickstart",
        [
            f"run.id=b{batch}-{'on' if drafts else 'off'}-s{seed}", f"run.root={root}", f"run.seed={seed}", "run.threads=1",
            "run.save_every=0", f"data.limit={2 * PROMPTS}", f"data.heldout={PROMPTS}", f"generation.drafts={drafts}",
            f"optimisation.batch_size={batch}", f"optimisation.steps={-(-EPOCHS * PROMPTS * GROUP // batch)}",
            "optimisation.learning_rate=2e-4", "evaluation.before=false", "evaluation.after=false", "evaluation.every=0",
        ],
    )  # fmt: skip
    Generator.turn = timed  # type: ignore[method-assign]
    try:
        lines = kit.train.run(config, quiet=True).metrics()
    finally:
        Generator.turn = turn  # type: ignore[method-assign]
    if len(lines) != config.optimisation.steps:
        raise SystemExit(f"{config.run.id} ended at step {len(lines)} of {config.optimisation.steps}")
    epochs = []
    for epoch in range(EPOCHS):
        part = range(round(epoch * len(lines) / EPOCHS), round((epoch + 1) * len(lines) / EPOCHS))
        keys = ("reward", "entropy", "completions/mean_length", *((CALLS, PLAIN) if drafts else ()))
        record = {key: statistics.fmean(lines[step][key] for step in part) for key in keys}
        seconds = {key: statistics.median(lines[step][key] for step in part) for key in (GENERATION, STEP)}
        cpu = statistics.median(spent[step] for step in part)
        epochs.append(record | seconds | {"cpu_seconds": cpu, "steps_an_epoch": a_epoch})
    return epochs


def ratios(found: dict[str, Any], batch: int, epoch: int, key: str) -> list[float]:
    """Of each seed: a quantity without drafts to that with them."""
    seeds = [name.rpartition("-s")[2] for name in found if name.startswith(f"b{batch}-on")]
    return [found[f"b{batch}-off-s{s}"][epoch][key] / found[f"b{batch}-on-s{s}"][epoch][key] for s in seeds]


def table(found: dict[str, Any]) -> str:
    """What the page shows: means over seeds; ratios without drafts to with them, and of seconds those of the seeds."""
    lines = [
        "| completions a step | epoch | calls without, with | ratio "
        "| s of generation a step | ratio (by seed) | of CPU time | of the step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch in sorted({int(name.split("-")[0][1:]) for name in found}):
        on = [runs for name, runs in found.items() if name.startswith(f"b{batch}-on")]
        off = [runs for name, runs in found.items() if name.startswith(f"b{batch}-off")]
        for epoch in range(EPOCHS):
            plain, calls = (statistics.fmean(runs[epoch][key] for runs in on) for key in (PLAIN, CALLS))
            slow, fast = (statistics.fmean(runs[epoch][GENERATION] for runs in arm) for arm in (off, on))
            cpu, whole = (statistics.fmean(ratios(found, batch, epoch, key)) for key in ("cpu_seconds", STEP))
            seeds = ", ".join(f"{ratio:.1f}" for ratio in ratios(found, batch, epoch, GENERATION))
            lines.append(
                f"| {batch} | {epoch + 1} | {plain:.1f}, {calls:.1f} | {plain / calls:.1f} "
                f"| {slow:.3f}, {fast:.3f} | {slow / fast:.1f} ({seeds}) | {cpu:.1f} | {whole:.1f} |"
            )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 128])
    given = parser.parse_args(arguments)
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as root:
        for seed in given.seeds:
            for batch in given.batches:
                for drafts in (True, False) if seed % 2 else (False, True):
                    name = f"b{batch}-{'on' if drafts else 'off'}-s{seed}"
                    if name not in found:
                        found[name] = run(batch, drafts, seed, root)
                        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(head + BEGIN + "\n" + table(found) + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
