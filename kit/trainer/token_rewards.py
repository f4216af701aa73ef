"""Rewards laid out over tokens, for estimators that discount them: `token_returns`, `reinforce_pp`, `gae`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kit.errors import RewardError


def lay_out(
    totals: Tensor, mask: Tensor, completion_ids: Sequence[Sequence[int]], reported: Sequence[Sequence[float]] | None
) -> Tensor:
    """(B, T): each completion's reward at its last live token, plus what reward functions reported for single tokens.

    Args:
        totals: (B,) weighted reward of each completion; NaN counts as 0.
        mask: (B, T) bool, live tokens.
        completion_ids: the completions, unpadded.
        reported: a number for each token of each completion, from `log_extra("token_rewards", ...)`; or None.

    Raises `RewardError` when there is not one finite number for each token of each completion.
    """
    laid = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if reported is not None and len(reported) != len(completion_ids):
        raise RewardError(
            f"token_rewards holds {len(reported)} lists for {len(completion_ids)} completions. Report one list for each "
            "completion, and from one reward function only: lists of several are not added up."
        )
    for row, values in enumerate(reported or ()):
        length = len(completion_ids[row])
        if not isinstance(values, Sequence) or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            raise RewardError(
                f"token_rewards of completion {row} is {values!r:.80}, expected a list of finite numbers, one for each of "
                "its completion_ids."
            )
        if len(values) != length:
            raise RewardError(
                f"token_rewards of completion {row} holds {len(values)} numbers, but the completion has {length} tokens. "
                "Report one number for each of completion_ids, 0.0 where there is none."
            )
        laid[row, :length] = torch.tensor(values, dtype=torch.float32, device=mask.device)
    laid = laid * mask
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=1)  # (B,)
    ends = mask.any(dim=1).nonzero().squeeze(1)
    laid[ends, last[ends]] += totals[ends].nan_to_num(nan=0.0).float()
    return laid
