"""Selection as a step of the trainer: sample groups, choose, and let TRL make its batch of the chosen ones.

1. `sample_groups` generates and scores completions with logging off.
2. `Selector` (selector.py) chooses among these groups, and asks for more where its methods need them.
3. The chosen completions go through TRL's rollout once more as a `ReplayedRollout`: the generator and the reward functions
   give back what they made, so that old and reference log-probabilities, advantages, logs and the loss are those of a batch
   that holds the chosen completions and nothing else. Every reduction then divides by what is trained on.

Without methods nothing is chosen, and only the tokens that were spent are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kit.config.sections import SelectionConfig
from kit.errors import EngineError
from kit.trainer.greedy import muted_metrics
from kit.trainer.micro_batch import MicroBatch
from kit.trainer.rollout import ReplayedRollout, RewardResult
from kit.trainer.selection.methods import Group, is_flat, key_of, largest_advantages
from kit.trainer.selection.rules import check_trainer
from kit.trainer.selection.selector import Selected, Selector

Row = dict[str, Any]
RollOut = Callable[[list[Row], ReplayedRollout | None], tuple[dict[str, Any], RewardResult]]
"""TRL's batch of these rows, generated or replayed; and what the reward functions gave."""


class GroupSelector:
    """The selection of one trainer. Raises `ConfigError` for a method that this trainer cannot follow.

    selector: the methods and their memory; None where the configuration has no method.
    """

    def __init__(self, trainer: Any, config: SelectionConfig) -> None:
        self.trainer, self.config = trainer, config
        self.selector: Selector | None = None
        self._seen_metrics: dict[str, list[float]] = {}
        if config.methods:
            check_trainer(trainer, config)
            self.selector = Selector(config, trainer.train_dataset, trainer.num_generations, trainer.args.seed)

    def batch(self, rows: list[Row], roll_out: RollOut) -> dict[str, Any]:
        """TRL's batch of the groups that are trained on. `rows` repeat each prompt. Logs the tokens that were spent."""
        if self.selector is None:
            output, rewards = roll_out(rows, None)
            self._count_plain(output, rewards)
            return output
        self._seen_metrics = {}
        found = self._selected([dict(row) for row in rows[:: self.trainer.num_generations]])
        self._count_discarded(found)
        size = self.selector.group_size
        repeated = [dict(group.row) for group in found.groups for _ in range(size)]
        with _groups_of(self.trainer, size):
            output, _ = roll_out(repeated, self._replayed(found.groups))
        if self.config.cppo:
            output = self._drop_unselected(output, size)
        self._count(output, found)
        return output

    def _selected(self, rows: list[Row]) -> Selected:
        """The selector's choice. Where the engine fails, the selector forgets this step: the checkpoint that is written then
        must be that of a run which has not begun it."""
        assert self.selector is not None
        before = self.selector.state_dict() if self.trainer.use_vllm else None
        try:
            return self.selector.select(rows, self.trainer.state.global_step, self.sample_groups)
        except EngineError:
            if before is not None:
                self.selector.load_state_dict(before)
            raise

    def sample_groups(self, rows: Sequence[Row]) -> list[Group]:
        """Generates and scores a group of completions for every row. What the reward functions log is kept for the replay;
        nothing else reaches the logs."""
        trainer, size = self.trainer, self.trainer.num_generations
        repeated = [dict(row) for row in rows for _ in range(size)]
        with muted_metrics(trainer), trainer.rolling_out(repeated) as state:
            prompts = [row["prompt"] for row in repeated]
            prompt_ids, ids, _, completions, logps, *_ = trainer._generate(prompts)
            components = trainer._calculate_rewards(repeated, prompts, completions, ids)
            for name, values in trainer._pending_metrics.items():
                self._seen_metrics.setdefault(name, []).extend(values)
        extra = {name: values for name, values in state.rewards.extra.items() if len(values) == len(repeated)}
        totals, parts = state.rewards.total.tolist(), components.tolist()
        groups = []
        for number, row in enumerate(rows):
            one = slice(number * size, (number + 1) * size)
            groups.append(
                Group(
                    key=key_of(row),
                    row=dict(row),
                    prompt_ids=list(prompt_ids[one.start]),
                    completion_ids=[list(row_ids) for row_ids in ids[one]],
                    completions=list(completions[one]),
                    components=parts[one],
                    totals=totals[one],
                    extra={name: list(values[one]) for name, values in extra.items()},
                    sampler_logps=None if logps is None else [list(values) for values in logps[one]],
                )
            )
        return groups

    def _replayed(self, groups: Sequence[Group]) -> ReplayedRollout:
        names = dict.fromkeys(name for group in groups for name in group.extra)
        with_logps = all(group.sampler_logps is not None for group in groups)
        return ReplayedRollout(
            completion_ids=[list(ids) for group in groups for ids in group.completion_ids],
            logps=[list(row) for group in groups for row in group.sampler_logps or []] if with_logps else None,
            components=torch.tensor(
                [row for group in groups for row in group.components], device=self.trainer.accelerator.device
            ),
            extra={
                name: [value for group in groups for value in group.extra.get(name, [None] * len(group.totals))]
                for name in names
            },
            metrics=self._seen_metrics,
        )

    def _drop_unselected(self, output: dict[str, Any], size: int) -> dict[str, Any]:
        """CPPO: the batch without the completions that are not trained on."""
        assert self.config.cppo is not None
        rows = largest_advantages(output["advantages"].cpu(), size, self.config.cppo.keep)
        kept = MicroBatch(output).select(rows.tolist())
        kept.inputs["num_items_in_batch"] = kept.loss_mask.sum().to(output["num_items_in_batch"])
        return kept.inputs

    # --- what was spent -----------------------------------------------------------------------------------------------

    def _count_discarded(self, found: Selected) -> None:
        """Adds the tokens of completions that were dropped to those seen. TRL counts only the ones in its batch."""
        self.trainer.state.num_input_tokens_seen += _seen(found.made) - _seen(found.groups)

    def _count(self, output: Mapping[str, Any], found: Selected) -> None:
        metrics = self.trainer.metric_log
        useful = sum(not group.flat for group in found.groups)
        updated, learned = _forwarded(output)
        self._log(float(found.generated), updated, learned, float(useful), float(len(found.made)))
        scored = [total for group in found.made for total in group.totals if total == total]
        if scored:
            metrics.append("selection/reward", sum(scored) / len(scored))
        if self.config.greso:
            metrics.append("selection/skipped", float(found.skipped))
        if self.config.dynamic_sampling:
            metrics.append("selection/rounds", float(found.rounds))

    def _count_plain(self, output: Mapping[str, Any], rewards: RewardResult) -> None:
        spent = torch.tensor([float(sum(map(len, rewards.completion_ids))), *_forwarded(output)])
        reduce = self.trainer.accelerator.reduce
        generated, updated, learned = reduce(spent.to(rewards.total.device), reduction="sum").tolist()
        groups = rewards.total.view(-1, self.trainer.num_generations).tolist()
        useful = sum(not is_flat(group) for group in groups)
        self._log(generated, updated, learned, float(useful), float(len(groups)))

    def _log(self, generated: float, updated: float, learned: float, useful: float, groups: float) -> None:
        append = self.trainer.metric_log.append
        append("tokens/generated", generated)
        append("tokens/updated", updated)
        append("tokens/with_advantage", learned)
        append("groups/rolled_out", groups)
        append("groups/useful", useful)
        if useful:
            append("tokens/per_useful_group", generated / useful)


@contextmanager
def _groups_of(trainer: Any, size: int) -> Iterator[None]:
    """Inside, TRL compares rewards in groups of `size`: PODS keeps fewer completions of a prompt than are sampled."""
    sampled, trainer.num_generations = trainer.num_generations, size
    try:
        yield
    finally:
        trainer.num_generations = sampled


def _seen(groups: Sequence[Group]) -> int:
    """Prompt and completion tokens."""
    return sum(len(group.prompt_ids) * len(group.completion_ids) + group.tokens for group in groups)


def _forwarded(output: Mapping[str, Any]) -> tuple[float, float]:
    """Prompt and completion tokens of the completions that train; of those among them with an advantage."""
    batch = MicroBatch(dict(output))
    live = batch.loss_mask.any(dim=1)
    learned = live & (batch.advantages != 0).any(dim=1)
    tokens = output["prompt_mask"].sum(dim=1) + output["completion_mask"].sum(dim=1)
    return float(tokens[live].sum()), float(tokens[learned].sum())
