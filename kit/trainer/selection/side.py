"""The half of the trainer that chooses rollouts. Without methods it only counts what was spent.

Groups are made and scored aside, chosen (`kit.trainer.selection.selector`), and then handed to TRL in the place of what it
would generate: old and reference log-probabilities, advantages, logs and the loss are those of a batch that holds the chosen
completions and nothing else. What is not trained on is not in the batch, so that every reduction divides by what is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kit.errors import EngineError
from kit.trainer.greedy import aside
from kit.trainer.rollout import trained_tokens
from kit.trainer.selection.cppo import largest_advantages
from kit.trainer.selection.group import Group
from kit.trainer.selection.memory import is_flat, key_of
from kit.trainer.selection.rules import check_trainer
from kit.trainer.selection.selector import Selected, Selector

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is


@dataclass(frozen=True)
class Handed:
    """What TRL is given instead of generating and scoring: N completions, in groups."""

    completion_ids: list[list[int]]
    components: torch.Tensor  # (N, K)
    extra: dict[str, list[Any]]


class SelectionSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before `RolloutSide`. Does nothing without a `selection`."""

    selection: Any  # SelectionConfig | None
    selector: Selector | None = None
    num_generations: int
    rollout_func: Any
    _handed: Handed | None = None
    _making = False
    _seen_metrics: dict[str, list[float]]

    def _make_selector(self) -> None:
        """For the methods that are on. Raises `ConfigError` for what they cannot do with this trainer."""
        if self.selection is not None and self.selection.methods:
            check_trainer(self, self.selection)
            self.selector = Selector(self.selection, self.train_dataset, self.num_generations, self.args.seed)
            self.stateful["selection"] = self.selector

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.selection is None or not self.model.training:
            plain: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return plain
        if self.selector is None:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            self._count_plain(output)
            return output
        rows, size = inputs[:: self.num_generations], self.selector.group_size
        self._seen_metrics = {}
        found = self._selected([dict(row) for row in rows])
        handed = _handed(found.groups, self.accelerator.device)
        self._count_discarded(found)
        repeated = [dict(group.row) for group in found.groups for _ in range(size)]
        with self._handing(handed, found.groups, size):
            output = super()._generate_and_score_completions(repeated)
        if self.selection.cppo:
            output = self._pruned(output, size)
        self._count(output, found)
        return output

    def _selected(self, rows: list[dict[str, Any]]) -> Selected:
        """The selector's choice. Where the engine fails, nothing of this step is remembered: a checkpoint is written then."""
        assert self.selector is not None
        before = self.selector.state_dict() if self.use_vllm else None
        try:
            return self.selector.select(rows, self.state.global_step, self._make)
        except EngineError:
            if before is not None:
                self.selector.load_state_dict(before)
            raise

    # --- making groups ------------------------------------------------------------------------------------------------

    def _make(self, rows: Sequence[dict[str, Any]], each: int) -> list[Group]:
        """Generates and scores `each` completions of every row, without a trace in the logs."""
        repeated = [dict(row) for row in rows for _ in range(each)]
        kept, self.num_generations, self._making = self.num_generations, each, True
        try:
            with aside(self), self._generating_for(repeated):
                prompts = [row["prompt"] for row in repeated]
                prompt_ids, ids, _, completions, logps, *_ = self._generate(prompts)
                components = self._calculate_rewards(repeated, prompts, completions, ids)
                scored = self._scored
                assert scored is not None  # set by _calculate_rewards
                for name, values in self._pending_metrics.items():
                    self._seen_metrics.setdefault(name, []).extend(values)
        finally:
            self.num_generations, self._making = kept, False
        extra = {name: values for name, values in scored.extra.items() if len(values) == len(repeated)}
        totals, parts = scored.total.tolist(), components.tolist()
        groups = []
        for number, row in enumerate(rows):
            one = slice(number * each, (number + 1) * each)
            groups.append(
                Group(
                    key=key_of(row),
                    row=dict(row),
                    prompt_ids=list(prompt_ids[one.start]),
                    completion_ids=[list(each_ids) for each_ids in ids[one]],
                    completions=list(completions[one]),
                    components=parts[one],
                    totals=totals[one],
                    extra={name: list(values[one]) for name, values in extra.items()},
                    sampler_logps=None if logps is None else [list(values) for values in logps[one]],
                )
            )
        return groups

    # --- handing them to TRL ------------------------------------------------------------------------------------------

    @contextmanager
    def _handing(self, handed: Handed, groups: Sequence[Group], size: int) -> Iterator[None]:
        """Inside, generating gives the chosen completions, and scoring their rewards."""
        with_logps = all(group.sampler_logps is not None for group in groups)
        made = {
            "prompt_ids": [list(group.prompt_ids) for group in groups for _ in range(size)],
            "completion_ids": handed.completion_ids,
            "logprobs": [list(row) for group in groups for row in group.sampler_logps or []] if with_logps else None,
        }
        kept = self.rollout_func, self.num_generations
        self.rollout_func, self.num_generations = (lambda *_: dict(made)), size
        self._handed = handed
        for name, values in self._seen_metrics.items():
            self._pending_metrics[name].extend(values)
        try:
            yield
        finally:
            self.rollout_func, self.num_generations = kept
            self._handed = None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        if self._handed is None or self._making:
            fresh: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return fresh
        for name, values in self._handed.extra.items():
            self._pending_extra_logs[name].extend(values)
        rewards = self._handed.components.clone()
        self._note_scores(rewards, completions, completion_ids_list)
        return rewards

    # --- after scoring ------------------------------------------------------------------------------------------------

    def _pruned(self, output: dict[str, Any], size: int) -> dict[str, Any]:
        """CPPO: the batch without the completions that are not trained on."""
        rows = largest_advantages(output["advantages"].cpu(), size, self.selection.cppo.keep)
        output = take_rows(output, rows.to(output["completion_ids"].device))
        output["num_items_in_batch"] = trained_tokens(output).sum().to(output["num_items_in_batch"])
        return output

    # --- what was spent -----------------------------------------------------------------------------------------------

    def _count_discarded(self, found: Selected) -> None:
        """Tokens that no batch holds were seen all the same. TRL counts those that it is handed."""
        self.state.num_input_tokens_seen += _seen(found.made) - _seen(found.groups)

    def _count(self, output: Mapping[str, Any], found: Selected) -> None:
        metrics = self._metrics["train"]
        useful = sum(not group.flat for group in found.groups)
        updated, learned = _forwarded(output)
        self._tell(float(found.generated), updated, learned, float(useful), float(len(found.made)))
        scored = [total for group in found.made for total in group.totals if total == total]
        if scored:
            metrics["selection/reward"].append(sum(scored) / len(scored))
        if self.selection.greso:
            metrics["selection/skipped"].append(float(found.skipped))
        if self.selection.dynamic_sampling:
            metrics["selection/rounds"].append(float(found.rounds))

    def _count_plain(self, output: Mapping[str, Any]) -> None:
        scored = self._scored
        assert scored is not None  # set by _calculate_rewards
        spent = torch.tensor([float(sum(map(len, scored.completion_ids))), *_forwarded(output)])
        generated, updated, learned = self.accelerator.reduce(spent.to(scored.total.device), reduction="sum").tolist()
        groups = scored.total.view(-1, self.num_generations).tolist()
        useful = sum(not is_flat(group) for group in groups)
        self._tell(generated, updated, learned, float(useful), float(len(groups)))

    def _tell(self, generated: float, updated: float, learned: float, useful: float, groups: float) -> None:
        metrics = self._metrics["train"]
        metrics["tokens/generated"].append(generated)
        metrics["tokens/updated"].append(updated)
        metrics["tokens/with_advantage"].append(learned)
        metrics["groups/rolled_out"].append(groups)
        metrics["groups/useful"].append(useful)
        if useful:
            metrics["tokens/per_useful_group"].append(generated / useful)


