"""What the first optimiser steps prove, or else the run stops: that the hooks reach the weights.

A silently ignored hook is the worst defect there is. Before the first step:

    the scorer       one unpadded completion through the model's plain logits agrees with the padded batch
    old and new      log-probabilities from before the step equal those in it
    the advantages   changing them changes the gradient of the loss
    the backward     what arrives at the log-probabilities is the gradient of the objective, and of nothing else

(A term that a subclass adds from a scoring pass of its own, or a loss that it makes of another, is its own affair.)

After it: the objective was called; within three steps in which completions had advantages, gradients reached the
weights; and the first that did were finite. Nothing is looked at from then on. Together this costs about one forward
pass of three completions.
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
"""Steps without any gradient after which a run is taken for dead."""
PROBE_TOKENS = 32
"""Completion tokens scored through plain logits, at most: V numbers each."""
GRADIENT_TOLERANCE = 1e-2
"""Relative: of the gradient that arrived to the one of the objective."""
KEPT = ("losses", "had_advantage", "had_gradient", "steps_without", "batches_without", "scored", "probed")
"""Attributes that a checkpoint keeps."""
SWITCH = "(From Python, HookedGRPOTrainer(first_step_checks=False) goes on regardless.)"


class SanityChecks(TrainerCallback):  # type: ignore[misc]
    """The checks of one trainer. Each method is called by it, and raises `ObjectiveError` for what it finds."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.losses = 0
        self.had_advantage = self.had_gradient = False
        self.steps_without = self.batches_without = 0
        self.scored = self.probed = False
        self.expected: Tensor | None = None  # (B, T) d loss / d logps of the micro-batch that is watched
        self.arrived: Tensor | None = None  # (B, T) what its backward passes have brought there
        self.watching = False

    @property
    def done(self) -> bool:
        """Whether nothing is left to look at while a loss is computed."""
        return self.scored and self.probed and self.had_gradient and bool(self.losses)

    def state_dict(self) -> dict[str, Any]:
        """The proofs made so far, and the steps waited for the others."""
        return {name: getattr(self, name) for name in KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in KEPT:
            setattr(self, name, state[name])

    # --- called while the loss of a training micro-batch is computed --------------------------------------------------

    def before_scoring(self, model: Any, batch: MicroBatch) -> None:
        """Compares the scorer with plain logits, once; begins to watch a micro-batch, until one has a gradient."""
        self.watching = not self.probed  # one micro-batch is looked at
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
        """Looks at the log-probabilities of the part `rows` (None: of all), as the scorer gives them, before they are used."""
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
        """Looks at a micro-batch before its loss is used; from the first on that has a gradient, no more."""
        self.losses += 1
        if not self.had_gradient:
            # Where weights of the kit mask everything (all completions cut, say) there is nothing to learn; where one of
            # the user's own does, time and again, it is taken for a defect.
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
        if not expected.isfinite().all():  # the gradients of the weights will tell
            return
        if torch.equal(expected, logps_gradient(self.services.objective, batch, scale)):  # else a hook draws lots
            self.expected = expected

    def _tolerance(self) -> float:
        """Nats by which two passes may differ in the precision of the forward pass."""
        half = self.services.accelerator.mixed_precision in ("bf16", "fp16")
        weights = (weight.dtype for weight in self.services.model.parameters() if weight.is_floating_point())
        return HALF_TOLERANCE if half else SCORE_TOLERANCE.get(next(weights, torch.float32), HALF_TOLERANCE)

    def _check_old_logps(self, batch: TokenBatch) -> None:
        """Compares old and new log-probabilities at the very first step: nothing has moved the policy since the rollout."""
        if has_dropout(self.services.model) or not batch.mask.any():
            return
        drift = float(batch.log_ratio.detach().abs()[batch.mask].mean())
        tolerance = self._tolerance()
        if not drift <= tolerance:
            raise ObjectiveError(
                f"Before any step the policy's log-probabilities differ from those at the rollout by {drift:.3g} nats a "
                f"token (at most {tolerance:g} is rounding), so that ratios and clipping would be wrong. Both must come "
                f"from one scorer, with the same temperature. {SWITCH}"
            )

    def after_advantages(self, hook: Hook, advantages: Tensor) -> None:
        """Looks at every generation batch in which rewards differ, until completions had advantages."""
        if self.had_gradient or not hook.factory.custom:  # the kit's own have zeros for a reason, as with tied rewards
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
                f"In {PATIENCE} steps no weight got a gradient, although completions had advantages. Either nothing is "
                "trainable (look at model.lora.targets), or a hook cuts the graph or multiplies everything by zero."
            )
        if self.had_gradient and self.services.accelerator.scaler is None:  # a loss scaler skips overflows by itself
            broken = [name for name, weight in weights if weight.grad is not None and not weight.grad.isfinite().all()]
            if broken:
                raise ObjectiveError(
                    f"The first gradient of {broken[0]} (and {len(broken) - 1} more weights) is NaN or infinite. Look at the "
                    "model's precision (model.dtype), and at a hook that divides or exponentiates."
                )

    def _check_arrival(self, expected: Tensor, arrived: Tensor) -> None:
        factor = float((arrived * expected).sum() / (expected * expected).sum())
        rest = float((arrived - factor * expected).norm() / arrived.norm().clamp(min=torch.finfo(torch.float32).tiny))
        scaled = self.services.accelerator.scaler is not None
        if not rest <= GRADIENT_TOLERANCE or not factor > 0 or not (scaled or abs(factor - 1.0) <= GRADIENT_TOLERANCE):
            raise ObjectiveError(
                f"The gradient that arrived at the log-probabilities is not the objective's (a multiple of {factor:.3g} of "
                f"it, and {rest:.2g} of its size is something else): something changed it on its way, a hook on the "
                f"log-probabilities or a wrapper of the loss or of the backward pass. {SWITCH}"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.losses:
            raise ObjectiveError(
                "A step was made without calling the objective: something replaced compute_loss or _compute_loss "
                "after the trainer was built. The run stops, because its hooks would be ignored."
            )
        self.had_advantage = False


def logps_gradient(objective: Objective, batch: TokenBatch, scale: LossScale) -> Tensor:
    """d loss / d logps, (B, T): what a trainer's backward pass must bring to the log-probabilities.

    Everything else in the batch is held constant. State that hooks keep is left as it was.
    """
    state = copy.deepcopy(objective.state_dict())
    leaf = batch.logps.detach().requires_grad_()
    values = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch) if item.init}
    held: dict[str, Any] = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()
    }
    with torch.enable_grad():
        loss = objective.loss(TokenBatch(**held | {"logps": leaf}), scale).loss
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    objective.load_state_dict(state)
    return torch.zeros_like(leaf) if gradient is None else gradient


