"""What follows from the held-out scores so far: keep this checkpoint, go on, end, or go back to the best.

A function of what lies in the run directory, so that a resumed run decides as the uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kit.config import EvaluationConfig
from kit.evaluation.alarms import Alert, Hacking, Line, reward_hacking
from kit.evaluation.selection import Result, Standing, standing


@dataclass(frozen=True)
class Decision:
    """After the last of some evaluations, by the score `key`.

    `new_best`: it is the best since training began. `cause`: why training should end now, if it should. `hacking` is the
    alarm as long as it holds, `hacking_begins` says that it did not at the evaluation before.
    """

    key: str
    standing: Standing
    new_best: bool = False
    cause: Literal["patience", "reward_hacking"] | None = None
    hacking: Hacking | None = None
    hacking_begins: bool = False
    rollback: bool = False

    @property
    def score(self) -> str:
        """The score's name in words."""
        return self.key.replace("_", " ")

    def reason(self) -> str | None:
        """Why training ends before its last step, in plain words; None where it does not."""
        if self.cause == "reward_hacking":
            return f"reward hacking: {self._fall()}, while the training reward rose"
        best, last = self.standing.counted, self.standing.last
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
    """What follows from `results`, evaluations in the order of their steps, and the metric lines of the steps before."""
    now = standing(results, key, config.min_delta)
    hacking = reward_hacking(results, lines, key) if config.alarm != "off" else None
    begins = hacking is not None and reward_hacking(results[:-1], lines, key) is None
    acts = hacking is not None and config.alarm in ("stop", "rollback")
    waited = config.patience is not None and now.waited >= config.patience
    return Decision(
        key=key,
        standing=now,
        new_best=now.best_trained is not None and now.best_trained == now.last,
        cause="reward_hacking" if acts else "patience" if waited else None,
        hacking=hacking,
        hacking_begins=begins,
        rollback=acts and config.alarm == "rollback",
    )
