"""Dynamic sampling (DAPO, arXiv 2503.14476): replace groups whose completions have equal rewards by groups of fresh prompts.

1. `_sample` generates and scores a group for each prompt, with logging off.
2. `_replace_flat` samples fresh prompts for flat groups until no group is flat or a limit is reached.
3. The groups go through TRL's rollout again as a `ReplayedRollout`: generator and reward functions return the stored results,
   so that old and reference log-probabilities, advantages, logs and loss are computed as for any other batch.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kit.config.sections import DynamicSamplingConfig
from kit.errors import ConfigError, EngineError, refuse
from kit.objective import Objective
from kit.trainer.metric_log import MetricLog
from kit.trainer.rollout import ReplayedRollout, RewardResult

if TYPE_CHECKING:
    from trl import GRPOTrainer

Row = dict[str, Any]
RollOut = Callable[[list[Row], ReplayedRollout | None], tuple[dict[str, Any], RewardResult]]
"""Function from rows and an optional replay to TRL's batch and the results of the reward functions."""
LEARNS_FROM_FLAT = {
    "components": "compares the components of the reward",
    "token_rewards": "compares tokens over the whole batch",
    "values": "compares with a value head",
}
"""Needs with which an advantage may differ from 0 in a flat group, and why."""


def check_dynamic_sampling(objective: Objective, *, turns: bool, processes: int, images: bool) -> None:
    """Raise `ConfigError` for a run in which dynamic sampling does not work."""
    reasons = [reason for need, reason in LEARNS_FROM_FLAT.items() if need in objective.advantage.needs]
    refuse(
        ConfigError,
        (
            processes > 1,
            f"selection.dynamic_sampling does not work with {processes} processes, which would choose different groups.",
            "Set it to null, or start one process.",
        ),
        (
            turns,
            "selection.dynamic_sampling does not work with generation.tools or .environment: their calls would run twice.",
            "Set it to null, or remove those.",
        ),
        (images, "selection.dynamic_sampling does not work with pictures.", "Set it to null."),
        (
            bool(reasons),
            f"selection.dynamic_sampling replaces flat groups, but {objective.advantage.title} "
            f"{' and '.join(reasons)}, and learns from them.",
            "Set it to null, or set another advantage, e.g. group_zscore.",
        ),
    )


@dataclass(frozen=True)
class Group:
    """g completions of one prompt."""

    row: Row
    completion_ids: list[list[int]]  # (g,)
    components: list[list[float]]  # (g, K) rewards, NaN where one does not apply
    totals: list[float]  # (g,) weighted sums, NaN without a score
    extra: dict[str, list[Any]]  # (g,) each, as reward functions logged them
    sampler_logps: list[list[float]] | None  # (g,) log-probabilities that vLLM reported, nats

    @property
    def flat(self) -> bool:
        """Whether all scored completions have the same reward, so that a comparison teaches nothing."""
        scored = [reward for reward in self.totals if not math.isnan(reward)]
        return not scored or min(scored) == max(scored)


