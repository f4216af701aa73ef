"""Clips: `TokenBatch` -> per-token surrogate loss (B, T), to be minimised.

With r = exp(logp - old) the token ratio, s its geometric mean over a completion, and A the advantage:

    file                clips
    token_clip.py       ppo_clip, two_sided, dual_clip, cispo, sapo, dppo, reinforce
    sequence_clip.py    gspo, gspo_token, luspo, gmpo, vespo
    covariance_clip.py  clip_cov, kl_cov

A clip may carry `function.clipped(batch) -> {"low": bool, "high": bool, ...}`, each (B, T), or (B, 1) when whole
completions are clipped; the objective logs the fractions as `clip_fraction/low`, `/high`, ..., and `/region` for any of
them. It may also carry `function.metrics(batch) -> {name: (B, T), (B, 1) or ()}`, logged as masked means.
"""

from __future__ import annotations

import kit.objective.covariance_clip  # importing a module files its clips
import kit.objective.sequence_clip
import kit.objective.token_clip  # noqa: F401
from kit.objective.surrogate import ClipFunction, clips

__all__ = ["ClipFunction", "clips"]
