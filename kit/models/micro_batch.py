"""How many completions go through the model at once, where nobody has said."""

from __future__ import annotations

from kit.config import RunConfig
from kit.models.backend import Backend

GPU_MICRO_BATCH = 16


def micro_batch_size(config: RunConfig, backend: Backend, processes: int = 1) -> int:
    """Completions per forward pass: as asked, else the whole batch (CPU) or its largest divisor up to 16 (GPU).

    Of several processes each has its share of the batch.
    """
    batch = config.optimisation.batch_size // processes
    if config.optimisation.micro_batch_size is not None:
        return config.optimisation.micro_batch_size
    if backend.device == "cpu":
        return batch
    return max(size for size in range(1, min(GPU_MICRO_BATCH, batch) + 1) if batch % size == 0)
