"""Alerts of a run, computed from metric lines and evaluations without torch.

`AlertMonitor` reads the lines of metrics.jsonl in order and returns each alert once per episode: when its condition begins to
hold, and again only after it has not held for `QUIET` lines. The alerts depend on the lines alone. `conditions` defines them.

`reward_hacking` compares evaluations.

`decide` decides from the held-out scores so far whether to keep this checkpoint, and whether to continue. It depends on the
run directory alone, so that a resumed run decides like an uninterrupted one.
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
"""Lines without the condition after which an episode ends."""
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
"""Names of a quantity in metrics.jsonl. The first one in a line is used."""
CONDITIONS = (
    "zero_spread", "truncated", "length_collapse", "length_explosion", "entropy_collapse", "kl_spike", "plateau",
    "gradient_overflow",
)  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """A warning about a run. `severity` is info, warning or error."""

    step: int
    name: str
    message: str
    severity: str = "warning"


class AlertMonitor:
    """Reads metric lines in order and returns alerts when their conditions begin to hold."""

    def __init__(self) -> None:
        self.series: dict[str, list[float]] = {name: [] for name in (*KEYS, "overflow")}
        self._quiet: dict[str, int] = {}  # lines since the condition last held, during an episode

    def see(self, line: Line) -> list[Alert]:
        """Read one line and return the alerts that begin with it."""
        self.take(line)
        holding = conditions(self.series)
        alerts = [
            Alert(int(line.get("step") or 0), name, text) for name, text in holding.items() if name not in self._quiet
        ]
        silent = {name: lines + 1 for name, lines in self._quiet.items() if name not in holding}
        self._quiet = {name: lines for name, lines in silent.items() if lines < QUIET} | dict.fromkeys(holding, 0)
        return alerts

    def take(self, line: Line) -> None:
        """Read one line without checking the conditions."""
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
    """The number, or None if it is not finite. metrics.jsonl has null for NaN and infinities."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def conditions(series: Series) -> dict[str, str]:
    """The alerts that hold at the end of the series: by name, a text with the meaning and a remedy."""
    texts = {}
    flat, cut, overflow = (series[name][-10:] for name in ("zero_spread", "truncated", "overflow"))
    if len(flat) >= 10 and fmean(flat) >= 0.9:
        texts["zero_spread"] = (
            f"In {fmean(flat):.0%} of the groups of the last 10 steps all completions got the same reward, so "
            "nothing is learned from them. The problems are now too easy or too hard, or the reward does not distinguish "
            "completions: add other problems, or read completions/ to see what is rewarded."
        )
    if len(cut) >= 10 and fmean(cut) >= 0.3:
        texts["truncated"] = (
            f"{fmean(cut):.0%} of the completions of the last 10 steps were cut at the length limit, usually before their "
            "answer. Raise generation.max_completion_tokens, or reward shorter completions."
        )
    lengths = series["length"]
    recent = fmean(lengths[-10:]) if lengths else 0.0
    earlier_mean = fmean(lengths[-30:-10]) if len(lengths) >= 20 else None
    sudden = earlier_mean is not None and recent < 0.5 * earlier_mean
    if sudden or (len(lengths) >= 30 and recent < 0.25 * fmean(lengths[:10])):
        start = earlier_mean if sudden else fmean(lengths[:10])
        texts["length_collapse"] = (
            f"Completions have become much shorter: {recent:.0f} instead of {start:.0f} tokens. Often the reward pays for short "
            "or empty answers: read some of completions/ to see whether it does."
        )
    if earlier_mean is not None and recent > 2 * earlier_mean:
        texts["length_explosion"] = (
            f"Completions have grown from {earlier_mean:.0f} to {recent:.0f} tokens within a few steps. Read some of "
            "completions/: longer reasoning is fine, repetition is not. Lower the learning rate, or reward short answers."
        )
    entropy = series["entropy"]
    if len(entropy) >= 15 and fmean(entropy[-10:]) < min(0.03, 0.1 * fmean(entropy[:5])):
        texts["entropy_collapse"] = (
            f"Entropy has fallen from {fmean(entropy[:5]):.2g} to {fmean(entropy[-10:]):.2g} nats per token: completions of a "
            "group are nearly identical, and little more can be learned. Lower the learning rate, raise "
            "objective.clip.eps_high or add a KL or entropy term."
        )
    kl, earlier = series["kl"], series["kl"][-21:-1]
    if len(earlier) >= 10 and kl[-1] > max(0.1, 3 * max(earlier)):
        texts["kl_spike"] = (
            f"The KL divergence to the reference policy jumped to {kl[-1]:.2g} nats per token, from at most {max(earlier):.2g} "
            "in earlier steps. If it stays high, lower the learning rate or optimisation.max_grad_norm."
        )
    rewards, right = series["reward"], series["right"][-10:]
    if len(rewards) >= 20 and len(right) >= 10 and fmean(right) < 0.1:
        first, last = fmean(rewards[:5]), fmean(rewards[-10:])
        if last - first >= abs(last) / 3 and rise_p(rewards) <= LEVEL < rise_p(series["right"]):
            texts["plateau"] = (
                f"The reward rises from {first:.2f} to {last:.2f}, but right answers do not: {fmean(right):.0%} in the last "
                "10 steps. The model earns the reward for other things than right answers. Pay less for parts of an "
                "answer, or describe the missing part in the prompt."
            )
    if sum(overflow) >= 3:
        texts["gradient_overflow"] = (
            f"The gradient was infinite or not a number in {sum(overflow):.0f} of the last {len(overflow)} steps. Nothing "
            "is learned from such a step. Lower the learning rate, or use model.dtype: bfloat16 (not on a T4) or float32."
        )
    return texts


