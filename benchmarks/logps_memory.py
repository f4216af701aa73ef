"""Extra peak memory and time of the log-probability head against plain logits, over vocabulary sizes.

`python benchmarks/logps_memory.py [--out benchmarks/results/logps_memory.json]`

One micro-batch of 2 x 512 completion tokens, hidden size 256, float32. Each cell runs in a fresh process: peak RSS
(ru_maxrss) less the RSS after inputs, weights and libraries are in place and, for a trainable head, less the bytes of
the weight's own gradient. The loss weights log-probabilities and entropies, forward and backward. Gradients of both
ways are compared in a process of their own, and the run stops if they differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.training.logps import token_logps_and_entropy

TOKENS, HIDDEN = 2 * 512, 256
VOCABS = (32768, 65536, 151936)
Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logps = torch.log_softmax(hidden @ weight.t(), dim=-1)  # (N, V)
    return logps.gather(1, targets.unsqueeze(1)).squeeze(1), -(logps.exp() * logps).sum(-1)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logps, entropy = token_logps_and_entropy(hidden, weight, targets)
    assert entropy is not None
    return logps, entropy


METHODS: dict[str, Score] = {"plain": plain, "ours": ours}


def inputs(vocab: int, trainable: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(vocab, HIDDEN, generator=generator).mul_(0.1).requires_grad_(trainable)
    targets = torch.randint(vocab, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(TOKENS, generator=generator)


def step(score: Score, hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> None:
    hidden.grad = weight.grad = None
    logps, entropy = score(hidden, weight, targets)
    torch.autograd.backward((logps * advantages).mean() - 0.01 * entropy.mean())


def rss() -> int:
    """Resident bytes now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(method: str, vocab: int, trainable: bool, repeats: int) -> dict[str, float]:
    # Thread pools and BLAS buffers belong to the process, not to the method: warm them up on a small problem.
    small = torch.randn(64, 64, requires_grad=True)
    step(METHODS[method], small, torch.randn(64, 64), torch.randint(64, (64,)), torch.randn(64))
    batch = inputs(vocab, trainable)
    before = rss()
    seconds, peak = [], 0
    for repeat in range(repeats):
        start = time.perf_counter()
        step(METHODS[method], *batch)
        seconds.append(time.perf_counter() - start)
        if repeat == 0:  # the first step alone: later ones may only fragment
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    own_gradient = batch[1].numel() * 4 if trainable else 0
    return {"peak_mb": (peak - before - own_gradient) / 1e6, "seconds": statistics.median(seconds)}


def compare(vocab: int, trainable: bool) -> dict[str, float]:
    """Largest gradient difference relative to the largest gradient; also the difference in log-probabilities."""
    batch = inputs(vocab, trainable)
    found = {}
    for name, score in METHODS.items():
        step(score, *batch)
        with torch.no_grad():
            found[name] = [*score(*batch[:3]), *(x.grad for x in batch[:2] if x.grad is not None)]
    differences = [
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found["ours"][2:], found["plain"][2:], strict=True)
    ]
    assert max(differences) <= 1e-5, f"gradients differ by {max(differences):.1e} at V={vocab}"
    return {
        "gradient_rel": max(differences),
        "logp_abs": (found["ours"][0] - found["plain"][0]).abs().max().item(),
    }


def fresh(*arguments: str) -> dict[str, float]:
    """Run one cell in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", *arguments]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def cell(threads: str, kind: str, vocab: str, head: str, repeats: str) -> None:
    torch.set_num_threads(int(threads))
    trainable = head == "trainable"
    result = compare(int(vocab), trainable) if kind == "compare" else measure(kind, int(vocab), trainable, int(repeats))
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        return cell(*options.cell)

    machine = f"2 cores {platform.machine().replace('_', '-')}, CPU"
    print(
        f"{TOKENS} tokens, hidden {HIDDEN}, float32, {options.threads} thread(s), torch {torch.__version__}, {machine}"
    )
    names = ("plain MB", "ours MB", "plain s", "ours s", "time", "grad rel")
    print(f"{'head':<10}{'vocab':>8}" + "".join(f"{name:>10}" for name in names))
    rows = []
    for head in ("frozen", "trainable"):
        for vocab in VOCABS:
            common = (str(vocab), head, str(options.repeats))
            exact = fresh(str(options.threads), "compare", *common)
            cells = {name: fresh(str(options.threads), name, *common) for name in METHODS}
            a, b = cells["plain"], cells["ours"]
            print(
                f"{head:<10}{vocab:>8}{a['peak_mb']:>10.0f}{b['peak_mb']:>10.0f}{a['seconds']:>10.2f}"
                f"{b['seconds']:>10.2f}{b['seconds'] / a['seconds']:>9.2f}x{exact['gradient_rel']:>10.1e}",
                flush=True,
            )
            rows.append({"head": head, "vocab": vocab, **exact, **cells})
    if options.out:
        report = {
            "tokens": TOKENS,
            "hidden": HIDDEN,
            "dtype": "float32",
            "threads": options.threads,
            "repeats": options.repeats,
            "torch": torch.__version__,
            "machine": machine,
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
