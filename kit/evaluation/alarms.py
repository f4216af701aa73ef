"""Alerts of a run in plain words: pure functions over metric lines and evaluations. No torch.

`AlertMonitor` takes the lines of metrics.jsonl one by one and gives each alert once an episode: when its condition begins to
hold, and again only after it has not held for `QUIET` lines. Nothing but the lines decides, so feeding it the file
again gives the same alerts. `conditions` has them.

`reward_hacking` compares evaluations: see there.

`decide` says what follows from the held-out scores so far: keep this checkpoint, go on, or end. A
function of what lies in the run directory, so that a resumed run decides as the uninterrupted one would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from kit.config import EvaluationConfig
from kit.evaluation.results import Mark, Result, Standing, scores_by_problem, standing, value_of
from kit.evaluation.statistics import drop_p, rise_p

Line = Mapping[str, Any]
Series = Mapping[str, Sequence[float]]
QUIET = 10
"""Lines without the condition after which an episode is over."""
LEVEL = 0.05
KEYS = {
    "zero_spread": ("groups/zero_spread", "frac_reward_zero_std"),
    "truncated": ("completions/clipped_ratio",),
    "length": ("completions/mean_length",),
    "entropy": ("entropy",),
    "kl": ("kl", "kl/k3", "kl/k1", "kl/k2", "kl/abs"),
    "reward": ("reward",),
    "right": ("answers/right",),
}
"""What a quantity is called in metrics.jsonl; the first name found in a line counts."""
CONDITIONS = (
    "zero_spread", "truncated", "length_collapse", "length_explosion", "entropy_collapse", "kl_spike", "plateau",
    "gradient_overflow",
)  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """A finding that a person should look at. `severity` is info, warning or error."""

    step: int
    name: str
    message: str
    severity: str = "warning"


class AlertMonitor:
    """Takes metric lines in their order and says what has begun to look wrong."""

    def __init__(self) -> None:
        self.series: dict[str, list[float]] = {name: [] for name in (*KEYS, "overflow")}
        self._quiet: dict[str, int] = {}  # lines since the condition last held; absent outside of an episode

    def see(self, line: Line) -> list[Alert]:
        """Takes in one line, and returns the alerts that begin with it."""
        self.take(line)
        holding = conditions(self.series)
        alerts = [
            Alert(int(line.get("step") or 0), name, text) for name, text in holding.items() if name not in self._quiet
        ]
        silent = {name: lines + 1 for name, lines in self._quiet.items() if name not in holding}
        self._quiet = {name: lines for name, lines in silent.items() if lines < QUIET} | dict.fromkeys(holding, 0)
        return alerts

    def take(self, line: Line) -> None:
        """Takes in one line without looking at the conditions."""
        for name, keys in KEYS.items():
            value = next((number for key in keys if (number := finite(line.get(key))) is not None), None)
            if value is not None:
                self.series[name].append(value)
        if "grad_norm" in line:
            self.series["overflow"].append(float(finite(line["grad_norm"]) is None))

    def holding(self) -> set[str]:
        """The names of the conditions that hold at the last line."""
        return set(conditions(self.series))


def finite(value: Any) -> float | None:
    """The number, or None for what is none: NaN and infinities stand as null in metrics.jsonl."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def conditions(series: Series) -> dict[str, str]:
    """Returns what looks wrong at the end of the series, by name, with what it means and what to do."""
    texts = {}
    flat, cut, overflow = (series[name][-10:] for name in ("zero_spread", "truncated", "overflow"))
    if len(flat) >= 10 and fmean(flat) >= 0.9:
        texts["zero_spread"] = (
            f"{fmean(flat):.0%} of the groups of the last 10 steps got one and the same reward for every completion; they "
            "teach nothing. The problems are too easy or too hard by now, or the reward cannot tell completions apart: mix in "
            "other problems, or look at completions/ for what is rewarded."
        )
    if len(cut) >= 10 and fmean(cut) >= 0.3:
        texts["truncated"] = (
            f"{fmean(cut):.0%} of the completions of the last 10 steps were cut at the length limit, most often before their "
            "answer. Raise generation.max_completion_tokens, or reward shorter completions."
        )
    lengths = series["length"]
    recent = fmean(lengths[-10:]) if lengths else 0.0
    before = fmean(lengths[-30:-10]) if len(lengths) >= 20 else None
    sudden = before is not None and recent < 0.5 * before
    if sudden or (len(lengths) >= 30 and recent < 0.25 * fmean(lengths[:10])):
        start = before if sudden else fmean(lengths[:10])
        texts["length_collapse"] = (
            f"Completions have collapsed from {start:.0f} to {recent:.0f} tokens. Often the reward can be had without the work: "
            "read some of completions/, and see whether the reward pays for short or empty answers."
        )
    if before is not None and recent > 2 * before:
        texts["length_explosion"] = (
            f"Completions have grown from {before:.0f} to {recent:.0f} tokens within a few steps. Read some of completions/: "
            "longer reasoning is fine, repetition is not. A lower learning rate or a reward that counts length helps."
        )
    entropy = series["entropy"]
    if len(entropy) >= 15 and fmean(entropy[-10:]) < min(0.03, 0.1 * fmean(entropy[:5])):
        texts["entropy_collapse"] = (
            f"Entropy has fallen from {fmean(entropy[:5]):.2g} to {fmean(entropy[-10:]):.2g} nats per token: completions of a "
            "group are nearly copies of each other, and little more can be learned. Lower the learning rate, raise "
            "objective.clip.eps_high or add a KL or entropy term."
        )
    kl, earlier = series["kl"], series["kl"][-21:-1]
    if len(earlier) >= 10 and kl[-1] > max(0.1, 3 * max(earlier)):
        texts["kl_spike"] = (
            f"The KL divergence to the reference policy jumped to {kl[-1]:.2g} nats per token, from at most {max(earlier):.2g} "
            "in the steps before. Lower the learning rate or optimisation.max_grad_norm if it does not come back by itself."
        )
    rewards, right = series["reward"], series["right"][-10:]
    if len(rewards) >= 20 and len(right) >= 10 and fmean(right) < 0.1:
        first, last = fmean(rewards[:5]), fmean(rewards[-10:])
        if last - first >= abs(last) / 3 and rise_p(rewards) <= LEVEL < rise_p(series["right"]):
            texts["plateau"] = (
                f"The reward rises, from {first:.2f} to {last:.2f}, and right answers do not: {fmean(right):.0%} of the last 10 "
                "steps. The policy collects what the reward pays beside right answers. Pay less for parts of an "
                "answer, or let the prompt show what is missing."
            )
    if sum(overflow) >= 3:
        texts["gradient_overflow"] = (
            f"The gradient was infinite or not a number in {sum(overflow):.0f} of the last {len(overflow)} steps; such steps "
            "teach nothing. Use model.dtype: bfloat16 or float32 in place of float16, or lower the learning rate."
        )
    return texts


