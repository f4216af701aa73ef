"""Data parallelism: processes started by torchrun or `accelerate launch`, each with its share of a batch.

The first process runs `kit.train.run` and writes the run directory. The others (`follow`) build the same trainer from the
configuration that the first one has checked, and make the same steps, without writing files. During work of the first process
alone (held-out scores, the report) they wait in the next collective of the trainer. TRL and accelerate do everything else.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from kit.config import RunConfig
from kit.errors import ConfigError, EnvironmentUnsupported
from kit.runs.store import RunDir

PATIENCE = timedelta(days=2)
"""Timeout of collectives, where the other processes wait while the first one evaluates."""


def world_size() -> int:
    """Number of processes of this run, set by the launcher; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the process that writes the run directory."""
    return world_size() == 1 or os.environ.get("RANK") == "0"


def join() -> None:
    """Connects the processes of a launcher. Raises `EnvironmentUnsupported`."""
    if world_size() == 1:
        return
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise EnvironmentUnsupported(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but RANK or MASTER_ADDR is not set. Start several processes with "
            "torchrun --nproc-per-node N -m kit.train RUN.yaml (or accelerate launch), or unset WORLD_SIZE."
        )
    import torch
    from accelerate import PartialState

    # Chooses the GPU and NCCL or gloo, as the trainer will.
    PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def announce(config: RunConfig, resumption: Any, threads: int, folder: RunDir) -> None:
    """Starts the other processes. The first one calls it after all checks, when the run directory exists."""
    if world_size() > 1 and is_first():
        from accelerate.utils import broadcast_object_list

        if resumption:
            previous = replace(resumption.previous, run=FollowersRunDir(folder.path))
            resumption = replace(resumption, previous=previous)
        broadcast_object_list([(config, resumption, threads)])


def check_division(config: RunConfig, processes: int) -> None:
    """Raises `ConfigError` with the valid sizes if the batch cannot be divided evenly by the processes."""
    batch, micro = config.optimisation.batch_size, config.optimisation.micro_batch_size
    unit = processes * (micro or 1)
    if batch % unit == 0:
        return
    valid = math.lcm(unit, config.generation.num_generations)
    raise ConfigError(
        f"optimisation.batch_size: {batch} completions a step cannot be shared by {processes} processes"
        + (f" with {micro} completions each at once (optimisation.micro_batch_size)" if micro else "")
        + f". Use a multiple of {valid}."
    )


class FollowersRunDir(RunDir):
    """The run directory of the other processes, which write nothing."""

    def write_status(self, state: str, **fields: Any) -> None:
        """Does nothing."""

    def append_event(self, kind: str, **fields: Any) -> None:
        """Does nothing."""

    def write_json(self, name: str, content: Any) -> Path:
        """Does nothing."""
        return self.path / name
