"""The loss of a micro-batch and its gradient: rows are scored, the objective sees the scores, its gradient goes back.

Scoring is what needs memory and time, and only scoring is done in parts: those that a token budget or the memory allows,
and none that is not needed. The objective always sees the whole micro-batch.

A step has one way (`PolicyLoss.step`): plan the parts, score each, ask the objective, send its gradient back. For each part:

    score it with a graph; the objective on the whole micro-batch, of which other parts are constants -> the gradient with respect
    to the part's log-probabilities; send it through the graph, which is then freed

Where the gradient of a completion depends on no other completion's scores (`kit.objective.objective.to_parts`), parts that are
not scored yet are placeholders, and the objective's loss and metrics are taken at the last one. Any other objective (a quantile
of the entropies, a hook that says nothing) is asked once, after a pass without a graph over every part.
Completions without an advantage keep their placeholder where nobody would notice (`to_skipping`): they are counted, not scored.

Both are exact by the chain rule; the latter is gradient caching, arXiv 2101.06983. `StepRetry` does a micro-batch that ran out
of memory again, in smaller parts.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from kit.models.failures import BatchSizeBackoff, is_out_of_memory, release, rng_state, set_rng_state
from kit.objective import LossScale, Mean, TokenBatch
from kit.objective.advantage import value_loss
from kit.objective.batch import TOKEN_FIELDS, Divergence, fields_where
from kit.objective.objective import to_parts
from kit.scoring.divergence import divergence
from kit.scoring.head import Projection
from kit.scoring.layouts import Scores, Wanted, scatter_to_tokens, to_device
from kit.scoring.scorer import may_be_trimmed
from kit.trainer.metric_log import sampler_mismatch
from kit.trainer.micro_batch import MicroBatch, SequenceLengths, TokenBudget, split_by_tokens
from kit.trainer.rollout import Services
from kit.trainer.sanity_checks import SanityChecks

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

    def filled_in(self, part: PolicyOutputs, rows: Tensor | None) -> PolicyOutputs:
        """Returns these outputs with those of a part in its rows, as constants; those of the part where it has all rows."""
        if rows is None:
            return part
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
    checks: SanityChecks | None = None


class PolicyLoss:
    """The loss of one run. `whole` leaves its graph to the caller; `step` sends the gradient to the weights itself.

    router_coef: weight of a mixture of experts' load balance; None where it is not asked for.
    """

    token_budget: int | None = None
    """Tokens of a part, at most."""
    skip_flat = False
    """Completions without an advantage are not scored."""

    def __init__(self, services: Services, *, router_coef: float | None = None) -> None:
        self.objective, self.scorer, self.critic = services.objective, services.scorer, services.critic
        self.policy, self.backward = services.model, services.accelerator.backward
        self.metrics, self.memory = services.metrics, services.memory
        self.router_coef = router_coef
        self.at_once = 1
        """Completions of the largest pass of the last `step`."""
        self._reached: list[Tensor] | None = None  # weights to which a backward pass brings a gradient

    def whole(self, model: Any, batch: MicroBatch, context: StepContext) -> Tensor:
        """The loss () of all completions in one pass, with its graph."""
        outputs, scores = self._outputs(model, batch)
        loss = self._objective_loss(batch, outputs, context)
        aux_loss = self._auxiliary_loss(batch, scores, context)
        return loss if aux_loss is None else loss + aux_loss

    def step(self, model: Any, batch: MicroBatch, context: StepContext, max_rows: int | None = None) -> Tensor:
        """The loss () of a micro-batch whose gradient is in the weights already: its own graph reaches none of them.

        max_rows: completions of one pass, at most. A caller may add terms to what is returned and send it backwards.
        """
        if context.checks is not None:
            context.checks.before_scoring(model, batch)
        lengths, parts = self.plan(batch, len(batch) if max_rows is None else max_rows)
        all_scored = sum(map(len, parts)) == len(batch)

        def part(rows: list[int]) -> tuple[MicroBatch, Tensor | None]:
            """Some completions without the columns that none of them needs, and their row numbers; None: all."""
            if len(rows) == len(batch):
                return batch, None
            return batch.select(rows, lengths), to_device(torch.tensor(rows), batch.completion_ids.device)

        outputs_of_all, states, aux_losses = self._placeholder_outputs(batch), [], list[Tensor]()
        ahead = len(parts) != 1 and (not parts or to_parts(self.objective) is not None)
        if ahead:
            with torch.no_grad():
                for rows in parts:
                    states.append(rng_state())
                    chosen, numbers = part(rows)
                    outputs_of_all = outputs_of_all.filled_in(self._outputs(model, chosen)[0], numbers)
            loss, grads = self._grad_wrt_outputs(batch, outputs_of_all, context, all_scored=all_scored, last=True)
        for number, rows in enumerate(parts):
            if ahead:
                set_rng_state(states[number])  # the same dropout as without a graph
            chosen, numbers = part(rows)
            outputs, scores = self._outputs(model, chosen)
            if context.checks is not None:
                context.checks.watch(outputs.logps, numbers)
            if not ahead:
                last = number + 1 == len(parts)
                outputs_of_all = outputs_of_all.filled_in(outputs, numbers)
                loss, grads = self._grad_wrt_outputs(batch, outputs_of_all, context, all_scored=all_scored, last=last)
            aux_loss = self._auxiliary_loss(chosen, scores, context)
            self._send(outputs, grads, numbers, aux_loss)
            if aux_loss is not None:
                aux_losses.append(aux_loss.detach())
            del outputs, scores, aux_loss  # their graph ends here, before the next one begins
        if not parts:  # weights that a pass would have reached get a gradient of zero
            if self._reached is None:  # not known yet, so one short pass shows it
                shortest = min(range(len(lengths)), key=lambda number: lengths[number].tokens)
                self.backward(0.0 * self._outputs(model, part([shortest])[0])[0].logps.sum())
            for weight in self._reached or ():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        if self._reached is None and self.skip_flat:
            self._reached = [weight for weight in self.policy.parameters() if weight.grad is not None] or None
        return sum(aux_losses, loss).detach().requires_grad_()

    # --- what is scored together --------------------------------------------------------------------------------------

    def plan(self, batch: MicroBatch, max_rows: int) -> tuple[list[SequenceLengths], list[list[int]]]:
        """Lengths of the rows where they are needed, and the rows of each part, at most `max_rows` completions each."""
        count = len(batch)
        chosen = list(range(count))
        if self.skip_flat:
            chosen = torch.nonzero(batch.on_host.advantage).flatten().tolist()
        self.at_once = min(count, max_rows)
        if len(chosen) == count and self.token_budget is None and max_rows >= count:
            return [], [chosen]
        lengths = batch.lengths(trimmed=not batch.fields and may_be_trimmed(self.policy))
        way = self.scorer.report
        budget = TokenBudget(
            self.token_budget,
            max_rows if max_rows < count else None,
            padded=way["packing"] != "packed",
            shared=way["share_prompts"],
        )
        parts = split_by_tokens(lengths, chosen, budget)
        self.at_once = max((len(part) for part in parts), default=1)
        if self.token_budget is not None and any(budget.cost([lengths[n]]) > self.token_budget for n in chosen):
            longest = max(budget.cost([row]) for row in lengths)
            warn_once(
                f"A completion and its prompt take {longest} tokens, more than optimisation.token_budget "
                f"({self.token_budget}): it goes through the model alone, and memory is not bounded by the budget there."
            )
        return lengths, parts

    def _placeholder_outputs(self, batch: MicroBatch) -> PolicyOutputs:
        """(B, T) for scores that are not known: the policy has not moved, and is certain."""
        ids, old = batch.completion_ids, batch.get("old_per_token_logps")
        nothing = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        logps = nothing if old is None else old
        scored = torch.zeros((len(ids), 1), dtype=torch.bool, device=ids.device)
        full_kl, teacher_kl = (nothing if need in self.objective.needs else None for need in ("full_kl", "teacher_kl"))
        return PolicyOutputs(logps, nothing, full_kl, teacher_kl, scored=scored)

    def _grad_wrt_outputs(
        self, batch: MicroBatch, outputs_of_all: PolicyOutputs, context: StepContext, *, all_scored: bool, last: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss (detached) of the micro-batch, and its gradient with respect to each of the outputs, by name.

        all_scored: no completion keeps its placeholder. last: every score is known, so that metrics count and the first steps
        are looked at.
        """
        leaves = {
            name: value.detach().requires_grad_(name != "entropy" or self.objective.needs_entropy_gradient)
            for name in PER_TOKEN
            if (value := getattr(outputs_of_all, name)) is not None
        }
        scored = None if last and all_scored else outputs_of_all.scored  # asking the tensor would wait for the device
        loss = self._objective_loss(batch, replace(outputs_of_all, **leaves, scored=scored), context, last=last)
        sources = {name: value for name, value in leaves.items() if value.requires_grad}
        gradients = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
        return loss.detach(), {name: grad for name, grad in zip(sources, gradients, strict=True) if grad is not None}

    def _send(
        self, outputs: PolicyOutputs, grads: dict[str, Tensor], rows: Tensor | None, aux_loss: Tensor | None
    ) -> None:
        """Sends the gradient of the part `rows` (None: of all) through its graph, with that of the auxiliary loss."""
        width = outputs.logps.shape[1]
        values = {name: getattr(outputs, name) for name in PER_TOKEN if name in grads}
        loss = sum(
            (value * (grads[name] if rows is None else grads[name][rows, :width])).sum()
            for name, value in values.items()
        )
        loss = loss if aux_loss is None else loss + aux_loss
        if isinstance(loss, Tensor) and loss.requires_grad:
            self.backward(loss)

    # --- from rows to what the objective reads ------------------------------------------------------------------------

    def _outputs(self, model: Any, batch: MicroBatch) -> tuple[PolicyOutputs, Scores]:
        """Scores the completions; returns what the objective reads, and the scores."""
        objective, memory, live = self.objective, self.memory, batch.completion_mask.bool()
        wanted = Wanted(
            entropy=True,
            entropy_gradient=objective.needs_entropy_gradient,
            aux_loss=self.router_coef is not None,
            hidden=bool(objective.needs & HIDDEN_NEEDS),
        )
        scores = self.scorer.score(model, batch.rows, wanted)
        full_kl = teacher_kl = None
        if "full_kl" in objective.needs:
            assert memory.reference_head is not None
            full_kl = self._divergence(
                scores, replace(memory.reference_head, hidden=batch["ref_hidden"][live]), live, live
            )
        if "teacher_kl" in objective.needs:
            taught = live & batch["teacher_known"][:, None]
            if memory.teacher_head is None or not bool(taught.any()):
                teacher_kl = scores.logps * 0.0
            else:
                teacher = replace(memory.teacher_head, hidden=batch["teacher_hidden"][taught])
                teacher_kl = self._divergence(scores, teacher, live, taught, objective.divergence)
        return PolicyOutputs(scores.logps, scores.entropy, full_kl, teacher_kl), scores

    def _divergence(
        self, scores: Scores, other: Projection, live: Tensor, tokens: Tensor, kind: Divergence | None = None
    ) -> Tensor:
        """(B, T) nats at `tokens`, some of the `live` ones, and 0 elsewhere: from hidden states of this pass and of another."""
        policy = scores.projection
        if tokens is not live:
            policy = replace(policy, hidden=policy.hidden[tokens[live]])
        with self.scorer.autocast():
            return scatter_to_tokens(divergence(policy, other, kind), tokens)

    def _objective_loss(
        self, batch: MicroBatch, outputs: PolicyOutputs, context: StepContext, *, last: bool = True
    ) -> Tensor:
        """The objective's loss of a micro-batch, which gathers what hooks read. last: its metrics count."""
        sourced: dict[str, Tensor | None] = {}
        for name, spec in TOKEN_FIELDS.items():
            if spec.source is not None:
                values: Tensor | None = spec.source(batch) if callable(spec.source) else batch.get(spec.source)
                if values is not None and spec.shape == "(B, 1)" and values.dim() == 1:
                    values = values.unsqueeze(1)
                sourced[name] = values
        sampler_logps, old_logps = sourced["sampler_logps"], batch.get("old_per_token_logps")
        if outputs.scored is not None and sampler_logps is not None:  # what is not known cannot be compared
            sourced["sampler_logps"] = sampler_logps.masked_fill(~outputs.scored, torch.nan)
        tokens = TokenBatch.of(
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
        if not last:
            return self.objective.loss(tokens, context.scale).loss
        if context.checks is not None:
            context.checks.after_scoring(tokens, context.scale)
        if tokens.sampler_logps is not None:
            means, ratios = sampler_mismatch(tokens)
            self.metrics.add(means)
            self.metrics.sample("sampler_log_ratio", ratios)
        result = self.objective.loss(tokens, context.scale)
        self.metrics.take_in(result)
        return result.loss

    def _auxiliary_loss(self, batch: MicroBatch, scores: Scores, context: StepContext) -> Tensor | None:
        """The loss of the value head and the load balance of a mixture of experts.

        The first is a mean over the tokens of the accumulation window whose gradient stays within the head; the second is
        weighted by the part's share of rows.
        """
        loss: Tensor | None = None
        if self.critic is not None:
            mask = batch.loss_mask
            values = scatter_to_tokens(self.critic.head(scores.projection.hidden), batch.completion_mask)
            losses = value_loss(values, batch["old_values"], batch["value_targets"], self.critic.settings.clip)
            total = losses.masked_fill(~mask, 0.0).sum()
            self.metrics.add({"value/loss": Mean(total, mask.sum())})
            loss = total / torch.as_tensor(context.scale.window_tokens).clamp(min=1.0)
        if scores.aux_loss is not None and self.router_coef is not None:
            self.metrics.append("aux_loss", scores.aux_loss.item())
            balance = batch.share * self.router_coef * scores.aux_loss / context.scale.accumulation
            loss = balance if loss is None else loss + balance
        return loss


class StepRetry:
    """Repeats the micro-batches of one run that ran out of memory, in smaller parts: the same gradient.

    What an aborted attempt has left in gradients, metrics and hooks is taken back before the next one: the micro-batches of
    the optimiser step that had come through are done again, from gradients of zero. again: does such an earlier micro-batch
    once more, gradient included.
    """

    def __init__(
        self,
        loss: PolicyLoss,
        backoff: BatchSizeBackoff,
        checks: SanityChecks | None,
        again: Callable[[dict[str, Any]], None],
    ) -> None:
        self.loss, self.backoff, self.checks, self.again = loss, backoff, checks, again
        self._window: list[tuple[dict[str, Any], Any]] = []
        """Inputs of the micro-batches of this optimiser step that came through, and all that was counted before each."""
        self._replaying = False

    def reset(self) -> None:
        """A training begins: what another one left is forgotten."""
        self._window = []

    def step(self, model: Any, batch: MicroBatch, context: StepContext, *, last: bool) -> Tensor:
        """`PolicyLoss.step`, until it comes through. last: it is the last micro-batch of its optimiser step.

        Raises `ModelError` when smaller parts do not help.
        """
        loss, backoff = self.loss, self.backoff
        if self._replaying:
            return loss.step(model, batch, context, backoff.rows("training", len(batch)))
        start, failed = self._snapshot(), False
        while True:
            try:
                if failed:
                    self._take_back(start)
                result = loss.step(model, batch, context, backoff.rows("training", len(batch)))
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                backoff.halve("training", loss.at_once, error)
                failed = True
            self._zero_grad()
            release()
        self._window = [] if last else [*self._window, (batch.inputs, start)]
        return result

    def _take_back(self, start: Any) -> None:
        """Does the earlier micro-batches of this optimiser step again, and leaves all as it was before this one."""
        self._zero_grad()
        self._replaying = True
        try:
            for inputs, before in self._window:
                self._restore(before)
                self.again(inputs)
        finally:
            self._replaying = False
        self._restore(start)

    def _snapshot(self) -> tuple[Any, ...]:
        checks = dict(vars(self.checks)) if self.checks is not None else {}
        hooks = copy.deepcopy(self.loss.objective.state_dict())
        return rng_state(), self.loss.metrics.snapshot(), checks, hooks

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        random_numbers, metrics, checks, hooks = snapshot
        self.loss.metrics.restore(metrics)
        if self.checks is not None:
            self.checks.__dict__.update(checks)
        self.loss.objective.load_state_dict(copy.deepcopy(hooks))
        set_rng_state(random_numbers)

    def _zero_grad(self) -> None:
        self.loss.policy.zero_grad()
        if self.loss.critic is not None:
            self.loss.critic.head.zero_grad()


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


@functools.cache
def warn_once(text: str) -> None:
    """A warning in the log, the first time only."""
    log.warning("%s", text)
