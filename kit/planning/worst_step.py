"""One update of the worst case, before anything else: the longest prompt beside a completion of full length in every row.

No rollout is so bad: the tokens are random, no two prompts are the same, and no completion is without an advantage. What it
takes is what the largest pass of any step can take.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from transformers import TrainerCallback

from kit.trainer.checkpoint import restore_reference_head


class WorstStep(TrainerCallback):  # type: ignore[misc]
    """Makes the update when training begins, and drops its gradient; `found` then says what it took.

    prompt, completion: tokens. Every micro-batch has `per_device_train_batch_size` rows, and goes through as the trainer's
    token budget lets it.
    """

    def __init__(self, trainer: Any, prompt: int, completion: int) -> None:
        self.trainer, self.prompt, self.completion = trainer, prompt, completion
        self.found: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, started = self.trainer, time.perf_counter()
        checks, trainer.checks = trainer.checks, None  # they are for steps on real completions
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        trainer._stepping = True
        try:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, worst_micro_batch(trainer, self.prompt, self.completion))
            trainer.accelerator.backward(loss)
        finally:
            trainer._stepping, trainer.checks = False, checks
        trainer.model.zero_grad()
        if trainer.critic is not None:
            trainer.critic.head.zero_grad()
        rows = trainer.policy_loss.at_once
        self.found = {
            "rows": rows,
            "tokens": rows * (self.prompt + self.completion),
            "peak_bytes": int(peak(trainer.accelerator.device.type)),
            "seconds": time.perf_counter() - started,
        }


def peak(device: str) -> int:
    """The most memory of this process so far, in bytes: what the allocator reserved on a GPU, else resident."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worst_micro_batch(trainer: Any, prompt: int, completion: int) -> dict[str, Any]:
    """A micro-batch of random tokens without any padding, with whatever the trainer's objective needs."""
    rows, device = trainer.args.per_device_train_batch_size, trainer.accelerator.device
    generator = torch.Generator().manual_seed(0)
    vocabulary = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.shape[0]

    def ids(width: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (rows, width), generator=generator).to(device)

    whole = torch.ones(rows, completion, device=device)
    inputs: dict[str, Any] = {
        "prompt_ids": ids(prompt),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long, device=device),
        "completion_ids": ids(completion),
        "completion_mask": whole.long(),
        "advantages": 1.0 - 2.0 * (torch.arange(rows, device=device) % 2),
        "num_items_in_batch": torch.tensor(rows * completion * trainer.args.steps_per_generation, device=device),
    }
    needs = trainer.needs
    if "rewards" in needs:
        inputs["rewards"] = whole[:, 0]
    if "truncated" in needs:
        inputs["truncated"] = whole[:, 0] == 0
    if "all_lengths" in needs:
        trainer.rollout_memory.all_lengths = whole.sum(1)
    if needs & {"ref_logps", "full_kl"}:
        inputs["ref_per_token_logps"] = -whole
    if "sampler_logps" in needs:
        inputs["sampling_per_token_logps"] = -whole
    if "values" in needs:
        inputs |= {"old_values": 0.0 * whole, "value_targets": 0.0 * whole}
    if "full_kl" in needs:
        restore_reference_head(trainer, inputs)
        head = trainer.rollout_memory.reference_head
        inputs["ref_hidden"] = head.hidden.new_zeros(rows, completion, head.hidden.shape[-1])
    return inputs
