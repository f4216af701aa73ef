"""Check in the first optimiser steps that the gradient of the objective reaches the weights, or stop the run.

Before the first step:

    the scorer       the padded batch agrees with one unpadded completion through the model's plain logits
    old and new      log-probabilities from before the step equal those of the step
    the advantages   changing them changes the gradient of the loss
    the backward     the gradient that arrives at the log-probabilities is that of the objective

Terms that a subclass adds to the loss are not checked.

After the first step: the objective was called, a gradient reached the weights within three steps with non-zero advantages,
and the first such gradient was finite. The checks end then. They cost about one forward pass of three completions.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from kit.errors import ObjectiveError
from kit.objective import LossScale, Objective, TokenBatch
from kit.scoring.scorer import HALF_TOLERANCE, SCORE_TOLERANCE, has_dropout
from kit.trainer.policy_loss import MicroBatch, Services

if TYPE_CHECKING:
    from kit.objective import Hook

PATIENCE = 3
"""Steps without any gradient after which the run stops."""
PROBE_TOKENS = 32
"""Most completion tokens to score through plain logits, with V numbers each."""
GRADIENT_TOLERANCE = 1e-2
"""Largest relative difference between the gradient that arrived and that of the objective."""
SAVED = ("losses", "had_advantage", "had_gradient", "steps_without", "batches_without", "scored", "probed")
"""Attributes that a checkpoint contains."""
SWITCH = "(In Python, HookedGRPOTrainer(first_step_checks=False) turns this check off.)"


class SanityChecks(TrainerCallback):  # type: ignore[misc]
    """The checks of one trainer, which calls each method. Raises `ObjectiveError` if a check fails."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.losses = 0
        self.had_advantage = self.had_gradient = False
        self.steps_without = self.batches_without = 0
        self.scored = self.probed = False
        self.expected: Tensor | None = None  # (B, T) d loss / d logps of the watched micro-batch
        self.arrived: Tensor | None = None  # (B, T) the gradient that its backward passes brought
        self.watching = False

    @property
    def done(self) -> bool:
        """Whether all checks during the computation of a loss are done."""
        return self.scored and self.probed and self.had_gradient and bool(self.losses)

    def state_dict(self) -> dict[str, Any]:
        """The checks done so far, and the steps waited for the others."""
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in SAVED:
            setattr(self, name, state[name])

    # --- called while the loss of a training micro-batch is computed --------------------------------------------------

    def before_scoring(self, model: Any, batch: MicroBatch) -> None:
        """Compare the scorer with plain logits, once, and watch micro-batches until one has a gradient."""
        self.watching = not self.probed
        if self.watching:
            ids = batch.completion_ids
            self.arrived = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        if self.scored or not bool(batch.completion_mask.any()):
            return
        self.scored = True
        if getattr(getattr(self.services.model, "active_peft_config", None), "is_prompt_learning", False):
            return
        difference, tolerance = scoring_error(self.services, model, batch), self._tolerance()
        if not difference <= tolerance:
            raise ObjectiveError(
                f"The scorer's log-probabilities differ from the model's own logits by {difference:.3g} nats a token (at "
                f"most {tolerance:g} is rounding): the gradient would be wrong. Usual causes: a backend that reads left "
                f"padding wrongly, or a logit transform that the fused head leaves out. {SWITCH}"
            )

    def watch(self, logps: Tensor, rows: Tensor | None) -> None:
        """Watch the log-probabilities of the part `rows` (None: of all) before the loss uses them."""
        if not logps.requires_grad:
            raise ObjectiveError(
                "The log-probabilities carry no gradient, so no hook could change the model. Something between the "
                "model and the scorer detaches them (a backend's own scorer, or torch.no_grad around training)."
            )
        if self.watching and self.arrived is not None:
            arrived = self.arrived

            def receive(gradient: Tensor) -> None:
                arrived[slice(None) if rows is None else rows, : gradient.shape[1]] = gradient.detach().to(
                    torch.float32
                )

            logps.register_hook(receive)  # type: ignore[no-untyped-call]

    def after_scoring(self, batch: TokenBatch, scale: LossScale) -> None:
        """Check a micro-batch before its loss is used, until the first one that has a gradient."""
        self.losses += 1
        if not self.had_gradient:
            # If weights of the kit mask all tokens (for example because all completions are cut), there is nothing to learn. If
            # a user's own weight masks all tokens in several steps, that is a defect.
            learning = open_tokens(self.services.objective, batch, of_the_kit=True)
            self.had_advantage = self.had_advantage or bool((batch.advantages * learning).any())
        if self.probed:
            return
        expected = logps_gradient(self.services.objective, batch, scale)
        if not expected.any():
            return
        self.probed = True
        if batch.step == 0:
            self._check_old_logps(batch)
        if ignores_advantages(self.services.objective, batch, scale):
            raise ObjectiveError(
                f"Changing the advantages changes nothing in the gradient, so {self.services.objective.advantage.title} is "
                f"ignored: the clip does not use batch.advantages. {SWITCH}"
            )
        if not expected.isfinite().all():  # `on_pre_optimizer_step` reports it
            return
        # If they differ, a hook uses random numbers.
        if torch.equal(expected, logps_gradient(self.services.objective, batch, scale)):
            self.expected = expected

    def _tolerance(self) -> float:
        """Largest difference in nats that rounding explains, in the precision of the forward pass."""
        half = self.services.accelerator.mixed_precision in ("bf16", "fp16")
        weights = (weight.dtype for weight in self.services.model.parameters() if weight.is_floating_point())
        return HALF_TOLERANCE if half else SCORE_TOLERANCE.get(next(weights, torch.float32), HALF_TOLERANCE)

    def _check_old_logps(self, batch: TokenBatch) -> None:
        """Compare old and new log-probabilities in the first step, where the policy is still that of the rollout."""
        if has_dropout(self.services.model) or not batch.mask.any():
            return
        drift = float(batch.log_ratio.detach().abs()[batch.mask].mean())
        tolerance = self._tolerance()
        if not drift <= tolerance:
            raise ObjectiveError(
                f"Before the first step the policy's log-probabilities differ from those at the rollout by {drift:.3g} nats a "
                f"token (rounding explains at most {tolerance:g}), so ratios and clipping would be wrong. Both must come "
                f"from the same scorer with the same temperature. {SWITCH}"
            )

    def after_advantages(self, hook: Hook, advantages: Tensor) -> None:
        """Check generation batches in which rewards differ, until completions have non-zero advantages."""
        # The kit's hooks give 0 only for a reason, such as tied rewards.
        if self.had_gradient or not hook.factory.custom:
            return
        self.batches_without = 0 if advantages.any() else self.batches_without + 1
        if self.batches_without >= PATIENCE:
            raise ObjectiveError(
                f"{hook.title} gave every completion the advantage 0 in {PATIENCE} generation batches, although rewards "
                f"differed within groups: nothing would be learned. {SWITCH}"
            )

    # --- callbacks ----------------------------------------------------------------------------------------------------

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.expected is not None:
            assert self.arrived is not None
            self._check_arrival(self.expected.to(torch.float32), self.arrived)
            self.expected = self.arrived = None
        if self.had_gradient or not self.had_advantage:
            return
        weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self.had_gradient = any(weight.grad is not None and bool(weight.grad.any()) for _, weight in weights)
        self.steps_without += not self.had_gradient
        if self.steps_without >= PATIENCE:
            raise ObjectiveError(
                f"In {PATIENCE} steps no weight got a gradient, although completions had advantages. Either no weight is "
                "trainable (check model.lora.targets), or a hook detaches its result or multiplies it by zero."
            )
        if self.had_gradient and self.services.accelerator.scaler is None:  # a loss scaler skips overflows by itself
            broken = [name for name, weight in weights if weight.grad is not None and not weight.grad.isfinite().all()]
            if broken:
                raise ObjectiveError(
                    f"The first gradient of {broken[0]} (and {len(broken) - 1} more weights) is NaN or infinite. Check the "
                    "precision of the model (model.dtype) and hooks that divide or exponentiate."
                )

    def _check_arrival(self, expected: Tensor, arrived: Tensor) -> None:
        factor = float((arrived * expected).sum() / (expected * expected).sum())
        rest = float((arrived - factor * expected).norm() / arrived.norm().clamp(min=torch.finfo(torch.float32).tiny))
        scaled = self.services.accelerator.scaler is not None
        if not rest <= GRADIENT_TOLERANCE or not factor > 0 or not (scaled or abs(factor - 1.0) <= GRADIENT_TOLERANCE):
            raise ObjectiveError(
                f"The gradient that arrived at the log-probabilities is not that of the objective: it is {factor:.3g} times that "
                f"gradient, and {rest:.2g} of its norm comes from elsewhere. A tensor hook on the log-probabilities or a "
                f"wrapper of the loss or of the backward pass changed it. {SWITCH}"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.losses:
            raise ObjectiveError(
                "A step ran without calling the objective: other code replaced compute_loss or _compute_loss after the "
                "trainer was built. The run stops, because its hooks would be ignored."
            )
        self.had_advantage = False


def logps_gradient(objective: Objective, batch: TokenBatch, scale: LossScale) -> Tensor:
    """d loss / d logps, (B, T): the gradient that the backward pass must bring to the log-probabilities.

    The other fields of the batch are constants. The state of the hooks does not change.
    """
    state = copy.deepcopy(objective.state_dict())
    leaf = batch.logps.detach().requires_grad_()
    values = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch) if item.init}
    constants: dict[str, Any] = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
    with torch.enable_grad():
        loss = objective.loss(TokenBatch(**constants | {"logps": leaf}), scale).loss
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    objective.load_state_dict(state)
    return torch.zeros_like(leaf) if gradient is None else gradient


