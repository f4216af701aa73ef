"""How long torch takes on idle cores and on crowded ones, with threads that spin while they wait and with threads that sleep.

`python benchmarks/waiting_threads.py [--work ...] [--threads 1 2] [--busy 0 2] [--out benchmarks/results/waiting_threads.json]`

Two workers that differ in nothing but their environment (OpenMP's own wait policy; `kit.threads.SLEEPY`) do the same work in
turns, beside so many busy loops. `network`: forward and backward passes of a perceptron of 30 layers. `step`: generation,
forward, backward and AdamW on a random model of the embedded one's shape. A measurement repeats its work for at least
`--seconds`, and is seconds a piece by the clock. A pair beside which anything else used more than `--others` cores (or the
host took them) is measured again. Both workers must come to the same gradients, bit by bit. A call replaces the rows that
it measured in `--out`, so that the table can be made in short pieces. `--preload FILE` loads another OpenMP
than the one in torch's wheel (Intel's `libiomp5.so`, LLVM's `libomp.so`); `--sleep NAME=VALUE` tries other settings.
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


# --- a worker ---------------------------------------------------------------------------------------------------------


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
    """16 completions of 24 tokens, and an AdamW step on them; returns the gradients."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=512, intermediate_size=384, pad_token_id=0, eos_token_id=1, **shape)
    )
    optimizer, prompts = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.randint(2, 512, (16, 32))

    def once() -> list[Any]:
        rows = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=24, min_new_tokens=24
        )
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        return [weight.grad for weight in model.parameters()]

    return once


def serve(work: str, threads: int) -> None:
    """Says a digest of the first gradients, and then, for every line of seconds, how long one piece of work took."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    once = {"network": network, "step": step}[work]()
    digest = hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in once())).hexdigest()
    print(json.dumps({"gradients": digest, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < float(line):
            once()
            done += 1
        print((time.perf_counter() - start) / done, flush=True)


class Worker:
    """A process that has loaded torch with `settings` in its environment, and works when asked."""

    def __init__(self, work: str, threads: int, settings: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in WAIT_POLICY | {"OMP_NUM_THREADS"}}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", work, str(threads)],
            env=clean | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.begun: dict[str, str] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with code {self.process.wait()}")
        return line

    def seconds(self, at_least: float) -> float:
        """Wall-clock seconds that a piece of work takes, over at least so many seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{at_least}\n")
        self.process.stdin.flush()
        return float(self._line())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


# --- the measurement --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many programs that never wait."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def busy_seconds(*processes: subprocess.Popen[Any]) -> float:
    """CPU seconds of this machine so far, those of the host's other guests included, without those of `processes`."""
    times = psutil.cpu_times()
    own = [psutil.Process(process.pid).cpu_times() for process in processes]
    return sum(times[:8]) - times.idle - times.iowait - sum(one.user + one.system for one in own)


def pair(
    ways: dict[str, Worker], options: argparse.Namespace, loops: Sequence[subprocess.Popen[Any]]
) -> dict[str, float]:
    """Seconds a piece of both ways, in a moment at which nothing else was running."""
    processes = [*loops, *(worker.process for worker in ways.values())]
    while True:
        clock, busy = time.perf_counter(), busy_seconds(*processes)
        found = {way: worker.seconds(options.seconds) for way, worker in ways.items()}
        others = (busy_seconds(*processes) - busy) / (time.perf_counter() - clock)
        if others <= options.others:
            return found
        print(f"  {others:.2f} cores were used by others: once more", file=sys.stderr, flush=True)


def measured(work: str, threads: int, busy: int, options: argparse.Namespace) -> dict[str, Any]:
    """`--pairs` measurements of both ways in turns."""
    loaded = {"LD_PRELOAD": options.preload} if options.preload else {}
    sleepy = dict(setting.split("=", 1) for setting in options.sleep) or SLEEPY
    ways = {SPIN: Worker(work, threads, loaded), SLEEP: Worker(work, threads, loaded | sleepy)}
    try:
        gradients = {way: worker.begun["gradients"] for way, worker in ways.items()}
        assert gradients[SPIN] == gradients[SLEEP], f"{work}, {threads} threads: the gradients differ"
        with busy_loops(busy) as loops:
            pairs = [pair(ways, options, loops) for _ in range(options.pairs)]
        version = ways[SPIN].begun["torch"]
    finally:
        for worker in ways.values():
            worker.end()
    ratios = [found[SPIN] / found[SLEEP] for found in pairs]
    return {
        "work": work,
        "threads": threads,
        "busy": busy,
        "seconds": {way: [float(f"{found[way]:.4g}") for found in pairs] for way in ways},
        "ratio": {
            name: round(found(ratios), 3)
            for name, found in (("median", statistics.median), ("least", min), ("most", max))
        },
        "torch": version,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| work | threads | busy programs beside | spin, ms | sleep, ms | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        spin, sleep = (1000 * statistics.median(row["seconds"][way]) for way in (SPIN, SLEEP))
        ratio = row["ratio"]
        lines.append(
            f"| {WORKS[row['work']]} | {row['threads']} | {row['busy']} | {spin:,.0f} | {sleep:,.0f} | "
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
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return serve(options.worker[0], int(options.worker[1]))
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