def _seen(groups: Sequence[Group]) -> int:
    """Prompt and completion tokens."""
    return sum(len(group.prompt_ids) * len(group.completion_ids) + group.tokens for group in groups)


def _handed(groups: Sequence[Group], device: torch.device) -> Handed:
    names = dict.fromkeys(name for group in groups for name in group.extra)
    return Handed(
        completion_ids=[list(ids) for group in groups for ids in group.completion_ids],
        components=torch.tensor([row for group in groups for row in group.components], device=device),
        extra={
            name: [value for group in groups for value in group.extra.get(name, [None] * len(group.totals))]
            for name in names
        },
    )


def take_rows(output: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Some rows of a generation batch; what has none (counts) is kept."""
    size = len(output["completion_ids"])

    def some(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == size:
            return value[rows]
        return [value[row] for row in rows.tolist()] if isinstance(value, list) and len(value) == size else value

    return {name: some(value) for name, value in output.items()}


def _forwarded(output: Mapping[str, Any]) -> tuple[float, float]:
    """Prompt and completion tokens of the completions that train; of those among them with an advantage."""
    live = trained_tokens(output).any(dim=1)
    advantages = output["advantages"] != 0
    learned = live & (advantages if advantages.dim() == 1 else advantages.any(dim=1))
    tokens = output["prompt_mask"].sum(dim=1) + output["completion_mask"].sum(dim=1)
    return float(tokens[live].sum()), float(tokens[learned].sum())
