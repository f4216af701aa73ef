"""Presets as the custom reward function of verl."""

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.adaptors._failures import FailureLog
from rewards.adaptors.easyr1 import score_dicts
from rewards.evaluation import Evaluation
from rewards.preset import Preset
from rewards.protocol import Context
from rewards.samples import make_sample, same

__all__ = ["VerlReward"]


class VerlReward:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`, as verl's reward managers call it.

    `extra_info`, when it is a dict, becomes columns, and its `prompt` or `question` the prompt. The answer is a dict with
    `score`, the weighted sum, and each component's native value under its name; or the sum alone, with
    `as_dict=False`. The batch manager's plural arguments give a list. verl tells no step, so weights that follow a
    schedule stay at their start. What a component failed to score is logged as a warning; statuses and reasons of a batch
    are in `last_evaluation`.

    >>> from rewards import load
    >>> compute_score = load("gsm8k-hash").verl()
    >>> compute_score("openai/gsm8k", "#### 72", "72", extra_info={"split": "train"})
    {'score': 1.1, 'accuracy': 1.0, 'format': 1.0}
    """

    def __init__(self, preset: Preset, *, seed: int = 0, as_dict: bool = True) -> None:
        self.preset = preset
        self.seed = seed
        self.as_dict = as_dict
        self.last_evaluation: Evaluation | None = None
        self._failures = FailureLog()
        self.__name__ = "compute_score"

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
        """One score, or a list of them for plural arguments. `options` (verl's `reward_kwargs`) become columns."""
        if solution_strs is None:
            return self._scores([(data_source, solution_str, ground_truth, extra_info)], options)[0]
        nothing = [None] * len(solution_strs)
        columns = (column if column is not None else nothing for column in (data_sources, ground_truths, extra_infos))
        sources, truths, infos = columns
        return self._scores(list(zip(sources, solution_strs, truths, infos, strict=True)), options)

    def _scores(self, rows: Sequence[tuple[Any, Any, Any, Any]], options: Mapping[str, Any]) -> list[Any]:
        samples = []
        group, before = -1, object()
        for index, (source, solution, truth, extra) in enumerate(rows):
            info = {str(key): value for key, value in extra.items()} if isinstance(extra, Mapping) else {}
            prompt = info.get("prompt", info.get("question"))
            prompt = getattr(prompt, "tolist", lambda prompt=prompt: prompt)()  # parquet gives messages as an array
            asked = truth if prompt is None else prompt
            group += not same(asked, before)
            before = asked
            columns = {**options, **info, "data_source": source, "ground_truth": truth, "extra_info": extra}
            samples.append(make_sample(prompt, solution, truth, columns, index, group))
        self.last_evaluation = self.preset.score(samples, Context(seed=self.seed))
        self._failures.look_at(self.last_evaluation)
        scores = score_dicts(self.last_evaluation, "score")
        return list(scores) if self.as_dict else [score["score"] for score in scores]
