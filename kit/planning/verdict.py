"""From samples of the base model to a verdict: will this run learn, and if not, what is the one thing to change?

A group learns something only where its rewards differ: with equal rewards every advantage is 0. So the share of groups
with spread decides, and what kind the others are says why. A verdict is given only where the 95 % interval of the share
that it rests on lies on one side of its threshold; else more samples are asked for.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from kit.config import RunConfig, load_config
from kit.errors import KitError
from kit.evaluation.statistics import Z_95, Estimate

FAILING = 0.2
"""Share of completions that a reward fails on, above which the verdict is about the reward. run.max_failure_share's default."""
TRUNCATED = 0.3
"""Share of completions cut at the limit: these earn nothing for answers that they had no room for."""
MALFORMED = 0.5
"""Share of completions whose format keeps a reward from reading them."""
INFORMATIVE = 0.25
"""Share of groups with spread below which most of the work of a step is wasted (DAPO, arXiv 2503.14476, drops the others)."""
EASY, HARD = 0.75, 0.25
"""pass@1 above which groups without spread are mostly solved ones, and below which they are mostly failed ones."""
SLOW = 0.5
"""Share of a step's time that is spent on rewards."""
MOST_PROMPTS = 4096


@dataclass(frozen=True)
class Signal:
    """What was measured of N prompts with k completions each; shares and rates with 95 % intervals over prompts."""

    prompts: int
    k: int
    spread: Estimate  # share of groups of `spread_group` whose rewards differ
    truncated: Estimate
    malformed: Estimate
    failures: Estimate
    pass_at_1: Estimate | None  # None: nothing says what is right
    constant: bool  # every reward is the same number
    reward: Estimate
    reward_seconds: float  # a step, as measured
    step_seconds: float  # a step, rewards included
    config: RunConfig
    failure: str | None = None
    rows: int | None = None  # prompts that there are; None: not known
    room: int | None = None  # tokens that the context leaves to a completion; None: not known

    @property
    def group(self) -> int:
        """Completions a prompt in training."""
        return self.config.generation.num_generations

    @property
    def spread_group(self) -> int:
        """Completions of the groups that `spread` is about: training's, where as many were sampled."""
        return min(self.k, self.group)


@dataclass(frozen=True)
class Verdict:
    """`verdict` is one of will learn, too easy, too hard, no signal, truncated, wrong format, reward fails, slow reward,
    sample more, borderline."""

    verdict: str
    because: str
    change: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(signal: Signal) -> Verdict:
    """The verdict, what it rests on, and the one change to make (empty where none is needed)."""
    for decide in (_failing, _truncated, _malformed, _spread):
        found = decide(signal)
        if found is not None:
            return found
    return _learns(signal)


def _failing(signal: Signal) -> Verdict | None:
    reason = f" ({signal.failure})" if signal.failure else ""
    change = f"Mend the reward{reason}; try it with: grpo-kit reward test"
    if signal.failures.low <= FAILING:
        return _unsure(signal, "of completions could not be scored", signal.failures, FAILING, change)
    return Verdict("reward fails", f"{_share(signal.failures)} of completions could not be scored", change)


def _truncated(signal: Signal) -> Verdict | None:
    limit = signal.config.generation.max_completion_tokens
    if signal.truncated.low <= TRUNCATED:
        change = longer_completions(signal.config, signal.room)
        return _unsure(signal, "of completions are cut at the limit", signal.truncated, TRUNCATED, change)
    because = f"{_share(signal.truncated)} of completions are cut at {limit} tokens"
    return Verdict("truncated", because, longer_completions(signal.config, signal.room))


def _malformed(signal: Signal) -> Verdict | None:
    if signal.malformed.low <= MALFORMED or signal.spread.low > INFORMATIVE:
        return None  # where rewards differ within groups, the format is something that is learned
    because = f"{_share(signal.malformed)} of completions do not have the format that the reward reads"
    change = (
        "Say in data.system_prompt which format the answer must have, or choose a reward.preset that reads this one"
    )
    return Verdict("wrong format", because, change)


