"""The half of the trainer that scores a micro-batch in parts: those that a token budget allows, and none that is not needed.

Scoring is what needs memory and time, and only scoring is done in parts; the objective always sees the whole micro-batch.

Where the gradient of a completion depends on no other completion's scores (`kit.objective.objective.to_parts`), each part
is scored once:

    score the part with a graph; the objective on the whole micro-batch, other completions by what is known of them or a
    stand-in -> the gradient with respect to the part's log-probabilities; send it through the graph, which is then freed

and the last time round, when every score is known, the objective's loss and metrics are taken. Completions without an
advantage keep their stand-in where nobody would notice (`to_skipping`): they are counted, and not scored.

Any other objective (a quantile of the entropies, a covariance, a hook that says nothing) takes one pass more:

    1. score every part without a graph             -> log-probabilities, entropies (B, T) of the whole micro-batch
    2. the objective, once, on all of them          -> the loss, and its gradient with respect to each of these numbers
    3. score every part again, with a graph, and send the gradient of 2. through it

Both are exact by the chain rule; the latter is gradient caching, arXiv 2101.06983.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kit.models.failures import rng_state, set_rng_state
from kit.models.lora import lora_weight_norm
from kit.objective import LossScale, Objective
from kit.objective.objective import to_parts
from kit.trainer.loss import Terms
from kit.trainer.micro_batch import Limits, Row, divide, may_be_trimmed, measured, part_of
from kit.trainer.rollout import MODEL_INPUTS, trained_tokens
from kit.trainer.sanity_checks import FirstSteps
from kit.trainer.savings import say_once
from kit.trainer.value_head import Critic

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
PER_TOKEN = ("logps", "entropy", "full_kl")


@dataclass(frozen=True)
class Division:
    """What of a micro-batch is scored together."""

    rows: list[Row]
    parts: list[list[int]]

    @property
    def most(self) -> int:
        """Completions of the largest part."""
        return max((len(part) for part in self.parts), default=1)


class PartsSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before TRL's class. Divides nothing outside of a training step."""

    objective: Objective | None
    needs: frozenset[str]
    token_budget: int | None
    _critic: Critic | None
    _first_steps: FirstSteps | None
    _at_once = 1  # completions of the largest pass of this attempt
    _reached: list[Tensor] | None = None  # weights to which a backward pass brings a gradient

    def _division(self, inputs: dict[str, Any], most_rows: int) -> Division | None:
        """The parts of a micro-batch, at most `most_rows` completions each; None where it goes through as it is."""
        count = len(inputs["completion_ids"])
        chosen = list(range(count))
        if self.skips_flat:
            chosen = torch.nonzero(_has_advantage(inputs)).flatten().tolist()
        self._at_once = min(count, most_rows)
        if len(chosen) == count and self.token_budget is None and most_rows >= count:
            return None
        fields = self._fields_of_model(inputs)
        rows = measured(inputs, trimmed=not fields and may_be_trimmed(self.accelerator.unwrap_model(self.model)))
        limits = Limits(self.token_budget, most_rows if most_rows < count else None, padded=not self._packs_rows())
        found = Division(rows, divide(rows, chosen, limits))
        self._at_once = found.most
        if self.token_budget is not None and any(limits.cost([rows[n]]) > self.token_budget for n in chosen):
            longest = max(limits.cost([row]) for row in rows)
            say_once(
                f"A completion and its prompt take {longest} tokens, more than optimisation.token_budget "
                f"({self.token_budget}): it goes through the model alone, and memory is not bounded by the budget there."
            )
        return None if found.parts == [list(range(count))] else found

    def _fields_of_model(self, inputs: dict[str, Any]) -> list[str]:
        """Names of the inputs beside ids and masks that the model is given."""
        further = [name for name in inputs if name.startswith("extra_inputs.")]
        return [name for name in MODEL_INPUTS if inputs.get(name) is not None] + further

    def _packs_rows(self) -> bool:
        """Whether the scorer leaves padding out, so that it costs nothing."""
        return bool(self.packing_report["packing"] == "packed")

    def _loss_in_parts(self, model: Any, inputs: dict[str, Any], division: Division) -> Tensor:
        """The loss of a micro-batch whose gradient is in the weights already: its own graph reaches none of them."""
        assert self.objective is not None
        given = _Given(inputs, division, self._fields_of_model(inputs))
        norm = lora_weight_norm(self.model) if "weight_norm" in self.needs else None
        if not given.parts:
            total = self._without_scores(model, given, norm)
        elif to_parts(self.objective) is None:
            total = self._each_part_once(model, given, norm)
        else:
            total = self._each_part_twice(model, given, norm)
        total.requires_grad_()
        return total

    def _each_part_once(self, model: Any, given: _Given, norm: Tensor | None) -> Tensor:
        whole, watch = self._stand_ins(given), _Watch(self._first_steps, given)
        total: Tensor | None = None
        for number, rows in enumerate(given.parts):
            part = given.part(number)
            terms, scored, aux_loss = self._terms(model, part)
            watch.over(terms.logps, rows)
            whole = _filled_in(whole, terms, rows)
            last = number + 1 == len(given.parts)
            loss, scale, slopes = self._slopes(given, whole, norm, taken_in=last)
            beside = self._beside(part, scored, aux_loss, scale)
            self._send(terms, slopes, rows, beside)
            if last:
                self._send_norm(norm, slopes)
                total = loss if total is None else total + loss
            if beside is not None:
                total = beside.detach() if total is None else total + beside.detach()
            del terms, scored, aux_loss, beside, loss  # their graph ends here, before the next one begins
        watch.tell()
        assert total is not None
        return total

    def _each_part_twice(self, model: Any, given: _Given, norm: Tensor | None) -> Tensor:
        whole, states = self._stand_ins(given), []
        with torch.no_grad():
            for number, rows in enumerate(given.parts):
                states.append(rng_state())
                whole = _filled_in(whole, self._terms(model, given.part(number))[0], rows)
        total, scale, slopes = self._slopes(given, whole, norm, taken_in=True)
        watch = _Watch(self._first_steps, given)
        for number, rows in enumerate(given.parts):
            set_rng_state(states[number])  # the same dropout as without a graph
            part = given.part(number)
            terms, scored, aux_loss = self._terms(model, part)
            watch.over(terms.logps, rows)
            beside = self._beside(part, scored, aux_loss, scale)
            self._send(terms, slopes, rows, beside)
            total = total if beside is None else total + beside.detach()
            del terms, scored, aux_loss, beside
        self._send_norm(norm, slopes)
        watch.tell()
        return total

    def _without_scores(self, model: Any, given: _Given, norm: Tensor | None) -> Tensor:
        """No completion needs its scores: a gradient of zero, in the weights that a pass would have reached."""
        loss, _, slopes = self._slopes(given, self._stand_ins(given), norm, taken_in=True)
        if self._reached is None:  # not known yet, so one short pass shows it
            shortest = min(range(len(given.rows)), key=lambda number: given.rows[number].tokens)
            terms = self._terms(model, given.taking([shortest]))[0]
            self.accelerator.backward(0.0 * terms.logps.sum())
        for weight in self._reached or ():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self._send_norm(norm, slopes)
        return loss

    def _note_reached(self) -> None:
        """Once: which weights a backward pass has brought a gradient to."""
        if self._reached is None and self.skips_flat:
            found = [weight for weight in self.model.parameters() if weight.grad is not None]
            self._reached = found or None

    def _stand_ins(self, given: _Given) -> Terms:
        """(B, T) for scores that are not known: the policy has not moved, and is certain."""
        ids, old = given.inputs["completion_ids"], given.inputs.get("old_per_token_logps")
        nothing = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        logps = nothing if old is None else torch.nan_to_num(old, nan=0.0)
        seen = torch.zeros((len(ids), 1), dtype=torch.bool, device=ids.device)
        return Terms(logps, nothing, nothing if "full_kl" in self.needs else None, scored=seen)

    def _slopes(
        self, given: _Given, whole: Terms, norm: Tensor | None, *, taken_in: bool
    ) -> tuple[Tensor, LossScale, dict[str, Tensor]]:
        """The loss (detached) of the micro-batch, and its gradient with respect to each of the terms, by name.

        taken_in: every score is known, so that metrics count and the first steps are looked at.
        """
        assert self.objective is not None
        wanted = {"logps": True, "entropy": self.objective.needs_entropy_gradient, "full_kl": True}
        leaves = {
            name: value.detach().requires_grad_(wanted[name])
            for name in PER_TOKEN
            if (value := getattr(whole, name)) is not None
        }
        if norm is not None:
            leaves["weight_norm"] = norm.detach().requires_grad_(taken_in)
        # By number: asking the tensor would wait for the device.
        every = taken_in and sum(map(len, given.parts)) == len(given.rows)
        scored = None if every else whole.scored
        terms = replace(whole, **leaves, scored=scored)
        if taken_in:
            loss, scale = self._objective_loss(given.inputs, terms)
        else:
            scale = self._loss_scale(given.inputs)
            loss = self.objective.loss(self._token_batch(given.inputs, terms), scale).loss
        sources = {name: value for name, value in leaves.items() if value.requires_grad}
        found = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
        slopes = {name: slope for name, slope in zip(sources, found, strict=True) if slope is not None}
        return loss.detach(), scale, slopes

    def _send(self, terms: Terms, slopes: dict[str, Tensor], rows: list[int], beside: Tensor | None) -> None:
        """The gradient of the part `rows` through its graph, with that of what is beside the objective."""
        width = terms.logps.shape[1]
        values = {name: getattr(terms, name) for name in PER_TOKEN if name in slopes}
        loss = sum((value * slopes[name][rows, :width]).sum() for name, value in values.items())
        loss = loss if beside is None else loss + beside
        if isinstance(loss, Tensor) and loss.requires_grad:
            self.accelerator.backward(loss)

    def _send_norm(self, norm: Tensor | None, slopes: dict[str, Tensor]) -> None:
        if norm is not None and "weight_norm" in slopes:
            self.accelerator.backward(norm * slopes["weight_norm"])


