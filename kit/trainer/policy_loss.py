"""The loss of a micro-batch and its gradient: rows are scored, the objective sees the scores, its gradient goes back.

Scoring is what needs memory and time, and only scoring is done in parts (`MicroBatchPlan`): those that a token budget or
the memory allows, and none that is not needed. The objective always sees the whole micro-batch.

A step has one way (`PolicyLoss.step`): plan the parts, score each, ask the objective, send its gradient back. For each part:

    score it with a graph; the objective on the whole micro-batch, of which other parts are constants -> the gradient with respect
    to the part's log-probabilities; send it through the graph, which is then freed

Where the gradient of a completion depends on no other completion's scores (`kit.objective.objective.to_parts`), parts that are
not scored yet are placeholders, and the objective's loss and metrics are taken at the last one. Any other objective (a quantile
of the entropies, a hook that says nothing) is asked once, after a pass without a graph over every part.
Completions without an advantage keep their placeholder where nobody would notice (`to_skipping`): they are counted, not scored.

Both are exact by the chain rule; the latter is gradient caching, arXiv 2101.06983.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from kit.models.failures import rng_state, set_rng_state
from kit.objective import LossOutput, LossScale, Mean, TokenBatch
from kit.objective.advantage import value_loss
from kit.objective.batch import TOKEN_FIELDS, Field, fields_where
from kit.objective.objective import to_parts
from kit.scoring.divergence import divergence
from kit.scoring.layouts import Scores, Wanted, scatter_to_tokens, to_device
from kit.scoring.proof import may_be_trimmed
from kit.trainer.micro_batch import MicroBatch, SequenceLengths, TokenBudget, split_by_tokens
from kit.trainer.mismatch import sampler_mismatch
from kit.trainer.sanity_checks import SanityChecks
from kit.trainer.services import Services

log = logging.getLogger("kit")
PER_TOKEN = ("logps", *sorted(fields_where(gradient=True, shape="(B, T)")))
HIDDEN_NEEDS = fields_where(hidden=True)
"""What a hook may need that is computed from hidden states."""
BUCKET_BYTES = 64 * 2**20
"""Of gradients that processes average in one message."""


@dataclass(frozen=True)
class PolicyOutputs:
    """Outputs of a scoring pass that the objective reads, and sends its gradient to."""

    logps: Tensor  # (B, T) nats
    entropy: Tensor | None  # (B, T) nats
    full_kl: Tensor | None  # (B, T) nats
    teacher_kl: Tensor | None = None  # (B, T) nats
    scored: Tensor | None = None  # (B, 1) bool: completions whose values these are, others have placeholders; None: all

    def filled_in(self, part: PolicyOutputs, rows: Tensor) -> PolicyOutputs:
        """Returns these outputs with those of a part in its rows, as constants."""
        values: dict[str, Tensor | None] = {}
        for name in PER_TOKEN:
            value, new = getattr(self, name), getattr(part, name)
            if value is not None and new is not None:
                value = value.to(torch.promote_types(value.dtype, new.dtype), copy=True)
                value.index_fill_(0, rows, 0.0)
                value[rows, : new.shape[1]] = new.detach().to(value.dtype)
            values[name] = value
        assert self.scored is not None
        scored = self.scored.clone()
        scored.index_fill_(0, rows, True)
        return replace(self, **values, scored=scored)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StepContext:
    """Inputs of a loss beside the micro-batch. checks: those of the first steps, while they are to look at this one."""

    scale: LossScale
    step: int = 0  # optimiser steps made so far
    training: bool = True  # False: of an evaluation
    checks: SanityChecks | None = None


@dataclass(frozen=True)
class MicroBatchPlan:
    """The division of a micro-batch into parts whose completions are scored together."""

    batch: MicroBatch
    lengths: list[SequenceLengths]
    parts: list[list[int]]

    def part(self, number: int) -> MicroBatch:
        return self.batch if self.at_once else self.taking(self.parts[number])

    def rows(self, number: int) -> Tensor:
        """Row numbers of a part, on the device."""
        return to_device(torch.tensor(self.parts[number]), self.batch.completion_ids.device)

    def taking(self, rows: Sequence[int]) -> MicroBatch:
        """Some completions, without the columns that none of them needs."""
        return self.batch.select(rows, self.lengths)

    @property
    def at_once(self) -> bool:
        """Whether there is one part, of all completions."""
        return len(self.parts) == 1 and len(self.parts[0]) == len(self.batch)

    @property
    def skips(self) -> bool:
        """Whether some completions are in no part."""
        return sum(map(len, self.parts)) < len(self.batch)


class PolicyLoss:
    """The loss of one run. `whole` leaves its graph to the caller; `step` sends the gradient to the weights itself.

    router_coef: weight of a mixture of experts' load balance; None where it is not asked for.
    """

    token_budget: int | None = None
    """Tokens of a part, at most."""
    skip_flat = False
    """Completions without an advantage are not scored."""

    def __init__(
        self,
        services: Services,
        *,
        router_coef: float | None = None,
    ) -> None:
        self.objective, self.scorer, self.critic = services.objective, services.scorer, services.critic
        self.policy, self.backward = services.model, services.accelerator.backward
        self.metrics, self.memory = services.metrics, services.memory
        self.router_coef = router_coef
        self.at_once = 1
        """Completions of the largest pass of the last `step`."""
        self.returned: Tensor | None = None
        """The loss that the last `step` gave; it has a `grad` once somebody has sent a gradient to it."""
        self._reached: list[Tensor] | None = None  # weights to which a backward pass brings a gradient

    # --- the two ways to call it --------------------------------------------------------------------------------------

    def whole(self, model: Any, batch: MicroBatch, context: StepContext) -> Tensor:
        """The loss () of all completions in one pass, with its graph."""
        if context.checks is not None:
            context.checks.before_scoring(model, batch)
        outputs, scores = self._outputs(model, batch, context)
        loss = self._objective_loss(batch, outputs, context)
        beside = self._auxiliary_loss(batch, scores, context)
        return loss if beside is None else loss + beside

    def step(self, model: Any, batch: MicroBatch, context: StepContext, max_rows: int | None = None) -> Tensor:
        """The loss () of a micro-batch whose gradient is in the weights already: its own graph reaches none of them.

        max_rows: completions of one pass, at most. A caller may add terms to what is returned and send it backwards; the
        first steps refuse one that multiplies it (`SanityChecks`).
        """
        if context.checks is not None:
            context.checks.before_scoring(model, batch)
        plan = self.plan(batch, len(batch) if max_rows is None else max_rows)
        outputs_of_all, arrivals = self._placeholder_outputs(batch), _Arrivals(context, plan)
        count, states = len(plan.parts), []
        ahead = count != 1 and (count == 0 or to_parts(self.objective) is not None)
        if ahead:
            with torch.no_grad():
                for number in range(count):
                    states.append(rng_state())
                    outputs_of_all = outputs_of_all.filled_in(
                        self._outputs(model, plan.part(number), context)[0], plan.rows(number)
                    )
            loss, grads = self._grad_wrt_outputs(plan, outputs_of_all, context, taken_in=True)
        besides: list[Tensor] = []
        for number in range(count):
            if ahead:
                set_rng_state(states[number])  # the same dropout as without a graph
            part, rows = plan.part(number), None if plan.at_once else plan.rows(number)
            outputs, scores = self._outputs(model, part, context)
            if context.checks is not None:
                context.checks.attached(outputs.logps)
            arrivals.watch(outputs.logps, rows)
            if not ahead:
                outputs_of_all = outputs if rows is None else outputs_of_all.filled_in(outputs, rows)
                loss, grads = self._grad_wrt_outputs(plan, outputs_of_all, context, taken_in=number + 1 == count)
            beside = self._auxiliary_loss(part, scores, context)
            self._send(outputs, grads, rows, beside)
            if beside is not None:
                besides.append(beside.detach())
            del outputs, scores, beside  # their graph ends here, before the next one begins
        if not count:
            self._reach(model, plan, context)
        arrivals.report()
        if self._reached is None and self.skip_flat:
            self._reached = [weight for weight in self.policy.parameters() if weight.grad is not None] or None
        self.returned = sum(besides, loss).detach().requires_grad_()
        return self.returned

    # --- what is scored together --------------------------------------------------------------------------------------

    def plan(self, batch: MicroBatch, max_rows: int) -> MicroBatchPlan:
        """The parts of a micro-batch, at most `max_rows` completions each."""
        count = len(batch)
        chosen = list(range(count))
        if self.skip_flat:
            chosen = torch.nonzero(batch.on_host.advantage).flatten().tolist()
        self.at_once = min(count, max_rows)
        if len(chosen) == count and self.token_budget is None and max_rows >= count:
            return MicroBatchPlan(batch, [], [chosen])
        lengths = batch.lengths(trimmed=not batch.fields and may_be_trimmed(self.policy))
        way = self.scorer.report
        budget = TokenBudget(
            self.token_budget,
            max_rows if max_rows < count else None,
            padded=way["packing"] != "packed",
            shared=way["share_prompts"],
        )
        plan = MicroBatchPlan(batch, lengths, split_by_tokens(lengths, chosen, budget))
        self.at_once = max((len(part) for part in plan.parts), default=1)
        if self.token_budget is not None and any(budget.cost([lengths[n]]) > self.token_budget for n in chosen):
            longest = max(budget.cost([row]) for row in lengths)
            warn_once(
                f"A completion and its prompt take {longest} tokens, more than optimisation.token_budget "
                f"({self.token_budget}): it goes through the model alone, and memory is not bounded by the budget there."
            )
        return plan

    def _reach(self, model: Any, plan: MicroBatchPlan, context: StepContext) -> None:
        """Sets a gradient of zero in the weights that a pass would have reached, where no completion is scored."""
        if self._reached is None:  # not known yet, so one short pass shows it
            shortest = min(range(len(plan.lengths)), key=lambda number: plan.lengths[number].tokens)
            self.backward(0.0 * self._outputs(model, plan.taking([shortest]), context)[0].logps.sum())
        for weight in self._reached or ():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def _placeholder_outputs(self, batch: MicroBatch) -> PolicyOutputs:
        """(B, T) for scores that are not known: the policy has not moved, and is certain."""
        ids, old = batch.completion_ids, batch.get("old_per_token_logps")
        nothing = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        logps = nothing if old is None else old
        scored = torch.zeros((len(ids), 1), dtype=torch.bool, device=ids.device)
        full_kl, teacher_kl = (nothing if need in self.objective.needs else None for need in ("full_kl", "teacher_kl"))
        return PolicyOutputs(logps, nothing, full_kl, teacher_kl, scored=scored)

    def _grad_wrt_outputs(
        self,
        plan: MicroBatchPlan,
        outputs_of_all: PolicyOutputs,
        context: StepContext,
        *,
        taken_in: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss (detached) of the micro-batch, and its gradient with respect to each of the outputs, by name.

        taken_in: every score is known, so that metrics count and the first steps are looked at.
        """
        leaves = {
            name: value.detach().requires_grad_(name != "entropy" or self.objective.needs_entropy_gradient)
            for name in PER_TOKEN
            if (value := getattr(outputs_of_all, name)) is not None
        }
        # By number: asking the tensor would wait for the device.
        scored = outputs_of_all.scored if not taken_in or plan.skips else None
        outputs = replace(outputs_of_all, **leaves, scored=scored)
        if taken_in:
            loss = self._objective_loss(plan.batch, outputs, context)
        else:
            loss = self.objective.loss(self._token_batch(plan.batch, outputs, context), context.scale).loss
        sources = {name: value for name, value in leaves.items() if value.requires_grad}
        gradients = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
        return loss.detach(), {name: grad for name, grad in zip(sources, gradients, strict=True) if grad is not None}

    def _send(
        self, outputs: PolicyOutputs, grads: dict[str, Tensor], rows: Tensor | None, beside: Tensor | None
    ) -> None:
        """The gradient of the part `rows` (None: of all) through its graph, with that of what is beside the objective."""
        width = outputs.logps.shape[1]
        values = {name: getattr(outputs, name) for name in PER_TOKEN if name in grads}
        loss = sum(
            (value * (grads[name] if rows is None else grads[name][rows, :width])).sum()
            for name, value in values.items()
        )
        loss = loss if beside is None else loss + beside
        if isinstance(loss, Tensor) and loss.requires_grad:
            self.backward(loss)

    # --- from rows to what the objective reads ------------------------------------------------------------------------

    def _outputs(self, model: Any, batch: MicroBatch, context: StepContext) -> tuple[PolicyOutputs, Scores]:
        """Scores the completions; returns what the objective reads, and the scores."""
        wanted = Wanted(
            entropy=True,
            entropy_gradient=self.objective.needs_entropy_gradient,
            aux_loss=self.router_coef is not None,
            hidden=bool(self.objective.needs & HIDDEN_NEEDS),
        )
        scores = self.scorer.score(model, batch.rows, wanted)
        from_reference = self._full_kl(batch, scores) if "full_kl" in self.objective.needs else None
        from_teacher = self._teacher_kl(batch, scores) if "teacher_kl" in self.objective.needs else None
        return PolicyOutputs(scores.logps, scores.entropy, from_reference, from_teacher), scores

    def _full_kl(self, batch: MicroBatch, scores: Scores) -> Tensor:
        """(B, T) nats, from the hidden states of this pass and those of the reference pass at the rollout."""
        live = batch.completion_mask.bool()
        assert self.memory.reference_head is not None
        reference = replace(self.memory.reference_head, hidden=batch["ref_hidden"][live])
        with self.scorer.autocast():
            values = divergence(scores.projection, reference)
        return scatter_to_tokens(values, live)

    def _teacher_kl(self, batch: MicroBatch, scores: Scores) -> Tensor:
        """(B, T) nats, from the hidden states of this pass and those of the teacher at the rollout; 0 without a teacher."""
        what, live = self.objective.divergence, batch.completion_mask.bool()
        taught = live & batch["teacher_known"][:, None]
        assert what is not None
        if self.memory.teacher_head is None or not bool(taught.any()):
            return scores.logps * 0.0
        policy = replace(scores.projection, hidden=scores.projection.hidden[taught[live]])
        teacher = replace(self.memory.teacher_head, hidden=batch["teacher_hidden"][taught])
        with self.scorer.autocast():
            values = divergence(policy, teacher, what)
        return scatter_to_tokens(values, taught)

    def _objective_loss(self, batch: MicroBatch, outputs: PolicyOutputs, context: StepContext) -> Tensor:
        """The objective's loss of a micro-batch, its metrics taken in."""
        tokens = self._token_batch(batch, outputs, context)
        if context.checks is not None:
            context.checks.after_scoring(tokens, context.scale)
        if tokens.sampler_logps is not None:
            means, ratios = sampler_mismatch(tokens)
            self.metrics.add(means)
            self.metrics.sample("sampler_log_ratio", ratios)
        result: LossOutput = self.objective.loss(tokens, context.scale)
        self.metrics.take_in(result)
        return result.loss

    def _token_batch(self, batch: MicroBatch, outputs: PolicyOutputs, context: StepContext) -> TokenBatch:
        """Gathers what hooks read."""
        sourced = {name: _sourced(batch, spec) for name, spec in TOKEN_FIELDS.items() if spec.source is not None}
        sampler_logps = sourced["sampler_logps"]
        if outputs.scored is not None and sampler_logps is not None:  # what is not known cannot be compared
            sourced["sampler_logps"] = sampler_logps.masked_fill(~outputs.scored, torch.nan)
        old_logps = batch.get("old_per_token_logps")
        return TokenBatch.of(
            **sourced,
            logps=outputs.logps,
            old_logps=outputs.logps.detach() if old_logps is None else old_logps,
            advantages=batch.advantages,
            mask=batch.loss_mask,
            entropy=outputs.entropy,
            full_kl=outputs.full_kl,
            teacher_kl=outputs.teacher_kl,
            scored=outputs.scored,
            step=context.step,
        )

    # --- beside the objective -----------------------------------------------------------------------------------------

    def _auxiliary_loss(self, batch: MicroBatch, scores: Scores, context: StepContext) -> Tensor | None:
        """The loss of the value head, and the load balance of a mixture of experts (of a part: by its share of rows)."""
        loss: Tensor | None = None
        if self.critic is not None:
            loss = self._value_loss(batch, scores, context.scale)
        if scores.aux_loss is not None and self.router_coef is not None:
            self.metrics.append("aux_loss", scores.aux_loss.item())
            balance = batch.share * self.router_coef * scores.aux_loss / context.scale.accumulation
            loss = balance if loss is None else loss + balance
        return loss

    def _value_loss(self, batch: MicroBatch, scores: Scores, scale: LossScale) -> Tensor:
        """Mean over the tokens of the accumulation window. Its gradient stays within the value head."""
        assert self.critic is not None
        mask = batch.loss_mask
        values = scatter_to_tokens(self.critic.head(scores.projection.hidden), batch.completion_mask)
        losses = value_loss(values, batch["old_values"], batch["value_targets"], self.critic.settings.clip)
        losses = losses.masked_fill(~mask, 0.0)
        self.metrics.add({"value/loss": Mean(losses.sum(), mask.sum())})
        return losses.sum() / torch.as_tensor(scale.window_tokens).clamp(min=1.0)


