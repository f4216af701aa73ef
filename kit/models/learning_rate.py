"""`optimisation.learning_rate: auto`: the published rule for adapters, by the model's width.

    5e-5 * 10 * (2000 / H)^P        H: hidden size; the 10 for adapters only; P: 0.781 for Llama, 0.0775 for Qwen

Sources: "LoRA Without Regret" (Schulman et al., Thinking Machines, 2025, thinkingmachines.ai/blog/lora) for the factor of about
ten over full fine-tuning in supervised and reinforcement learning alike, for ranks from 1 on, and for large batches; the
constants are those of `tinker_cookbook.hyperparam_utils.get_lr`. They were fitted with alpha 32, scaled by alpha / rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.config import RunConfig

BASE, FOR_ADAPTERS, WIDTH = 5e-5, 10.0, 2000
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
"""By the beginning of `model_type`; no other family has a published one, and its width is left out."""
ALPHA = 32.0


def exponent(model_config: Any) -> float:
    """The exponent P of the model's width in this family; 0 where nothing is published."""
    kind = str(getattr(model_config, "model_type", ""))
    return next((value for name, value in EXPONENTS.items() if kind.startswith(name)), 0.0)


def learning_rate(model_config: Any, *, lora: bool) -> float:
    """The rule for a transformers configuration, to two digits."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    rate = BASE * (FOR_ADAPTERS if lora else 1.0) * (WIDTH / text.hidden_size) ** exponent(model_config)
    return float(f"{rate:.2g}")


def with_learning_rate(config: RunConfig, model_config: Any) -> RunConfig:
    """The configuration with the number in place of `auto`."""
    if config.optimisation.learning_rate != "auto":
        return config
    rate = learning_rate(model_config, lora=config.model.lora is not None)
    return config.model_copy(update={"optimisation": config.optimisation.model_copy(update={"learning_rate": rate})})


def notes(unresolved: RunConfig, config: RunConfig, model_config: Any) -> list[str]:
    """Returns the notes of `validate` on the learning rate. unresolved: before `auto` was written out."""
    lines, lora = [], config.model.lora
    if unresolved.optimisation.learning_rate == "auto":
        why = "ten times that of all weights" if lora is not None else "all weights"
        width = (
            f"by the width of {model_config.model_type}"
            if exponent(model_config)
            else (f"without the width, as no exponent is published for {model_config.model_type}")
        )
        lines.append(f"learning rate: {config.optimisation.learning_rate:g} (auto: {why}, {width})")
        if lora is not None and (lora.alpha != ALPHA or lora.rslora):
            lines.append(
                f"learning rate: the rule was fitted with model.lora.alpha: 32 without rslora, and this run has alpha "
                f"{lora.alpha:g}{' and rslora' * lora.rslora}: the update scales with it, so try half and twice the number, too"
            )
    return lines
