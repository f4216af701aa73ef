"""What a checkpoint of transformers leaves out, so that a resumed run makes the very steps that the interrupted one would.

    progress.json   how far into a generation batch, what the first steps proved, the state of other parts of the run
    rollout.pt      the completions that steps are still to be made on (`optimisation.iterations` above 1)

A hook's state has a file of its own (`objective_state.json`), and so has the value head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from kit.runs.files import write_atomic

PROGRESS_FILE = "progress.json"
ROLLOUT_FILE = "rollout.pt"


class Stateful(Protocol):
    """A part of a run that keeps something between steps: plain values, exact in JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def save_progress(trainer: Any, folder: Path) -> None:
    """Writes both files for this process into a checkpoint; `progress.json` by the first process only."""
    folder.mkdir(parents=True, exist_ok=True)
    if _inside_a_window(trainer):
        torch.save({"inputs": trainer._buffered_inputs, "all_lengths": trainer._all_lengths}, _rollout(trainer, folder))
    if trainer.args.should_save:
        write_atomic(folder / PROGRESS_FILE, json.dumps(_progress(trainer), indent=1) + "\n")


def load_progress(trainer: Any, folder: Path) -> None:
    """Puts a trainer where the one that wrote the checkpoint stood. Without the files it is left as it is."""
    _advance_sampler(trainer)
    path = folder / PROGRESS_FILE
    if not path.is_file():
        return
    progress = json.loads(path.read_text(encoding="utf-8"))
    trainer._step = progress["micro_batches"]
    for name, part in trainer.stateful.items():
        if name in progress["parts"]:
            part.load_state_dict(progress["parts"][name])
    checks = trainer._first_steps
    if checks is not None and progress["first_steps"] is not None and not trainer.check_anew:
        checks.load_state_dict(progress["first_steps"])
    if _rollout(trainer, folder).is_file():
        _load_rollout(trainer, folder)


def is_over(folder: Path) -> bool:
    """Whether the run ended itself at this checkpoint before its last step; not where somebody stopped it."""
    try:
        return bool(json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))["over"])
    except (OSError, ValueError, KeyError):
        return False


def _progress(trainer: Any) -> dict[str, Any]:
    checks = trainer._first_steps
    return {
        "micro_batches": trainer._step,
        "over": _ended_early(trainer),
        "first_steps": checks.state_dict() if checks is not None else None,
        "parts": {name: part.state_dict() for name, part in trainer.stateful.items()},
    }


def _ended_early(trainer: Any) -> bool:
    steps_left = trainer.state.global_step < trainer.state.max_steps
    return steps_left and trainer.control.should_training_stop and not trainer.was_stopped()


def _inside_a_window(trainer: Any) -> bool:
    every = trainer.args.steps_per_generation * trainer.num_iterations
    return trainer._buffered_inputs is not None and trainer._step % every != 0


def _rollout(trainer: Any, folder: Path) -> Path:
    one = trainer.accelerator.num_processes == 1
    return folder / (ROLLOUT_FILE if one else f"rollout_{trainer.accelerator.process_index}.pt")


def _load_rollout(trainer: Any, folder: Path) -> None:
    device = trainer.accelerator.device
    place = "cpu" if device.type == "cpu" else device  # torch cannot load to the `cpu:1` of several processes
    kept = torch.load(_rollout(trainer, folder), map_location=place, weights_only=True)
    trainer._buffered_inputs, trainer._all_lengths = kept["inputs"], kept["all_lengths"]
    if "ref_hidden" in kept["inputs"][0]:
        trainer.restore_reference_head(kept["inputs"][0])


def _advance_sampler(trainer: Any) -> None:
    """Draws the orders of the epochs that are behind: TRL's sampler keeps a generator that a new one starts anew."""
    sampler = trainer._train_sampler
    if not getattr(sampler, "shuffle", False):
        return
    for _ in range(int(trainer.state.epoch or 0.0)):  # a whole number exactly at the end of an epoch
        torch.randperm(sampler.num_samples, generator=sampler.generator)
