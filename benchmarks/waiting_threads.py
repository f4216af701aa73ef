"""How long torch takes on idle cores and on crowded ones, with threads that spin while they wait and with threads that sleep.

`python benchmarks/waiting_threads.py [--work ...] [--threads 1 2] [--busy 0 2] [--out benchmarks/results/waiting_threads.json]`

The same work in two ways that differ in nothing but the environment (OpenMP's own wait policy; `kit.threads.SLEEPY`), in turns,
each time in a new process that is started beside so many busy loops. `network`: forward and backward passes of a perceptron
of 30 layers. `step`: 24 tokens one by one, forward, backward and AdamW of a transformer of the embedded model's shape. A
measurement repeats its work for at least `--seconds`, and is seconds a piece by the clock. A pair beside which anything else
used more than `--others` cores (or the host took them) is measured again. Both ways must come to the same gradients, bit by
bit. A call replaces the rows that it measured in `--out`, so that the table can be made in short pieces. `--preload FILE`
loads another OpenMP than the one in torch's wheel (Intel's `libiomp5.so`, LLVM's `libomp.so`); `--sleep NAME=VALUE` tries
other settings.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.threads import SLEEPY, WAIT_POLICY

SPIN, SLEEP = "spin", "sleep"
WORKS = {"network": "perceptron of 30 layers", "step": "training step"}


# --- one process --------------------------------------------------------------------------------------------------------


def network() -> Callable[[], list[Any]]:
    """A forward and a backward pass; returns the gradients."""
    import torch

    layers = [part for _ in range(30) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model, data = torch.nn.Sequential(*layers), torch.randn(64, 256)

    def once() -> list[Any]:
        model.zero_grad()
        model(data).square().mean().backward()
        return [weight.grad for weight in model.parameters()]

    return once


def step() -> Callable[[], list[Any]]:
    """16 rows: a token at a time, then all 56 with an AdamW step; returns the gradients."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(128, 4, 384, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    optimizer, token, rows = (
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        torch.randn(16, 1, 128),
        torch.randn(16, 56, 128),
    )

    def once() -> list[Any]:
        with torch.no_grad():
            for _ in range(24):
                model(token)
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        return [weight.grad for weight in model.parameters()]

    return once


def work_alone(work: str, threads: int, seconds: float, loops: Sequence[int]) -> dict[str, Any]:
    """A digest of the first gradients, seconds a piece, and the cores that others used meanwhile but for the `loops`."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    once = {"network": network, "step": step}[work]()
    digest = hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in once())).hexdigest()
    processes = [psutil.Process(), *map(psutil.Process, loops)]

    def of_others() -> float:
        times, own = psutil.cpu_times(), [process.cpu_times() for process in processes]
        return sum(times[:8]) - times.idle - times.iowait - sum(one.user + one.system for one in own)

    others, start, done = of_others(), time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds or not done:
        once()
        done += 1
    found = {"seconds": spent / done, "others": (of_others() - others) / spent}
    return found | {"gradients": digest, "torch": torch.__version__}


# --- the measurement --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[int]]:
    """So many programs that never wait, by their ids."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def one(way: str, work: str, threads: int, loops: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """`work_alone` in a new process."""
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_POLICY | {"OMP_NUM_THREADS"}}
    if options.preload:
        environment["LD_PRELOAD"] = options.preload
    if way == SLEEP:
        environment |= dict(setting.split("=", 1) for setting in options.sleep) or SLEEPY
    cell = json.dumps([work, threads, options.seconds, loops])
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", cell]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(work: str, threads: int, busy: int, options: argparse.Namespace) -> dict[str, Any]:
    """`--pairs` measurements of both ways in turns."""
    pairs: list[dict[str, dict[str, Any]]] = []
    with busy_loops(busy) as loops:
        while len(pairs) < options.pairs:
            pair = {way: one(way, work, threads, loops, options) for way in (SPIN, SLEEP)}
            assert pair[SPIN]["gradients"] == pair[SLEEP]["gradients"], f"{work}, {threads} threads: gradients differ"
            others = max(found["others"] for found in pair.values())
            if others <= options.others:
                pairs.append(pair)
            else:
                print(f"  {others:.2f} cores were used by others: once more", file=sys.stderr, flush=True)
    ratios = [pair[SPIN]["seconds"] / pair[SLEEP]["seconds"] for pair in pairs]
    return {
        "work": work,
        "threads": threads,
        "busy": busy,
        "seconds": {way: [float(f"{pair[way]['seconds']:.4g}") for pair in pairs] for way in (SPIN, SLEEP)},
        "ratio": {
            name: round(found(ratios), 3)
            for name, found in (("median", statistics.median), ("least", min), ("most", max))
        },
        "others": round(statistics.median(found["others"] for pair in pairs for found in pair.values()), 2),
        "torch": pairs[0][SPIN]["torch"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| work | threads | busy loops | cores used by others | spin, ms | sleep, ms | times as fast |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spin, sleep = (1000 * statistics.median(row["seconds"][way]) for way in (SPIN, SLEEP))
        ratio = row["ratio"]
        lines.append(
            f"| {WORKS[row['work']]} | {row['threads']} | {row['busy']} | {row['others']:.2f} | {spin:,.0f} | {sleep:,.0f} | "
            f"{ratio['median']:.2f}x ({ratio['least']:.2f} to {ratio['most']:.2f}) |"
        )
    return "\n".join(lines)


def place_of(row: dict[str, Any]) -> tuple[int, int, int]:
    return list(WORKS).index(row["work"]), row["busy"], row["threads"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--others", type=float, default=0.1)
    parser.add_argument("--preload", help="the file of another OpenMP")
    parser.add_argument("--sleep", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        return print(json.dumps(work_alone(*options.cell)))
    rows = []
    for work in options.work:
        for busy in options.busy:
            for threads in options.threads:
                rows.append(measured(work, threads, busy, options))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    if options.out:
        before = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
        rows = list({place_of(row): row for row in before + rows}.values())
        machine = f"2 cores {platform.machine().replace('_', '-')}, CPU"
        found = {"sleep": SLEEPY, "machine": machine, "rows": sorted(rows, key=place_of)}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(sorted(rows, key=place_of)))


if __name__ == "__main__":
    main()
