"""The size of a LoRA update, for `reference_free_l2`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def lora_weight_norm(model: Any) -> Tensor | None:
    """Squared Frobenius norm of the update Σ s·B·A of each adapted layer, summed over layers: a scalar with gradient.

    <s B A, s' B' A'> = s s' <BᵀB', A A'ᵀ>, (r, r') matrices: the update itself is never formed. float32; None without
    LoRA layers.
    """
    total: Tensor | None = None
    for factors in _adapted_layers(model):
        with torch.autocast(factors[0][0].device.type, enabled=False):
            pairs = itertools.product(factors, repeat=2)
            part = torch.stack([s * t * ((b.t() @ d) * (a @ c.t())).sum() for (a, b, s), (c, d, t) in pairs]).sum()
        total = part if total is None else total + part.to(total.device)
    return total


def _adapted_layers(model: Any) -> Iterator[list[tuple[Tensor, Tensor, float]]]:
    """A (r, in), B (out, r) and s of every active adapter, layer by layer."""
    for module in model.modules():
        factors = []
        for name in getattr(module, "active_adapters", ()) if hasattr(module, "lora_A") else ():
            if name in module.lora_A:
                a, b = module.lora_A[name].weight, module.lora_B[name].weight
            elif name in getattr(module, "lora_embedding_A", ()):
                a, b = module.lora_embedding_A[name], module.lora_embedding_B[name]
            else:
                continue
            # convolutions have more axes
            factors.append((a.float().flatten(1), b.float().flatten(1), float(module.scaling[name])))
        if factors:
            yield factors
