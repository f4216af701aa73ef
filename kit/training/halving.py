"""The half of the trainer that survives running out of memory: smaller parts, and the same gradient.

An objective may look across completions (a mean over the tokens of the micro-batch, a quantile of its entropies), so the
loss of a part is not a part of the loss. Scoring is what needs memory, and only scoring is done in parts:

    1. score every part without a graph             -> log-probabilities, entropies (B, T) of the whole micro-batch
    2. the objective, once, on all of them          -> the loss, and its gradient with respect to each of these numbers
    3. score every part again, with a graph, and send the gradient of 2. through it

which is exact by the chain rule, for any hook (gradient caching, arXiv 2101.06983). It costs one more scoring pass, from
the first shortage on. What an aborted attempt has left in gradients, metrics and hooks is taken back before the next one:
the micro-batches of the optimiser step that had come through are done again, from gradients of zero.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.objective import LossScale, Objective
from kit.training.critic import Critic
from kit.training.failures import is_out_of_memory
from kit.training.family_fields import divided
from kit.training.first_steps import FirstSteps
from kit.training.hidden_states import ScoringPass
from kit.training.lora_norm import lora_weight_norm
from kit.training.out_of_memory import SHARE, Memory, release, rng_state, set_rng_state
from kit.training.rollout_side import trained_tokens

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is


@dataclass(frozen=True)
class Terms:
    """What an objective reads of one scoring pass, and sends its gradient to."""

    logps: Tensor  # (B, T) nats
    entropy: Tensor | None  # (B, T) nats
    full_kl: Tensor | None  # (B, T) nats
    weight_norm: Tensor | None = None  # ()


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch as it was before its first attempt: inputs, random numbers, and all that counts what was seen."""

    inputs: dict[str, Any]
    random: Any
    books: dict[str, Any]


class HalvingSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before TRL's class. Does nothing without a `Memory`."""

    objective: Objective | None
    needs: frozenset[str]
    memory: Memory | None = None
    _critic: Critic | None
    _first_steps: FirstSteps | None
    _stepping = False  # inside training_step
    _micro: MicroBatch | None = None  # the one in progress
    _window: tuple[MicroBatch, ...] = ()  # those of the optimiser step that came through

    def _halving(self) -> Memory | None:
        """The memory, where a step can be done again: one process, or one that averages its gradients with others'."""
        alone = str(self.accelerator.distributed_type).rpartition(".")[2] in ("NO", "MULTI_GPU", "MULTI_CPU")
        return self.memory if self.objective is not None and alone and self._is_plain() else None

    def _is_plain(self) -> bool:
        """False where a subclass or a wrapper adds to the loss: its terms would be lost in parts."""
        ours = [cls for cls in type(self).__mro__ if cls.__dict__.get("_in_parts_too")]
        same = all(getattr(type(self), name) is ours[0].__dict__[name] for name in ("compute_loss", "_compute_loss"))
        return same and not {"compute_loss", "_compute_loss"} & vars(self).keys()

    # --- a step of training -------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        memory = self._halving()
        if memory is None:
            whole: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return whole
        if self.accelerator.num_processes > 1:
            model = self.model  # each process by itself; an attempt that fails must not leave the others waiting
        self._stepping, self._micro = True, None
        try:
            loss = self._until_it_fits(memory, model, inputs, num_items_in_batch)
        finally:
            self._stepping = False
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
                memory.halve("training", len(self._micro.inputs["completion_ids"]), error)
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
        if not self._stepping:
            return super()._prepare_inputs(generation_batch)
        if self._micro is None:
            inputs = super()._prepare_inputs(generation_batch)
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

    # --- a micro-batch in parts ---------------------------------------------------------------------------------------

    def _rows_at_once(self, inputs: dict[str, Any]) -> int:
        """Completions that one training pass takes."""
        whole = len(inputs["completion_ids"])
        memory = self._halving() if self._stepping else None
        return memory.rows("training", whole) if memory is not None else whole

    def _loss_in_parts(self, model: Any, inputs: dict[str, Any], size: int) -> Tensor:
        """The loss of a micro-batch whose gradient is in the weights already: its own graph reaches none of them."""
        assert self.objective is not None
        parts, states, found = divided(inputs, size), [], []
        with torch.no_grad():
            for part in parts:
                states.append(rng_state())
                found.append(self._terms(model, part)[0])
        norm = lora_weight_norm(self.model) if "weight_norm" in self.needs else None
        whole = _joined(found, norm, self.objective.needs_entropy_gradient)
        loss, scale = self._objective_loss(inputs, whole)
        slopes = _slopes(loss, whole)
        norm_slope = slopes.pop("weight_norm", None)
        total: Tensor = loss.detach()
        for number, (part, state) in enumerate(zip(parts, states, strict=True)):
            set_rng_state(state)  # the same dropout as without a graph
            rows = slice(number * size, (number + 1) * size)
            beside = self._backward_part(model, part, {name: slope[rows] for name, slope in slopes.items()}, scale)
            total = total if beside is None else total + beside
        if norm is not None and norm_slope is not None:
            self.accelerator.backward(norm * norm_slope)
        total.requires_grad_()
        return total

    def _backward_part(
        self, model: Any, part: dict[str, Any], slopes: dict[str, Tensor], scale: LossScale
    ) -> Tensor | None:
        """Scores some completions with a graph and sends the gradient through it; returns what is beside the objective."""
        terms, scored, aux_loss = self._terms(model, part)
        loss = sum((getattr(terms, name) * slope).sum() for name, slope in slopes.items())
        beside = self._beside(part, scored, aux_loss, scale)
        loss = loss if beside is None else loss + beside
        if isinstance(loss, Tensor) and loss.requires_grad:
            self.accelerator.backward(loss)
        return beside.detach() if beside is not None else None

    def _beside(
        self, inputs: dict[str, Any], scored: ScoringPass, aux_loss: Tensor | None, scale: LossScale
    ) -> Tensor | None:
        """The loss of the value head, and the load balance of a mixture of experts (of a part: by its share of rows)."""
        loss: Tensor | None = None
        if self._critic is not None:
            loss = self._value_loss(inputs, scored, trained_tokens(inputs), scale)
        if aux_loss is not None:
            self._metrics[self._mode()]["aux_loss"].append(aux_loss.item())
            share = inputs.get(SHARE, 1.0)
            balance = share * self.router_aux_loss_coef * aux_loss / self._accumulation()
            loss = balance if loss is None else loss + balance
        return loss

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


def _joined(found: list[Terms], norm: Tensor | None, entropy_gradient: bool) -> Terms:
    """The terms of all parts as leaves of a new graph, which begins at them."""

    def leaf(values: list[Tensor | None], wanted: bool = True) -> Tensor | None:
        tensors = [value for value in values if value is not None]
        return torch.cat(tensors).requires_grad_(wanted) if tensors else None

    logps = leaf([terms.logps for terms in found])
    assert logps is not None
    return Terms(
        logps,
        leaf([terms.entropy for terms in found], entropy_gradient),
        leaf([terms.full_kl for terms in found]),
        norm.detach().requires_grad_() if norm is not None else None,
    )


def _slopes(loss: Tensor, whole: Terms) -> dict[str, Tensor]:
    """d loss / d term, by the name of the term; those that the loss does not depend on are left out."""
    leaves = {name: value for name, value in vars(whole).items() if value is not None and value.requires_grad}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}
