"""The loss of a micro-batch and its gradient: the scorer scores rows, the objective computes the loss, its gradient goes back.

Scoring needs most of the memory and time, so only scoring is divided into parts, as a token budget or the memory requires. The
objective always sees the complete micro-batch.

`PolicyLoss.step` plans the parts. For each part it

    1. scores the part with a graph,
    2. computes the objective on the micro-batch, with the scores of the other parts as constants,
    3. sends the gradient with respect to the part's log-probabilities through the part's graph, which is then freed.

If no completion's gradient depends on the scores of another completion (`kit.objective.objective.parts_obstacle`), unscored parts
hold placeholders, and loss and metrics come from the last part. Any other objective (a quantile of the entropies, a
custom hook) is evaluated once, after a pass over every part without a graph: gradient caching, arXiv 2101.06983. Both are exact
by the chain rule. If neither loss nor metrics would change (`skipping_obstacle`), completions without an advantage are counted
but not scored. `StepRetry` repeats a micro-batch that ran out of memory in smaller parts.

TRL's micro-batch is a dictionary of tensors and lists; prompts are left-padded, completions right-padded. `MicroBatch` gives it
types and selects rows. `split_by_tokens` plans parts within a limit of tokens or rows. Completions of one prompt stay together
as long as they fit, because the model may then read their prompt once. Parts join rows of similar length, so that little padding
is left; columns that only hold padding are cut off.
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
from kit.objective.objective import parts_obstacle
from kit.scoring.divergence import divergence
from kit.scoring.head import Projection
from kit.scoring.scorer import ExtraOutputs, Rows, Scorer, Scores, may_be_trimmed, scatter_to_tokens, take, to_device
from kit.trainer.metric_log import MetricLog, sampler_mismatch

log = logging.getLogger("kit")
PER_TOKEN = ("logps", *sorted(fields_where(gradient=True, shape="(B, T)")))
HIDDEN_NEEDS = fields_where(hidden=True)
"""Names of `objective.needs` that are computed from hidden states."""
BUCKET_BYTES = 64 * 2**20
"""Size of the gradients that processes average in one message."""

# --- a micro-batch and its parts ---------------------------------------------------------------------------------------

MODEL_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""Inputs of the model, besides ids and masks, that TRL 1.15 passes on."""
EXTRA = "extra_inputs."
"""Prefix of the inputs that TRL does not pass on: each is a list with one tensor per completion."""


@dataclass(frozen=True)
class HostCopy:
    """Host copies of the values of B rows that lengths and layouts depend on, so that a step does not wait for the device."""

    ids: Tensor  # (B, P + T)
    mask: Tensor  # (B, P + T) bool
    advantage: Tensor  # (B,) bool: completions with an advantage other than 0 at a live token


