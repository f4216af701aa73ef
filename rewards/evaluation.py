"""Run components without raising, and record the scores of a preset."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rewards.protocol import FAILURES, STATUSES, Component, Context, Sample, Score, Status, failure_reason, shown


@dataclass(frozen=True)
class Evaluation:
    """Scores of all components for a batch of B completions; every list has length B, in the order of the samples.

    `values` are native (unweighted). `totals` are the sums of the values that are not None times `weights`, or None if all
    are None. `latencies` are seconds per completion, `groups` the samples' group ids. `token_values` holds the native process
    rewards of components that return them, `token_rewards` their weighted sum: one list per completion with one number per
    token, or None if no component returns process rewards.
    """

    weights: Mapping[str, float]
    values: Mapping[str, list[float | None]]
    statuses: Mapping[str, list[Status]]
    infos: Mapping[str, list[Mapping[str, Any]]]
    latencies: Mapping[str, list[float]]
    totals: list[float | None]
    groups: list[int] = field(default_factory=list)
    token_values: Mapping[str, list[Sequence[float] | None]] = field(default_factory=dict)
    token_rewards: list[list[float]] | None = None

    @property
    def failure_share(self) -> float:
        """Share of completions that at least one component failed to score (error, timeout or infra)."""
        return _share([any(s in FAILURES for s in row) for row in zip(*self.statuses.values(), strict=True)])

    def status_shares(self, name: str) -> dict[Status, float]:
        """Return the share of each status for one component, zeros included, so that all ranks log the same keys."""
        statuses = self.statuses[name]
        return {status: _share([s == status for s in statuses]) for status in STATUSES}

    def latency_ms(self, name: str, quantile: float) -> float:
        """Return a quantile (0 to 1, nearest rank) of one component's latencies in milliseconds; 0.0 for an empty batch."""
        ordered = sorted(self.latencies[name])
        return 1000.0 * ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else 0.0

    def zero_spread_share(self, name: str) -> float:
        """Return the share of flat groups of one component: groups with equal values, which give GRPO no signal.

        Values of None are ignored, and so are groups without other values. 0.0 if no group remains.
        """
        members: dict[int, list[float]] = {}
        for group, value in zip(self.groups, self.values[name], strict=True):
            if value is not None:
                members.setdefault(group, []).append(value)
        return _share([max(values) == min(values) for values in members.values()])


class Scorer(Protocol):
    """The interface of `rewards.preset.Preset` that adaptors use."""

    @property
    def itemwise(self) -> bool: ...
    @property
    def checker(self) -> str | None: ...
    @property
    def weights(self) -> dict[str, float]: ...

    def score(self, samples: Sequence[Sample], ctx: Context | None = None) -> Evaluation: ...
    def scores(self, samples: Sequence[Sample], ctx: Context) -> dict[str, list[Score]]: ...
    def evaluation(self, ordered: dict[str, list[Score]], samples: Sequence[Sample], ctx: Context) -> Evaluation: ...


def run_component(component: Component, samples: Sequence[Sample], ctx: Context) -> list[Score]:
    """Score samples in order and validate the scores. Never raises: if the component raises, all scores are `error`."""
    if not samples:
        return []
    start = time.perf_counter()
    try:
        scores = list(component.score(samples, ctx))
        if len(scores) != len(samples):
            raise ValueError(f"{component.name!r} returned {len(scores)} scores for {len(samples)} completions")
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # SystemExit and timeouts derived from BaseException must not end a run
        scores = [Score(None, "error", {"reason": failure_reason(failure)})] * len(samples)
    per_item = (time.perf_counter() - start) / len(samples)
    return [settle(component, score, per_item, sample.n_tokens) for score, sample in zip(scores, samples, strict=True)]


def settle(component: Component, score: Score, seconds: float = 0.0, n_tokens: int | None = None) -> Score:
    """Apply the value rules of `Score`; NaN, infinities, unknown statuses and other objects become `error`.

    Args:
        seconds: time of the completion, used if the component did not measure it.
        n_tokens: expected number of token values, or None if it is not known.
    """
    is_score = (  # a component may put any object into the fields
        isinstance(score, Score)
        and isinstance(score.status, str)
        and score.status in STATUSES
        and isinstance(score.info, Mapping)
        and (score.seconds is None or isinstance(score.seconds, int | float))
    )
    if not is_score:
        return Score(component.floor, "error", {"reason": f"not a valid score: {shown(score, 280)}"}, seconds)
    seconds = seconds if score.seconds is None else score.seconds
    if score.status in ("not_applicable", "infra"):
        return replace(score, value=None, seconds=seconds, token_values=None)
    if score.status in ("timeout", "error"):
        return replace(score, value=component.floor, seconds=seconds, token_values=None)
    value: float = component.floor
    if score.value is not None or score.status == "ok":
        value = _number(score.value)
        if not math.isfinite(value):
            reason = f"value is not a finite number: {shown(score.value)}"
            return Score(component.floor, "error", {**score.info, "reason": reason}, seconds)
    tokens = score.token_values
    if tokens is not None:
        try:
            tokens = [_number(value) for value in tokens]
            wrong = "" if all(map(math.isfinite, tokens)) else "a token value is not a finite number"
        except Exception as failure:
            tokens, wrong = [], f"token values cannot be read: {failure_reason(failure)}"
        if not wrong and n_tokens is not None and len(tokens) != n_tokens:
            wrong = f"{len(tokens)} token values for {n_tokens} tokens"
        if wrong:
            return Score(component.floor, "error", {**score.info, "reason": wrong}, seconds)
    if value is score.value and seconds is score.seconds and tokens is score.token_values:
        return score
    return Score(value, score.status, score.info, seconds, tokens)


def _number(value: Any) -> float:
    try:
        return float(value)
    except Exception:  # __float__ of any object may raise any error
        return math.nan


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
