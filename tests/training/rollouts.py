"""Helpers of the trainer tests: rollouts of the trainer, their losses, gradients and plain logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kit.objective import Objective

NewTrainer = Callable[..., Any]
KL = {"name": "kl", "coef": 0.04}

# name: (the kit's objective, the equivalent arguments of TRL's loss)
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"recipe": "grpo"}, {"loss_type": "grpo"}),
    "bnpo": ({"recipe": "bnpo"}, {"loss_type": "bnpo"}),
    "dr_grpo": ({"recipe": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ({"recipe": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "cispo": ({"recipe": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "gspo": (
        {"recipe": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "sapo": ({"recipe": "sapo"}, {"loss_type": "sapo"}),
    "vespo": ({"recipe": "vespo"}, {"loss_type": "vespo"}),
    "luspo": (
        {"recipe": "luspo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
    ),
}
# TRL stores no old log-probabilities if the current policy generated the completions.
POLICIES: dict[str, Callable[[int], dict[str, int]]] = {
    "on_policy": lambda accumulation: {},
    "two_iterations": lambda accumulation: {"num_iterations": 2},
    "two_windows": lambda accumulation: {"steps_per_generation": 2 * accumulation},
}


def kl_term(name: str, corrected: bool) -> dict[str, Any]:
    """The KL term, with TRL's bias correction if `corrected`; its ratio is that of the loss: of a token, or of a completion."""
    return {**KL, "bias_corrected": corrected, "level": "sequence" if name in ("gspo", "luspo") else "token"}


def rollout(trainer: Any) -> list[dict[str, Any]]:
    """The micro-batches of one generation batch, for the first seed with completions of several lengths."""
    trainer.model.train()
    for seed in range(50):
        torch.manual_seed(seed)
        rows = next(iter(trainer.get_train_dataloader()))
        batches = []
        for step in range(trainer.args.steps_per_generation):
            trainer._step = step
            batches.append(trainer._prepare_inputs(rows))
        if batches[0]["completion_mask"].sum(1).unique().numel() > 2:
            return batches
    raise AssertionError("the tiny model never ends its completions at different places")


def generated(trainer: Any) -> dict[str, Any]:
    """One generation batch with scores, before it is shuffled."""
    trainer.model.train()
    output: dict[str, Any] = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    return output


def log_of(trainer: Any, step: int = 0) -> dict[str, float]:
    line: dict[str, float] = trainer.state.log_history[step]
    return line


def drift(trainer: Any, size: float = 0.03) -> None:
    """Move the adapter away from the policy that generated, by the same amounts for each trainer."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def train(trainer: Any) -> None:
    """Train with the random generator reset, so that the result does not depend on how the trainer was built."""
    torch.manual_seed(0)
    trainer.train()


def adapter(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}


def losses_and_gradients(trainer: Any, batches: list[Any], accumulation: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of the micro-batches, and the sum of their gradients for each LoRA weight."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = accumulation
    losses = []
    for inputs in batches:
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {
        name: value.grad.clone() for name, value in trainer.model.named_parameters() if value.requires_grad
    }


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Compare relative to the norm of each weight's gradient: single elements may cancel to nearly nothing."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert want.norm() > 0, f"no gradient reaches {name}: the comparison would be empty"
        assert (actual[name] - want).norm() <= rtol * want.norm(), name


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max((actual[name] - expected[name]).abs().max().item() for name in expected)


def scores(trainer: Any, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies (B, T) of a micro-batch, from the method that the trainer calls."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    logps, entropy, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, **options)
    return logps, entropy


def unpadded(inputs: dict[str, Any], row: int) -> tuple[Tensor, Tensor]:
    """Prompt ids and completion ids of one row, without padding."""
    prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
    return prompt, inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]


def plain_logps(model: Any, prompt: Tensor, completion: Tensor) -> Tensor:
    """Log-probabilities (T, V) of the next token at each position of the completion, from complete logits."""
    logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


class Recorder(Objective):
    """An objective that stores the batches and losses of all its calls."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.seen: list[Any] = []

    def loss(self, batch: Any, scale: Any = None) -> Any:
        output = super().loss(batch, scale)
        self.seen.append(batch)
        return output

    def mean(self, function: Callable[[Any], Tensor]) -> float:
        """Mean of a per-token value over the live tokens of all stored batches."""
        total = sum(function(batch)[batch.mask].double().sum().item() for batch in self.seen)
        return total / sum(int(batch.mask.sum()) for batch in self.seen)


def mixed_prompts(trainer: Any) -> dict[str, Any]:
    """One micro-batch with different prompts, so that left padding is ragged."""
    batches = rollout(trainer)
    widths = {batch["prompt_mask"].sum().item() for batch in batches}
    inputs = {
        key: torch.cat([batch[key][:1] for batch in batches]) if value.dim() else value
        for key, value in batches[0].items()
    }
    lengths = inputs["prompt_mask"].sum(1)
    assert lengths.unique().numel() > 2, widths
    return inputs


def watch_scoring(trainer: Any) -> list[bool]:
    """Record for each later scoring pass whether the adapter was disabled in it; return the list."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    original, passes = trainer.scorer.score, []

    def score(model: Any, *args: Any, **keywords: Any) -> Any:
        layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
        passes.append(bool(layers) and all(layer.disable_adapters for layer in layers))
        return original(model, *args, **keywords)

    trainer.scorer.score = score
    return passes


class Counting:
    """A minimal hook with state: a regularizer that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> Tensor:
        self.calls += 1
        return 0.0 * batch.logps

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]
