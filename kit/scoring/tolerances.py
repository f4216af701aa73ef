"""How far two ways of scoring may be apart by rounding."""

from __future__ import annotations

from typing import Any

import torch

SCORE_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}


HALF_TOLERANCE = 0.15
"""Nats, mean over tokens. Half precision rounds padded and unpadded rows apart by some hundredths; a scorer that
misreads padding is wrong by whole nats."""


def has_dropout(model: Any) -> bool:
    """Whether two passes over the same text may differ in training mode."""
    config = getattr(model, "config", None)
    names = ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout")
    of_text = getattr(config, "get_text_config", None)  # a part, where it sees pictures
    text = of_text() if of_text is not None else config
    rates = (getattr(one, name, 0) for one in (config, text) for name in names)
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        return True
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
