"""Defects planted in a trainer of Unsloth's generated class; each must stop the run with its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def planted(bench: Any) -> dict[str, str]:
    """Return, for each planted defect, the message of the error that stopped the run; empty if no error did."""
    return {name: _stopped(bench, plant) for name, plant in DEFECTS.items()}


def _stopped(bench: Any, plant: Callable[[Any, type], None]) -> str:
    from trl import GRPOTrainer

    try:
        trainer = bench.trainer("grpo", unchecked=False)
        plant(trainer, GRPOTrainer)
        trainer.train()
    except Exception as error:  # the tests compare the message
        return f"{type(error).__name__}: {error}"
    return ""


def _own_scorer(trainer: Any, base: type) -> None:
    """Replace the scorer by Unsloth's, which returns log-probabilities without a gradient."""
    score = trainer.scorer.score

    def detached(*args: Any, **more: Any) -> Any:
        output = score(*args, **more)
        return dataclasses.replace(output, logps=output.logps.detach())

    trainer.scorer.score = detached


def _another_loss(trainer: Any, base: type) -> None:
    trainer.compute_loss = lambda model, inputs, *_, **__: model(input_ids=inputs["completion_ids"]).logits.mean()


def _mask_dropped(trainer: Any, base: type) -> None:
    """Use TRL's layout on a backbone that ignores the mask in training, as Unsloth's backbones do."""
    backbone = trainer.accelerator.unwrap_model(trainer.model).get_base_model().base_model
    forward = backbone.forward

    def without_mask(*args: Any, attention_mask: Any = None, **more: Any) -> Any:
        return forward(*args, attention_mask=None if backbone.training else attention_mask, **more)

    backbone.forward = without_mask
    trainer.scorer.padding = "left"


def _no_gradient(trainer: Any, base: type) -> None:
    for weight in trainer.model.parameters():
        weight.requires_grad_(False)
    trainer.model.get_input_embeddings().weight.requires_grad_(True)
    trainer.model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * float("nan"))


DEFECTS: dict[str, Callable[[Any, type], None]] = {
    "own scorer": _own_scorer,
    "another loss": _another_loss,
    "mask dropped": _mask_dropped,
    "gradient not finite": _no_gradient,
    "none": lambda trainer, base: None,
}
