"""What a checkpoint keeps beside transformers' files, so that a resumed run makes the very steps that the interrupted one would.

objective_state.json      state of hooks and controllers
value_head.safetensors    of `gae`
teacher_average.safetensors  moving average of the trained weights, of `teacher.weights: ema`
progress.json             how far into a generation batch, what the first steps proved, the state of other parts of the run
rollout.pt                the completions that steps are still to be made on (`optimisation.iterations` above 1)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerState

from kit.runs.files import write_atomic
from kit.runs.store import PREFIX, STATE, numbered, whole_checkpoints
from kit.scoring.layouts import Wanted
from kit.trainer.checkpoint_writer import STAGING, rotate, save_aside
from kit.trainer.micro_batch import MicroBatch
from kit.trainer.value_head import check_critic

STATE_FILE = "objective_state.json"
PROGRESS_FILE = "progress.json"
ROLLOUT_FILE = "rollout.pt"


class Stateful(Protocol):
    """A part of a run that keeps something between steps: plain values, exact in JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class CheckpointState:
    """Writes and reads the checkpoints of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.check_anew = False
        """In a resumed run the first steps have been proved; say True where something that matters has changed."""
        self.was_stopped: Callable[[], bool] = lambda: False
        """Whether somebody ended the run: a checkpoint then notes that steps are left to make."""
        self.sampler: Any = None  # of the training data
        self.staging: Path | None = None
        """Where the checkpoint in progress is written, aside while it is not whole."""

    # --- writing ------------------------------------------------------------------------------------------------------

    def save(self, root: Path, write: Callable[[], None]) -> None:
        """Writes a checkpoint of this step below `root`, whole or not at all. write: transformers' and TRL's part of it."""
        if self.trainer.args.push_to_hub:  # transformers uploads it from where it wrote it, in the background
            self._write(write, root)
            return
        self.staging = root / STAGING
        try:
            save_aside(self.trainer, root, lambda: self._write(write, root / STAGING))
        finally:
            self.staging = None

    def _write(self, write: Callable[[], None], root: Path) -> None:
        """First ours: TRL's part ends with trainer_state.json, by which a checkpoint is known to be whole."""
        trainer = self.trainer
        trainer.flush_sinks()  # a checkpoint promises that what led to it is on disk
        folder = root / f"{PREFIX}{trainer.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._inside_a_window():
            kept = {"inputs": trainer._buffered_inputs, "all_lengths": trainer.rollout_memory.all_lengths}
            torch.save(kept, self._rollout_file(folder))
        if trainer.args.should_save:
            write_atomic(folder / PROGRESS_FILE, json.dumps(self._progress(), indent=1) + "\n")
            state = trainer.objective.state_dict() if trainer.objective is not None else {}
            if state:
                (folder / STATE_FILE).write_text(json.dumps(state))
            if trainer.critic is not None:
                trainer.critic.save(folder)
            if trainer.teacher is not None:
                trainer.teacher.save(folder)
        write()

    def _progress(self) -> dict[str, Any]:
        trainer = self.trainer
        steps_left = trainer.state.global_step < trainer.state.max_steps
        return {
            "micro_batches": trainer._step,
            "over": steps_left and trainer.control.should_training_stop and not self.was_stopped(),
            "first_steps": trainer.checks.state_dict() if trainer.checks is not None else None,
            "parts": {name: part.state_dict() for name, part in trainer.stateful.items()},
        }

    def _inside_a_window(self) -> bool:
        trainer = self.trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        return trainer._buffered_inputs is not None and trainer._step % every != 0

    def _rollout_file(self, folder: Path) -> Path:
        accelerator = self.trainer.accelerator
        return folder / (ROLLOUT_FILE if accelerator.num_processes == 1 else f"rollout_{accelerator.process_index}.pt")

    # --- reading ------------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self, checkpoint: str | None) -> Iterator[None]:
        """Around transformers' reading of optimiser and schedule: afterwards the trainer stands where the other one stood."""
        trainer = self.trainer
        if checkpoint is not None:
            check_critic(Path(checkpoint), trainer.critic)
        with loadable_device(trainer.args):
            yield
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if trainer.objective is not None:
            path = folder / STATE_FILE  # not written by an objective without state
            trainer.objective.load_state_dict(json.loads(path.read_text()) if path.is_file() else {})
            if trainer.critic is not None:
                trainer.critic.load(folder)
            if trainer.teacher is not None:
                trainer.teacher.load(folder)
        self._load_progress(folder)

    def _load_progress(self, folder: Path) -> None:
        """Without the files the trainer is left as it is."""
        trainer = self.trainer
        self._advance_sampler()
        path = folder / PROGRESS_FILE
        if not path.is_file():
            return
        progress = json.loads(path.read_text(encoding="utf-8"))
        trainer._step = progress["micro_batches"]
        for name, part in trainer.stateful.items():
            if name in progress["parts"]:
                part.load_state_dict(progress["parts"][name])
        if trainer.checks is not None and progress["first_steps"] is not None and not self.check_anew:
            trainer.checks.load_state_dict(progress["first_steps"])
        if self._rollout_file(folder).is_file():
            self._load_rollout(folder)

    def _load_rollout(self, folder: Path) -> None:
        trainer = self.trainer
        device = trainer.accelerator.device
        place = "cpu" if device.type == "cpu" else device  # torch cannot load to the `cpu:1` of several processes
        kept = torch.load(self._rollout_file(folder), map_location=place, weights_only=True)
        trainer._buffered_inputs, trainer.rollout_memory.all_lengths = kept["inputs"], kept["all_lengths"]
        if "ref_hidden" in kept["inputs"][0]:
            restore_reference_head(trainer, kept["inputs"][0])
        if "teacher_hidden" in kept["inputs"][0]:
            trainer.teacher.see_head(MicroBatch(kept["inputs"][0]))
            trainer.rollout_memory.teacher_head = trainer.teacher.head

    def _advance_sampler(self) -> None:
        """Draws the orders of the epochs that are behind: TRL's sampler keeps a generator that a new one starts anew."""
        if not getattr(self.sampler, "shuffle", False):
            return
        for _ in range(int(self.trainer.state.epoch or 0.0)):  # a whole number exactly at the end of an epoch
            torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)

    def load_weights(self, checkpoint: Path) -> None:
        """The weights and step of a checkpoint and nothing else: for a run that has no step left to make."""
        trainer = self.trainer
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = TrainerState.load_from_json(str(checkpoint / STATE))
        if (
            trainer.args.should_save
        ):  # the run may have been killed between this checkpoint and the removal of older ones
            found = whole_checkpoints(numbered(checkpoint.parent))
            rotate(found, trainer.args.save_total_limit, trainer.state.best_model_checkpoint)


