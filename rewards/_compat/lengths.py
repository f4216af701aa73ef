"""Functions of `rewards.compat` that need no answer: repetition and length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewards._compat.shared import Completions, is_ids
from rewards.components.repetition import repeated_share
from rewards.components.soft_overlong import overlong_penalty
from rewards.errors import RewardsError
from rewards.extract import MAX_CHARS
from rewards.samples import completion_text

__all__ = [
    "RepetitionPenaltyReward",
    "SoftOverlongPunishment",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
]


def get_repetition_penalty_reward(
    ngram_size: int = 3, max_penalty: float = -1.0, language: str = "en"
) -> "RepetitionPenaltyReward":
    r"""max_penalty · (1 - distinct n-grams / n-grams) (2502.03373, C.2); 0.0 where there are fewer than n items.

    Of tokens where `completion_ids` are given (TRL), else of lower-case words (open-r1). The function returned takes
    either as its first argument, too.

    Different from open-r1: tokens are preferred; of `language` only "en" is there, words split at white space: Chinese
    is served by tokens.

    Raises:
        RewardsError: a positive penalty, n-grams of no items, or another language.

    >>> reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    >>> reward(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]]), reward(["so it is so it is"])
    ([0.0, -0.75], [-0.4])
    """
    if max_penalty > 0:
        raise RewardsError(f"max_penalty is {max_penalty}, which would reward repetition. Give 0 or less.")
    if ngram_size < 1:
        raise RewardsError(f"ngram_size is {ngram_size}. Give 1 or more.")
    if language != "en":
        raise RewardsError(f"language is {language!r}. Use 'en', and pass completion_ids for other languages.")
    return RepetitionPenaltyReward(ngram_size, max_penalty)


@dataclass(frozen=True)
class RepetitionPenaltyReward:
    """See `get_repetition_penalty_reward`."""

    ngram_size: int
    max_penalty: float
    high = 0.0
    __name__ = "repetition_penalty_reward"

    @property
    def low(self) -> float:
        return float(self.max_penalty)

    def __call__(
        self,
        completions: Completions | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """The penalty of each completion, 0 or below."""
        if completion_ids is None and completions is not None and all(is_ids(each) for each in completions):
            completion_ids = completions
        if completion_ids is not None:
            return [self._value(ids) for ids in completion_ids]
        return [self._value(completion_text(each)[:MAX_CHARS].lower().split()) for each in completions or ()]

    def _value(self, items: Sequence[Any]) -> float:
        share = repeated_share(items, self.ngram_size)
        return share * self.max_penalty if share else 0.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> "SoftOverlongPunishment":
    r"""0 up to max_completion_len - soft_punish_cache tokens, then falling to -1 at max_completion_len.

    DAPO's soft overlong punishment (2503.14476, eq. 13). Equal to TRL and open-r1.

    >>> get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)(completion_ids=[[1] * 90, [1] * 101])
    [-0.5, -1.0]
    """
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """See `get_soft_overlong_punishment`."""

    max_completion_len: int
    soft_punish_cache: int
    low = -1.0
    high = 0.0
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """The punishment of each completion."""
        return [overlong_penalty(len(ids), self.max_completion_len, self.soft_punish_cache) for ids in completion_ids]
