"""Presets as the reward function of EasyR1."""

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.adaptors._failures import FailureLog
from rewards.evaluation import Evaluation
from rewards.preset import Preset
from rewards.protocol import Context, Sample
from rewards.samples import make_sample, same

__all__ = ["EasyR1Reward"]

_NOT_COLUMNS = frozenset({"response", "response_length", "prompt"})


class EasyR1Reward:
    """Called with a batch of dicts, or with one of them: `worker.reward.reward_type` batch or sequential.

    Each dict has `response` and `ground_truth`, usually `response_length` in tokens, and perhaps more, which become
    columns. Consecutive ones with the same prompt (or, where none is given, the same ground truth) form a group. The
    answer has `overall`, the weighted sum, and each component's native value under its name, `<name>_score` where a
    component is itself called overall. EasyR1 tells no step, so weights that follow a schedule stay at their start. What a
    component failed to score is logged as a warning; statuses and reasons of a batch are in `last_evaluation`.

    >>> from rewards import load
    >>> compute_score = load("gsm8k-hash").easyr1()
    >>> compute_score([{"response": "#### 72", "response_length": 3, "ground_truth": "72"}])
    [{'overall': 1.1, 'accuracy': 1.0, 'format': 1.0}]
    """

    def __init__(self, preset: Preset, *, seed: int = 0) -> None:
        self.preset = preset
        self.seed = seed
        self.last_evaluation: Evaluation | None = None
        self._failures = FailureLog()
        self.__name__ = "compute_score"

    def __call__(self, reward_inputs: Any, **options: Any) -> Any:
        """A list of scores for a batch, one dict of scores for one dict. `options` (EasyR1's `reward_function_kwargs`)
        become columns of every row."""
        if isinstance(reward_inputs, Mapping):
            return self._scores([reward_inputs], options)[0]
        return self._scores(reward_inputs, options)

    def _scores(self, rows: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[dict[str, float]]:
        samples: list[Sample] = []
        group, before = -1, object()
        for index, row in enumerate(rows):
            asked = row.get("prompt", row.get("ground_truth"))
            group += not same(asked, before)
            before = asked
            columns = {**options, **{str(key): value for key, value in row.items() if key not in _NOT_COLUMNS}}
            samples.append(
                make_sample(
                    row.get("prompt"),
                    row.get("response"),
                    row.get("ground_truth"),
                    columns,
                    index,
                    group,
                    n_tokens=_count(row.get("response_length")),
                )
            )
        self.last_evaluation = self.preset.score(samples, Context(seed=self.seed))
        self._failures.look_at(self.last_evaluation)
        return score_dicts(self.last_evaluation, "overall")


def _count(length: Any) -> int | None:
    try:
        return int(length)
    except (TypeError, ValueError, OverflowError):
        return None


def score_dicts(evaluation: Evaluation, total: str) -> list[dict[str, float]]:
    """For each completion: the weighted sum under `total`, and each component's native value."""
    names = {name: f"{name}_score" if name == total else name for name in evaluation.values}
    return [
        {
            total: evaluation.totals[row] or 0.0,
            **{names[name]: column[row] or 0.0 for name, column in evaluation.values.items()},
        }
        for row in range(len(evaluation.totals))
    ]
