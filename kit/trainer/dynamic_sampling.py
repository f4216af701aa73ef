"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose completions all have one reward are made again from fresh prompts.

1. `_sample` generates and scores a group for each prompt, with logging off.
2. `_replace_flat` samples fresh prompts in the place of flat groups, until none is left or a limit is reached.
3. The groups go through TRL's rollout once more as a `ReplayedRollout`: the generator and the reward functions give back what
   they made, so that old and reference log-probabilities, advantages, logs and the loss are those of any other batch.

Without `selection.dynamic_sampling` nothing is replaced, and only the tokens that were spent are counted.
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
from typing import Any

import torch

from kit.config.sections import DynamicSamplingConfig
from kit.errors import ConfigError, EngineError
from kit.objective import Objective
from kit.trainer.micro_batch import MicroBatch
from kit.trainer.rollout import ReplayedRollout, RewardResult

Row = dict[str, Any]
RollOut = Callable[[list[Row], ReplayedRollout | None], tuple[dict[str, Any], RewardResult]]
"""TRL's batch of these rows, generated or replayed; and what the reward functions gave."""
LEARNS_FROM_FLAT = {
    "components": "compares the components of the reward",
    "token_rewards": "compares tokens over the whole batch",
    "values": "compares with a value head",
}
"""What an advantage may need that makes it differ from 0 in a flat group."""


def check_dynamic_sampling(objective: Objective, *, turns: bool, processes: int, images: bool) -> None:
    """Refuses what dynamic sampling cannot do. Raises `ConfigError`."""
    seen_in_flat = [reason for need, reason in LEARNS_FROM_FLAT.items() if need in objective.advantage.needs]
    refusals = (
        (processes > 1, f"in a run of {processes} processes: each would choose for itself", "start one process"),
        (turns, "with generation.tools, .environment or .rollout: their calls would act twice", "leave those out"),
        (images, "with pictures is not made in this version", "set data.image_column: none"),
        (
            bool(seen_in_flat),
            f"takes a flat group for useless, but {objective.advantage.title} {' and '.join(seen_in_flat)}, and learns from it",
            "set another advantage, e.g. group_zscore",
        ),
    )
    for applies, why, remedy in refusals:
        if applies:
            raise ConfigError(f"selection.dynamic_sampling {why}. Set it to null, or {remedy}.")


@dataclass(frozen=True)
class Group:
    """g completions of one prompt."""

    row: Row
    prompt_ids: list[int]
    completion_ids: list[list[int]]  # (g,)
    components: list[list[float]]  # (g, K) rewards, NaN where one does not apply
    totals: list[float]  # (g,) weighted sums, NaN without a score
    extra: dict[str, list[Any]]  # (g,) each, as reward functions logged them
    sampler_logps: list[list[float]] | None  # (g,) as an engine apart from the trainer reported them, nats

    @property
    def flat(self) -> bool:
        """Whether no two rewards differ: nothing can be learned from it by comparison."""
        return is_flat(self.totals)

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(map(len, self.completion_ids))


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether no two scored completions differ in reward."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    return not scored or min(scored) == max(scored)


