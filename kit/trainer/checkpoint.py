"""The checkpoint half of the trainer: all that a step depends on is saved with it, and found again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerState

from kit.objective import Objective
from kit.runs.store import PREFIX, STATE
from kit.trainer.checkpoint_writer import STAGING, save_aside
from kit.trainer.progress import Stateful, load_progress, save_progress
from kit.trainer.sanity_checks import FirstSteps
from kit.trainer.value_head import Critic, check_critic

STATE_FILE = "objective_state.json"
_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is


class CheckpointSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before TRL's class."""

    objective: Objective | None
    stateful: dict[str, Stateful]
    rollout_sinks: tuple[Any, ...]
    check_anew: bool = False
    """In a resumed run the first steps have been proved; say True where something that matters has changed."""
    was_stopped: Callable[[], bool] = staticmethod(lambda: False)
    """Whether somebody ended the run: a checkpoint then notes that steps are left to make."""
    _critic: Critic | None
    _first_steps: FirstSteps | None
    _train_sampler: Any = None
    _staging: Path | None = None  # where the checkpoint in progress is written

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        root = Path(super()._get_output_dir(trial))
        if self.args.push_to_hub:  # transformers uploads it from where it wrote it, in the background
            self._write_checkpoint(model, trial, root)
            return
        self._staging = root / STAGING
        try:
            save_aside(self, root, lambda: self._write_checkpoint(model, trial, root / STAGING))
        finally:
            self._staging = None

    def _write_checkpoint(self, model: Any, trial: Any, root: Path) -> None:
        """First ours: TRL's part ends with trainer_state.json, by which a checkpoint is known to be whole."""
        self.flush_sinks()  # a checkpoint promises that what led to it is on disk
        folder = root / f"{PREFIX}{self.state.global_step}"
        save_progress(self, folder)
        state = self.objective.state_dict() if self.objective is not None else {}
        if state and self.args.should_save:
            (folder / STATE_FILE).write_text(json.dumps(state))
        if self._critic is not None and self.args.should_save:
            self._critic.save(folder)
        super()._save_checkpoint(model, trial)

    def flush_sinks(self) -> None:
        """Returns once the sinks of rollouts have written what they were handed. Raises what went wrong there."""
        for sink in self.rollout_sinks:
            getattr(sink, "flush", lambda: None)()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            check_critic(Path(checkpoint), self._critic)
        with loadable_device(self.args):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if self.objective is not None:
            path = folder / STATE_FILE  # not written by an objective without state
            self.objective.load_state_dict(json.loads(path.read_text()) if path.is_file() else {})
            if self._critic is not None:
                self._critic.load(folder)
        load_progress(self, folder)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def load_weights(self, checkpoint: Path) -> None:
        """The weights and step of a checkpoint and nothing else: for a run that has no step left to make."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / STATE))


@contextmanager
def loadable_device(args: Any) -> Iterator[None]:
    """Inside, `TrainingArguments.device` is one that `torch.load` knows: it knows `cpu`, but not the `cpu:1` of gloo.

    Can go when transformers loads the optimiser of several processes on the CPU by itself.
    """
    import torch

    known = args.device
    if known.type != "cpu":
        yield
        return
    vars(args)["_setup_devices"] = torch.device("cpu")  # where the cached property keeps it
    try:
        yield
    finally:
        vars(args)["_setup_devices"] = known
