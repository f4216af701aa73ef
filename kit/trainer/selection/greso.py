"""Selective rollouts (GRESO, arXiv 2506.02177): prompts that were flat lately are passed over, but never for good.

A prompt whose last z groups were all flat is skipped with probability 1 - p^z. p is one number for easy prompts (flat at a
high reward) and one for hard ones; after each step in which prompts came back it falls by `step` if there were at least as many
flat groups of that kind as wanted, else it rises. Rule, targets and bounds are those of the paper and of its authors' code
(github.com/Infini-AI-Lab/GRESO); it draws prompts epoch by epoch, here a skipped one gives its place to a fresh one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from kit.config.sections import GresoConfig
from kit.trainer.selection.memory import PassRates

LEAST, MOST = 0.05, 0.95
"""Bounds of the exploration probabilities: at 0 a prompt would never be seen again, at 1 none would be skipped."""


class Greso:
    """The filter of a run. Saved with its checkpoints."""

    def __init__(self, config: GresoConfig) -> None:
        self.config = config
        self.explore = {"easy": config.explore, "hard": config.explore}

    def kind(self, rate: float | None) -> str:
        """`easy` from half of the rewards' range on. Without a range nothing is known to be easy."""
        return "easy" if rate is not None and rate >= 0.5 else "hard"

    def skip_probability(self, memory: PassRates, key: str) -> float:
        """0 for a prompt that is new, or whose last group could be learned from."""
        flat = memory.flat_in_a_row(key)
        return 1.0 - float(self.explore[self.kind(memory.pass_rate(key))] ** flat)

    def skips(self, memory: PassRates, key: str, rng: random.Random) -> bool:
        """Draws whether to pass a prompt over. A random number is drawn for every prompt."""
        return rng.random() < self.skip_probability(memory, key)

    def adapt(self, flat_rates: Iterable[float | None], groups: int) -> None:
        """After a step of `groups` groups: `flat_rates` are the pass rates of the flat ones."""
        if not groups:
            return
        kinds = [self.kind(rate) for rate in flat_rates]
        for kind, target in (("easy", self.config.easy_target), ("hard", self.config.hard_target)):
            enough = kinds.count(kind) / groups >= target
            moved = self.explore[kind] + (-self.config.step if enough else self.config.step)
            self.explore[kind] = min(MOST, max(LEAST, moved)) if self.config.step else self.explore[kind]

    def state_dict(self) -> dict[str, Any]:
        return {"explore": dict(self.explore)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.explore = {kind: float(state["explore"][kind]) for kind in self.explore}
