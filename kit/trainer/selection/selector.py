"""The methods put together: from the prompts of a batch to the groups that are trained on.

    prompts of the sampler -> GRESO -> rollout -> dynamic sampling: flat ones again, fresh -> PODS within each group

Every random choice is drawn from the run's seed and the step, and nothing from torch's generators: a run goes on from its
checkpoint as it would have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.config.sections import SelectionConfig
from kit.trainer.selection.methods import Greso, Group, PassRates, Pool, key_of, max_variance

Row = dict[str, Any]
Sample = Callable[[Sequence[Row]], list[Group]]
"""Samples and scores a group of completions for each row."""


@dataclass
class Selected:
    """The groups of a batch, and what they took."""

    groups: list[Group] = field(default_factory=list)  # all of one size
    made: list[Group] = field(default_factory=list)  # everything that was rolled out for it
    rounds: int = 0
    skipped: int = 0  # prompts that GRESO passed over
    known: int = 0  # prompts that GRESO had to decide about: they had been rolled out before

    @property
    def generated(self) -> int:
        """Completion tokens made for this batch."""
        return sum(group.tokens for group in self.made)


class Selector:
    """The methods of a run and what they remember. `rows`: the training data; `size`: completions of a prompt."""

    def __init__(self, config: SelectionConfig, rows: Any, size: int, seed: int) -> None:
        self.config, self.size, self.seed = config, size, seed
        self.memory, self.pool = PassRates(), Pool(rows, seed)
        self.greso = Greso(config.greso) if config.greso else None

    @property
    def group_size(self) -> int:
        """Completions of a prompt in what is handed on."""
        return self.config.pods.keep if self.config.pods else self.size

    def select(self, rows: Sequence[Row], step: int, sample: Sample) -> Selected:
        """The groups of a batch whose prompts would be `rows`, at that optimiser step."""
        rng = random.Random(f"selection {self.seed} {step}")
        found = Selected()
        seen = {key_of(row) for row in rows}
        slots = self._roll_out([self._kept_or_fresh(row, seen, rng, found) for row in rows], sample, found)
        if self.config.dynamic_sampling:
            self._fill(slots, seen, rng, sample, found)
        if self.greso and found.known:
            flat = [self.memory.rate(_mean(group)) for group in found.made if group.flat]
            self.greso.adapt(flat, len(found.made))
        found.groups = [self._down_sampled(group) for group in slots]
        return found

    # --- before generation --------------------------------------------------------------------------------------------

    def _kept_or_fresh(self, row: Row, seen: set[str], rng: random.Random, found: Selected) -> Row:
        """The row, or the first fresh one that GRESO does not pass over; the row where the data has no other."""
        candidate = row
        while self.greso:
            key = key_of(candidate)
            found.known += key in self.memory.known
            if not self.greso.skips(self.memory, key, rng):
                break
            found.skipped += 1
            fresh = self.pool.draw(seen)
            if fresh is None:
                return row
            seen.add(key_of(fresh))
            candidate = fresh
        return candidate

    def _fresh(self, count: int, seen: set[str]) -> list[Row]:
        """Up to `count` rows that are not in `seen`, which gets their keys."""
        rows: list[Row] = []
        while len(rows) < count and (row := self.pool.draw(seen)) is not None:
            rows.append(row)
            seen.add(key_of(row))
        return rows

    # --- generation ---------------------------------------------------------------------------------------------------

    def _roll_out(self, rows: Sequence[Row], sample: Sample, found: Selected) -> list[Group]:
        """One round: a group of each row; the memory sees all."""
        groups = sample(rows)
        for group in groups:
            self.memory.saw(group.key, group.totals)
        found.made += groups
        found.rounds += 1
        return groups

    def _fill(self, slots: list[Group], seen: set[str], rng: random.Random, sample: Sample, found: Selected) -> None:
        """DAPO: rolls out fresh prompts in the place of flat groups, until none is left or a limit is reached."""
        config = self.config.dynamic_sampling
        assert config is not None
        while found.rounds < config.max_rounds:
            flat = [place for place, group in enumerate(slots) if group.flat]
            if not flat or (config.token_budget is not None and found.generated >= config.token_budget):
                return
            fresh = self._fresh(len(flat), seen)
            if not fresh:
                return
            fresh = [self._kept_or_fresh(row, seen, rng, found) for row in fresh]
            useful = [group for group in self._roll_out(fresh, sample, found) if not group.flat]
            for place, group in zip(flat, useful, strict=False):
                slots[place] = group

    # --- after generation ---------------------------------------------------------------------------------------------

    def _down_sampled(self, group: Group) -> Group:
        """PODS."""
        if not self.config.pods:
            return group
        return group.take(max_variance(group.totals, self.config.pods.keep))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values, exact in JSON."""
        state = {"memory": self.memory.state_dict(), "pool": self.pool.state_dict()}
        return state | ({"greso": self.greso.state_dict()} if self.greso else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a method that was off before there is nothing to load."""
        self.memory.load_state_dict(state["memory"])
        self.pool.load_state_dict(state["pool"])
        if self.greso and "greso" in state:
            self.greso.load_state_dict(state["greso"])


def _mean(group: Group) -> float:
    scored = [total for total in group.totals if total == total]
    return sum(scored) / len(scored) if scored else 0.0
