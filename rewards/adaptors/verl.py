"""Presets as the reward functions of EasyR1 and verl."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rewards.adaptors.failures import FailureLog
from rewards.evaluation import Evaluation, Scorer
from rewards.protocol import Context, Sample
from rewards.samples import make_sample, same

_NOT_COLUMNS = frozenset({"response", "response_length", "prompt"})


class _Reward:
    """A preset that scores rows of (prompt, completion, reference, columns, number of tokens)."""

    total: ClassVar[str]
    """Name of the weighted sum among the scores."""

    def __init__(self, preset: Scorer, *, seed: int = 0) -> None:
        self.preset = preset
        self.seed = seed
        self.last_evaluation: Evaluation | None = None
        self._failures = FailureLog()
        self.__name__ = "compute_score"

    def _score(self, rows: Sequence[tuple[Any, Any, Any, Mapping[str, Any], int | None]]) -> list[dict[str, float]]:
        """Return the weighted sum and each component's native value.

        Consecutive rows of one prompt (of one reference, if there is no prompt) form a group.
        """
        samples: list[Sample] = []
        group, before = -1, object()
        for index, (prompt, completion, reference, columns, n_tokens) in enumerate(rows):
            question = reference if prompt is None else prompt
            group += not same(question, before)
            before = question
            samples.append(make_sample(prompt, completion, reference, columns, index, group, n_tokens=n_tokens))
        evaluation = self.last_evaluation = self.preset.score(samples, Context(seed=self.seed))
        self._failures.look_at(evaluation)
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

    Each dict has `response` and `ground_truth`, usually `response_length` in tokens, and perhaps more, which become columns.
    Consecutive ones with the same prompt (or, where none is given, the same ground truth) form a group. The answer has
    `overall`, the weighted sum, and each component's native value under its name, `<name>_score` where a component is itself
    called overall. What a component failed to score is logged as a warning; statuses and reasons of a batch are in
    `last_evaluation`.

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

    `extra_info`, when it is a dict, becomes columns, and its `prompt` or `question` the prompt. The answer is a dict with
    `score`, the weighted sum, and each component's native value under its name; or the sum alone, with `as_dict=False`. The
    batch manager's plural arguments give a list. What a component failed to score is logged as a warning; statuses and
    reasons of a batch are in `last_evaluation`.

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
        nothing = [None] * len(solution_strs)
        columns = (column if column is not None else nothing for column in (data_sources, ground_truths, extra_infos))
        sources, truths, infos = columns
        return self._scores(list(zip(sources, solution_strs, truths, infos, strict=True)), options)

    def _scores(self, rows: Sequence[tuple[Any, Any, Any, Any]], options: Mapping[str, Any]) -> list[Any]:
        complete = []
        for source, solution, truth, extra in rows:
            info = {str(key): value for key, value in extra.items()} if isinstance(extra, Mapping) else {}
            prompt = info.get("prompt", info.get("question"))
            prompt = getattr(prompt, "tolist", lambda prompt=prompt: prompt)()  # parquet gives messages as an array
            columns = {**options, **info, "data_source": source, "ground_truth": truth, "extra_info": extra}
            complete.append((prompt, solution, truth, columns, None))
        scores = self._score(complete)
        return list(scores) if self.as_dict else [score[self.total] for score in scores]