@dataclass(frozen=True)
class Hacking:
    """Training reward up, held-out score down: the best evaluation, the present one, and the two p-values."""

    best: Mark
    now: Mark
    drop_p: float
    rise_p: float


def reward_hacking(results: Sequence[Result], lines: Sequence[Line], key: str) -> Hacking | None:
    """Whether the training reward rises while the held-out score falls, as of the last of `results`; None if not.

    It holds when all of this does:
      1. The score is below the best of the evaluations before it, by a one-sided paired randomisation test over problems at
         the level 0.05 / (number of evaluations before it). The division pays for the best having been picked among them.
      2. So it was at the evaluation before this one, against the best until then: one unlucky sample is no alarm.
      3. The training reward has risen since the step of the best evaluation, by a one-sided Mann-Kendall test at 0.05.

    `results` are evaluations in the order of their steps, `lines` metric lines; those from the step of the last evaluation
    on are ignored, as they are not there yet when it is made. How often it is wrong stands in docs/evaluation.md.
    """
    scored = [result for result in results if value_of(result, key) is not None]
    if len(scored) < 3 or _drop(scored[:-1], key) is None:
        return None
    drop = _drop(scored, key)
    if drop is None:
        return None
    best, now, p = drop
    rewards = [
        reward
        for line in lines
        if best.step < int(line.get("step") or 0) < now.step and (reward := finite(line.get("reward"))) is not None
    ]
    rise = rise_p(rewards)
    return Hacking(best, now, p, rise) if rise <= LEVEL else None