def key_of(row: Mapping[str, Any]) -> str:
    """16 hexadecimal digits for a row of the data: the same for the same content, in any process."""
    text = json.dumps(row, sort_keys=True, default=repr, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class FreshPrompts:
    """Training rows in orders of their own, one permutation after the other.

    The trainer's sampler draws as it would without, and nothing is drawn from torch's random numbers. rows: a
    `datasets.Dataset` or a list.
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.passed = 0  # rows drawn so far
        self._order: tuple[int, list[int]] | None = None  # of an epoch

    def draw(self, count: int, taken: set[str]) -> list[Row]:
        """Up to `count` rows whose keys are not among `taken`, which gets them."""
        rows: list[Row] = []
        for _ in range(2 * len(self.rows)):  # the end of one order and the whole of the next: every row
            if len(rows) == count:
                break
            epoch, place = divmod(self.passed, len(self.rows))
            if self._order is None or self._order[0] != epoch:
                order = list(range(len(self.rows)))
                random.Random(f"fresh prompts {self.seed} {epoch}").shuffle(order)
                self._order = (epoch, order)
            self.passed += 1
            row = dict(self.rows[self._order[1][place]])
            if (key := key_of(row)) not in taken:
                taken.add(key)
                rows.append(row)
        return rows


class DynamicSampling:
    """Makes the generation batches of one trainer, and logs the tokens that were spent. Saved with its checkpoints.

    config: None replaces nothing. Raises `ConfigError` for a trainer that cannot follow.
    """

    def __init__(self, trainer: Any, config: DynamicSamplingConfig | None) -> None:
        self.trainer, self.config = trainer, config
        self._logged: dict[str, list[float]] = {}  # by the reward functions, for the replay
        if config is None:
            return
        if trainer.objective is None:
            raise ConfigError("selection needs an objective: pass one, e.g. objective='grpo', or leave selection out.")
        check_dynamic_sampling(
            trainer.objective,
            turns=bool(trainer.tools or trainer.environment_factories or trainer.rollout_func),
            processes=trainer.accelerator.num_processes,
            images=trainer._is_vlm,
        )
        if not hasattr(trainer.train_dataset, "__getitem__"):
            raise ConfigError(
                "selection draws fresh prompts, and a streamed dataset cannot be drawn from. Load it whole."
            )
        self.fresh = FreshPrompts(trainer.train_dataset, trainer.args.seed)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"passed": self.fresh.passed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fresh.passed = int(state["passed"])

    def batch(self, rows: list[Row], roll_out: RollOut) -> dict[str, Any]:
        """TRL's batch of the groups that are trained on. `rows` repeat each prompt."""
        size = self.trainer.num_generations
        if self.config is None:
            output, rewards = roll_out(rows, None)
            self._count_plain(output, rewards)
            return output
        self._logged = {}
        passed = self.fresh.passed
        try:
            groups, made, rounds = self._replace_flat(self._sample([dict(row) for row in rows[::size]]))
        except EngineError:  # the checkpoint that is written then must be that of a run which has not begun this step
            self.fresh.passed = passed
            raise
        # TRL counts only the tokens in its batch.
        self.trainer.state.num_input_tokens_seen += _seen(made) - _seen(groups)
        output, _ = roll_out([dict(group.row) for group in groups for _ in range(size)], self._replayed(groups))
        generated = float(sum(group.tokens for group in made))
        self._log(generated, *_forwarded(output), sum(not group.flat for group in groups), len(made))
        scored = [total for group in made for total in group.totals if not math.isnan(total)]
        if scored:
            self.trainer.metric_log.append("selection/reward", sum(scored) / len(scored))
        self.trainer.metric_log.append("selection/rounds", float(rounds))
        return output

    def _replace_flat(self, groups: list[Group]) -> tuple[list[Group], list[Group], int]:
        """The groups to train on, everything that was made for them, and the rounds of generation that it took."""
        assert self.config is not None
        groups, made, rounds = list(groups), list(groups), 1
        taken, budget = {key_of(group.row) for group in groups}, self.config.token_budget
        while rounds < self.config.max_rounds:
            flat = [place for place, group in enumerate(groups) if group.flat]
            if not flat or (budget is not None and sum(group.tokens for group in made) >= budget):
                break
            rows = self.fresh.draw(len(flat), taken)
            if not rows:
                break
            again = self._sample(rows)
            made += again
            rounds += 1
            for place, group in zip(flat, (group for group in again if not group.flat), strict=False):
                groups[place] = group
        return groups, made, rounds

    def _sample(self, rows: Sequence[Row]) -> list[Group]:
        """Generates and scores a group for every row. Nothing reaches the logs but what reward functions log, in the replay."""
        trainer, size = self.trainer, self.trainer.num_generations
        repeated = [dict(row) for row in rows for _ in range(size)]
        with _muted(trainer), trainer.rolling_out(repeated) as state:
            prompts = [row["prompt"] for row in repeated]
            prompt_ids, ids, _, completions, logps, *_ = trainer._generate(prompts)
            components = trainer._calculate_rewards(repeated, prompts, completions, ids).tolist()
            for name, values in trainer._pending_metrics.items():
                self._logged.setdefault(name, []).extend(values)
        extra = {name: values for name, values in state.rewards.extra.items() if len(values) == len(repeated)}
        totals, groups = state.rewards.total.tolist(), []
        for number, row in enumerate(rows):
            places = slice(number * size, (number + 1) * size)
            groups.append(
                Group(
                    row=row,
                    prompt_ids=list(prompt_ids[places.start]),
                    completion_ids=[list(completion) for completion in ids[places]],
                    components=components[places],
                    totals=totals[places],
                    extra={name: list(values[places]) for name, values in extra.items()},
                    sampler_logps=None if logps is None else [list(values) for values in logps[places]],
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

    def _count_plain(self, output: Mapping[str, Any], rewards: RewardResult) -> None:
        spent = torch.tensor([float(sum(map(len, rewards.completion_ids))), *_forwarded(output)])
        reduce = self.trainer.accelerator.reduce
        generated, updated, learned = reduce(spent.to(rewards.total.device), reduction="sum").tolist()
        groups = rewards.total.view(-1, self.trainer.num_generations).tolist()
        self._log(generated, updated, learned, sum(not is_flat(group) for group in groups), len(groups))

    def _log(self, generated: float, updated: float, learned: float, useful: int, groups: int) -> None:
        append = self.trainer.metric_log.append
        append("tokens/generated", generated)
        append("tokens/updated", updated)
        append("tokens/with_advantage", learned)
        append("groups/rolled_out", float(groups))
        append("groups/useful", float(useful))
        if useful:
            append("tokens/per_useful_group", generated / useful)


@contextmanager
def _muted(trainer: Any) -> Iterator[None]:
    """Inside, nothing that is generated or scored enters the trainer's logs and counts."""
    fresh: dict[str, Any] = {
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_pending_metrics": defaultdict(list),
        "_pending_extra_logs": defaultdict(list),
    }
    before = {name: getattr(trainer, name) for name in fresh}
    seen = trainer.state.num_input_tokens_seen
    vars(trainer).update(fresh)
    try:
        yield
    finally:
        vars(trainer).update(before)
        trainer.state.num_input_tokens_seen = seen


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
