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

A micro-batch is TRL's: tensors and lists by name, prompts padded in front, completions behind. `MicroBatch` gives them types, and
parts of them as micro-batches of their own: it is the only place that indexes rows. `split_by_tokens` plans the parts: at most so
many tokens, or so many rows, each. Completions of one prompt stay together as long as they fit, because their prompt may then be
read once. Within a prompt, and among prompts, neighbours are of like length, so that little padding is left, and what is left is
cut off.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from kit.models.failures import BatchSizeBackoff, is_out_of_memory, release, rng_state, set_rng_state
from kit.models.family import FamilyAdapter
from kit.objective import LossScale, Mean, Objective, TokenBatch
from kit.objective.advantage import ValueSettings, value_loss
from kit.objective.batch import TOKEN_FIELDS, Divergence, fields_where
from kit.objective.objective import to_parts
from kit.scoring.divergence import divergence
from kit.scoring.head import Projection
from kit.scoring.scorer import Rows, Scorer, Scores, Wanted, may_be_trimmed, scatter_to_tokens, take, to_device
from kit.trainer.metric_log import MetricLog, sampler_mismatch

log = logging.getLogger("kit")
PER_TOKEN = ("logps", *sorted(fields_where(gradient=True, shape="(B, T)")))
HIDDEN_NEEDS = fields_where(hidden=True)
"""What a hook may need that is computed from hidden states."""
BUCKET_BYTES = 64 * 2**20
"""Of gradients that processes average in one message."""

# --- a micro-batch and its parts ---------------------------------------------------------------------------------------

MODEL_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""Inputs of the model beside ids and masks that TRL 1.15 has a place for."""
EXTRA = "extra_inputs."
"""Prefix of those that it has none for: each a list with a tensor a completion."""


@dataclass(frozen=True)
class HostCopy:
    """The values of B rows that lengths and layouts depend on, on the host, so that a step does not wait for the device."""

    ids: Tensor  # (B, P + T)
    mask: Tensor  # (B, P + T) bool
    advantage: Tensor  # (B,) bool: with an advantage that is not 0 at some token that trains


@dataclass(frozen=True)
class MicroBatch:
    """B completions of T columns behind prompts of P, under TRL's names.

    inputs: tensors (B, ...) and lists of B, what the model takes beside text (`MODEL_INPUTS`, laid out in ways of their own),
    and whatever is one for all of them. TRL's own dictionary: what is noted in it is there in the next iteration. share: these
    completions over those of the whole micro-batch that they are a part of.
    """

    inputs: dict[str, Any]
    share: float = 1.0

    def __len__(self) -> int:
        return len(self.inputs["completion_ids"])

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def get(self, name: str) -> Any:
        """The value of that name, or None."""
        return self.inputs.get(name)

    @property
    def completion_ids(self) -> Tensor:
        """(B, T) token ids of the completions, padded."""
        ids: Tensor = self.inputs["completion_ids"]
        return ids

    @property
    def completion_mask(self) -> Tensor:
        """(B, T) 1 for tokens of the completion, those of tools included."""
        mask: Tensor = self.inputs["completion_mask"]
        return mask

    @property
    def loss_mask(self) -> Tensor:
        """(B, T) bool: tokens that train; those that tools wrote do not."""
        mask = self.completion_mask
        return (mask * self.inputs["tool_mask"] if "tool_mask" in self.inputs else mask).bool()

    @property
    def advantages(self) -> Tensor:
        """(B, 1) or (B, T) advantages."""
        advantages: Tensor = self.inputs["advantages"]
        return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages

    @property
    def fields(self) -> dict[str, Any]:
        """The model's inputs beside ids and masks, by the names of the micro-batch."""
        names = (name for name in self.inputs if name in MODEL_INPUTS or name.startswith(EXTRA))
        return {name: self.inputs[name] for name in names if self.inputs[name] is not None}

    @property
    def rows(self) -> Rows:
        """The rows as the scorer takes them."""
        return Rows(
            torch.cat([self.inputs["prompt_ids"], self.completion_ids], dim=1),
            torch.cat([self.inputs["prompt_mask"], self.completion_mask], dim=1),
            self.completion_ids.shape[1],
            {name.removeprefix(EXTRA): value for name, value in self.fields.items()},
            (self.on_host.ids, self.on_host.mask),
        )

    @cached_property
    def on_host(self) -> HostCopy:
        """The copy on the host, made at the first call; the host waits for it."""
        ids = [self.inputs["prompt_ids"], self.completion_ids]
        advantage = torch.zeros_like(ids[0][:, 0])
        if "advantages" in self.inputs:
            advantage = ((self.advantages != 0) & self.loss_mask).any(1)
        masks = [self.inputs["prompt_mask"], self.completion_mask, advantage[:, None]]
        columns = torch.cat([*ids, *(mask.to(ids[0].dtype) for mask in masks)], dim=1).cpu()
        width = (columns.shape[1] - 1) // 2
        live = columns[:, width:].bool()
        return HostCopy(columns[:, :width], live[:, :-1], live[:, -1])

    @property
    def prompts(self) -> list[bytes]:
        """A key for each completion, the same for the same prompt."""
        width, held = self.inputs["prompt_ids"].shape[1], self.on_host
        keys = held.ids[:, :width].masked_fill(~held.mask[:, :width], -1).numpy()
        return [key.tobytes() for key in keys]

    def lengths(self, *, trimmed: bool) -> list[SequenceLengths]:
        """Lengths of every row. `trimmed`: without the padding that a part of the rows alone would not have."""
        width, length = self.inputs["prompt_ids"].shape[1], self.completion_ids.shape[1]
        live, mask = torch.split(self.on_host.mask, [width, length], dim=1)
        prompts = (live * torch.arange(width, 0, -1)).amax(1) if width else live.sum(1)
        completions = (mask * torch.arange(1, length + 1)).amax(1) if length else mask.sum(1)
        sizes = torch.stack([prompts, completions], dim=1).tolist()
        return [
            SequenceLengths(key, prompt if trimmed else width, max(1, completion if trimmed else length))
            for key, (prompt, completion) in zip(self.prompts, sizes, strict=True)
        ]

    def select(self, rows: Sequence[int], lengths: Sequence[SequenceLengths] | None = None) -> MicroBatch:
        """The completions `rows`, in that order. lengths: of all of them, to cut off the columns that none of these needs."""
        size, fields = len(self), self.fields
        width, length = self.inputs["prompt_ids"].shape[1], self.completion_ids.shape[1]
        prompt = width if lengths is None else max(lengths[row].prompt for row in rows)
        completion = length if lengths is None else max(lengths[row].completion for row in rows)
        chosen, held = torch.as_tensor(rows), self.on_host
        index = to_device(chosen, self.completion_ids.device)

        def some(name: str, value: Any) -> Any:
            if isinstance(value, list) and len(value) == size:
                return [value[row] for row in rows]
            if not isinstance(value, Tensor) or not value.dim() or len(value) != size:
                return value
            own = value[index if value.device == index.device else chosen.to(value.device)]
            if name in ("prompt_ids", "prompt_mask"):
                return own[:, width - prompt :]
            return own[:, :completion] if own.dim() > 1 and own.shape[1] == length else own

        own = {name: some(name, value) for name, value in self.inputs.items() if name not in fields}
        part = MicroBatch(own | take(fields, rows, size), self.share * len(rows) / size)
        columns = slice(width - prompt, width + completion)
        vars(part)["on_host"] = HostCopy(held.ids[chosen, columns], held.mask[chosen, columns], held.advantage[chosen])
        return part


