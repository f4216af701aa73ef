"""Presets as the reward functions of EasyR1 and verl."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rewards.adaptors.failures import FailureLog
from rewards.evaluation import Evaluation, Scorer
from rewards.protocol import Context, Sample
from rewards.samples import make_sample, same

_NOT_COLUMNS = frozenset({"response", "response_length", "prompt"})


class _Reward:
    """Base of both adaptors: scores rows of (prompt, completion, reference, columns, number of tokens)."""

    total: ClassVar[str]
    """Key of the weighted sum in the scores."""

    def __init__(self, preset: Scorer, *, seed: int = 0) -> None:
        self.preset = preset
        self.seed = seed
        self.last_evaluation: Evaluation | None = None
        self._failures = FailureLog()
        self.__name__ = "compute_score"

    def _score(self, rows: Sequence[tuple[Any, Any, Any, Mapping[str, Any], int | None]]) -> list[dict[str, float]]:
        """Return the weighted sum and the native value of each component, for each row.

        Consecutive rows with the same prompt (the same reference, if there is no prompt) form a group.
        """
        samples: list[Sample] = []
        group, previous = -1, object()
        for index, (prompt, completion, reference, columns, n_tokens) in enumerate(rows):
            question = reference if prompt is None else prompt
            group += not same(question, previous)
            previous = question
            samples.append(make_sample(prompt, completion, reference, columns, index, group, n_tokens=n_tokens))
        evaluation = self.last_evaluation = self.preset.score(samples, Context(seed=self.seed))
        self._failures.log_failures(evaluation)
        names = {name: f"{name}_score" if name == self.total else name for name in evaluation.values}
        return [
            {
                self.total: total or 0.0,
                **{names[name]: column[row] or 0.0 for name, column in evaluation.values.items()},
            }
            for row, total in enumerate(evaluation.totals)
        ]


class EasyR1Reward(_Reward):
    """EasyR1's `compute_score(reward_inputs)`, for `worker.reward.reward_type` batch or sequential.

    Each input is a dict with `response` and `ground_truth`, usually `response_length` in tokens; other keys become columns.
    Consecutive inputs with the same prompt (the same ground truth, if there is no prompt) form a group. A score is a dict
    with `overall`, the weighted sum, and the native value of each component under its name (`overall_score` for a component
    named overall). Failures are logged as warnings; `last_evaluation` has the statuses and reasons of the batch.

    >>> from rewards import load
    >>> compute_score = load("gsm8k-hash").easyr1()
    >>> compute_score([{"response": "#### 72", "response_length": 3, "ground_truth": "72"}])
    [{'overall': 1.1, 'accuracy': 1.0, 'format': 1.0}]
    """

    total = "overall"

    def __call__(self, reward_inputs: Any, **options: Any) -> Any:
        """Return a list of scores for a batch, one dict of scores for one dict.

        `options` (EasyR1's `reward_function_kwargs`) become columns of every row.
        """
        if isinstance(reward_inputs, Mapping):
            return self._score([_easyr1_row(reward_inputs, options)])[0]
        return self._score([_easyr1_row(row, options) for row in reward_inputs])


def _easyr1_row(
    row: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, Any, Any, Mapping[str, Any], int | None]:
    columns = {**options, **{str(key): value for key, value in row.items() if key not in _NOT_COLUMNS}}
    try:
        n_tokens = int(row.get("response_length"))  # type: ignore[arg-type]  # None is a TypeError
    except (TypeError, ValueError, OverflowError):
        n_tokens = None
    return row.get("prompt"), row.get("response"), row.get("ground_truth"), columns, n_tokens


class VerlReward(_Reward):
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`, as verl's reward managers call it.

    The keys of a dict `extra_info` become columns, and its `prompt` or `question` the prompt. The score is a dict with
    `score`, the weighted sum, and the native value of each component under its name; with `as_dict=False` the sum alone. The
    plural arguments of the batch manager give a list of scores. Failures are logged as warnings; `last_evaluation` has the
    statuses and reasons of the batch.

    >>> from rewards import load
    >>> compute_score = load("gsm8k-hash").verl()
    >>> compute_score("openai/gsm8k", "#### 72", "72", extra_info={"split": "train"})
    {'score': 1.1, 'accuracy': 1.0, 'format': 1.0}
    """

    total = "score"

    def __init__(self, preset: Scorer, *, seed: int = 0, as_dict: bool = True) -> None:
        super().__init__(preset, seed=seed)
        self.as_dict = as_dict

    def __call__(
        self,
        data_source: Any = None,
        solution_str: Any = None,
        ground_truth: Any = None,
        extra_info: Any = None,
        *,
        data_sources: Sequence[Any] | None = None,
        solution_strs: Sequence[Any] | None = None,
        ground_truths: Sequence[Any] | None = None,
        extra_infos: Sequence[Any] | None = None,
        **options: Any,
    ) -> Any:
        """Return one score, or a list of scores for plural arguments. `options` (verl's `reward_kwargs`) become columns."""
        if solution_strs is None:
            return self._scores([(data_source, solution_str, ground_truth, extra_info)], options)[0]
        empty = [None] * len(solution_strs)
        columns = (column if column is not None else empty for column in (data_sources, ground_truths, extra_infos))
        sources, truths, infos = columns
        return self._scores(list(zip(sources, solution_strs, truths, infos, strict=True)), options)

    def _scores(self, rows: Sequence[tuple[Any, Any, Any, Any]], options: Mapping[str, Any]) -> list[Any]:
        score_rows = []
        for source, solution, truth, extra in rows:
            info = {str(key): value for key, value in extra.items()} if isinstance(extra, Mapping) else {}
            prompt = info.get("prompt", info.get("question"))
            prompt = getattr(prompt, "tolist", lambda prompt=prompt: prompt)()  # Parquet stores messages as an array
            columns = {**options, **info, "data_source": source, "ground_truth": truth, "extra_info": extra}
            score_rows.append((prompt, solution, truth, columns, None))
        scores = self._score(score_rows)
        return list(scores) if self.as_dict else [score[self.total] for score in scores]