def key_of(row: Mapping[str, Any]) -> str:
    """A hash of a row's content, 16 hexadecimal digits, equal in all processes."""
    text = json.dumps(row, sort_keys=True, default=repr, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class FreshPrompts:
    """Draws training rows, one random permutation after the other.

    It has its own random numbers, so that the trainer's sampler and torch's generator are not affected. `rows` is a
    `datasets.Dataset` or a list.
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.passed = 0  # rows drawn so far
        self._order: tuple[int, list[int]] | None = None  # epoch, and its permutation

    def draw(self, count: int, taken: set[str]) -> list[Row]:
        """Draw up to `count` rows whose keys are not in `taken`, and add their keys to it."""
        rows: list[Row] = []
        for _ in range(2 * len(self.rows)):  # the rest of one permutation and the next one: every row
            if len(rows) == count:
                break
            epoch, position = divmod(self.passed, len(self.rows))
            if self._order is None or self._order[0] != epoch:
                order = list(range(len(self.rows)))
                random.Random(f"fresh prompts {self.seed} {epoch}").shuffle(order)
                self._order = (epoch, order)
            self.passed += 1
            row = dict(self.rows[self._order[1][position]])
            if (key := key_of(row)) not in taken:
                taken.add(key)
                rows.append(row)
        return rows


class DynamicSampling:
    """Makes the generation batches of one trainer and logs the generated tokens. Its state is saved in checkpoints.

    Raises `ConfigError` for a trainer with which dynamic sampling does not work.
    """

    def __init__(
        self, trainer: GRPOTrainer, objective: Objective | None, metrics: MetricLog, config: DynamicSamplingConfig
    ) -> None:
        self.trainer, self.metrics, self.config = trainer, metrics, config
        self._logged: dict[str, list[float]] = {}  # metrics of the reward functions, for the replay
        if objective is None:
            raise ConfigError("selection needs an objective. Pass one, for example objective='grpo', or omit it.")
        check_dynamic_sampling(
            objective,
            turns=bool(trainer.tools or trainer.environment_factories or trainer.rollout_func),
            processes=trainer.accelerator.num_processes,
            images=trainer._is_vlm,
        )
        if not hasattr(trainer.train_dataset, "__getitem__"):
            raise ConfigError(
                "selection draws fresh prompts, which a streamed dataset does not allow. Load the dataset into memory."
            )
        self.fresh = FreshPrompts(trainer.train_dataset, trainer.args.seed)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"passed": self.fresh.passed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fresh.passed = int(state["passed"])

    def batch(self, rows: list[Row], roll_out: RollOut) -> dict[str, Any]:
        """Make TRL's batch of the groups to train on. `rows` has each prompt once per completion."""
        size = self.trainer.num_generations
        self._logged = {}
        passed = self.fresh.passed
        try:
            groups, sampled, rounds = self._replace_flat(self._sample([dict(row) for row in rows[::size]]))
        except EngineError:  # `checkpoint_on_failure` saves the state before this step
            self.fresh.passed = passed
            raise
        output, _ = roll_out([dict(group.row) for group in groups for _ in range(size)], self._replayed(groups))
        append = self.metrics.append
        append("tokens/generated", float(sum(len(ids) for group in sampled for ids in group.completion_ids)))
        append("groups/rolled_out", float(len(sampled)))
        append("groups/useful", float(sum(not group.flat for group in groups)))
        append("selection/rounds", float(rounds))
        scored = [total for group in sampled for total in group.totals if not math.isnan(total)]
        if scored:
            append("selection/reward", sum(scored) / len(scored))
        return output

    def _replace_flat(self, groups: list[Group]) -> tuple[list[Group], list[Group], int]:
        """The groups to train on, all sampled groups, and the number of generation rounds."""
        groups, sampled, rounds = list(groups), list(groups), 1
        taken = {key_of(group.row) for group in groups}
        while rounds < self.config.max_rounds:
            flat = [number for number, group in enumerate(groups) if group.flat]
            rows = self.fresh.draw(len(flat), taken)
            if not rows:  # nothing is flat, or no prompt is left
                break
            fresh = self._sample(rows)
            sampled += fresh
            rounds += 1
            for number, group in zip(flat, (group for group in fresh if not group.flat), strict=False):
                groups[number] = group
        return groups, sampled, rounds

    def _sample(self, rows: Sequence[Row]) -> list[Group]:
        """Generate and score a group for every row. Only metrics of reward functions are logged, in the replay."""
        trainer, size = self.trainer, self.trainer.num_generations
        repeated = [dict(row) for row in rows for _ in range(size)]
        with _muted(trainer), trainer.rolling_out(repeated) as state:
            prompts = [row["prompt"] for row in repeated]
            _, ids, _, completions, logps, *_ = trainer._generate(prompts)
            components = trainer._calculate_rewards(repeated, prompts, completions, ids).tolist()
            for name, values in trainer._pending_metrics.items():
                self._logged.setdefault(name, []).extend(values)
        extra = {name: values for name, values in state.rewards.extra.items() if len(values) == len(repeated)}
        totals, groups = state.rewards.total.tolist(), []
        for number, row in enumerate(rows):
            span = slice(number * size, (number + 1) * size)
            groups.append(
                Group(
                    row=row,
                    completion_ids=[list(completion) for completion in ids[span]],
                    components=components[span],
                    totals=totals[span],
                    extra={name: list(values[span]) for name, values in extra.items()},
                    sampler_logps=None if logps is None else [list(values) for values in logps[span]],
                )
            )
        return groups

    def _replayed(self, groups: Sequence[Group]) -> ReplayedRollout:
        names = dict.fromkeys(name for group in groups for name in group.extra)
        with_logps = all(group.sampler_logps is not None for group in groups)
        return ReplayedRollout(
            completion_ids=[ids for group in groups for ids in group.completion_ids],
            logps=[row for group in groups for row in group.sampler_logps or []] if with_logps else None,
            components=torch.tensor(
                [row for group in groups for row in group.components], device=self.trainer.accelerator.device
            ),
            extra={
                name: [value for group in groups for value in group.extra.get(name, [None] * len(group.totals))]
                for name in names
            },
            metrics=self._logged,
        )


@contextmanager
def _muted(trainer: GRPOTrainer) -> Iterator[None]:
    """Keep generated and scored completions out of the trainer's logs and counts."""
    fresh: dict[str, Any] = {
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_pending_metrics": defaultdict(list),
        "_pending_extra_logs": defaultdict(list),
    }
    original = {name: getattr(trainer, name) for name in fresh}
    tokens = trainer.state.num_input_tokens_seen
    vars(trainer).update(fresh)
    try:
        yield
    finally:
        vars(trainer).update(original)
        trainer.state.num_input_tokens_seen = tokens
