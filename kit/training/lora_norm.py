"""The size of a LoRA update, for `reference_free_l2`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def lora_weight_norm(model: Any) -> Tensor | None:
    """Squared Frobenius norm of the update s·B·A, summed over all adapted layers: a scalar with gradient, float32.

    ||B A||² = <BᵀB, A Aᵀ>, two (r, r) matrices a layer: the update itself is never formed. None without LoRA layers.
    """
    total: Tensor | None = None
    for a, b, scaling in _pairs(model):
        with torch.autocast(a.device.type, enabled=False):
            a, b = a.float().flatten(1), b.float().flatten(1)  # (r, in), (out, r); convolutions have more axes
            part = scaling**2 * ((b.t() @ b) * (a @ a.t())).sum()
        total = part if total is None else total + part.to(total.device)
    return total


def _pairs(model: Any) -> list[tuple[Tensor, Tensor, float]]:
    pairs = []
    for module in model.modules():
        for name in getattr(module, "active_adapters", ()) if hasattr(module, "lora_A") else ():
            if name in module.lora_A:
                a, b = module.lora_A[name].weight, module.lora_B[name].weight
            elif name in getattr(module, "lora_embedding_A", ()):
                a, b = module.lora_embedding_A[name], module.lora_embedding_B[name]
            else:
                continue
            pairs.append((a, b, float(module.scaling[name])))
    return pairs