def _spread(signal: Signal) -> Verdict | None:
    if signal.spread.low > INFORMATIVE:
        return None
    because = f"rewards differ in {_share(signal.spread)} of groups of {signal.spread_group}"
    if signal.k < signal.group:
        because += f", and may differ in more of training's groups of {signal.group}"
        return Verdict("sample more", because, f"--k {signal.group}")
    if signal.spread.high >= INFORMATIVE:
        return _unsure(signal, because, signal.spread, INFORMATIVE, larger_groups(signal.config))
    right = signal.pass_at_1
    if right is not None:
        because += f"; pass@1 is {_share(right)}"
        if right.low > EASY:
            change = "Take harder problems (data.task_params, or another data.source): these are solved already"
            return Verdict("too easy", because, change)
        if right.high < HARD:
            change = (
                "Take easier problems (data.task_params, or another data.source), or a model that solves some of them"
            )
            return Verdict("too hard", because, change)
    if signal.constant:
        known = not math.isnan(signal.reward.value)
        because += f"; every completion got the reward {signal.reward.value:g}" if known else "; none got a reward"
        return Verdict("no signal", because, "Choose a reward that tells completions apart: grpo-kit reward list")
    return Verdict("no signal", because, larger_groups(signal.config))


def larger_groups(config: RunConfig) -> str:
    """Twice the group size as overrides that `load_config` takes, with the batch where it must change; from 16 on words."""
    group, batch = 2 * config.generation.num_generations, config.optimisation.batch_size
    whole = math.lcm(group, config.optimisation.micro_batch_size or 1)
    groups = f"generation.num_generations={group}"
    if group < 32:
        for overrides in ([groups], [groups, f"optimisation.batch_size={whole * math.ceil(batch / whole)}"]):
            if _valid(config, overrides):
                return " ".join(f"-o {one}" for one in overrides)
    return "Mix problems of other difficulty into data.source"


def longer_completions(config: RunConfig, room: int | None) -> str:
    """Twice the completion length as an override, at most the `room` in the context; words where that is no longer."""
    limit = config.generation.max_completion_tokens
    tokens = 2 * limit if room is None else min(2 * limit, room)
    override = f"generation.max_completion_tokens={tokens}"
    if tokens > limit and _valid(config, [override]):
        return f"-o {override}"
    return (
        "Lower data.max_prompt_tokens, ask for shorter answers, or take a model with a longer context: this one is full"
    )


def _valid(config: RunConfig, overrides: list[str]) -> bool:
    try:
        load_config(config, overrides)
    except KitError:
        return False
    return True


def _learns(signal: Signal) -> Verdict:
    because = f"rewards differ in {_share(signal.spread)} of groups of {signal.spread_group}"
    if signal.reward_seconds > SLOW * signal.step_seconds and signal.reward_seconds > 1.0:
        share = signal.reward_seconds / signal.step_seconds
        because += f"; rewards take {signal.reward_seconds:.1f} s a step, {share:.0%} of it"
        change = "Make the reward faster (batch it, cache it, lower its timeout): the run will learn, but waits for it"
        return Verdict("slow reward", because, change)
    return Verdict("will learn", because, "")


def _unsure(signal: Signal, what: str, share: Estimate, threshold: float, change: str) -> Verdict | None:
    """`sample more` where the threshold lies within the interval and the share itself beyond it, or the spread's.

    `borderline`, with `change`, where no more prompts can be sampled.
    """
    decides = threshold == INFORMATIVE
    if not decides and not share.value > threshold:
        return None
    text = what if decides else f"{_share(share)} {what}"
    within = f"{text}: {threshold:.0%} lies within the interval"
    most = MOST_PROMPTS if signal.rows is None else min(signal.rows, MOST_PROMPTS)
    if signal.prompts >= most:
        there = f"all {signal.prompts} training rows" if signal.prompts == signal.rows else f"{signal.prompts} prompts"
        return Verdict("borderline", f"{within}, with {there} sampled", change)
    more = min(most, prompts_needed(signal.prompts, share, threshold))
    return Verdict("sample more", f"{within}, so {signal.prompts} prompts do not decide", f"--prompts {more}")


def prompts_needed(prompts: int, share: Estimate, threshold: float) -> int:
    """Prompts at which an interval of the same spread around `share` would leave the threshold out; 2 to 16 times more."""
    gap = max(abs(share.value - threshold), 1e-9)
    variance = max(share.value * (1 - share.value), 0.25 / max(prompts, 1))
    wanted = math.ceil(Z_95**2 * variance / gap**2)
    return min(MOST_PROMPTS, max(2 * prompts, min(wanted, 16 * prompts)))


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}]"
