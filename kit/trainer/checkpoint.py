"""The kit's files in a checkpoint, with which a resumed run makes the same steps as an uninterrupted one.

objective_state.json      state of hooks and controllers
value_head.safetensors    the value head of `gae`
progress.json             position in a generation batch, results of the first-step checks, state of other parts of the run
rollout.pt                completions that have steps left (`optimisation.iterations` above 1)
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy
import torch
from transformers import TrainerState

from kit.errors import EngineError
from kit.models.failures import rng_state, set_rng_state
from kit.runs.files import read_json, write_atomic
from kit.runs.store import PREFIX, STATE, complete_checkpoints, is_complete, numbered
from kit.scoring.scorer import ExtraOutputs
from kit.trainer.checkpoint_writer import STAGING, rotate, save_aside
from kit.trainer.policy_loss import MicroBatch, RolloutMemory, Services
from kit.trainer.sanity_checks import SanityChecks
from kit.trainer.teacher import Teacher

if TYPE_CHECKING:
    from trl import GRPOTrainer

log = logging.getLogger("kit")

STATE_FILE = "objective_state.json"
PROGRESS_FILE = "progress.json"
ROLLOUT_FILE = "rollout.pt"


class Stateful(Protocol):
    """A part of a run with state between steps: plain values that JSON represents exactly."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class CheckpointState:
    """Writes and reads the checkpoints of one trainer."""

    def __init__(
        self,
        trainer: GRPOTrainer,
        *,
        stateful: Mapping[str, Stateful],
        memory: RolloutMemory,
        services: Services | None = None,
        teacher: Teacher | None = None,
        checks: SanityChecks | None = None,
        was_stopped: Callable[[], bool] = lambda: False,
        check_anew: bool = False,
    ) -> None:
        """Save and restore what TRL's checkpoints leave out.

        `stateful` has further parts of the run by name. `services` is None without an objective. `was_stopped` returns whether a
        user stopped the run. With `check_anew` a resumed run repeats the first-step checks.
        """
        self.trainer, self.stateful, self.memory = trainer, stateful, memory
        self.objective = services.objective if services is not None else None
        self.critic = services.critic if services is not None else None
        self.services, self.teacher, self.checks = services, teacher, checks
        self.was_stopped, self.check_anew = was_stopped, check_anew
        self.sampler: Any = None  # the sampler of the training data
        self.staging: Path | None = None
        """Folder in which an incomplete checkpoint is being written."""

    # --- writing ------------------------------------------------------------------------------------------------------

    def save(self, root: Path, write: Callable[[], None]) -> None:
        """Write a complete checkpoint of this step below `root`, or none. `write` writes the files of transformers and TRL."""
        if self.trainer.args.push_to_hub:  # transformers uploads it in the background from where it was written
            self._write(write, root)
            return
        self.staging = root / STAGING
        try:
            save_aside(self.trainer, root, lambda: self._write(write, root / STAGING))
        finally:
            self.staging = None

    def _write(self, write: Callable[[], None], root: Path) -> None:
        """Write the kit's files first: TRL's end with trainer_state.json, which marks a complete checkpoint."""
        trainer = self.trainer
        folder = root / f"{PREFIX}{trainer.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        every = trainer.args.steps_per_generation * trainer.num_iterations
        if trainer._buffered_inputs is not None and trainer._step % every != 0:
            torch.save(trainer._buffered_inputs, self._rollout_file(folder))
        if trainer.args.should_save:
            steps_left = trainer.state.global_step < trainer.state.max_steps
            progress = {
                "micro_batches": trainer._step,
                "accumulation": trainer.args.gradient_accumulation_steps,
                "optimizer": class_of(trainer.optimizer),
                "over": steps_left and trainer.control.should_training_stop and not self.was_stopped(),
                "first_steps": self.checks.state_dict() if self.checks is not None else None,
                "parts": {name: part.state_dict() for name, part in self.stateful.items()},
            }
            write_atomic(folder / PROGRESS_FILE, json.dumps(progress, indent=1) + "\n")
            state = self.objective.state_dict() if self.objective is not None else {}
            if state:
                (folder / STATE_FILE).write_text(json.dumps(state))
            if self.critic is not None:
                self.critic.save(folder)
        write()

    def _rollout_file(self, folder: Path) -> Path:
        accelerator = self.trainer.accelerator
        return folder / (ROLLOUT_FILE if accelerator.num_processes == 1 else f"rollout_{accelerator.process_index}.pt")

    # --- reading ------------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self, checkpoint: str | None) -> Iterator[None]:
        """Wrap transformers' loading of optimiser and schedule; load the kit's files of the checkpoint afterwards.

        The micro-batches may have another size than before, and the optimiser another class: its moments then start from 0.
        With a `LambdaLR`, rate, schedule and weight decay are those of the arguments; torch would restore the checkpoint's.
        """
        trainer = self.trainer
        path = Path(checkpoint or "") / PROGRESS_FILE
        progress = json.loads(path.read_text(encoding="utf-8")) if checkpoint is not None and path.is_file() else {}
        now = class_of(trainer.optimizer)
        if other := progress.get("optimizer", now) != now:
            trainer.optimizer.load_state_dict = lambda state: log.warning(
                "the moments of %s do not fit %s and start from 0", progress["optimizer"], now
            )
        names = ("initial_lr", "weight_decay")
        own = [{name: group[name] for name in names if name in group} for group in trainer.optimizer.param_groups]
        args, device = trainer.args, trainer.args.device
        if device.type == "cpu":  # torch.load accepts `cpu`, but not `cpu:1` as with several processes
            vars(args)["_setup_devices"] = torch.device("cpu")  # the cached property stores it there
        try:
            yield
        finally:
            vars(args)["_setup_devices"] = device
            if other:
                del trainer.optimizer.load_state_dict
        if checkpoint is None:
            return
        if isinstance(schedule := trainer.lr_scheduler, torch.optim.lr_scheduler.LambdaLR):
            schedule.base_lrs = [group["initial_lr"] for group in own]
            factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
            schedule._last_lr = [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
            for group, values, rate in zip(trainer.optimizer.param_groups, own, schedule._last_lr, strict=True):
                group.update(values, lr=rate)
        folder = Path(checkpoint)
        if self.objective is not None:
            path = folder / STATE_FILE  # an objective without state writes none
            self.objective.load_state_dict(json.loads(path.read_text()) if path.is_file() else {})
            if self.critic is not None:
                self.critic.load(folder)
        if getattr(self.sampler, "shuffle", False):
            # Draw the permutations of past epochs again: TRL's new sampler starts with a new generator.
            for _ in range(int(trainer.state.epoch or 0.0)):  # at the end of an epoch this is an integer
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        if not progress:
            return
        trainer._step = progress["micro_batches"] * args.gradient_accumulation_steps // progress["accumulation"]
        for name, part in self.stateful.items():
            if name in progress["parts"]:
                part.load_state_dict(progress["parts"][name])
        if self.checks is not None and progress["first_steps"] is not None and not self.check_anew:
            self.checks.load_state_dict(progress["first_steps"])
        # Micro-batches of another size do not fit into the loop over a rollout, which is then generated anew.
        fits = progress["accumulation"] == args.gradient_accumulation_steps
        if fits and (rollout := self._rollout_file(folder)).is_file():
            target = torch.device("cpu") if device.type == "cpu" else trainer.accelerator.device
            batches = trainer._buffered_inputs = torch.load(rollout, map_location=target, weights_only=True)
            if "ref_hidden" in batches[0]:
                self.restore_reference_head(batches[0])
            if "teacher_hidden" in batches[0]:
                assert self.teacher is not None
                self.teacher.restore_head(MicroBatch(batches[0]))
                self.memory.teacher_head = self.teacher.head

    def restore_reference_head(self, inputs: dict[str, Any]) -> None:
        """Score one completion of a restored rollout with the reference policy, because checkpoints do not contain its head.

        TRL's reference policy is a separate model, or the policy with its adapters off.
        """
        from trl.trainer.utils import use_adapter

        assert self.services is not None
        trainer, bare = self.trainer, self.trainer.accelerator.unwrap_model(self.trainer.model)
        model, adapters_off = trainer.ref_model, contextlib.nullcontext()
        if model is None:
            name = "ref" if "ref" in bare.peft_config else None
            model, adapters_off = trainer.model, use_adapter(bare, adapter_name=name)
        with torch.no_grad(), adapters_off:
            scores = self.services.scorer.score(model, MicroBatch(inputs).select([0]).rows, ExtraOutputs(hidden=True))
        self.memory.reference_head = scores.projection.bare()

    def load_weights(self, checkpoint: Path) -> None:
        """Load only the weights and the step of a checkpoint, for a run that has no steps left."""
        trainer = self.trainer
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = TrainerState.load_from_json(str(checkpoint / STATE))
        # The run may have been killed between this checkpoint and the removal of older ones.
        if trainer.args.should_save:
            checkpoints = complete_checkpoints(numbered(checkpoint.parent))
            rotate(checkpoints, trainer.args.save_total_limit, trainer.state.best_model_checkpoint)


def class_of(optimizer: Any) -> str:
    """The class of an optimiser without accelerate's wrapper, with its module: AdamW is torch's or bitsandbytes'."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    return f"{kind.__module__}.{kind.__qualname__}"


@contextmanager
def checkpoint_on_failure(trainer: GRPOTrainer) -> Iterator[None]:
    """Save a checkpoint of the last step if the engine fails in a rollout, and raise the failure again.

    No checkpoint is saved if steps were already made on the current completions, or with several processes; the last regular
    checkpoint remains.
    """
    random_states = random.getstate(), numpy.random.get_state(), rng_state()
    try:
        yield
    except EngineError as error:
        step, every = trainer.state.global_step, trainer.args.steps_per_generation * trainer.num_iterations
        if step == 0 or not trainer.is_in_train or trainer.accelerator.num_processes > 1 or trainer._step % every:
            raise
        if not is_complete(Path(trainer.args.output_dir) / f"{PREFIX}{step}"):
            random.setstate(random_states[0])
            numpy.random.set_state(random_states[1])
            set_rng_state(random_states[2])
            try:
                trainer._save_checkpoint(trainer.model, None)
                trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
                log.info("saved a checkpoint after step %d, because generation failed: %s", step, error)
            except Exception as second:  # the failure of the engine is the one to report
                log.warning("no checkpoint after step %d (%s: %s)", step, type(second).__name__, second)
        raise


def is_over(folder: Path) -> bool:
    """Whether the run ended at this checkpoint before its last step without being stopped by a user."""
    return bool(read_json(folder / PROGRESS_FILE).get("over"))