def _drop(results: Sequence[Result], key: str) -> tuple[Mark, Mark, float] | None:
    """The best earlier evaluation, the last one, and the p-value, if the last one is significantly below."""
    earlier, best = results[:-1], standing(results[:-1], key).best
    now = standing(results[-1:], key).last
    if best is None or now is None or now.value >= best.value:
        return None
    then = next(result for result in earlier if result["step"] == best.step)
    scores_then, scores_now = scores_by_problem(then, key), scores_by_problem(results[-1], key)
    shared = [problem for problem in scores_then if problem in scores_now]
    p = drop_p([scores_then[problem] for problem in shared], [scores_now[problem] for problem in shared])
    return (best, now, p) if p <= LEVEL / len(earlier) else None


# --- what follows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """The decision after the last of some evaluations, by the score `key`.

    `new_best`: it is the best since training began. `cause`: why training should end now, if it should. `hacking` is the
    alarm as long as it holds, `hacking_begins` says that it did not at the evaluation before.
    """

    key: str
    standing: Standing
    new_best: bool = False
    cause: Literal["patience", "reward_hacking"] | None = None
    hacking: Hacking | None = None
    hacking_begins: bool = False

    @property
    def score(self) -> str:
        """The score's name in words."""
        return self.key.replace("_", " ")

    def reason(self) -> str | None:
        """Returns why training ends before its last step; None where it does not."""
        if self.cause == "reward_hacking":
            return f"reward hacking: {self._fall()}, while the training reward rose"
        best, last = self.standing.best, self.standing.last
        if self.cause is None or best is None or last is None:
            return None
        return (
            f"held-out {self.score} has not been better than the {best.value:.3f} of step {best.step} for {self.standing.waited} "
            f"evaluations (evaluation.patience)"
        )

    def alert(self) -> Alert | None:
        """The alarm in plain words, if it has begun with this evaluation."""
        if self.hacking is None or not self.hacking_begins:
            return None
        text = (
            f"Reward hacking? {self._fall()}, while the training reward rose. The policy earns reward in a way that does not "
            "solve problems: read the newest completions, mend the reward, and go back to the best checkpoint."
        )
        return Alert(self.hacking.now.step, "reward_hacking", text, "error" if self.cause else "warning")

    def _fall(self) -> str:
        assert self.hacking is not None
        best, now = self.hacking.best, self.hacking.now
        since = f"step {best.step}" if best.step else "before training"
        return f"held-out {self.score} fell from {best.value:.3f} ({since}) to {now.value:.3f} (step {now.step})"


def decide(results: Sequence[Result], lines: Sequence[Line], config: EvaluationConfig, key: str) -> Decision:
    """Decides what follows from `results`, evaluations in the order of their steps, and the metric lines of the steps before."""
    now = standing(results, key)
    hacking = reward_hacking(results, lines, key) if config.alarm != "off" else None
    begins = hacking is not None and reward_hacking(results[:-1], lines, key) is None
    waited = config.patience is not None and now.waited >= config.patience
    return Decision(
        key=key,
        standing=now,
        new_best=now.best_trained is not None and now.best_trained == now.last,
        cause="reward_hacking" if hacking is not None and config.alarm == "stop" else "patience" if waited else None,
        hacking=hacking,
        hacking_begins=begins,
    )
