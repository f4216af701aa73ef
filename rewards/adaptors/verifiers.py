"""Presets as functions of a rubric of verifiers."""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from rewards.adaptors._failures import FailureLog
from rewards.evaluation import Evaluation
from rewards.preset import Preset
from rewards.protocol import Context
from rewards.samples import completion_text, make_sample

__all__ = ["VerifiersReward", "VerifiersRewards"]

_REMEMBERED = 256  # rollouts whose functions may be called in between one another


class _RolloutEvaluator:
    """Evaluates a preset once per rollout, whichever of its functions asks first."""

    def __init__(self, preset: Preset, seed: int) -> None:
        self.preset = preset
        self.seed = seed
        self._forget()

    def _forget(self) -> None:
        self._failures = FailureLog()
        self._lock = threading.Lock()
        self._known: OrderedDict[Any, tuple[Any, Evaluation]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"preset": self.preset, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def evaluate(self, prompt: Any, completion: Any, answer: Any, columns: dict[str, Any]) -> Evaluation:
        """By the identity of what was passed, which is kept alive, and the text, which a list can change in place."""
        parts = (prompt, completion, answer, columns["info"], columns["task"])
        key = (*map(id, parts), completion_text(completion))
        with self._lock:
            if key in self._known:
                return self._known[key][1]
        evaluation = self.preset.score([make_sample(prompt, completion, answer, columns)], Context(seed=self.seed))
        self._failures.look_at(evaluation)
        with self._lock:
            self._known[key] = (parts, evaluation)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return evaluation


class VerifiersReward:
    """One component of a preset, called by argument name: `prompt`, `completion`, `answer`, `state`, `task`, `info`.

    Returns the native value, unweighted; 0.0 where the component excludes the rollout, and a warning in the log where it
    failed. `info`, a dict or its JSON,
    becomes columns, and so does whatever else the rubric passes.
    """

    def __init__(self, name: str, evaluator: _RolloutEvaluator) -> None:
        self.__name__ = name
        self._evaluator = evaluator

    def __repr__(self) -> str:
        return f"VerifiersReward({self.__name__!r})"

    def __call__(
        self,
        completion: Any = None,
        prompt: Any = None,
        answer: Any = None,
        state: Any = None,
        task: Any = None,
        info: Any = None,
        **given: Any,
    ) -> float:
        columns = {**given, **_columns(info), "answer": answer, "task": task, "info": info, "state": state}
        if task in (None, "", "default") and "task" in _columns(info):
            columns["task"] = _columns(info)["task"]  # "default" is what verifiers says where a row names no task
        return self._evaluator.evaluate(prompt, completion, answer, columns).values[self.__name__][0] or 0.0


class VerifiersRewards(list[VerifiersReward]):
    """What a verifiers `Rubric` takes as `funcs`, with `weights` for it.

    verifiers tells no step, so weights that follow a schedule stay at their start.

    >>> from rewards import load
    >>> rewards = load("gsm8k-hash").verifiers()          # vf.Rubric(funcs=rewards, weights=rewards.weights)
    >>> [reward.__name__ for reward in rewards], rewards.weights
    (['accuracy', 'format'], [1.0, 0.1])
    >>> rewards[0](completion=[{"role": "assistant", "content": "#### 72"}], answer="72", info={})
    1.0
    """

    weights: list[float]

    @classmethod
    def from_preset(cls, preset: Preset, *, seed: int = 0) -> "VerifiersRewards":
        """One function per component, all sharing one evaluation per rollout."""
        evaluator = _RolloutEvaluator(preset, seed)
        rewards = cls(VerifiersReward(name, evaluator) for name in preset.weights)
        rewards.weights = list(preset.weights.values())
        return rewards


def _columns(info: Any) -> dict[str, Any]:
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except (ValueError, RecursionError):
            return {}
    return {str(key): value for key, value in info.items()} if isinstance(info, Mapping) else {}
