"""`run:` id, seed, folders, checkpoints, trackers."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from kit.config.sections.base import Section


class RunSection(Section):
    """Names, seeds, folders."""

    id: str | None = None
    """Name of the run: lower-case letters, digits and dashes. Null: made from the preset and the time."""
    root: str = "runs"
    """Folder that holds all runs."""
    seed: int = 0
    """Seed of adapters, sampling and data order."""
    save_every: Annotated[int, Field(ge=0)] = 50
    """Optimiser steps between checkpoints; 0: only at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Checkpoints kept; older ones are removed."""
    save_completions: bool = True
    """Write every completion with its rewards to completions/*.parquet."""
    on_out_of_memory: Literal["halve", "fail"] = "halve"
    """Out of memory in a micro-batch: go on with halved micro-batches and the same effective batch (three times in a row
    at most), or end the run."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of torch; null: OMP_NUM_THREADS, or else one for the embedded models, and for others the number of physical
    cores that this process may use."""
    report_to: list[Literal["trackio", "wandb", "tensorboard", "mlflow"]] = Field(default_factory=list)
    """Trackers that mirror the metrics. The run directory stays the truth."""

    @field_validator("id")
    @classmethod
    def _is_a_plain_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?", value):
            raise ValueError("a run id has 1 to 64 lower-case letters, digits and dashes, and no dash at either end")
        return value