@dataclass(frozen=True)
class MicroBatch:
    """B prompts of P columns and their completions of T columns, under TRL's names.

    inputs: TRL's dictionary: tensors (B, ...), lists of length B, inputs of the model besides text (`MODEL_INPUTS`, in other
    shapes), and values that hold for all rows. The next iteration gets the same dictionary. share: number of these completions
    divided by that of the micro-batch that they were selected from.
    """

    inputs: dict[str, Any]
    share: float = 1.0

    def __len__(self) -> int:
        return len(self.inputs["completion_ids"])

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def get(self, name: str) -> Any:
        """The input `name`, or None."""
        return self.inputs.get(name)

    @property
    def completion_ids(self) -> Tensor:
        """(B, T) token ids of the completions, padded."""
        ids: Tensor = self.inputs["completion_ids"]
        return ids

    @property
    def completion_mask(self) -> Tensor:
        """(B, T) 1 for tokens of the completion, including the output of tools."""
        mask: Tensor = self.inputs["completion_mask"]
        return mask

    @property
    def loss_mask(self) -> Tensor:
        """(B, T) bool: live tokens; the output of tools does not train."""
        mask = self.completion_mask
        return (mask * self.inputs["tool_mask"] if "tool_mask" in self.inputs else mask).bool()

    @property
    def advantages(self) -> Tensor:
        """(B, 1) or (B, T) advantages."""
        advantages: Tensor = self.inputs["advantages"]
        return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages

    @property
    def fields(self) -> dict[str, Any]:
        """The model's inputs besides ids and masks, under the names of the micro-batch."""
        names = (name for name in self.inputs if name in MODEL_INPUTS or name.startswith(EXTRA))
        return {name: self.inputs[name] for name in names if self.inputs[name] is not None}

    @property
    def rows(self) -> Rows:
        """The rows as input of the scorer."""
        return Rows(
            torch.cat([self.inputs["prompt_ids"], self.completion_ids], dim=1),
            torch.cat([self.inputs["prompt_mask"], self.completion_mask], dim=1),
            self.completion_ids.shape[1],
            {name.removeprefix(EXTRA): value for name, value in self.fields.items()},
            (self.on_host.ids, self.on_host.mask),
        )

    @cached_property
    def on_host(self) -> HostCopy:
        """The host copy. The first access waits for the device."""
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
        width, host = self.inputs["prompt_ids"].shape[1], self.on_host
        keys = host.ids[:, :width].masked_fill(~host.mask[:, :width], -1).numpy()
        return [key.tobytes() for key in keys]

    def lengths(self, *, trimmed: bool) -> list[SequenceLengths]:
        """Lengths of every row, with the padding of the batch; `trimmed`: without padding."""
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
        """The completions `rows`, in that order. lengths: of all rows; columns that none of `rows` needs are cut off."""
        size, fields = len(self), self.fields
        width, length = self.inputs["prompt_ids"].shape[1], self.completion_ids.shape[1]
        prompt = width if lengths is None else max(lengths[row].prompt for row in rows)
        completion = length if lengths is None else max(lengths[row].completion for row in rows)
        chosen, host = torch.as_tensor(rows), self.on_host
        index = to_device(chosen, self.completion_ids.device)

        def select_rows(name: str, value: Any) -> Any:
            if isinstance(value, list) and len(value) == size:
                return [value[row] for row in rows]
            if not isinstance(value, Tensor) or not value.dim() or len(value) != size:
                return value
            selected = value[index if value.device == index.device else chosen.to(value.device)]
            if name in ("prompt_ids", "prompt_mask"):
                return selected[:, width - prompt :]
            return selected[:, :completion] if selected.dim() > 1 and selected.shape[1] == length else selected

        inputs = {name: select_rows(name, value) for name, value in self.inputs.items() if name not in fields}
        part = MicroBatch(inputs | take(fields, rows, size), self.share * len(rows) / size)
        columns = slice(width - prompt, width + completion)
        vars(part)["on_host"] = HostCopy(host.ids[chosen, columns], host.mask[chosen, columns], host.advantage[chosen])
        return part


def grouped_by_prompt(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Redistributes the rows of equal micro-batches so that the completions of a prompt are next to each other.

    TRL shuffles a generation batch before it splits it into the micro-batches of one optimiser step. The gradients of these are
    summed, so a completion may move to another micro-batch, unless the objective compares completions within one
    (`kit.objective.objective.regrouping_obstacle`). If the completions of a prompt share a micro-batch, the model reads the
    prompt once. Returns the micro-batches unchanged if they hold a value that is neither per row nor the same for all rows.
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
    rollout = MicroBatch(joined)
    groups: dict[bytes, list[int]] = {}
    if rollout.fields:  # some model inputs are not per completion
        return list(batches)
    for row, key in enumerate(rollout.prompts):
        groups.setdefault(key, []).append(row)
    order = [row for group in groups.values() for row in group]
    return [
        batch | rollout.select(order[start : start + size]).inputs
        for batch, start in zip(batches, range(0, len(order), size), strict=True)
    ]


@dataclass(frozen=True)
class SequenceLengths:
    """Columns of the prompt and the completion of one row, and a key of the prompt."""

    key: Hashable
    prompt: int
    completion: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True)
