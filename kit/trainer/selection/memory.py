"""What is remembered of every prompt: its pass rate, and how often in a row its groups were flat.

A prompt is told by a hash of its row, so that it is found again whatever the order of the data. The pass rate of rewards that
are not 0 or 1 is their mean's place between the lowest and the highest reward of the run so far: for 0 and 1 it is the share
of passes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LATEST = 0.5
"""Weight of a prompt's newest group in its mean reward: the policy moves, and old rewards were another one's."""


def key_of(row: Mapping[str, Any]) -> str:
    """16 hexadecimal digits for a row of the data: the same for the same content, in any process."""
    text = json.dumps(row, sort_keys=True, default=repr, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether no two scored completions differ in reward, so that nothing can be compared."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    return not scored or min(scored) == max(scored)


@dataclass
class Known:
    """What is known of one prompt."""

    reward: float  # mean of its groups' means, the latest weighing half
    groups: int  # rolled out so far
    flat: int = 0  # of these, how many in a row, up to the last one, were flat


class PassRates:
    """The memory of a run. Saved with its checkpoints."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.low = math.inf
        self.high = -math.inf

    def saw(self, key: str, rewards: Sequence[float]) -> None:
        """Takes in the total rewards of one group; nothing where none was scored."""
        scored = [reward for reward in rewards if not math.isnan(reward)]
        if not scored:
            return
        mean = math.fsum(scored) / len(scored)
        self.low, self.high = min(self.low, *scored), max(self.high, *scored)
        one = self.known.get(key)
        if one is None:
            one = self.known[key] = Known(mean, 0)
        else:
            one.reward += LATEST * (mean - one.reward)
        one.groups += 1
        one.flat = one.flat + 1 if is_flat(rewards) else 0

    def rate(self, reward: float) -> float | None:
        """The place of a mean reward between the lowest and the highest so far, in [0, 1]; None while all are equal."""
        if not self.high > self.low:
            return None
        return min(1.0, max(0.0, (reward - self.low) / (self.high - self.low)))

    def pass_rate(self, key: str) -> float | None:
        """The pass rate of a prompt, in [0, 1]; None for one that was not rolled out."""
        one = self.known.get(key)
        return None if one is None else self.rate(one.reward)

    def flat_in_a_row(self, key: str) -> int:
        """How many of the prompt's last groups were flat, without one between that was not."""
        one = self.known.get(key)
        return 0 if one is None else one.flat

    def state_dict(self) -> dict[str, Any]:
        """Plain values, exact in JSON."""
        edges = [self.low, self.high] if self.known else []
        return {"edges": edges, "known": {key: [one.reward, one.groups, one.flat] for key, one in self.known.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.low, self.high = state["edges"] or (math.inf, -math.inf)
        self.known = {key: Known(*values) for key, values in state["known"].items()}
