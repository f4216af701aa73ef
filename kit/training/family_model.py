"""What a family says of a model between its configuration and its weights: where completions end, which layers adapt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.errors import ModelError
from kit.registry import did_you_mean
from kit.training.families import FamilyAdapter, adapter_of, is_remote
from kit.training.family_template import end_ids

if TYPE_CHECKING:
    from kit.config import ModelConfig
    from kit.planning.shapes import ModelShape
    from kit.training.models import ModelFiles


def end_where_turns_end(model: Any, files: ModelFiles, family: FamilyAdapter) -> None:
    """Adds what the tokenizer and the chat template end a completion with to what the model declares.

    Base models declare the end of a text, and never stop in a chat whose turns end otherwise.
    """
    template = family.template if files.chat else None
    ends = list(end_ids(model.generation_config, files.tokenizer, template))
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends


def family_of(model_config: Any, tokenizer: Any, *, chat: bool) -> FamilyAdapter | None:
    """What is known of the family before the weights are read; None where the architecture is remote code."""
    if is_remote(model_config):
        return None
    return adapter_of(model_config, tokenizer, chat=chat)


def check_targets(config: ModelConfig, shape: ModelShape | None, source: str) -> None:
    """Refuses adapters on modules that the model does not have. Raises `ModelError`."""
    if config.lora is None or shape is None or isinstance(config.lora.targets, str):
        return
    names = sorted({name for name, _, _ in shape.modules})
    for target in config.lora.targets:
        if target.rpartition(".")[2] not in names:
            raise ModelError(
                f"model.lora.targets: {source} has no linear layer called '{target}'.{did_you_mean(target, names)} It has: "
                f"{', '.join(names)}. Or set model.lora.targets: all-linear."
            )
