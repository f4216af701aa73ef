"""A process that forks two, which train one policy with gloo on the CPU, and then repeats their last step alone.

`two_processes.py FOLDER` writes the results of both processes, `0.pt` and `1.pt`, and the gradient of one process, `alone.pt`.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tiny_qwen import TARGETS, placed_ids, tiny_qwen, tiny_settings, tiny_tokenizer  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from kit.scoring import scorer  # noqa: E402
from kit.trainer.policy_loss import average_gradients  # noqa: E402
from kit.trainer.trainer import HookedGRPOTrainer  # noqa: E402
from training.conftest import PROMPTS  # noqa: E402
from training.rollouts import adapter, drift  # noqa: E402

STEERED = {"name": "kl", "coef": "adaptive_kl(target=0.001, horizon=40, start=0.1)"}
PPO = {"recipe": "ppo", "regularizers": [STEERED]}
OFF = {"skip_flat_groups": False}
KL = {"recipe": "dapo", "regularizers": [{"name": "kl", "coef": 0.04}]}  # each micro-batch is one pass


def nothing(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.0] * len(completion_ids)


def new_trainer(
    folder: Path, objective: Any, reward: Callable[..., Any] = placed_ids, *, size: int = 4, **switches: Any
) -> Any:
    """A trainer of four steps, two on each rollout."""
    tokenizer = tiny_tokenizer()
    changes = {
        "per_device_train_batch_size": size, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4,
        "weight_decay": 0.1,
    }  # fmt: skip
    args = GRPOConfig(**tiny_settings(tokenizer, folder / "run") | changes)
    model = tiny_qwen(tokenizer)
    torch.manual_seed(0)
    return HookedGRPOTrainer(
        model=model, reward_funcs=reward, args=args, train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer, objective=objective,
        peft_config=LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False), **switches,
    )  # fmt: skip


def gradients(trainer: Any, model: Any, batches: list[Any]) -> dict[str, torch.Tensor]:
    """Gradients of LoRA and value head over the micro-batches of a step, as the optimiser receives them."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.critic.head.zero_grad()
    trainer.current_gradient_accumulation_steps = len(batches)
    for inputs in batches:
        trainer.compute_loss(model, dict(inputs)).backward()
    average_gradients(trainer.accelerator, trainer.model)
    trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
    grads = {name: value.grad.clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    return grads | {f"head.{name}": value.grad.clone() for name, value in trainer.critic.head.named_parameters()}


def with_value_head(folder: Path, rank: int) -> dict[str, Any]:
    """A run of PPO with a controller, and the gradient of a further step."""
    rollouts: list[Any] = []
    trainer = new_trainer(folder, PPO)
    trainer.rollout_sinks = (rollouts.append,)
    start = adapter(trainer)
    trainer.train()
    results = {
        "backend": torch.distributed.get_backend(),
        "wrapped": type(trainer.model_wrapped).__name__,
        "completions": [rollout.completion_ids for rollout in rollouts],
        "start": start,
        "adapter": adapter(trainer),
        "head": {name: value.detach().clone() for name, value in trainer.critic.head.state_dict().items()},
        "state": trainer.objective.state_dict(),
        "log": trainer.state.log_history,
    }
    trainer.model.train()
    torch.manual_seed(10 + rank)
    rows = next(iter(trainer.get_train_dataloader()))
    batches = []
    for number in range(trainer.args.steps_per_generation):
        trainer._step = number
        batches.append(trainer._prepare_inputs(rows))
    drift(trainer)
    results |= {"batches": batches, "drifted": adapter(trainer)}
    return results | {"gradients": gradients(trainer, trainer.model_wrapped, batches)}


def saving(
    folder: Path, rank: int, objective: Any = "dapo", pack_tokens: int | None = None, **switches: Any
) -> dict[str, Any]:
    """A run whose first process has only flat groups."""
    trainer = new_trainer(folder, objective, placed_ids if rank else nothing, **switches)
    trainer.scorer.pack_tokens = pack_tokens or trainer.scorer.pack_tokens
    scored: list[int] = []
    made = trainer.policy_loss._outputs
    trainer.policy_loss._outputs = lambda model, batch, *more: (scored.append(len(batch)), made(model, batch, *more))[1]
    torch.manual_seed(rank)
    trainer.train()
    return {
        "adapter": adapter(trainer),
        "scored": scored,
        "report": trainer.savings_report,
        "way": trainer.packing_report["packing"],
        "log": [line for line in trainer.state.log_history if "loss" in line],
    }


def one_of_two(rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    limit = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2, timeout=limit)
    results = with_value_head(folder, rank)
    results |= {"off": saving(folder, rank, **OFF), "on": saving(folder, rank, token_budget=60)}
    results["plain"] = saving(folder, rank, KL, packing=False)
    scorer.LONG_PROMPT = 0
    results["packed"] = saving(folder, rank, KL, pack_tokens=(4096, 1)[rank])
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def widened(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Join the rows of both processes in one tensor. Prompts are padded on the left."""
    if not parts[0].dim():
        assert parts[0] == parts[1], name
        return parts[0]
    width = max(part.shape[-1] for part in parts)
    padded = []
    for part in parts:
        gap = width - part.shape[-1] if part.dim() == 2 else 0
        side = (gap, 0) if name.startswith("prompt_") else (0, gap)
        padded.append(torch.nn.functional.pad(part, side) if gap else part)
    return torch.cat(padded)


def alone(folder: Path) -> dict[str, torch.Tensor]:
    """The gradient of a single process on the completions of both."""
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    trainer = new_trainer(folder, PPO, size=8)
    trainer.model.load_state_dict(ranks[0]["drifted"], strict=False)
    trainer.critic.head.load_state_dict(ranks[0]["head"])
    trainer.objective.load_state_dict(ranks[0]["state"])
    batches = [
        {name: widened(name, [part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*[rank["batches"] for rank in ranks], strict=True)
    ]
    return gradients(trainer, trainer.model, batches)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.multiprocessing.start_processes(one_of_two, (place,), nprocs=2, start_method="fork")
    torch.save(alone(place), place / "alone.pt")