def grouped_by_prompt(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of equal micro-batches in as many again, those of a prompt next to each other, prompts in their order.

    TRL shuffles a generation batch before it is split into the micro-batches of one optimiser step. Their gradients are
    added up, so which completion is in which of them does not matter, unless the objective looks across a micro-batch
    (`kit.objective.objective.to_regrouping`); but completions of one prompt that are spread over several make each of these
    forward the prompt again. As they came where a value is neither one for each row nor the same for all.
    """
    size = len(batches[0]["prompt_ids"])
    joined: dict[str, Any] = {}
    for name in batches[0]:
        values: list[Any] = [batch.get(name) for batch in batches]
        if all(isinstance(value, Tensor) and value.dim() and len(value) == size for value in values):
            joined[name] = torch.cat(values)
        elif all(isinstance(value, list) and len(value) == size for value in values):
            joined[name] = [item for value in values for item in value]
        elif not all(value is None or (isinstance(value, Tensor) and not value.dim()) for value in values):
            return list(batches)
    everything = MicroBatch(joined)
    groups: dict[bytes, list[int]] = {}
    if everything.fields:  # not every one of them has a row for each completion
        return list(batches)
    for row, key in enumerate(everything.prompts):
        groups.setdefault(key, []).append(row)
    order = [row for group in groups.values() for row in group]
    return [
        batch | everything.select(order[start : start + size]).inputs
        for batch, start in zip(batches, range(0, len(order), size), strict=True)
    ]


@dataclass(frozen=True)
class SequenceLengths:
    """The columns that prompt and completion of one row take up in a batch, and a key for its prompt."""

    key: Hashable
    prompt: int
    completion: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True)
class TokenBudget:
    """Limits of one part. None: any number.

    padded: padding goes through the model, and counts as tokens. shared: if not, a prompt goes once for its completions.
    """

    tokens: int | None = None
    rows: int | None = None
    padded: bool = True
    shared: bool = False

    def cost(self, part: Sequence[SequenceLengths]) -> int:
        """Tokens that go through the model."""
        if not self.padded and self.shared:
            prompts = {row.key: row.prompt for row in part}
            return sum(prompts.values()) + sum(row.completion for row in part)
        if not self.padded:
            return sum(row.tokens for row in part)
        return len(part) * (max(row.prompt for row in part) + max(row.completion for row in part)) if part else 0

    def admits(self, part: Sequence[SequenceLengths]) -> bool:
        """Whether a part is within the budget; one row always is."""
        if len(part) <= 1:
            return True
        fits = self.tokens is None or self.cost(part) <= self.tokens
        return fits and (self.rows is None or len(part) <= self.rows)


def split_by_tokens(rows: Sequence[SequenceLengths], chosen: Sequence[int], budget: TokenBudget) -> list[list[int]]:
    """Parts of the `chosen` rows, each of them in exactly one; as few as comes of taking long prompts' groups first.

    Everything in one part, in its order, where that is within the budget.
    """
    if budget.admits([rows[number] for number in chosen]):
        return [list(chosen)] if chosen else []
    groups: dict[Hashable, list[int]] = {}
    for number in chosen:
        groups.setdefault(rows[number].key, []).append(number)
    pieces: list[list[int]] = []
    for group in groups.values():  # the completions of a prompt, the longest first, in stretches that fit
        cut: list[list[int]] = []
        for number in sorted(group, key=lambda number: -rows[number].tokens):
            if cut and budget.admits([rows[n] for n in (*cut[-1], number)]):
                cut[-1].append(number)
            else:
                cut.append([number])
        pieces += cut
    pieces.sort(key=lambda piece: -max(rows[number].tokens for number in piece))
    parts: list[list[int]] = []
    for piece in pieces:
        home = next((part for part in parts if budget.admits([rows[n] for n in part + piece])), None)
        if home is None:
            parts.append(list(piece))
        else:
            home += piece
    return parts


# --- the value head of `gae` ------------------------------------------------------------------------------------------

# A linear layer on the policy's own last hidden states, which are detached: the head costs no forward pass, and its loss changes
# nothing but the head. It has an optimiser group of its own, and is saved in checkpoints.

CRITIC_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """Hidden states (..., H) of any precision -> values (...), float32.

    They are normalised first: their scale differs by orders of magnitude between models, the learning rate does not.
    Weights start at zero, so that the first values are 0 and the first advantages plain returns.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False)
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.linear(self.norm(hidden.detach().float()))
        return values.squeeze(-1)


