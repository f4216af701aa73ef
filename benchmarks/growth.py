"""How time and memory of a train phase grow with completion length, prompt length, group size and vocabulary.

`python benchmarks/growth.py [--quick] [--out benchmarks/results/growth.json] [--plot docs/images/growth.png]`

The train phase of benchmarks/train_phase.py (scoring, loss, backward; float32, one thread) on one group, ours and stock TRL,
each cell in a process of its own: CPU seconds, the median of three phases, and how far the first phase raised resident
memory. One size changes at a time, around C = 256, P = 256, G = 8, V = 32,768; completions have C/8 to C tokens in even
steps. Attention's own share grows with the square of the length. Gradients of the two ways are compared in every cell,
and the run stops if they differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import train_phase  # noqa: E402

BASE = {"longest": 256, "prompt": 256, "group": 8, "vocab": 32768}
GRID = {
    "longest": (128, 256, 512, 1024, 2048),
    "prompt": (64, 128, 256, 512, 1024),
    "group": (4, 8, 16, 32),
    "vocab": (32768, 151936),
}
TITLES = {
    "longest": "completion tokens C",
    "prompt": "prompt tokens P",
    "group": "group size G",
    "vocab": "vocabulary V",
}
WAYS = {"ours": "+ flat groups skipped", "stock": train_phase.STOCK}


def options_of(sizes: dict[str, int]) -> argparse.Namespace:
    return argparse.Namespace(prompts=1, hidden=128, layers=4, shortest=max(1, sizes["longest"] // 8), **sizes)


def batch_of(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """One group, whose lengths are the same shares of C at every size."""
    options, steps = options_of(sizes), sizes["group"] - 1
    span = options.longest - options.shortest
    return train_phase.inputs(options, [options.shortest + round(span * place / steps) for place in range(steps + 1)])


def peak_bytes(*, start: bool = False) -> int:
    """Most resident memory since `start` (Linux)."""
    if start:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def cell(way: str, sizes: dict[str, int], gradients_to: str) -> dict[str, float]:
    torch.set_num_threads(1)
    options, name = options_of(sizes), WAYS[way]
    trainer, batch = train_phase.make_trainer(name, options), batch_of(sizes)
    train_phase.phase(name, trainer, batch_of(sizes | {"longest": 16, "prompt": 8, "group": 4}))
    before = peak_bytes(start=True)
    tokens, gradients = train_phase.forwarded(name, trainer, batch)
    raised = peak_bytes() - before
    seconds = statistics.median(train_phase.phase(name, trainer, batch)[0] for _ in range(3))
    torch.save(gradients, gradients_to)
    return {"seconds": round(seconds, 3), "peak_mb": round(raised / 1e6, 1), "tokens": tokens}


def compared(sizes: dict[str, int]) -> dict[str, Any]:
    """Both ways at these sizes, and how far their gradients differ."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        for way in WAYS:
            file = str(Path(folder) / way)
            command = [sys.executable, str(Path(__file__).resolve()), "--cell", way, json.dumps(sizes), file]
            found[way] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        ours, stock = (torch.load(Path(folder) / way) for way in WAYS)
    found["gradient_rel"] = train_phase.largest_difference(ours, stock)
    assert found["gradient_rel"] <= 1e-5, f"{sizes}: a gradient differs by {found['gradient_rel']:.1e}"
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| size | | tokens ours / stock | CPU s | ratio | peak MB | ratio |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        ours, stock = row["ours"], row["stock"]
        lines.append(
            f"| {TITLES[row['axis']]} | {row['value']:,} | {ours['tokens']:,} / {stock['tokens']:,} | "
            f"{ours['seconds']:.2f} / {stock['seconds']:.2f} | {stock['seconds'] / ours['seconds']:.2f}x | "
            f"{ours['peak_mb']:,.0f} / {stock['peak_mb']:,.0f} | {ours['peak_mb'] / stock['peak_mb']:.2f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(GRID), figsize=(12.8, 5.2), layout="constrained", sharey="row")
    for column, axis in enumerate(GRID):
        cells = [row for row in rows if row["axis"] == axis]
        for line, (what, unit) in enumerate((("seconds", "CPU seconds"), ("peak_mb", "extra memory, MB"))):
            plot = axes[line, column]
            for way, colour in (("stock", "#9a9a9a"), ("ours", "#1f77b4")):
                values = [row[way][what] for row in cells]
                plot.plot(
                    [row["value"] for row in cells],
                    values,
                    "o-",
                    color=colour,
                    label=f"{way} TRL" if way == "stock" else way,
                )
            plot.set(xscale="log", yscale="log", ylabel=unit if not column else None)
            plot.set_xticks([row["value"] for row in cells], [f"{row['value']:,}" for row in cells], minor=False)
            plot.minorticks_off()
            plot.grid(alpha=0.3)
            if line:
                plot.set_xlabel(TITLES[axis])
    for first, ticks in zip(axes[:, 0], ((0.3, 1, 3, 10), (100, 300, 1000, 3000)), strict=True):
        first.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--quick", action="store_true", help="the first two values of every size")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        way, sizes, file = options.cell
        return print(json.dumps(cell(way, json.loads(sizes), file)))
    rows: list[dict[str, Any]] = []
    known: dict[str, dict[str, Any]] = {}  # the base case stands on every axis
    for axis, values in GRID.items():
        for value in values[:2] if options.quick else values:
            sizes = BASE | {axis: value}
            key = json.dumps(sizes)
            known[key] = known.get(key) or compared(sizes)
            rows.append({"axis": axis, "value": value, **known[key]})
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    if options.plot:
        draw(rows, options.plot)
    if options.out:
        machine = f"2 cores {platform.machine().replace('_', '-')}, CPU"
        setting = {"base": BASE, "hidden": 128, "layers": 4, "torch": torch.__version__, "machine": machine}
        options.out.write_text(json.dumps({**setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