def ignores_advantages(objective: Objective, batch: TokenBatch, scale: LossScale) -> bool:
    """Whether no change of the advantages changes d loss / d logps by more than rounding: the clip does not use them.

    False where nothing can be told: weights leave no token open, or the gradient has NaN.
    """
    before = logps_gradient(objective, batch, scale)
    if not before.isfinite().all() or not open_tokens(objective, batch).any():
        return False
    least, numbers = 1e-6 * before.abs().max(), torch.arange(batch.advantages.numel(), device=batch.advantages.device)
    amounts = (1.0 + (numbers * 0.6180339887) % 1.0).view(batch.advantages.shape)  # between 1 and 2, nowhere the same
    farther = batch.advantages + torch.where(batch.advantages < 0, -amounts, amounts)
    for changed in (farther, -farther):  # a clip may use nothing but the sign
        after = logps_gradient(objective, dataclasses.replace(batch, advantages=changed), scale)
        if (after - before).abs().max() > least:
            return False
    return True


def open_tokens(objective: Objective, batch: TokenBatch, *, of_the_kit: bool = False) -> Tensor:
    """(B, T) bool: live tokens that no weight masks; `of_the_kit` looks at the kit's own weights alone."""
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

    Dropout is off for both, and without any the scorer works as in training. The row is scored beside the longest one, with
    the batch's padding; PROBE_TOKENS tokens of it go through the model's own logits, alone and unpadded.
    """
    prompt_mask, live = batch["prompt_mask"].bool(), batch.completion_mask.bool()
    candidates, length = live.any(1), prompt_mask.sum(1) + live.sum(1)
    row = int(torch.where(candidates, prompt_mask.shape[1] - prompt_mask.sum(1), -1).argmax())
    count = min(int(live[row].sum()), PROBE_TOKENS)
    own = batch.select([row]).rows
    chosen_tokens = torch.cat([prompt_mask[row], live[row] & (live[row].cumsum(0) <= count)])
    alone = own.ids[0][chosen_tokens]

    training = model.training
    try:
        model.train(training and not has_dropout(model))  # a backend may read the mask in evaluation only
        with torch.no_grad():
            scored = services.scorer.score(model, batch.select([row, int(length.argmax())]).rows).logps
            model.eval()
            bare = services.accelerator.unwrap_model(model)
            base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
            takes = inspect.signature(base.forward).parameters
            keep = {"logits_to_keep": count + 1} if "logits_to_keep" in takes else {}  # all may be more than fits
            model_inputs = {
                "input_ids": alone[None],
                "attention_mask": torch.ones_like(alone)[None],
                "use_cache": False,
            }
            for name, value in own.model_inputs().items():
                if (rule := services.family.rule(name)) != "drop":
                    model_inputs[name] = value[:, chosen_tokens] if rule == "extend" else value
            with services.accelerator.autocast():
                plainly = model(**model_inputs, **keep)
    finally:
        model.train(training)
    chosen = (plainly.logits[0, -count - 1 : -1].float() / services.temperature).log_softmax(-1)
    plain = chosen.gather(1, alone[-count:, None]).squeeze(1)
    return float((scored[0][live[row]][:count].float() - plain).abs().mean())
