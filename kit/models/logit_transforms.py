"""Models whose logits are transformed in a way that the fused head does not compute."""

from __future__ import annotations

from typing import Any

from kit.errors import ModelError

# config field -> a model that has it; TRL's fused head does not apply these, so its log-probabilities would be wrong
UNSUPPORTED = {"logits_soft_cap": "RecurrentGemma", "output_logit_soft_cap": "xLSTM"}


def check_logit_transforms(config: Any) -> None:
    """Refuse a model whose logits pass through a transform that TRL's fused head leaves out.

    Args:
        config: a transformers config; of a multimodal one the text part is looked at.

    Raises:
        ModelError: the config sets one of the fields in `UNSUPPORTED`.
    """
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field, family in UNSUPPORTED.items():
        value = getattr(text_config, field, None)
        if value is not None:
            raise ModelError(
                f"the model config sets {field}={value} (as {family} does), a logit transform that the fused LM head "
                "does not apply: its log-probabilities would be wrong. Choose a model without it."
            )
