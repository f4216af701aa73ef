"""The value head of `gae`: a linear layer on the policy's own last hidden states.

They are detached, so the head costs no forward pass and its loss changes nothing but the head. It has an optimiser group of
its own, and is saved in checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kit.objective.advantage import ValueSettings

CRITIC_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """Hidden states (..., H) of any precision -> values (...), float32.

    They are normalised first: their scale differs by orders of magnitude between models, the learning rate does not.
    Weights start at zero, so that the first values are 0 and the first advantages plain returns.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False)
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.linear(self.norm(hidden.detach().float()))
        return values.squeeze(-1)


class Critic:
    """The head with its settings."""

    def __init__(self, model: Any, settings: ValueSettings) -> None:
        self.settings = settings
        output = model.get_output_embeddings()
        self.head = ValueHead(getattr(output, "in_features", output.weight.shape[-1])).to(output.weight.device)

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds a parameter group of the head's own to the policy's optimiser; once."""
        parameters = list(self.head.parameters())
        if any(parameters[0] is other for group in optimizer.param_groups for other in group["params"]):
            return
        group = {"params": parameters, "lr": self.settings.learning_rate, "weight_decay": 0.0}
        optimizer.add_param_group(group)

    def save(self, checkpoint: Path) -> None:
        from safetensors.torch import save_file

        save_file(
            {name: value.contiguous() for name, value in self.head.state_dict().items()}, checkpoint / CRITIC_FILE
        )

    def load(self, checkpoint: Path) -> None:
        from safetensors.torch import load_file

        self.head.load_state_dict(load_file(checkpoint / CRITIC_FILE))
