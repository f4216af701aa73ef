"""Time and memory of training steps on a real model, SmolLM2-135M-Instruct, with stock TRL and with this kit.

`python benchmarks/real_model.py [--steps 2] [--prompts 8] [--group 8] [--tokens 128] [--out FILE]`

The task is to write sentences as JSON, with LoRA of rank 16 on all linear layers, Dr. GRPO and float32. Each arm runs in its own
process with one thread and the same seed, so that all arms sample the same completions. Seconds are CPU seconds of the
process, because other programs on the machine change them little; memory is the largest resident set. Stock TRL is
`trl.GRPOTrainer` with its fused head on a CPU (benchmarks/stock_trl.py).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from stock_trl import trl_on_a_cpu  # noqa: E402

ARMS: dict[str, dict[str, Any] | None] = {
    "stock TRL": None,
    "kit, TRL's generation": {"fast_decoding": False},
    "kit": {"fast_decoding": True},
}
"""Arguments of the trainer; None for TRL's own class."""
STOCK = "stock TRL"


def make_trainer(arm: str, *, steps: int, prompts: int, group: int, tokens: int, **changes: Any) -> Any:
    """Return a trainer of SmolLM2.

    arm: key of `ARMS`. prompts: prompts per step. group: completions per prompt. tokens: most tokens per completion.
    changes: arguments of `GRPOConfig` that replace the benchmark's.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from kit.config import DataConfig
    from kit.data.sources import read_sentences
    from kit.models.gguf import converted, smollm2_file
    from kit.trainer.trainer import HookedGRPOTrainer

    torch.manual_seed(0)
    folder = converted(smollm2_file())
    records = read_sentences(
        DataConfig(source="kit:sentence-to-json", limit=max(64, steps * prompts), heldout=0)
    ).records
    system = {"role": "system", "content": "You reply with one line of JSON."}
    rows = [[system, {"role": "user", "content": record.values["prompt"]}] for record in records]
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": group,
        "gradient_accumulation_steps": prompts,
        "num_generations": group,
        "max_completion_length": tokens,
        "max_steps": steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    options = ARMS[arm]
    if options is None:
        arguments |= {"loss_type": "dr_grpo", "scale_rewards": "none"}
    parts: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        "reward_funcs": share_of_json,
        "args": GRPOConfig(**arguments | changes),
        "train_dataset": Dataset.from_dict({"prompt": rows}),
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    }
    return GRPOTrainer(**parts) if options is None else HookedGRPOTrainer(**parts, objective="dr_grpo", **options)


def share_of_json(completions: list[Any], **_: Any) -> list[float]:
    """Reward: the share of a completion's characters that belong to JSON's syntax. It varies within a group."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(text.count(character) for character in '{}":,') / (len(text) + 1) for text in texts]


def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm; return seconds per step, the largest memory, losses and gradient norms."""
    import torch

    torch.set_num_threads(1)
    trainer = make_trainer(
        arm, steps=options.steps, prompts=options.prompts, group=options.group, tokens=options.tokens
    )
    rollout_seconds = [0.0]
    generate = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        start = time.process_time()
        outputs = generate(inputs)
        rollout_seconds[0] += time.process_time() - start
        return outputs

    trainer._generate_and_score_completions = timed
    with trl_on_a_cpu() if arm == STOCK else nullcontext():
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "step_seconds": round(seconds / options.steps, 1),
        "rollout_seconds": round(rollout_seconds[0] / options.steps, 1),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
        "mean_tokens": [round(log["completions/mean_length"], 1) for log in logs],
    }


def seconds_per_token(row: dict[str, Any]) -> float:
    """Seconds per step and token of the mean completion, which compares arms with completions of different lengths."""
    return float(row["step_seconds"]) * len(row["mean_tokens"]) / sum(row["mean_tokens"])


def table(results: dict[str, dict[str, Any]]) -> str:
    """Format the results as Markdown."""
    head = [
        "arm",
        "s per step",
        "of it rollout",
        "tokens per completion",
        "faster by token",
        "memory, GiB",
        "losses",
        "gradient norms",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for arm, row in results.items():
        faster = seconds_per_token(results[STOCK]) / seconds_per_token(row)
        tokens = ", ".join(f"{value:.0f}" for value in row["mean_tokens"])
        losses, norms = (", ".join(f"{value:.5f}" for value in row[name]) for name in ("losses", "grad_norms"))
        cells = [
            arm,
            row["step_seconds"],
            row["rollout_seconds"],
            tokens,
            f"{faster:.2f}x",
            row["memory_gib"],
            losses,
            norms,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=list(ARMS), help="run this arm only and print its result as JSON")
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options.arm, options)))
        return
    results = {}
    for arm in ARMS:
        sizes = [f"--{name}={getattr(options, name)}" for name in ("steps", "prompts", "group", "tokens")]
        command = [sys.executable, __file__, "--arm", arm, *sizes]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[arm] = json.loads(output.splitlines()[-1])
    print(table(results))
    if options.out:
        setting = {name: value for name, value in vars(options).items() if name not in ("out", "arm")}
        options.out.write_text(
            json.dumps({**setting, "dtype": "float32", "threads": 1, "rows": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
