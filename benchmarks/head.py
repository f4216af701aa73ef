"""Time and extra peak memory of the log-probability head, against plain logits and against TRL's own head.

`python benchmarks/head.py [--quick] [--out benchmarks/results/head.json]`

One micro-batch of 1,024 completion tokens, float32, log-probabilities and entropies, forward and backward, once with
gradients of both and once with entropies that are only logged (most objectives): ours, plain logits, and TRL's chunked
head on a CPU (benchmarks/stock_trl.py). Times: CPU seconds of one process, the three in turns, medians and spread.
Memory: each in a process of its own, peak RSS (ru_maxrss) less the RSS after inputs, weights and libraries are in place
and, for a trainable head, less the bytes of the weight's own gradient. Gradients of the three are compared in the same
run, which stops if they differ by more than 1e-5.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from stock_trl import trl_on_a_cpu  # noqa: E402

from kit.scoring.head import DEFAULT_CHUNK, ChunkedLogProb  # noqa: E402

TOKENS = 1024
SIZES = ((512, 32768), (512, 151936))  # hidden, vocabulary
CASES = (("frozen", True), ("frozen", False), ("trainable", False))  # head, whether the entropy has a gradient
Score = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logps = torch.log_softmax(hidden @ weight.t(), dim=-1)  # (N, V)
    return logps.gather(1, targets.unsqueeze(1)).squeeze(1), -(logps.exp() * logps).sum(-1)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logps, entropy = ChunkedLogProb.apply(
        hidden, weight, None, targets, 1.0, DEFAULT_CHUNK, None, 1.0, ("entropy",), entropy_gradient
    )
    assert entropy is not None
    return logps, entropy


def trl(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    logps, entropy, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 8192, None, 1.0, ("entropy",))
    return logps, entropy


METHODS: dict[str, Score] = {"plain": plain, "trl": trl, "ours": ours}


def inputs(hidden_size: int, vocab: int, trainable: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, hidden_size, generator=generator).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=generator).mul_(0.1).requires_grad_(trainable)
    targets = torch.randint(vocab, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(TOKENS, generator=generator)


def step(method: str, with_entropy: bool, hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> None:
    hidden.grad = weight.grad = None
    with trl_on_a_cpu() if method == "trl" else nullcontext():
        logps, entropy = METHODS[method](hidden, weight, targets, with_entropy)
        loss = (logps * advantages).mean()
        torch.autograd.backward(loss - 0.01 * entropy.mean() if with_entropy else loss)


def rss() -> int:
    """Resident bytes now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def warm_up(method: str) -> None:
    """Thread pools and BLAS buffers belong to the process, not to the method."""
    hidden = torch.randn(64, 64).requires_grad_()
    step(method, True, hidden, torch.randn(64, 64), torch.randint(64, (64,)), torch.randn(64))


def peak(method: str, hidden: int, vocab: int, trainable: bool, with_entropy: bool) -> dict[str, float]:
    warm_up(method)
    batch = inputs(hidden, vocab, trainable)
    before = rss()
    step(method, with_entropy, *batch)
    own_gradient = batch[1].numel() * 4 if trainable else 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_mb": round((most - before - own_gradient) / 1e6, 1)}


def times(hidden: int, vocab: int, trainable: bool, with_entropy: bool, repeats: int) -> dict[str, Any]:
    """CPU seconds of each method in turns, and how far its gradients lie from those of plain logits."""
    batch = inputs(hidden, vocab, trainable)
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    gradients = {}
    for _ in range(repeats + 1):
        for name in METHODS:
            start = time.process_time()
            step(name, with_entropy, *batch)
            seconds[name].append(round(time.process_time() - start, 3))
            gradients[name] = [x.grad for x in batch[:2] if x.grad is not None]
    differs: dict[str, float] = {}
    for name in ("trl", "ours"):
        pairs = zip(gradients[name], gradients["plain"], strict=True)
        differs[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        assert differs[name] <= 1e-5, f"gradients of {name} differ by {differs[name]:.1e} at V={vocab}"
    return {
        "seconds": {name: values[1:] for name, values in seconds.items()},
        "gradient_rel": differs,
    }  # the first warms up


def fresh(*arguments: str) -> dict[str, Any]:
    """One cell in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", *arguments]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return result


def cell(kind: str, hidden: str, vocab: str, head: str, entropy: str, repeats: str) -> None:
    torch.set_num_threads(1)
    size = (int(hidden), int(vocab), head == "trainable", entropy == "True")
    print(json.dumps(times(*size, int(repeats)) if kind == "times" else peak(kind, *size)))


def row(head: str, entropy: bool, hidden: int, vocab: int, repeats: int) -> dict[str, Any]:
    common = (str(hidden), str(vocab), head, str(entropy), str(repeats))
    timed = fresh("times", *common)
    made: dict[str, Any] = {"head": head, "entropy_gradient": entropy, "hidden": hidden, "vocab": vocab, **timed}
    made["median"] = {name: statistics.median(values) for name, values in timed["seconds"].items()}
    made["peak_mb"] = {name: fresh(name, *common)["peak_mb"] for name in METHODS}
    return made


def table(rows: list[dict[str, Any]]) -> str:
    names = ("head", "gradient of the entropy", "V", "ours s", "plain s", "TRL s")
    names += ("time / plain", "time / TRL", "peak / plain", "gradient differs by")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for one in rows:
        middle, most = one["median"], one["peak_mb"]
        seconds = [f"{middle[name]:.2f}" for name in ("ours", "plain", "trl")]
        ratios = [middle["ours"] / middle["plain"], middle["ours"] / middle["trl"], most["ours"] / most["plain"]]
        cells = [one["head"], "yes" if one["entropy_gradient"] else "no", f"{one['vocab']:,}", *seconds]
        cells += [f"{ratio:.2f}" for ratio in ratios] + [f"{one['gradient_rel']['ours']:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the small vocabulary only")
    parser.add_argument("--cell", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        return cell(*options.cell)
    sizes = SIZES[:1] if options.quick else SIZES
    rows = [row(*case, *size, options.repeats) for case in CASES for size in sizes]
    print(table(rows))
    if options.out:
        setting = {"tokens": TOKENS, "dtype": "float32", "threads": 1, "torch": torch.__version__}
        machine = f"2 cores {platform.machine().replace('_', '-')}, CPU"
        options.out.write_text(json.dumps({**setting, "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
