"""Presets as reward functions of TRL's GRPOTrainer."""

import threading
from collections.abc import Sequence
from typing import Any

from rewards.adaptors.failures import FailureLog
from rewards.evaluation import Evaluation, Scorer
from rewards.protocol import Context
from rewards.samples import build_samples, completion_text, is_column

_LOGGED_CHARS = 200
TOKEN_REWARDS = "token_rewards"  # the logged column from which trainers read process rewards
_TOKEN_INPUTS = ("prompt_ids", "logps")  # arguments of `build_samples` that are not dataset columns


class BatchEvaluator:
    """Evaluates a preset once per batch, for all its reward functions.

    A call belongs to the last batch if step, texts and the identities of its columns are equal; the evaluator keeps the
    columns alive. Pickles contain no batch. A lock makes it thread-safe. `strict` logs failures, and raises `RewardsError` if
    a component cannot score any completion of the first batch.
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
        """Return the evaluation of the batch; `passed` contains the dataset columns and other arguments of the trainer."""
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
                    self._failures.raise_if_broken(evaluation, columns)
                    self._failures.log_failures(evaluation)
                self.last = evaluation
                self._key, self._alive = key, alive
            return self.last


RIGHT = "answers/right"
"""Metric: share of the completions that the preset's checker accepts."""


class TrlReward:
    """One component of a preset as a reward function of TRL's GRPOTrainer.

    It returns native, unweighted values, because TRL applies `reward_weights`. The function of the first component logs the
    weighted process rewards of all components, in the column `token_rewards`.
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
        """Return B native values of this component; None excludes a completion."""
        evaluation, name = self._evaluator.evaluate(prompts, completions, completion_ids, passed), self.__name__
        if callable(log_extra := passed.get("log_extra")):
            log_extra(f"{name}/status", list(evaluation.statuses[name]))
            for key in ("extracted", "reason"):
                values = [info.get(key) for info in evaluation.infos[name]]
                if any(value is not None for value in values):
                    # Short text without lone surrogates, which every table format can store.
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

    A completion that a component fails to score is logged as a warning, once for each reason. If a component cannot score
    any completion of the first batch (no reference column, a function that raises), a call raises `RewardsError`, because
    TRL would train on zeros. `strict=False` turns both off, for callers that read `last_evaluation`.

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
        """Return one reward function per component, which share one evaluation per batch. `seed` is `Context.seed`."""
        evaluator = BatchEvaluator(preset, seed, reference_column, strict)
        rewards = cls(TrlReward(name, evaluator) for name in preset.weights)
        rewards.reward_weights = list(preset.weights.values())
        return rewards

    @property
    def last_evaluation(self) -> Evaluation | None:
        """Evaluation of the last batch, for example to stop a run if `failure_share` is high."""
        return self[0]._evaluator.last if self else None