def ignores_advantages(objective: Objective, batch: TokenBatch, scale: LossScale) -> bool:
    """Whether other advantages leave d loss / d logps unchanged up to rounding, so that the clip does not use them.

    False if this cannot be decided: weights mask all tokens, or the gradient has NaN.
    """
    gradient = logps_gradient(objective, batch, scale)
    if not gradient.isfinite().all() or not open_tokens(objective, batch).any():
        return False
    least, numbers = 1e-6 * gradient.abs().max(), torch.arange(batch.advantages.numel(), device=batch.advantages.device)
    amounts = (1.0 + (numbers * 0.6180339887) % 1.0).view(batch.advantages.shape)  # between 1 and 2, all different
    larger = batch.advantages + torch.where(batch.advantages < 0, -amounts, amounts)
    for changed in (larger, -larger):  # a clip may use the sign alone
        other = logps_gradient(objective, dataclasses.replace(batch, advantages=changed), scale)
        if (other - gradient).abs().max() > least:
            return False
    return True


def open_tokens(objective: Objective, batch: TokenBatch, *, of_the_kit: bool = False) -> Tensor:
    """(B, T) bool: trained tokens that no weight masks. With `of_the_kit` only the kit's own weights count."""
    state = copy.deepcopy(objective.state_dict())
    with torch.no_grad():
        live = batch.mask
        for hook in objective.weights:
            if not (of_the_kit and hook.factory.custom):
                live = live & (hook(batch) != 0)
    objective.load_state_dict(state)
    return live


