"""Time of the objective against TRL's loss code: `python benchmarks/objective_overhead.py [--out FILE]`.

The time covers the part of a training step between the model's forward and backward pass: the loss of log-probabilities
(64, 512), its gradient with respect to them, and the logged metrics. The benchmark uses one thread, float32, completions of 64 to
512 tokens and off-policy ratios. It passes the same tensors to kit and TRL in turns, in one process, and prints medians. TRL's
side is `GRPOTrainer._compute_loss` of the installed version, called on a mock trainer whose model returns these tensors.

The exit code is 1 if a recipe takes 2 ms or more, or more than 1.1 times TRL's time for the same loss.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from kit.objective import LossScale, Objective, TokenBatch, recipe_names
from kit.objective.metrics import Sums
from kit.trainer.teacher import TEACHER_NEEDS

B, T = 64, 512
LIMIT_MS, LIMIT_RATIO = 2.0, 1.1
TRL: dict[str, dict[str, Any]] = {  # recipe -> TRL's name for it
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
}
KL = {"name": "kl", "coef": 0.04}


def tensors() -> dict[str, Tensor]:
    """Random inputs of the loss: log-probabilities, entropies, advantages and the mask."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(B, T, generator=generator) * 3
    lengths = torch.randint(64, T + 1, (B,), generator=generator)
    return {
        "logps": (old + 0.1 * torch.randn(B, T, generator=generator)).requires_grad_(),
        "old_logps": old,
        "ref_logps": old + 0.1 * torch.randn(B, T, generator=generator),
        "entropy": torch.rand(B, T, generator=generator) * 2,
        "advantages": torch.randn(B, generator=generator),
        "mask": (torch.arange(T) < lengths[:, None]).long(),
    }


def kit_step(inputs: dict[str, Tensor], objective: Objective) -> Callable[[], None]:
    """Return a function that runs the kit's loss and backward pass and records the metrics as the trainer does."""
    sums, tokens = Sums(), inputs["mask"].sum()
    rewards = torch.randn(B, 1, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        inputs["logps"].grad = None
        batch = TokenBatch(
            logps=inputs["logps"],
            old_logps=inputs["old_logps"],
            advantages=inputs["advantages"].unsqueeze(1),
            mask=inputs["mask"].bool(),
            ref_logps=inputs["ref_logps"] if "ref_logps" in objective.needs else None,
            entropy=inputs["entropy"],
            rewards=rewards,
        )
        out = objective.loss(batch, LossScale(1, tokens, T))
        sums.add(out.metrics)
        out.loss.backward()  # type: ignore[no-untyped-call]

    return step


def trl_step(tensors: dict[str, Tensor], beta: float = 0.0, **options: Any) -> Callable[[], None]:
    """Return a function that runs TRL's loss and backward pass. options: arguments of `GRPOConfig`."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (tensors["logps"], tensors["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        beta=beta,
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=None,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        loss_type=options["loss_type"],
        epsilon_low=options.get("epsilon_low", 0.2),
        epsilon_high=options.get("epsilon_high", 0.2),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=T,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": tensors["mask"],
        "advantages": tensors["advantages"].unsqueeze(1) if options["loss_type"] == "vespo" else tensors["advantages"],
        "old_per_token_logps": tensors["old_logps"],
        "ref_per_token_logps": tensors["ref_logps"],
        "num_items_in_batch": tensors["mask"].sum(),
    }

    def step() -> None:
        tensors["logps"].grad = None
        GRPOTrainer._compute_loss(trainer, None, inputs).backward()

    return step


def medians(steps: list[Callable[[], None]], repeats: int) -> list[float]:
    """Median milliseconds of each step. The steps take turns, so that a slow moment of the machine affects all of them."""
    seconds: list[list[float]] = [[] for _ in steps]
    for repeat in range(repeats + 5):
        for index, step in enumerate(steps):
            started = time.perf_counter()
            step()
            if repeat >= 5:
                seconds[index].append(time.perf_counter() - started)
    return [1000 * statistics.median(values) for values in seconds]


def main() -> int:
    """Measure every recipe with and without a KL term, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    inputs, rows = tensors(), []
    print(f"| recipe | KL | kit, ms | TRL {trl.__version__}, ms | ratio |\n|---|---|---|---|---|")
    for name in [name for name in recipe_names() if not Objective.from_spec(name).needs & TEACHER_NEEDS]:
        for kl in ([], [KL]):
            steps = [kit_step(inputs, Objective.from_spec({"recipe": name, "regularizers": kl}))]
            if name in TRL:
                steps.append(trl_step(inputs, beta=0.04 if kl else 0.0, **TRL[name]))
            times = medians(steps, arguments.repeats)
            ratio = times[0] / times[1] if name in TRL else None
            rows.append({"recipe": name, "kl": bool(kl), "ours_ms": round(times[0], 3)})
            rows[-1] |= {"trl_ms": round(times[1], 3), "ratio": round(times[0] / times[1], 3)} if name in TRL else {}
            cells = f"{times[1]:.2f} | {ratio:.2f}" if ratio is not None else "- | -"
            print(f"| {name} | {'k3' if kl else '-'} | {times[0]:.2f} | {cells} |", flush=True)
    slow = [row for row in rows if row["ours_ms"] >= LIMIT_MS or row.get("ratio", 0) > LIMIT_RATIO]
    for row in slow:
        print(f"over the limit: {row}")
    if arguments.out:
        machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
        arguments.out.write_text(json.dumps({"machine": machine, "shape": [B, T], "rows": rows}, indent=1) + "\n")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