class Critic:
    """The head with its settings."""

    def __init__(self, model: Any, settings: ValueSettings) -> None:
        self.settings = settings
        output = model.get_output_embeddings()
        self.head = ValueHead(getattr(output, "in_features", output.weight.shape[-1])).to(output.weight.device)

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds a parameter group of the head's own to the policy's optimiser; once."""
        parameters = list(self.head.parameters())
        if any(parameters[0] is other for group in optimizer.param_groups for other in group["params"]):
            return
        group = {"params": parameters, "lr": self.settings.learning_rate, "weight_decay": 0.0}
        optimizer.add_param_group(group)

    def save(self, checkpoint: Path) -> None:
        from safetensors.torch import save_file

        save_file(
            {name: value.contiguous() for name, value in self.head.state_dict().items()}, checkpoint / CRITIC_FILE
        )

    def load(self, checkpoint: Path) -> None:
        from safetensors.torch import load_file

        self.head.load_state_dict(load_file(checkpoint / CRITIC_FILE))


# --- the loss ----------------------------------------------------------------------------------------------------------


@dataclass
class RolloutMemory:
    """Values of a rollout that its steps need beside its micro-batches."""

    reference_head: Projection | None = None  # that the reference policy was scored with, without hidden states
    teacher_head: Projection | None = None  # likewise, of the teacher


@dataclass(frozen=True)
class Services:
    """Built once by a trainer with an objective, and handed to its parts.

    model: the policy that trains, as accelerate wraps it. accelerator: of several processes, gathers and reduces.
    temperature: of sampling, by which logits are divided.
    """

    objective: Objective
    model: Any
    accelerator: Any
    family: FamilyAdapter
    scorer: Scorer
    temperature: float
    metrics: MetricLog
    memory: RolloutMemory
    critic: Critic | None


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
    checks: Any = None  # `kit.trainer.sanity_checks.SanityChecks`


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
        self.metrics.record_loss(result)
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
        checks: Any,
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
