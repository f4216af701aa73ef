"""Time of the train phase (scoring, loss, backward pass) compared with stock TRL; each arm adds one optimisation.

`python benchmarks/train_phase.py [--pairs 5] [--hidden 192] [--layers 6] [--out benchmarks/results/train_phase.json]`

The model is a Qwen3 with random weights and LoRA on all linear layers, in float32 with one thread. A micro-batch has `--group`
completions of 32 to 256 tokens for each of `--prompts` prompts of 256 tokens, shuffled and padded as in TRL; a quarter of the
groups has no advantage. Stock TRL is `trl.GRPOTrainer` with its own chunked head on a CPU (benchmarks/stock_trl.py). The arms
take turns in one process. The table has median CPU seconds, and the range of the speedup over the turns. The benchmark stops if
a gradient differs from stock TRL's by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from stock_trl import trl_on_a_cpu  # noqa: E402

ARMS: dict[str, dict[str, Any] | None] = {
    "stock TRL": None,
    "our head": {"packing": False, "skip_flat_groups": False},
    "+ packing": {"packing": True, "share_prompts": False, "skip_flat_groups": False},
    "+ shared prompts": {"packing": True, "share_prompts": True, "skip_flat_groups": False},
    "+ flat groups skipped": {"packing": True, "share_prompts": True, "skip_flat_groups": True},
}
"""Arguments of the trainer by arm; None for TRL's own class."""
STOCK = "stock TRL"


def make_trainer(arm: str, options: argparse.Namespace, objective: Any = "dapo") -> Any:
    """Return the trainer of an arm, with the same weights in each arm. options: the sizes that `main` parses."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from kit.models.embedded import source_of
    from kit.trainer.trainer import HookedGRPOTrainer

    torch.manual_seed(0)
    heads = options.hidden // 64
    config = Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=8 * options.hidden // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        tie_word_embeddings=False,
    )
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=options.group * options.prompts,
        num_generations=options.group,
        max_completion_length=options.longest,
        report_to="none",
        loss_type="dapo",
        epsilon_high=0.28 if arm == STOCK else None,
    )
    arguments: dict[str, Any] = {
        "model": Qwen3ForCausalLM(config),
        "reward_funcs": lambda completion_ids, **_: [0.0] * len(completion_ids),
        "args": args,
        "train_dataset": Dataset.from_dict({"prompt": ["1 ="] * options.group}),
        "processing_class": AutoTokenizer.from_pretrained(source_of("embedded")),
        "peft_config": LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False),
    }
    if ARMS[arm] is None:
        trainer = GRPOTrainer(**arguments)
    else:
        trainer = HookedGRPOTrainer(**arguments, objective=objective, first_step_checks=False, **ARMS[arm])
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def inputs(options: argparse.Namespace, lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
    """A micro-batch in TRL's layout. lengths: tokens per completion of each group; uniformly random by default."""
    draw = random.Random(0)
    rows = []
    for number in range(options.prompts):
        prompt = [draw.randrange(4, options.vocab) for _ in range(options.prompt)]
        for index in range(options.group):
            length = lengths[index] if lengths else draw.randint(options.shortest, options.longest)
            completion = [draw.randrange(4, options.vocab) for _ in range(length)]
            rows.append((prompt, completion, 0.0 if number % 4 == 3 else draw.gauss(0, 1)))
    draw.shuffle(rows)
    longest = max(len(completion) for _, completion, _ in rows)
    completions, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest).long()
    for row, (_, completion, _) in enumerate(rows):
        completions[row, : len(completion)], mask[row, : len(completion)] = torch.tensor(completion), 1
    prompts = torch.tensor([prompt for prompt, _, _ in rows])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.tensor([advantage for *_, advantage in rows]),
        "num_items_in_batch": mask.sum().float(),
    }


@contextmanager
def batch_as_rollout(batch: dict[str, Tensor]) -> Iterator[None]:
    """Let trainers inside the block train on this micro-batch instead of a rollout."""
    from trl import GRPOTrainer

    prepare_inputs = GRPOTrainer._prepare_inputs
    GRPOTrainer._prepare_inputs = lambda self, _: dict(batch)
    try:
        yield
    finally:
        GRPOTrainer._prepare_inputs = prepare_inputs


def phase(arm: str, trainer: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return CPU seconds of a training step without the optimiser on this micro-batch, and the gradients."""
    trainer.model.zero_grad()
    with trl_on_a_cpu() if arm == STOCK else nullcontext(), batch_as_rollout(batch):
        start = time.process_time()
        trainer.training_step(trainer.model, {}, None)
        seconds = time.process_time() - start
    return seconds, {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.grad is not None}


def forwarded(arm: str, trainer: Any, batch: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    """Return the number of tokens that the model reads, padding included, and the gradients."""
    counts: list[int] = []
    embeddings = trainer.accelerator.unwrap_model(trainer.model).get_base_model().get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    gradients = {name: value.clone() for name, value in phase(arm, trainer, batch)[1].items()}
    handle.remove()
    return sum(counts), gradients


def largest_difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference between two gradients of a weight, relative to the norm of the expected gradient."""
    assert gradients.keys() == expected.keys()
    return max(float((gradients[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    batch, trainers = inputs(options), {arm: make_trainer(arm, options) for arm in ARMS}
    weights = list(trainers[STOCK].model.parameters())
    head = options.hidden * options.vocab / sum(weight.numel() for weight in weights)
    expected: dict[str, Tensor] = {}
    rows: dict[str, Any] = {}
    for arm, trainer in trainers.items():
        phase(arm, trainer, batch)  # warms up, and runs the check of packing that happens once per run
        tokens, gradients = forwarded(arm, trainer, batch)
        expected = expected or gradients
        error = largest_difference(gradients, expected)
        assert error <= 1e-5, f"{arm}: a gradient differs from stock TRL's by {error:.1e}"
        rows[arm] = {"tokens": tokens, "gradient_rel": error, "seconds": []}
    for _ in range(options.pairs):
        for arm, trainer in trainers.items():
            rows[arm]["seconds"].append(round(phase(arm, trainer, batch)[0], 3))
    for row in rows.values():
        ratios = [stock / seconds for stock, seconds in zip(rows[STOCK]["seconds"], row["seconds"], strict=True)]
        row["speedup"] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    learning = batch["advantages"] != 0  # flat groups have no gradient
    unique = int(learning.sum()) // options.group * options.prompt + int(batch["completion_mask"][learning].sum())
    return {"rows": rows, "unique_tokens": unique, "head_share": round(head, 3)}


def table(results: dict[str, Any]) -> str:
    """Format the results as Markdown. useful: unique tokens of groups that train, per token that the model reads."""
    lines = ["| arm | tokens | useful | CPU s | faster than stock | gradient differs by |", "|---|---|---|---|---|---|"]
    for arm, row in results["rows"].items():
        speed = row["speedup"]
        lines.append(
            f"| {arm} | {row['tokens']:,} | {results['unique_tokens'] / row['tokens']:.2f} | "
            f"{statistics.median(row['seconds']):.2f} | {speed['median']:.2f}x ({speed['least']:.2f} to "
            f"{speed['most']:.2f}) | {row['gradient_rel']:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=32)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options)
    print(f"head: {results['head_share']:.1%} of the weights")
    print(table(results))
    if options.out:
        setting = {name: value for name, value in vars(options).items() if name != "out"}
        machine = f"2 cores {platform.machine().replace('_', '-')}, CPU"
        more = {"dtype": "float32", "threads": 1, "torch": torch.__version__, "machine": machine}
        options.out.write_text(json.dumps({**setting, **more, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