def scoring_error(services: Services, model: Any, batch: MicroBatch) -> float:
    """Mean difference (nats) between the scorer on the padded batch and plain logits on the row with most padding.

    Dropout is off for both; without dropout the scorer works as in training. The scorer gets the row next to the longest one,
    with the batch's padding. PROBE_TOKENS tokens of the row go through the model's own logits, alone and unpadded.
    """
    prompt_mask, live = batch["prompt_mask"].bool(), batch.completion_mask.bool()
    candidates, length = live.any(1), prompt_mask.sum(1) + live.sum(1)
    row = int(torch.where(candidates, prompt_mask.shape[1] - prompt_mask.sum(1), -1).argmax())
    count = min(int(live[row].sum()), PROBE_TOKENS)
    rows = batch.select([row]).rows
    chosen_tokens = torch.cat([prompt_mask[row], live[row] & (live[row].cumsum(0) <= count)])
    alone = rows.ids[0][chosen_tokens]

    training = model.training
    try:
        model.train(training and not has_dropout(model))  # a backend may read the mask in evaluation only
        with torch.no_grad():
            scored = services.scorer.score(model, batch.select([row, int(length.argmax())]).rows).logps
            model.eval()
            bare = services.accelerator.unwrap_model(model)
            base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
            takes = inspect.signature(base.forward).parameters
            # The logits of all tokens may not fit.
            keep = {"logits_to_keep": count + 1} if "logits_to_keep" in takes else {}
            model_inputs = {
                "input_ids": alone[None],
                "attention_mask": torch.ones_like(alone)[None],
                "use_cache": False,
            }
            for name, value in rows.model_inputs().items():
                if (rule := services.family.rule(name)) != "drop":
                    model_inputs[name] = value[:, chosen_tokens] if rule == "extend" else value
            with services.accelerator.autocast():
                output = model(**model_inputs, **keep)
    finally:
        model.train(training)
    chosen = (output.logits[0, -count - 1 : -1].float() / services.temperature).log_softmax(-1)
    plain = chosen.gather(1, alone[-count:, None]).squeeze(1)
    return float((scored[0][live[row]][:count].float() - plain).abs().mean())
