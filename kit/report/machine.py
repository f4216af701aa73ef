"""What the machine did: where the seconds of a run went, which term is the largest, and what one would change about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kit.report.panels import PHASES, Numbers

MEANING = {
    "generation": "completions, tools included",
    "rewards": "waiting for reward functions",
    "scoring": "log-probabilities of the rollout",
    "update": "forward and backward passes",
    "saving": "checkpoints",
    "other": "the rest of making a batch",
}
LEFT_OUT = 1
"""Steps at the beginning that are not counted where there are more: the first compiles, checks and fills caches."""
LONG_TAIL = 3.0
"""Longest completion of a batch by its mean, from which on the tail is worth naming."""


@dataclass(frozen=True)
class Spending:
    """Seconds of a run by phase, the first step left out where there are more."""

    seconds: dict[str, float]
    steps: int
    advice: tuple[str, ...]
    """What to change about the largest, the most promising first."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def largest(self) -> str:
        return max(self.seconds, key=lambda phase: self.seconds[phase])

    def share(self, phase: str) -> float:
        """From 0 to 1."""
        return self.seconds[phase] / self.total

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Phase, seconds a step, share, and what it is, the largest first."""
        ordered = sorted(self.seconds, key=lambda phase: -self.seconds[phase])
        return [
            (phase, f"{self.seconds[phase] / self.steps:.3g}", f"{self.share(phase):.1%}", MEANING[phase])
            for phase in ordered
        ]

    @property
    def words(self) -> str:
        """The largest term in a sentence."""
        largest = self.largest
        return (
            f"{largest.capitalize()} takes the most: {self.share(largest):.0%} of the time, "
            f"{self.seconds[largest] / self.steps:.2g} s of {self.total / self.steps:.2g} s a step ({MEANING[largest]})."
        )


def spending(
    columns: Mapping[str, Numbers], config: Mapping[str, Any], env: Mapping[str, Any] | None = None
) -> Spending | None:
    """Where the time went, of columns of metrics, the tree of a configuration, and what env.json says of the machine.

    None where no phase was measured.
    """
    found = {phase: columns[f"seconds/{phase}"] for phase in PHASES if f"seconds/{phase}" in columns}
    rows = np.any([np.isfinite(values) for values in found.values()], axis=0).nonzero()[0] if found else []
    kept = rows[LEFT_OUT:] if len(rows) > LEFT_OUT else rows
    seconds = {phase: float(np.nansum(values[kept])) for phase, values in found.items()} if len(kept) else {}
    if not sum(seconds.values()):
        return None
    spent = Spending(seconds, len(kept), ())
    recent = {
        key: float(np.nanmean(values[-20:])) for key, values in columns.items() if np.isfinite(values[-20:]).any()
    }
    known = {**config, "env": env or {}}
    return Spending(seconds, len(kept), tuple(ADVICE[spent.largest](known, recent)))


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _generation(config: Mapping[str, Any], recent: Mapping[str, float]) -> list[str]:
    found = []
    mean, longest = recent.get("completions/mean_length", 0.0), recent.get("completions/max_length", 0.0)
    if mean and longest > LONG_TAIL * mean:
        found.append(
            f"A batch waits for its longest completion, {longest:.0f} tokens where the mean is {mean:.0f}: set "
            f"generation.max_completion_tokens (now {_value(config, 'generation.max_completion_tokens')}) nearer to what right "
            "answers need."
        )
    if _value(config, "env.gpu") and _value(config, "env.engine.name") == "hf":
        found.append("generation.engine: vllm fills the places of completions that have ended with the next ones.")
    if (_value(config, "optimisation.iterations") or 1) < 2:
        found.append(
            "optimisation.iterations: 2 makes two steps from each batch; watch the clipped share and the ratio then."
        )
    alike = recent.get("groups/zero_spread", recent.get("frac_reward_zero_std", 0.0))
    if alike > 0.5:
        found.append(
            f"{alike:.0%} of the groups teach nothing and were generated all the same: choose problems that are neither too "
            "easy nor too hard, or let selection.dynamic_sampling make them again from others."
        )
    return found


def _rewards(config: Mapping[str, Any], recent: Mapping[str, float]) -> list[str]:
    slow = {
        key.split("/")[1]: value
        for key, value in recent.items()
        if key.startswith("rewards/") and key.endswith("_p95_ms")
    }
    found = []
    if slow:
        name = max(slow, key=lambda each: slow[each])
        found.append(f"The slowest component is {name}: 95 % of its calls end within {slow[name]:,.3g} ms.")
    return [*found, "Rewards that call a service gain most from a faster one, or from shorter completions to judge."]


def _scoring(config: Mapping[str, Any], recent: Mapping[str, float]) -> list[str]:
    found = []
    if any(key.startswith("kl/") for key in recent) or "kl" in recent:
        found.append(
            "The KL to the reference policy takes a forward pass of its own: leave its regularizer out if it is small."
        )
    return [
        *found,
        "optimisation.token_budget bounds how much goes through the model at once; where memory is free, raise it.",
    ]


def _update(config: Mapping[str, Any], recent: Mapping[str, float]) -> list[str]:
    off = {
        "packing": "puts completions into one row without padding",
        "share_prompts": "sends a prompt that completions share through the model once",
        "skip_flat_groups": "leaves out completions from which nothing is learned",
    }
    found = [
        f"optimisation.{key}: true {what}."
        for key, what in off.items()
        if _value(config, f"optimisation.{key}") is False
    ]
    if _value(config, "optimisation.gradient_checkpointing"):
        found.append("Gradient checkpointing makes every forward pass twice: turn it off where memory allows.")
    useful = recent.get("tokens/useful", 1.0)
    if useful < 0.7:
        found.append(f"Only {useful:.0%} of the tokens that went through the model were of use; the rest is padding.")
    return [
        *found,
        "This is the learning itself: fewer completions a step (optimisation.batch_size), a shorter "
        "generation.max_completion_tokens or a smaller model make it cheaper.",
    ]


def _saving(config: Mapping[str, Any], recent: Mapping[str, float]) -> list[str]:
    return [f"run.save_every (now {_value(config, 'run.save_every')}) may be larger: a resume then repeats more steps."]


def _other(config: Mapping[str, Any], recent: Mapping[str, float]) -> list[str]:
    return [
        "Tokenizing, advantages and selection are here: a slow disk or an environment of one's own may be the reason."
    ]


ADVICE = {
    "generation": _generation,
    "rewards": _rewards,
    "scoring": _scoring,
    "update": _update,
    "saving": _saving,
    "other": _other,
}
