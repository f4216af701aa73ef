"""Weights: `TokenBatch` -> per-token multiplier (B, T) of the surrogate loss.

Weights of one objective multiply each other. The objective detaches them, so they carry no gradient of their own, and
they leave the regularizers alone.
"""

from __future__ import annotations

from kit.objective.registry import HookRegistry

weights = HookRegistry("weight")
