"""The methods of selection, each by itself, and what they know: prompts, their pass rates, groups of completions."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kit.config.sections import GresoConfig

# --- what is remembered of every prompt -------------------------------------------------------------------------------
#
# What is remembered of every prompt: its pass rate, and how often in a row its groups were flat.
#
# A prompt is told by a hash of its row, so that it is found again whatever the order of the data. The pass rate of rewards that
# are not 0 or 1 is their mean's place between the lowest and the highest reward of the run so far: for 0 and 1 it is the share
# of passes.

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


# --- a group of completions -------------------------------------------------------------------------------------------
#
# A group of completions of one prompt, made and scored, as it is handed from one method to the next.


@dataclass(frozen=True)
class Group:
    """g completions of one prompt."""

    key: str
    row: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[list[int]]  # (g,)
    completions: list[Any]  # (g,) decoded
    components: list[list[float]]  # (g, K) rewards, NaN where one does not apply
    totals: list[float]  # (g,) weighted sums, NaN without a score
    extra: dict[str, list[Any]] = field(default_factory=dict)  # (g,) each, as reward functions logged them
    sampler_logps: list[list[float]] | None = None  # (g,) as an engine apart from the trainer reported them, nats

    @property
    def flat(self) -> bool:
        """Whether no two rewards differ: nothing can be learned from it by comparison."""
        return is_flat(self.totals)

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(map(len, self.completion_ids))

    def take(self, places: Sequence[int]) -> Group:
        """Some of its completions."""

        def some(values: list[Any]) -> list[Any]:
            return [values[place] for place in places]

        return replace(
            self,
            completion_ids=some(self.completion_ids),
            completions=some(self.completions),
            components=some(self.components),
            totals=some(self.totals),
            extra={name: some(values) for name, values in self.extra.items()},
            sampler_logps=None if self.sampler_logps is None else some(self.sampler_logps),
        )


# --- fresh prompts ----------------------------------------------------------------------------------------------------
#
# Fresh prompts: rows of the training data in orders of its own, one permutation after the other.
#
# The trainer's sampler draws as it would without: a run is resumed to the same batches, and nothing is drawn from torch's
# random numbers.


class Pool:
    """The training rows. `rows`: a `datasets.Dataset` or a list."""

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.passed = 0  # rows drawn so far
        self._order: tuple[int, list[int]] | None = None  # of an epoch

    def draw(self, taken: Collection[str]) -> dict[str, Any] | None:
        """The next row whose key is not among `taken`; None when no row has another."""
        for _ in range(2 * len(self.rows)):  # the end of one order and the whole of the next: every row
            epoch, place = divmod(self.passed, len(self.rows))
            self.passed += 1
            row: dict[str, Any] = self.rows[self._of(epoch)[place]]
            if key_of(row) not in taken:
                return row
        return None

    def _of(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"fresh prompts {self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        return {"passed": self.passed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passed = int(state["passed"])


# --- GRESO ------------------------------------------------------------------------------------------------------------
#
# Selective rollouts (GRESO, arXiv 2506.02177): prompts that were flat lately are passed over, but never for good.
#
# A prompt whose last z groups were all flat is skipped with probability 1 - p^z. p is one number for easy prompts (flat at a
# high reward) and one for hard ones; after each step in which prompts came back it falls by `step` if there were at least as many
# flat groups of that kind as wanted, else it rises. Rule, targets and bounds are those of the paper and of its authors' code
# (github.com/Infini-AI-Lab/GRESO); it draws prompts epoch by epoch, here a skipped one gives its place to a fresh one.

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


# --- PODS -------------------------------------------------------------------------------------------------------------
#
# Down-sampling of rollouts by variance (PODS, arXiv 2504.13818).
#
# Of n rewards the m with the largest variance are always some of the highest and the rest of the lowest (the paper's lemma):
# with the rewards sorted, m + 1 candidates are compared by prefix sums, O(n log n) in all.


def max_variance(rewards: Sequence[float], keep: int) -> list[int]:
    """Indices, ascending, of `keep` rewards with the largest population variance; NaN (no score) is taken last.

    Of subsets with equal variance the one with more of the low rewards; of equal rewards the first ones, so that what is
    kept of a flat group is its beginning. Raises `ValueError` unless 1 <= keep <= len(rewards).
    """
    if not 1 <= keep <= len(rewards):
        raise ValueError(f"{keep} of {len(rewards)} completions cannot be kept")
    scored = sorted((index for index in range(len(rewards)) if not math.isnan(rewards[index])), key=rewards.__getitem__)
    if len(scored) <= keep:
        rest = [index for index in range(len(rewards)) if math.isnan(rewards[index])]
        return sorted(scored + rest[: keep - len(scored)])
    # Shifted by the lowest: a constant added to all rewards changes no comparison.
    values = [rewards[index] - rewards[scored[0]] for index in scored]
    sums, squares = [0.0], [0.0]
    for value in values:
        sums.append(sums[-1] + value)
        squares.append(squares[-1] + value * value)
    best, best_low = -1.0, keep
    for low in range(keep, -1, -1):
        start = len(values) - (keep - low)
        total = sums[low] + sums[-1] - sums[start]
        variance = (squares[low] + squares[-1] - squares[start]) / keep - (total / keep) ** 2
        if variance > best + 1e-12 * max(1.0, best):
            best, best_low = variance, low
    # `scored` is in order of reward, then of place; from above, too, the first of equals are taken.
    rest = sorted(scored[best_low:], key=lambda index: (-rewards[index], index))
    return sorted([*scored[:best_low], *rest[: keep - best_low]])


# --- CPPO -------------------------------------------------------------------------------------------------------------
#
# Completion pruning (CPPO, arXiv 2503.22342): those with the largest |advantage| are trained on.
#
# The paper fills the room with further questions; here a larger `optimisation.batch_size` does.


def largest_advantages(advantages: Tensor, size: int, keep: int) -> Tensor:
    """(N,) or (N, T) advantages in groups of `size` rows -> (N / size * keep,) rows to keep, ascending.

    With advantages over tokens a row counts by its largest one. Of equals the first; in a flat group its beginning.
    """
    sizes = advantages.abs() if advantages.dim() == 1 else advantages.abs().amax(dim=1)
    ranks = torch.argsort(sizes.view(-1, size), dim=1, descending=True, stable=True)[:, :keep]
    start = torch.arange(0, len(sizes), size, device=sizes.device)[:, None]
    return (ranks.sort(dim=1).values + start).flatten()
