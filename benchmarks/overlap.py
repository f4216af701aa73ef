"""What it saves to score a part of a batch while the next one is generated: `python benchmarks/overlap.py [--out FILE]`.

Quickstart's embedded model makes 64 completions in 1, 2, 4 and 8 parts; a reward stands for a judge over a network: it waits
`--wait` seconds for each completion, eight at a time. Wall-clock seconds of generation and rewards together, with the
scoring of a part beside the generation of the next (`generation.chunks`) and behind it, in turns; medians. Completions and
rewards of both are compared in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rewards.preset import Preset
from rewards.protocol import Context, ItemComponent, Sample, Score

COMPLETIONS, GROUP, AT_ONCE = 64, 8, 8
CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Judge(ItemComponent):
    """Takes its time, and asks eight at once."""

    name: str = "judge"
    wait: float = 0.1

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        time.sleep(self.wait)
        return Score((sum(sample.token_ids or ()) % 11) / 10)

    def score(self, samples: Any, ctx: Context) -> list[Score]:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(lambda sample: self._timed(sample, ctx), samples))


def make_trainer(wait: float) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    from kit.models.embedded import source_of
    from kit.trainer.trainer import HookedGRPOTrainer

    folder = source_of("embedded")
    rows = [{"prompt": f"{number} + {number + 1} ="} for number in range(COMPLETIONS // GROUP)]
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, per_device_train_batch_size=COMPLETIONS,
        num_generations=GROUP, max_completion_length=64, report_to="none", gradient_checkpointing=False,
    )  # fmt: skip
    return HookedGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        Preset([(Judge(wait=wait), 1.0)]).trl(),
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        objective="dapo",
        first_step_checks=False,
    )


def rollout(trainer: Any, chunks: int, *, ahead: bool) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    seen: list[Any] = []
    trainer.generator.chunks, trainer.rollout_sinks = chunks, (seen.append,)
    begin = trainer._begin_rewards
    if not ahead:
        trainer._begin_rewards = lambda *_: None
    rows = [row for row in trainer.train_dataset for _ in range(GROUP)]
    torch.manual_seed(0)
    trainer.model.train()
    try:
        start = time.perf_counter()
        trainer._generate_and_score_completions(rows)
        return time.perf_counter() - start, seen[0]
    finally:
        trainer._begin_rewards = begin


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| parts | rewards behind, s | rewards beside, s | |", "|---|---|---|---|"]
    lines += [
        f"| {row['chunks']} | {row['behind']:.2f} | {row['ahead']:.2f} | {row['behind'] / row['ahead']:.2f}x |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--wait", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer, rows = make_trainer(options.wait), []
    rollout(trainer, 1, ahead=True)
    for chunks in CHUNKS:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.pairs):
            found = {}
            for ahead in (False, True):
                spent, found[ahead] = rollout(trainer, chunks, ahead=ahead)
                seconds[ahead].append(spent)
            assert found[True].completion_ids == found[False].completion_ids
            assert torch.equal(found[True].rewards, found[False].rewards)
        rows.append(
            {"chunks": chunks}
            | {name: statistics.median(seconds[on]) for name, on in (("behind", False), ("ahead", True))}
        )
    print(table(rows))
    if options.out:
        setting = {"wait": options.wait, "completions": COMPLETIONS, "at_once": AT_ONCE, "torch": torch.__version__}
        machine = f"2 cores {platform.machine().replace('_', '-')}, CPU"
        options.out.write_text(json.dumps({**setting, "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