class TokenBudget:
    """Limits of one part; None: no limit.

    padded: padding goes through the model and counts. shared: without padding, the model reads each prompt once per part.
    """

    tokens: int | None = None
    rows: int | None = None
    padded: bool = True
    shared: bool = False

    def cost(self, part: Sequence[SequenceLengths]) -> int:
        """Number of tokens that go through the model."""
        if not self.padded and self.shared:
            prompts = {row.key: row.prompt for row in part}
            return sum(prompts.values()) + sum(row.completion for row in part)
        if not self.padded:
            return sum(row.tokens for row in part)
        return len(part) * (max(row.prompt for row in part) + max(row.completion for row in part)) if part else 0

    def admits(self, part: Sequence[SequenceLengths]) -> bool:
        """Whether a part is within the budget; a single row always is."""
        if len(part) <= 1:
            return True
        fits = self.tokens is None or self.cost(part) <= self.tokens
        return fits and (self.rows is None or len(part) <= self.rows)


def split_by_tokens(rows: Sequence[SequenceLengths], chosen: Sequence[int], budget: TokenBudget) -> list[list[int]]:
    """Divides the `chosen` rows into parts within the budget: first fit, the groups with the longest rows first.

    Returns one part, in the given order, if all chosen rows are within the budget.
    """
    if budget.admits([rows[number] for number in chosen]):
        return [list(chosen)] if chosen else []
    groups: dict[Hashable, list[int]] = {}
    for number in chosen:
        groups.setdefault(rows[number].key, []).append(number)
    pieces: list[list[int]] = []
    for group in groups.values():  # cut the completions of a prompt, the longest first, into pieces that fit
        cuts: list[list[int]] = []
        for number in sorted(group, key=lambda number: -rows[number].tokens):
            if cuts and budget.admits([rows[n] for n in (*cuts[-1], number)]):
                cuts[-1].append(number)
            else:
                cuts.append([number])
        pieces += cuts
    pieces.sort(key=lambda piece: -max(rows[number].tokens for number in piece))
    parts: list[list[int]] = []
    for piece in pieces:
        fitting = next((part for part in parts if budget.admits([rows[n] for n in part + piece])), None)
        if fitting is None:
            parts.append(list(piece))
        else:
            fitting += piece
    return parts


# --- the value head of `gae` ------------------------------------------------------------------------------------------

# A linear layer on the detached last hidden states of the policy: it needs no forward pass, and its loss trains the head only.
# The head has its own parameter group in the optimiser and is saved in checkpoints.

CRITIC_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """Maps hidden states (..., H) of any precision to values (...), float32.

    Normalises the hidden states first, because their scale differs by orders of magnitude between models and the learning rate
    does not. Weights start at zero, so that the first values are 0 and the first advantages are plain returns.
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
    """The value head and its settings."""

    def __init__(self, model: Any, settings: ValueSettings) -> None:
        self.settings = settings
        output = model.get_output_embeddings()
        self.head = ValueHead(getattr(output, "in_features", output.weight.shape[-1])).to(output.weight.device)

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds the head to the policy's optimiser as a parameter group, unless it is there already."""
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
    """Values of a rollout that its steps need besides the micro-batches."""

    reference_head: Projection | None = None  # the head of the reference policy, without hidden states
    teacher_head: Projection | None = None  # the head of the teacher, without hidden states