class _Given:
    """A micro-batch and its parts, each made when it is needed."""

    def __init__(self, inputs: dict[str, Any], division: Division, fields: list[str]) -> None:
        self.inputs, self.rows, self.parts, self.fields = inputs, division.rows, division.parts, fields

    def part(self, number: int) -> dict[str, Any]:
        return self.taking(self.parts[number])

    def taking(self, rows: list[int]) -> dict[str, Any]:
        taken: dict[str, Any] = part_of(self.inputs, rows, self.rows, self.fields)
        return taken


class _Watch:
    """Shows the first steps what the backward passes of all parts brought to the log-probabilities (B, T)."""

    def __init__(self, checks: FirstSteps | None, given: _Given) -> None:
        self.checks = checks if checks is not None and not checks.probed else None  # they look at one micro-batch
        ids = given.inputs["completion_ids"]
        self.arrived = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) if self.checks else None
        self.any = False

    def over(self, logps: Tensor, rows: list[int]) -> None:
        if self.arrived is None or not logps.requires_grad:
            return
        arrived = self.arrived

        def receive(gradient: Tensor) -> None:
            arrived[rows, : gradient.shape[1]] = gradient.detach().to(torch.float32)
            self.any = True

        logps.register_hook(receive)  # type: ignore[no-untyped-call]

    def tell(self) -> None:
        if self.checks is not None and self.checks.expected is not None:
            self.checks.arrived = self.arrived if self.any else None


def _filled_in(whole: Terms, part: Terms, rows: list[int]) -> Terms:
    """The terms (B, T) with those of a part in its rows, as constants."""
    values: dict[str, Tensor | None] = {}
    for name in PER_TOKEN:
        kept, new = getattr(whole, name), getattr(part, name)
        if kept is not None and new is not None:
            kept = kept.to(torch.promote_types(kept.dtype, new.dtype), copy=True)
            kept[rows] = 0.0
            kept[rows, : new.shape[1]] = new.detach().to(kept.dtype)
        values[name] = kept
    assert whole.scored is not None
    scored = whole.scored.clone()
    scored[rows] = True
    return replace(whole, **values, scored=scored)  # type: ignore[arg-type]


def _has_advantage(inputs: dict[str, Any]) -> Tensor:
    """(B,) bool: completions with an advantage that is not 0 at some token that trains."""
    advantages = inputs["advantages"]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    found: Tensor = ((advantages != 0) & trained_tokens(inputs)).any(1)
    return found