@dataclass(frozen=True)
class Hacking:
    """A rising training reward with a falling held-out score: the best and the current evaluation, and both p-values."""

    best: Mark
    now: Mark
    drop_p: float
    rise_p: float


def reward_hacking(results: Sequence[Result], lines: Sequence[Line], key: str) -> Hacking | None:
    """Detect a rising training reward with a falling held-out score at the last of `results`; None if there is none.

    All of these must hold:
      1. The score is below the best earlier one, by a one-sided paired randomisation test over problems at the level
         0.05 / (number of earlier evaluations). The division corrects for choosing the best of them.
      2. The same held at the previous evaluation with the best one until then, so that one unlucky sample is no alarm.
      3. The training reward has risen since the step of the best evaluation, by a one-sided Mann-Kendall test at 0.05.

    `results` are evaluations in the order of their steps, `lines` metric lines. Lines from the step of the last evaluation on
    are ignored, because they do not exist yet when it runs. docs/evaluation.md has the error rates.
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
    best_result = next(result for result in earlier if result["step"] == best.step)
    best_scores, scores = scores_by_problem(best_result, key), scores_by_problem(results[-1], key)
    shared = [problem for problem in best_scores if problem in scores]
    p = drop_p([best_scores[problem] for problem in shared], [scores[problem] for problem in shared])
    return (best, now, p) if p <= LEVEL / len(earlier) else None


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """The decision after the last evaluation, by the score `key`.

    `new_best` says that it is the best one since training began, `cause` why training should end now. `hacking` is the alarm
    while it holds; `hacking_begins` says that it did not hold at the previous evaluation.
    """

    key: str
    standing: Standing
    new_best: bool = False
    cause: Literal["patience", "reward_hacking"] | None = None
    hacking: Hacking | None = None
    hacking_begins: bool = False

    @property
    def score(self) -> str:
        """The name of the score with spaces."""
        return self.key.replace("_", " ")

    def reason(self) -> str | None:
        """Why training ends before its last step, or None if it does not."""
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
        """The alert, if the alarm begins with this evaluation."""
        if self.hacking is None or not self.hacking_begins:
            return None
        text = (
            f"Reward hacking? {self._fall()}, while the training reward rose. The model earns reward without solving the "
            "problems: read the newest completions, correct the reward, and return to the best checkpoint."
        )
        return Alert(self.hacking.now.step, "reward_hacking", text, "error" if self.cause else "warning")

    def _fall(self) -> str:
        assert self.hacking is not None
        best, now = self.hacking.best, self.hacking.now
        since = f"step {best.step}" if best.step else "before training"
        return f"held-out {self.score} fell from {best.value:.3f} ({since}) to {now.value:.3f} (step {now.step})"


def decide(results: Sequence[Result], lines: Sequence[Line], config: EvaluationConfig, key: str) -> Decision:
    """Decide from `results`, evaluations in the order of their steps, and the metric lines of earlier steps."""
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