@dataclass(frozen=True)
class Services:
    """Objects that the parts of a trainer with an objective share.

    model: the policy as wrapped by accelerate. temperature: of sampling; logits are divided by it.
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
    """Outputs of a scoring pass that the objective reads. The gradient of the loss goes back to them."""

    logps: Tensor  # (B, T) nats
    entropy: Tensor | None  # (B, T) nats
    full_kl: Tensor | None  # (B, T) nats
    teacher_kl: Tensor | None = None  # (B, T) nats
    scored: Tensor | None = None  # (B, 1) bool: completions that were scored, others hold placeholders; None: all

    def filled_in(self, part: PolicyOutputs, rows: Tensor | None) -> PolicyOutputs:
        """Returns a copy with the outputs of `part` at `rows`, as constants; `rows` None: `part` itself, which has all rows."""
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
    """Inputs of a loss besides the micro-batch. checks: those of the first steps, or None once they have passed."""

    scale: LossScale
    step: int = 0  # optimiser steps made so far
    checks: Any = None  # `kit.trainer.sanity_checks.SanityChecks`


class PolicyLoss:
    """The loss of one run. `in_one_pass` returns it with its graph; `step` also adds its gradient to the weights.

    router_coef: weight of the load-balancing loss of a mixture of experts; None: no such loss.
    """

    token_budget: int | None = None
    """The most tokens of a part; None: no limit."""
    skip_flat = False
    """Whether completions without an advantage are not scored."""

    def __init__(self, services: Services, *, router_coef: float | None = None) -> None:
        self.objective, self.scorer, self.critic = services.objective, services.scorer, services.critic
        self.policy, self.backward = services.model, services.accelerator.backward
        self.metrics, self.memory = services.metrics, services.memory
        self.router_coef = router_coef
        self.at_once = 1
        """Completions of the largest pass of the last `step`."""
        self._reached: list[Tensor] | None = None  # weights that get a gradient in a backward pass; None: unknown

    def in_one_pass(self, model: Any, batch: MicroBatch, context: StepContext) -> Tensor:
        """Computes the loss () of all completions in one pass and returns it with its graph."""
        outputs, scores = self._outputs(model, batch)
        loss = self._objective_loss(batch, outputs, context)
        aux_loss = self._auxiliary_loss(batch, scores, context)
        return loss if aux_loss is None else loss + aux_loss

    def step(self, model: Any, batch: MicroBatch, context: StepContext, max_rows: int | None = None) -> Tensor:
        """Adds the gradient of a micro-batch to the weights and returns its loss (), without a graph to the weights.

        max_rows: the most completions of one pass. A caller may add terms to the result and call `backward` on it.
        """
        if context.checks is not None:
            context.checks.before_scoring(model, batch)
        lengths, parts = self.plan(batch, len(batch) if max_rows is None else max_rows)
        all_scored = sum(map(len, parts)) == len(batch)

        def part(rows: list[int]) -> tuple[MicroBatch, Tensor | None]:
            """The completions `rows`, without superfluous columns, and a tensor of their row numbers; None: all rows."""
            if len(rows) == len(batch):
                return batch, None
            return batch.select(rows, lengths), to_device(torch.tensor(rows), batch.completion_ids.device)

        outputs_of_all, states, aux_losses = self._placeholder_outputs(batch), [], list[Tensor]()
        scores_first = len(parts) != 1 and (not parts or parts_obstacle(self.objective) is not None)
        if scores_first:  # gradient caching: a pass without a graph over every part, then the objective once
            with torch.no_grad():
                for rows in parts:
                    states.append(rng_state())
                    chosen, numbers = part(rows)
                    outputs_of_all = outputs_of_all.filled_in(self._outputs(model, chosen)[0], numbers)
            loss, grads = self._grad_wrt_outputs(batch, outputs_of_all, context, all_scored=all_scored, last=True)
        for number, rows in enumerate(parts):
            if scores_first:
                set_rng_state(states[number])  # the same dropout as in the pass without a graph
            chosen, numbers = part(rows)
            outputs, scores = self._outputs(model, chosen)
            if context.checks is not None:
                context.checks.watch(outputs.logps, numbers)
            if not scores_first:
                last = number + 1 == len(parts)
                outputs_of_all = outputs_of_all.filled_in(outputs, numbers)
                loss, grads = self._grad_wrt_outputs(batch, outputs_of_all, context, all_scored=all_scored, last=last)
            aux_loss = self._auxiliary_loss(chosen, scores, context)
            self._backward(outputs, grads, numbers, aux_loss)
            if aux_loss is not None:
                aux_losses.append(aux_loss.detach())
            del outputs, scores, aux_loss  # frees the graph before the next part builds its own
        if not parts:  # weights that a pass would have reached get a gradient of zero
            if self._reached is None:  # find them by a pass over the shortest row
                shortest = min(range(len(lengths)), key=lambda number: lengths[number].tokens)
                self.backward(0.0 * self._outputs(model, part([shortest])[0])[0].logps.sum())
            for weight in self._reached or ():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        if self._reached is None and self.skip_flat:
            self._reached = [weight for weight in self.policy.parameters() if weight.grad is not None] or None
        return sum(aux_losses, loss).detach().requires_grad_()

    # --- the parts of a micro-batch -----------------------------------------------------------------------------------

    def plan(self, batch: MicroBatch, max_rows: int) -> tuple[list[SequenceLengths], list[list[int]]]:
        """Returns the lengths of the rows ([]: one part has all rows), and the rows of each part, at most `max_rows` each."""
        count = len(batch)
        chosen = list(range(count))
        if self.skip_flat:
            chosen = torch.nonzero(batch.on_host.advantage).flatten().tolist()
        self.at_once = min(count, max_rows)
        if len(chosen) == count and self.token_budget is None and max_rows >= count:
            return [], [chosen]
        lengths = batch.lengths(trimmed=not batch.fields and may_be_trimmed(self.policy))
        layout = self.scorer.report
        budget = TokenBudget(
            self.token_budget,
            max_rows if max_rows < count else None,
            padded=layout["packing"] != "packed",
            shared=layout["share_prompts"],
        )
        parts = split_by_tokens(lengths, chosen, budget)
        self.at_once = max((len(part) for part in parts), default=1)
        if self.token_budget is not None and any(budget.cost([lengths[n]]) > self.token_budget for n in chosen):
            longest = max(budget.cost([row]) for row in lengths)
            warn_once(
                f"A completion and its prompt have {longest} tokens, more than optimisation.token_budget ({self.token_budget}). "
                "It goes through the model alone, beyond the budget. If memory runs out, lower generation.max_completion_tokens."
            )
        return lengths, parts

    def _placeholder_outputs(self, batch: MicroBatch) -> PolicyOutputs:
        """Outputs (B, T) of completions that are not scored: the log-probabilities of the rollout, and zeros."""
        ids, old = batch.completion_ids, batch.get("old_per_token_logps")
        zeros = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        logps = zeros if old is None else old
        scored = torch.zeros((len(ids), 1), dtype=torch.bool, device=ids.device)
        full_kl, teacher_kl = (zeros if need in self.objective.needs else None for need in ("full_kl", "teacher_kl"))
        return PolicyOutputs(logps, zeros, full_kl, teacher_kl, scored=scored)

    def _grad_wrt_outputs(
        self, batch: MicroBatch, outputs_of_all: PolicyOutputs, context: StepContext, *, all_scored: bool, last: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss (detached) of the micro-batch and its gradient with respect to each output, by name.

        all_scored: no completion keeps its placeholder. last: every part is scored, so metrics are recorded and checks run.
        """
        leaves = {
            name: value.detach().requires_grad_(name != "entropy" or self.objective.needs_entropy_gradient)
            for name in PER_TOKEN
            if (value := getattr(outputs_of_all, name)) is not None
        }
        scored = None if last and all_scored else outputs_of_all.scored  # reading the tensor would wait for the device
        loss = self._objective_loss(batch, replace(outputs_of_all, **leaves, scored=scored), context, last=last)
        sources = {name: value for name, value in leaves.items() if value.requires_grad}
        gradients = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
        return loss.detach(), {name: grad for name, grad in zip(sources, gradients, strict=True) if grad is not None}

    def _backward(
        self, outputs: PolicyOutputs, grads: dict[str, Tensor], rows: Tensor | None, aux_loss: Tensor | None
    ) -> None:
        """Backpropagates the gradients of the outputs at `rows` (None: all rows), together with the auxiliary loss."""
        width = outputs.logps.shape[1]
        values = {name: getattr(outputs, name) for name in PER_TOKEN if name in grads}
        loss = sum(
            (value * (grads[name] if rows is None else grads[name][rows, :width])).sum()
            for name, value in values.items()
        )
        loss = loss if aux_loss is None else loss + aux_loss
        if isinstance(loss, Tensor) and loss.requires_grad:
            self.backward(loss)

    # --- from rows to the objective's loss ----------------------------------------------------------------------------

    def _outputs(self, model: Any, batch: MicroBatch) -> tuple[PolicyOutputs, Scores]:
        """Scores the completions. Returns the objective's inputs, and the scores."""
        objective, memory, live = self.objective, self.memory, batch.completion_mask.bool()
        requested = ExtraOutputs(
            entropy=True,
            entropy_gradient=objective.needs_entropy_gradient,
            aux_loss=self.router_coef is not None,
            hidden=bool(objective.needs & HIDDEN_NEEDS),
        )
        scores = self.scorer.score(model, batch.rows, requested)
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
        """(B, T) nats: divergence between this pass and `other` at `tokens`, a subset of `live`; 0 elsewhere."""
        policy = scores.projection
        if tokens is not live:
            policy = replace(policy, hidden=policy.hidden[tokens[live]])
        with self.scorer.autocast():
            return scatter_to_tokens(divergence(policy, other, kind), tokens)

    def _objective_loss(
        self, batch: MicroBatch, outputs: PolicyOutputs, context: StepContext, *, last: bool = True
    ) -> Tensor:
        """Builds the `TokenBatch` of a micro-batch and computes the objective's loss. last: as in `_grad_wrt_outputs`."""
        sourced: dict[str, Tensor | None] = {}
        for name, spec in TOKEN_FIELDS.items():
            if spec.source is not None:
                values: Tensor | None = spec.source(batch) if callable(spec.source) else batch.get(spec.source)
                if values is not None and spec.shape == "(B, 1)" and values.dim() == 1:
                    values = values.unsqueeze(1)
                sourced[name] = values
        sampler_logps, old_logps = sourced["sampler_logps"], batch.get("old_per_token_logps")
        if outputs.scored is not None and sampler_logps is not None:  # no mismatch without scores
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
        """Sums the loss of the value head and the load-balancing loss of a mixture of experts; None: neither is used.

        The first is a mean over the tokens of the accumulation window; its gradient reaches the head only. The second is weighted
        by the part's share of rows.
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
    """Repeats micro-batches that ran out of memory in smaller parts, with the same gradient.

    Before the next attempt it undoes the changes of the failed one to gradients, metrics and hooks: it clears the gradients and
    repeats the earlier micro-batches of the optimiser step. again: repeats one such micro-batch, including its backward pass.
    """

    def __init__(
        self, loss: PolicyLoss, backoff: BatchSizeBackoff, checks: Any, again: Callable[[dict[str, Any]], None]
    ) -> None:
        self.loss, self.backoff, self.checks, self.again = loss, backoff, checks, again
        self._window: list[tuple[dict[str, Any], Any]] = []
        """Inputs of the completed micro-batches of this optimiser step, each with the snapshot taken before it."""
        self._replaying = False

    def reset(self) -> None:
        """Forgets the micro-batches of an earlier training."""
        self._window = []

    def step(self, model: Any, batch: MicroBatch, context: StepContext, *, last: bool) -> Tensor:
        """Calls `PolicyLoss.step` until it succeeds. last: this micro-batch ends the optimiser step.

        Raises `ModelError` if smaller parts do not help.
        """
        loss, backoff = self.loss, self.backoff
        if self._replaying:
            return loss.step(model, batch, context, backoff.rows("training", len(batch)))
        start, failed = self._snapshot(), False
        while True:
            try:
                if failed:
                    self._undo_attempt(start)
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

    def _undo_attempt(self, start: Any) -> None:
        """Repeats the earlier micro-batches of this optimiser step and restores the snapshot `start`."""
        self._zero_grad()
        self._replaying = True
        try:
            for inputs, snapshot in self._window:
                self._restore(snapshot)
                self.again(inputs)
        finally:
            self._replaying = False
        self._restore(start)

    def _snapshot(self) -> tuple[Any, ...]:
        checks = dict(vars(self.checks)) if self.checks is not None else {}
        hooks = copy.deepcopy(self.loss.objective.state_dict())
        return rng_state(), self.loss.metrics.snapshot(), checks, hooks

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        rng, metrics, checks, hooks = snapshot
        self.loss.metrics.restore(metrics)
        if self.checks is not None:
            self.checks.__dict__.update(checks)
        self.loss.objective.load_state_dict(copy.deepcopy(hooks))
        set_rng_state(rng)

    def _zero_grad(self) -> None:
        self.loss.policy.zero_grad()
        if self.loss.critic is not None:
            self.loss.critic.head.zero_grad()


def average_gradients(accelerator: Any, model: Any) -> None:
    """Averages gradients over all processes, after the last part of an optimiser step; a missing gradient counts as 0.

    Sends many gradients in one message, as one flat tensor per precision: a message per weight would wait for the network as
    often as there are weights.
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
    """Logs a warning, the first time only."""
    log.warning("%s", text)
