"""A race: the trials of a sweep train in turns, and those that are shown to be worse than others are dropped.

A look is a step before the last one, at which all arms that are left have a sampled held-out score (pass@1 and the like) on the
same P problems. The completions are sampled anew at each look and for each arm, so that, given the weights and all that was seen
before, the scores s_i of arm i on the problems are independent of each other and of the past. With differences d = s_j - s_i,
between -1 and 1, and constants λ,

    E_ij = mean over λ of  Π (1 + λ·d)      over all problems of all looks at which both were there, λ in BETS

is the capital of somebody who bets against arm i (Waudby-Smith & Ramdas, arXiv 2010.09686). At a look where arm i is at least as
good as j, that is Σ E[d] <= 0 over the P problems, it does not grow in the mean: Π (1 + λ·E[d]) <= (1 + λ·ΣE[d]/P)^P <= 1, the
mean of products of independent factors and the inequality of the two means. So E_ij is a supermartingale that begins at 1, and
so is the mean over the other arms, E_i = Σ_j E_ij / (K - 1). By Ville's inequality it ever reaches 1/α with probability α at
most, however often one looks. Arm i is dropped when E_i >= 1/α.

The error rate: an arm whose mean score over the held-out problems is, at every look and with the weights that it has there, at
least that of each other arm still in the race, is dropped with probability α at most. A mean over opponents needs no correction
for their number, and as the statement is about one arm, the best, none for the number of arms. It is no statement about other
problems or other seeds of training, and none about the end of training: an arm that learns slowly and would be the best in the
end is rightly found worse now, and dropped.

Everything follows from the evaluations on disk, so that a race that was interrupted decides what it would have decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.errors import KitError, RunError
from kit.evaluation.results import course, metric_key, problem_scores
from kit.runs.files import to_json, write_atomic
from kit.runs.store import RunDir
from kit.studies.arms import run_once
from kit.studies.sweep_config import SweepConfig, base_config, metric_of, trial_config
from kit.studies.sweep_study import RACE, Result, Study

Floats = NDArray[np.float64]
BETS = np.array([0.1, 0.25, 0.5, 0.9])
"""Shares of the capital that are put on each problem; the best one is about E[d] / E[d²], which is not known before."""


class Evidence:
    """Against each arm being the best, from the scores of look after look."""

    def __init__(self, arms: int) -> None:
        self.log_capital = np.zeros((arms, arms, len(BETS)))
        """[i, j]: what bets against i in favour of j have become, in nats."""

    def see(self, arms: Sequence[int], scores: Floats) -> None:
        """Scores (arms, problems), between 0 and 1, of completions that were sampled for this look."""
        gained = np.log1p(BETS * (scores[None, :] - scores[:, None])[..., None])  # (arms, arms, problems, bets)
        self.log_capital[np.ix_(arms, arms)] += gained.sum(axis=2)

    def against(self, arm: int) -> dict[int, float]:
        """E_ij of arm i by its opponent j."""
        capital = np.exp(np.minimum(self.log_capital[arm], 600.0)).mean(axis=-1)
        return {other: float(capital[other]) for other in range(len(capital)) if other != arm}

    def total(self, arm: int) -> float:
        """E_i."""
        return float(np.mean(list(self.against(arm).values())))


def dropped(evidence: Evidence, left: Sequence[int], error: float) -> list[int]:
    """The arms among `left` that are dropped now; the one with the least evidence against it stays in any case."""
    against = {arm: evidence.total(arm) for arm in left}
    safe = min(left, key=lambda arm: against[arm])
    return [arm for arm in left if arm != safe and against[arm] >= 1 / error]


class Race:
    """One race. `run` goes on with what is there. ended: reads how a run that was not stopped ended, by its metric."""

    def __init__(
        self,
        study: Study,
        sweep: SweepConfig,
        root: Path,
        ended: Callable[[RunDir, str], Result],
        tell: Callable[[str], None],
        *,
        quiet: bool,
    ) -> None:
        self.study, self.sweep, self.root, self.ended, self.tell = study, sweep, root, ended, tell
        self.quiet = quiet
        base = base_config(sweep)
        self.steps, self.metric = base.optimisation.steps, metric_of(sweep)
        self.looks = range(base.evaluation.every, self.steps, base.evaluation.every)
        self.arms = study.arms()
        self.record: list[dict[str, Any]] = []

    def run(self) -> None:
        """Trains the arms in turns until one is left or the end is near, then those that are left to the end.

        Raises `KeyboardInterrupt` on Ctrl-C, and `RunError` for scores that cannot be tested.
        """
        left, evidence = [arm.number for arm in self.arms], Evidence(len(self.arms))
        for step in self.looks:
            if len(left) == 1:
                break
            scores = {arm: found for arm in left if (found := self._turn(arm, step)) is not None}
            left = self._look(step, scores, evidence) if len(scores) > 1 else list(scores)
        for arm in left:
            self._to_the_end(arm)

    def _look(self, step: int, scores: dict[int, Floats], evidence: Evidence) -> list[int]:
        """Tests the arms at this step; returns those that go on."""
        sizes = sorted({len(of_arm) for of_arm in scores.values()})
        if len(sizes) > 1:
            raise RunError(
                f"At step {step} the arms have scores of {' and '.join(map(str, sizes))} held-out problems; a race needs "
                "the same ones. Look into eval/ of the runs; remove the sweep and its runs to begin again."
            )
        evidence.see(list(scores), np.stack(list(scores.values())))
        out = dropped(evidence, list(scores), self.sweep.race_error)
        for arm in out:
            rivals = evidence.against(arm)
            rival = self._name(max(rivals, key=lambda other: rivals[other]))
            strength = f"evidence {evidence.total(arm):.3g} of {1 / self.sweep.race_error:g}"
            why = f"dropped at step {step}: worse than {rival}, {strength}"
            self._say(arm, Result("pruned", float(scores[arm].mean()), step, why))
        entry = {
            "step": step,
            "problems": sizes[0],
            "scores": {self._name(arm): float(of_arm.mean()) for arm, of_arm in scores.items()},
            "evidence": {self._name(arm): evidence.total(arm) for arm in scores},
            "dropped": [self._name(arm) for arm in out],
        }
        self.record.append(entry)
        self.tell(f"Step {step} of {self.steps}: {len(scores) - len(out)} of {len(self.arms)} arms are left")
        write_atomic(self.study.folder / RACE, to_json({"error": self.sweep.race_error, "looks": self.record}) + "\n")
        return [arm for arm in scores if arm not in out]

    def _turn(self, arm: int, step: int) -> Floats | None:
        """The scores (problems,) of an arm at a step to which it is trained if it was not; None where it failed."""
        found = self._scores(arm, step)
        if found is None and self._train(arm, step):
            found = self._scores(arm, step)
            if found is None:
                self._say(arm, Result("failed", reason=f"no held-out score '{self.metric}' by problem at step {step}"))
        if found is not None:  # so that the table has a score of an arm that fails later
            self.study.report(self.arms[arm], step, float(found.mean()))
        return found

    def _scores(self, arm: int, step: int) -> Floats | None:
        result = next((one for one in course(self._run(arm)) if one["step"] == step), None)
        if result is None:
            return None
        key = metric_key(self.metric, int(result.get("k") or 1), checked="greedy_accuracy" in result)
        values = problem_scores(result, key)
        if values is None or any(value is None or not 0 <= value <= 1 for value in values):
            return None
        return np.array(values, float)

    def _to_the_end(self, arm: int) -> None:
        finished = self._run(arm).path.is_dir() and self._run(arm).status()["state"] == "finished"
        if finished or self._train(arm, None):
            self._say(arm, self.ended(self._run(arm), self.metric))

    def _train(self, arm: int, until: int | None) -> bool:
        """Trains up to a step, or to the end; False where that failed, now or in an earlier start."""
        if self.arms[arm].told:
            return False
        try:
            config = trial_config(self.sweep, self.arms[arm].values, self._name(arm), self.root)
            error = run_once(config, quiet=self.quiet, abandoned=self.study.folder / "abandoned", until=until)
        except KitError as failed:
            error = failed
        if error is not None:
            self._say(arm, Result("failed", reason=str(error)))
        return error is None

    def _say(self, arm: int, result: Result) -> None:
        """Tells the study how an arm ended, once."""
        if not self.arms[arm].told:
            result = self.study.tell(self.arms[arm], result)
            self.tell(f"    {self._name(arm)}: {result.state}{f': {result.reason}' if result.reason else ''}")

    def _name(self, arm: int) -> str:
        return self.arms[arm].run_id

    def _run(self, arm: int) -> RunDir:
        return RunDir(self.root / self._name(arm))
