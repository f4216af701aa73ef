"""Presets as reward functions of TRL's GRPOTrainer."""

import threading
from collections.abc import Sequence
from typing import Any

from rewards.adaptors.failures import FailureLog
from rewards.evaluation import Evaluation, Scorer
from rewards.protocol import Context
from rewards.samples import build_samples, completion_text, is_column

_LOGGED_CHARS = 200
TOKEN_REWARDS = "token_rewards"  # the column in which trainers look for process rewards
_TOKEN_INPUTS = ("prompt_ids", "logps")  # taken as what they are when a trainer passes them beside the columns


class BatchEvaluator:
    """Evaluates a preset once per batch, whichever of its reward functions asks first.

    The last batch is recognised by its step, its texts, and the identity of its columns, which it keeps alive. Batches are
    not pickled along; a lock makes it safe to share between threads. `strict` says failures in the log, and refuses a first
    batch of which nothing can be scored.
    """

    def __init__(self, preset: Scorer, seed: int, reference_column: str | None, strict: bool = True) -> None:
        self.preset = preset
        self.seed = seed
        self.reference_column = reference_column
        self.strict = strict
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._key: list[Any] = []
        self._alive: list[Any] = []
        self._failures = FailureLog()
        self.last: Evaluation | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("preset", "seed", "reference_column", "strict")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def evaluate(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any, passed: dict[str, Any]
    ) -> Evaluation:
        """Return the batch's evaluation; `passed` are dataset columns and everything else that the trainer passes."""
        columns = {name: value for name, value in passed.items() if is_column(value, len(prompts))}
        extras = {name: value for name, value in passed.items() if name not in columns}
        tokens = {name: columns.pop(name) for name in _TOKEN_INPUTS if name in columns}
        state = extras.get("trainer_state")
        step, total = (int(getattr(state, name, 0) or 0) for name in ("global_step", "max_steps"))
        ctx = Context(seed=self.seed, step=step, total_steps=total, extras=extras)
        texts = [text if isinstance(text, str) else completion_text(text) for text in completions]
        alive = [prompts, completion_ids, *columns.values()]
        key = [ctx.step, list(columns), texts, list(map(id, alive))]
        with self._lock:
            if self.last is None or key != self._key:
                samples = build_samples(
                    prompts, completions, completion_ids, reference_column=self.reference_column, **tokens, **columns
                )
                evaluation = self.preset.score(samples, ctx)
                if self.strict:
                    self._failures.refuse_what_scores_nothing(evaluation, columns)
                    self._failures.look_at(evaluation)
                self.last = evaluation
                self._key, self._alive = key, alive
            return self.last


RIGHT = "answers/right"
"""Metric: share of the completions that the preset's checker calls right."""


class TrlReward:
    """One component of a preset, called the way TRL's GRPOTrainer calls a reward function.

    Returns native values, unweighted: TRL applies `reward_weights`. Process rewards of all components, weighted, are reported
    by the first component's function, in the column `token_rewards`.
    """

    def __init__(self, name: str, evaluator: BatchEvaluator) -> None:
        self.__name__ = name
        self._evaluator = evaluator

    def __repr__(self) -> str:
        return f"TrlReward({self.__name__!r})"

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **passed: Any,
    ) -> list[float | None]:
        """Return native values of this component, one per completion; None excludes."""
        evaluation, name = self._evaluator.evaluate(prompts, completions, completion_ids, passed), self.__name__
        if callable(log_extra := passed.get("log_extra")):
            log_extra(f"{name}/status", list(evaluation.statuses[name]))
            for key in ("extracted", "reason"):
                values = [info.get(key) for info in evaluation.infos[name]]
                if any(value is not None for value in values):
                    # Text that every table format can store: short, and without lone surrogates.
                    texts = [None if value is None else str(value)[:_LOGGED_CHARS] for value in values]
                    log_extra(f"{name}/{key}", [text and text.encode("utf-8", "replace").decode() for text in texts])
            if evaluation.token_rewards is not None and name == next(iter(evaluation.values)):
                log_extra(TOKEN_REWARDS, evaluation.token_rewards)
        if callable(log_metric := passed.get("log_metric")):
            for status, share in evaluation.status_shares(name).items():
                log_metric(f"rewards/{name}/status_{status}", share)
                if status == "ok" and name == self._evaluator.preset.checker:
                    log_metric(RIGHT, share)
            log_metric(f"rewards/{name}/zero_spread", evaluation.zero_spread_share(name))
            for label, quantile in (("p50", 0.5), ("p95", 0.95)):
                log_metric(f"rewards/{name}/latency_{label}_ms", evaluation.latency_ms(name, quantile))
        return list(evaluation.values[name])


class TrlRewards(list[TrlReward]):
    """Reward functions for TRL's `reward_funcs`, with `reward_weights` for its GRPOConfig.

    What a component failed to score is logged as a warning, once for each reason. Where a component could not score a
    single completion of the first batch (no reference column, a function that raises), `RewardsError` says why, since
    TRL would train on zeros. With `strict=False` neither happens: for callers that look at `last_evaluation`.

    >>> from rewards import load
    >>> rewards = load("gsm8k-hash").trl()
    >>> [reward.__name__ for reward in rewards], rewards.reward_weights
    (['accuracy', 'format'], [1.0, 0.1])
    >>> rewards[0](prompts=["6 x 12?"], completions=["6 x 12 = 72\\n#### 72"], completion_ids=[[1, 2]], answer=["72"])
    [1.0]
    """

    reward_weights: list[float]

    @classmethod
    def from_preset(
        cls, preset: Scorer, *, seed: int = 0, reference_column: str | None = None, strict: bool = True
    ) -> "TrlRewards":
        """Return one reward function per component; all share one evaluation per batch."""
        evaluator = BatchEvaluator(preset, seed, reference_column, strict)
        rewards = cls(TrlReward(name, evaluator) for name in preset.weights)
        rewards.reward_weights = list(preset.weights.values())
        return rewards

    @property
    def last_evaluation(self) -> Evaluation | None:
        """The latest batch's evaluation, for instance to stop a run on its `failure_share`."""
        return self[0]._evaluator.last if self else None
