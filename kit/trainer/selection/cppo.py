"""Completion pruning (CPPO, arXiv 2503.22342): those with the largest |advantage| are trained on.

The paper fills the room with further questions; here a larger `optimisation.batch_size` does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest_advantages(advantages: Tensor, size: int, keep: int) -> Tensor:
    """(N,) or (N, T) advantages in groups of `size` rows -> (N / size * keep,) rows to keep, ascending.

    With advantages over tokens a row counts by its largest one. Of equals the first; in a flat group its beginning.
    """
    sizes = advantages.abs() if advantages.dim() == 1 else advantages.abs().amax(dim=1)
    ranks = torch.argsort(sizes.view(-1, size), dim=1, descending=True, stable=True)[:, :keep]
    start = torch.arange(0, len(sizes), size, device=sizes.device)[:, None]
    return (ranks.sort(dim=1).values + start).flatten()