class _Arrivals:
    """Shows the first steps what the backward passes of all parts brought to the log-probabilities (B, T)."""

    def __init__(self, context: StepContext, plan: MicroBatchPlan) -> None:
        checks = context.checks
        self.checks = checks if checks is not None and not checks.probed else None  # they look at one micro-batch
        ids = plan.batch.completion_ids
        self.arrived = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) if self.checks else None
        self.any = False

    def watch(self, logps: Tensor, rows: Tensor | None) -> None:
        """The log-probabilities of the part `rows`, before its backward pass."""
        if self.arrived is None or not logps.requires_grad:
            return
        arrived = self.arrived

        def receive(gradient: Tensor) -> None:
            arrived[slice(None) if rows is None else rows, : gradient.shape[1]] = gradient.detach().to(torch.float32)
            self.any = True

        logps.register_hook(receive)  # type: ignore[no-untyped-call]

    def report(self) -> None:
        if self.checks is not None and self.checks.expected is not None:
            self.checks.arrived = self.arrived if self.any else None


def average_gradients(accelerator: Any, model: Any) -> None:
    """Over all processes, after the last part of an optimiser step. A weight that one of them has not used has none there.

    Many gradients go together, as one flat tensor of each precision: a message of its own for every weight would wait for
    the network as often as there are weights.
    """
    if accelerator.num_processes == 1:
        return
    gradients = []
    for weight in model.parameters():
        if weight.requires_grad:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad)
    for bucket in _take_tensors(gradients, BUCKET_BYTES):  # type: ignore[no-untyped-call]
        mean = accelerator.reduce(_flatten_dense_tensors(bucket), reduction="mean")  # type: ignore[no-untyped-call]
        torch._foreach_copy_(bucket, _unflatten_dense_tensors(mean, bucket))  # type: ignore[no-untyped-call]


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """A warning in the log, the first time only."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


def _sourced(batch: MicroBatch, spec: Field) -> Tensor | None:
    """The values of a field that the micro-batch holds; one a completion (B,) as (B, 1)."""
    values: Tensor | None = spec.source(batch) if callable(spec.source) else batch.get(str(spec.source))
    return values.unsqueeze(1) if values is not None and spec.shape == "(B, 1)" and values.dim() == 1 else values
