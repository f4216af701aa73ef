"""What hooks of your own cost: a train phase with the built-in loss, and with the same loss made of custom hooks.

`python benchmarks/custom_hooks.py [--hooks 4] [--pairs 7] [--out benchmarks/results/custom_hooks.json]`

The train phase of benchmarks/train_phase.py: once with the recipe `dapo`, once with a clip of one's own that computes the same
and further regularizers of one's own whose sum is zero, so that the gradients must agree (checked; 1e-5). Custom hooks are
tried, shielded from padding and looked at after every call; this is what that costs. CPU seconds in turns, peak resident
memory of a phase in a process of its own for each.
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

import growth  # noqa: E402
import train_phase  # noqa: E402

HOOKS = """
import torch


def own_clip(eps_low=0.2, eps_high=0.28):
    def function(batch):
        ratio = batch.ratio
        clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
        return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)

    function.row_separable = function.zero_at_zero_advantage = True
    return function


def plus(scale=1.0):
    def function(batch):
        return scale * batch.log_ratio * batch.advantages

    function.row_separable = function.zero_at_zero_advantage = True
    return function
"""
WAY = "+ flat groups skipped"


def objective(kind: str, hooks: int, folder: Path) -> Any:
    if kind == "built-in":
        return "dapo"
    (folder / "own_hooks.py").write_text(HOOKS)
    file = folder / "own_hooks.py"
    signs = [1.0 if number % 2 else -1.0 for number in range(hooks - 1 - (hooks - 1) % 2)]  # they cancel
    terms = [{"name": f"{file}:plus", "coef": 0.01, "scale": sign} for sign in signs]
    return {"recipe": "dapo", "clip": {"name": f"{file}:own_clip"}, "regularizers": terms}


def trainer_of(kind: str, hooks: int, options: argparse.Namespace) -> Any:
    trainer = train_phase.make_trainer(WAY, options, objective(kind, hooks, Path(tempfile.mkdtemp())))
    train_phase.phase(WAY, trainer, train_phase.inputs(options))
    return trainer


def sizes(options: argparse.Namespace) -> argparse.Namespace:
    base = growth.BASE | {"vocab": 2048}
    return argparse.Namespace(prompts=options.prompts, hidden=192, layers=6, shortest=32, **base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--hooks", type=int, default=5, help="custom hooks: a clip and an even number of regularizers")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = sizes(options)
    if options.peak:
        trainer, batch = trainer_of(options.peak, options.hooks, shape), train_phase.inputs(shape)
        before = growth.peak_bytes(start=True)
        train_phase.phase(WAY, trainer, batch)
        return print(growth.peak_bytes() - before)
    kinds = ("built-in", "custom")
    trainers, batch = {kind: trainer_of(kind, options.hooks, shape) for kind in kinds}, train_phase.inputs(shape)
    gradients = {kind: train_phase.forwarded(WAY, trainer, batch)[1] for kind, trainer in trainers.items()}
    differs = train_phase.largest_difference(gradients["custom"], gradients["built-in"])
    assert differs <= 1e-5, f"a gradient differs by {differs:.1e}"
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.pairs):
        for kind, trainer in trainers.items():
            seconds[kind].append(round(train_phase.phase(WAY, trainer, batch)[0], 3))
    peaks = {}
    for kind in kinds:
        command = [sys.executable, str(Path(__file__).resolve()), "--peak", kind, "--hooks", str(options.hooks)]
        command += ["--prompts", str(options.prompts)]
        peaks[kind] = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    ratios = [own / built for own, built in zip(seconds["custom"], seconds["built-in"], strict=True)]
    ratio = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    print(
        f"{options.hooks} custom hooks ÷ built-in: time {ratio['median']:.3f} ({ratio['least']:.3f} to {ratio['most']:.3f}), "
        f"peak {peaks['custom'] / peaks['built-in']:.3f}, gradients differ by {differs:.0e}"
    )
    if options.out:
        machine = f"2 cores {platform.machine().replace('_', '-')}, CPU"
        found = {
            "hooks": options.hooks,
            "seconds": seconds,
            "ratio": ratio,
            "peak_bytes": peaks,
            "gradient_rel": differs,
        }
        options.out.write_text(json.dumps({"machine": machine, "torch": torch.__version__, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
