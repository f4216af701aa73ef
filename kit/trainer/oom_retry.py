"""The half of the trainer that survives running out of memory: smaller parts (`kit.trainer.loss_in_parts`), the same gradient.

What an aborted attempt has left in gradients, metrics and hooks is taken back before the next one: the micro-batches of the
optimiser step that had come through are done again, from gradients of zero.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.models.failures import Memory, is_out_of_memory, release, rng_state, set_rng_state
from kit.objective import Objective
from kit.trainer.sanity_checks import FirstSteps
from kit.trainer.value_head import Critic

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch as it was before its first attempt: inputs, random numbers, and all that counts what was seen."""

    inputs: dict[str, Any]
    random: Any
    books: dict[str, Any]


class HalvingSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before TRL's class."""

    objective: Objective | None
    memory: Memory | None = None
    _critic: Critic | None
    _first_steps: FirstSteps | None
    _stepping = False  # inside training_step
    _micro: MicroBatch | None = None  # the one in progress
    _window: tuple[MicroBatch, ...] = ()  # those of the optimiser step that came through
    _at_once: int  # completions of the largest pass of this attempt

    def _halving(self) -> Memory | None:
        """The memory, where a step can be done again."""
        return self.memory if self.objective is not None and self._steps_by_itself() and self._is_plain() else None

    def _divides(self) -> bool:
        """Whether a step may be made in parts."""
        wanted = self.objective is not None and (self.token_budget is not None or self.skips_flat)
        return wanted and self._steps_by_itself() and self._is_plain()

    def _steps_by_itself(self) -> bool:
        """Whether this is the one process, or one that averages its gradients with others' after the last part."""
        return str(self.accelerator.distributed_type).rpartition(".")[2] in ("NO", "MULTI_GPU", "MULTI_CPU")

    def _is_plain(self) -> bool:
        """False where a subclass or a wrapper adds to the loss: its terms would be lost in parts."""
        ours = [cls for cls in type(self).__mro__ if cls.__dict__.get("_in_parts_too")]
        same = all(getattr(type(self), name) is ours[0].__dict__[name] for name in ("compute_loss", "_compute_loss"))
        return same and not {"compute_loss", "_compute_loss"} & vars(self).keys()

    # --- a step of training -------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        memory = self._halving()
        if memory is None and not self._divides():
            self._note_undivided()
            whole: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return whole
        if self.accelerator.num_processes > 1:
            model = self.model  # each process by itself; parts that another one has not must not leave it waiting
        self._stepping, self._micro = True, None
        try:
            if memory is not None:
                loss = self._until_it_fits(memory, model, inputs, num_items_in_batch)
            else:
                loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._stepping = False
        self._note_reached()
        if memory is not None:
            assert self._micro is not None
            self._window = () if self.accelerator.sync_gradients else (*self._window, self._micro)
        self._micro = None
        if self.accelerator.sync_gradients and self.accelerator.num_processes > 1:
            self._average_gradients()
        return loss

    def _until_it_fits(self, memory: Memory, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        again = False
        while True:
            try:
                if again:
                    self._take_back(model)
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
                return loss
            except Exception as error:
                if self._micro is None or not is_out_of_memory(error):
                    raise  # not of a micro-batch
                memory.halve("training", self._at_once, error)
                again = True
            self.model.zero_grad()
            release()

    def _take_back(self, model: Any) -> None:
        """Does the earlier micro-batches of this optimiser step again, and leaves all as it was before this one."""
        assert self._micro is not None
        self.model.zero_grad()
        if self._critic is not None:
            self._critic.head.zero_grad()
        for done in self._window:
            self._return_to(done)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, done.inputs)
            self.accelerator.backward(loss)
        self._return_to(self._micro)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self._stepping or self._halving() is None:
            return super()._prepare_inputs(generation_batch)
        if self._micro is None:
            inputs = super()._prepare_inputs(generation_batch)
            self._at_once = self._rows_at_once(inputs)
            self._micro = MicroBatch(inputs, rng_state(), self._books())
        return self._micro.inputs

    def _average_gradients(self) -> None:
        """Over all processes, once an optimiser step. A weight that one of them has not used has none there."""
        for weight in self.model.parameters():
            if weight.requires_grad:
                own = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad = self.accelerator.reduce(own, reduction="mean")

    def _books(self) -> dict[str, Any]:
        """Whatever a micro-batch adds to: means, samples, what controllers observe, checks, and state of hooks."""
        assert self.objective is not None
        return {
            "means": self._objective_means["train"].copy(),
            "samples": {name: list(parts) for name, parts in self._samples["train"].items()},
            "observed": dict(self._observed),
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
            "checks": dict(vars(self._first_steps)) if self._first_steps is not None else {},
            "hooks": copy.deepcopy(self.objective.state_dict()),
        }

    def _return_to(self, micro: MicroBatch) -> None:
        assert self.objective is not None
        books = micro.books
        self._objective_means["train"] = books["means"].copy()
        self._samples["train"] = {name: list(parts) for name, parts in books["samples"].items()}
        self._observed = dict(books["observed"])
        self._metrics["train"].clear()
        self._metrics["train"].update({name: list(values) for name, values in books["metrics"].items()})
        if self._first_steps is not None:
            self._first_steps.__dict__.update(books["checks"])
        self.objective.load_state_dict(copy.deepcopy(books["hooks"]))
        set_rng_state(micro.random)

    def _rows_at_once(self, inputs: dict[str, Any]) -> int:
        """Completions that one training pass takes."""
        whole = len(inputs["completion_ids"])
        memory = self._halving() if self._stepping else None
        return memory.rows("training", whole) if memory is not None else whole

    # --- generation and scoring ---------------------------------------------------------------------------------------

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *rest: Any, **keywords: Any
    ) -> tuple[Any, Any]:
        make, memory = super()._generate_single_turn, self._halving()
        if memory is None or not self._generates_itself():
            whole: tuple[Any, Any] = make(prompt_ids, images, multimodal_fields, *rest, **keywords)
            return whole
        count = len(prompt_ids)
        self.note_further(multimodal_fields, images, count)

        def completions(size: int) -> tuple[Any, Any]:
            made = []
            for start in range(0, count, size):
                rows = range(start, min(start + size, count))
                part = prompt_ids[start : rows.stop]
                seen = images[start : rows.stop] if images is not None else None
                fields = multimodal_fields if size >= count else self.fields_of(multimodal_fields, images, rows, count)
                made += make(part, seen, fields, *rest, **keywords)[0]
            return made, None

        return memory.attempt("generation", len(prompt_ids), completions)

    def _generates_itself(self) -> bool:
        return not self.use_vllm and not self.use_transformers_continuous_batching