def restore_reference_head(trainer: Any, inputs: dict[str, Any]) -> None:
    """Scores one completion of a restored rollout with the reference policy: its head is in no checkpoint."""
    with torch.no_grad(), _reference_policy(trainer) as model:
        scores = trainer.scorer.score(model, MicroBatch(inputs).select([0]).rows, Wanted(hidden=True))
    trainer.rollout_memory.reference_head = scores.projection.bare()


@contextmanager
def _reference_policy(trainer: Any) -> Iterator[Any]:
    """As TRL has it: a model of its own, or the policy with its adapters off."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    from trl.trainer.utils import use_adapter

    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        yield trainer.model


def is_over(folder: Path) -> bool:
    """Whether the run ended itself at this checkpoint before its last step; not where somebody stopped it."""
    try:
        return bool(json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))["over"])
    except (OSError, ValueError, KeyError):
        return False


@contextmanager
def loadable_device(args: Any) -> Iterator[None]:
    """Inside, `TrainingArguments.device` is one that `torch.load` knows: it knows `cpu`, but not the `cpu:1` of gloo.

    Can go when transformers loads the optimiser of several processes on the CPU by itself.
    """
    known = args.device
    if known.type != "cpu":
        yield
        return
    vars(args)["_setup_devices"] = torch.device("cpu")  # where the cached property keeps it
    try:
        yield
    finally:
        vars(args)["_setup_devices"] = known
