"""The half of the trainer that makes a loss of one scoring pass: what hooks read, the objective, and what is beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.errors import ObjectiveError
from kit.models.failures import SHARE
from kit.objective import LossScale, Mean, Objective, TokenBatch
from kit.objective.advantage import value_loss
from kit.scoring.full_kl import full_kl
from kit.scoring.hidden_states import ScoringPass, capturing, spread
from kit.trainer.rollout import MODEL_INPUTS, trained_tokens
from kit.trainer.sanity_checks import FirstSteps
from kit.trainer.value_head import Critic

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
HIDDEN_NEEDS = {"full_kl", "values"}


@dataclass(frozen=True)
class Terms:
    """What an objective reads of one scoring pass, and sends its gradient to."""

    logps: Tensor  # (B, T) nats
    entropy: Tensor | None  # (B, T) nats
    full_kl: Tensor | None  # (B, T) nats
    weight_norm: Tensor | None = None  # ()
    scored: Tensor | None = None  # (B, 1) bool: completions whose values these are, others have stand-ins; None: all


class LossSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before TRL's class."""

    objective: Objective | None
    needs: frozenset[str]
    _critic: Critic | None
    _first_steps: FirstSteps | None

    def _objective_loss(self, inputs: dict[str, Any], terms: Terms) -> tuple[Tensor, LossScale]:
        """The objective's loss of a micro-batch, its metrics taken in."""
        assert self.objective is not None
        batch, scale = self._token_batch(inputs, terms), self._loss_scale(inputs)
        if self._first_steps is not None and self.model.training and self.is_in_train:
            self._first_steps.after_scoring(terms.logps, batch, scale)
        self._compare_with_sampler(batch)
        result = self.objective.loss(batch, scale)
        self._take_in(result)
        self._keep_old_logps(inputs, terms.logps, terms.scored)
        return result.loss, scale

    def _terms(self, model: Any, inputs: dict[str, Any]) -> tuple[Terms, ScoringPass, Tensor | None]:
        """What the objective reads of one pass over the completions, the pass, and a router's balancing loss."""
        scored, entropy, aux_loss = self._score(model, inputs)
        divergence = self._full_kl(inputs, scored) if "full_kl" in self.needs else None
        return Terms(scored.logps, entropy, divergence), scored, aux_loss

    def _score(self, model: Any, inputs: dict[str, Any]) -> tuple[ScoringPass, Tensor | None, Tensor | None]:
        """One pass over the completions (B, T); its entropy, and the load-balancing loss of a mixture of experts."""
        completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        with capturing(bool(self.needs & HIDDEN_NEEDS)) as projections:
            logps, entropy, aux_loss = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
                torch.cat([inputs["prompt_mask"], mask], dim=1),
                completion_ids.size(1),
                compute_entropy=True,
                compute_aux_loss=self.aux_loss_enabled,
                **{name: inputs.get(name) for name in MODEL_INPUTS},
                **self.further_inputs(inputs),
            )
        if logps.shape != completion_ids.shape:
            raise ObjectiveError(
                f"The scorer gave log-probabilities of shape {tuple(logps.shape)} for completions of shape "
                f"{tuple(completion_ids.shape)}: a backend replaced it with one of another layout."
            )
        return ScoringPass(logps, projections), entropy, aux_loss

    def _token_batch(self, inputs: dict[str, Any], terms: Terms) -> TokenBatch:
        """Gathers what hooks read."""
        advantages, sampler_logps = inputs["advantages"], inputs.get("sampling_per_token_logps")
        if terms.scored is not None and sampler_logps is not None:  # what is not known cannot be compared
            sampler_logps = sampler_logps.masked_fill(~terms.scored, torch.nan)
        return TokenBatch(
            logps=terms.logps,
            old_logps=self._old_logps(inputs, terms.logps),
            advantages=advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
            mask=trained_tokens(inputs),
            ref_logps=inputs.get("ref_per_token_logps"),
            sampler_logps=sampler_logps,
            entropy=terms.entropy,
            full_kl=terms.full_kl,
            rewards=inputs["rewards"].unsqueeze(1) if "rewards" in inputs else None,
            all_lengths=self._all_lengths,
            truncated=inputs["truncated"].unsqueeze(1) if "truncated" in inputs else None,
            scored=terms.scored,
            weight_norm=terms.weight_norm,
            step=self.state.global_step,
        )

    def _full_kl(self, inputs: dict[str, Any], scored: ScoringPass) -> Tensor:
        """(B, T) nats, from the hidden states of this pass and those of the reference pass at the rollout."""
        live = inputs["completion_mask"].bool()
        reference = dataclasses.replace(self._reference_head, hidden=inputs["ref_hidden"][live])
        with self.accelerator.autocast():
            divergence = full_kl(dataclasses.replace(scored.head, hidden=scored.hidden()), reference)
        return spread(divergence, live)

    def _value_loss(self, inputs: dict[str, Any], scored: ScoringPass, mask: Tensor, scale: LossScale) -> Tensor:
        """Mean over the tokens of the accumulation window. Its gradient stays within the value head."""
        assert self._critic is not None
        values = spread(self._critic.head(scored.hidden()), inputs["completion_mask"])
        losses = value_loss(values, inputs["old_values"], inputs["value_targets"], self._critic.settings.clip)
        losses = losses.masked_fill(~mask, 0.0)
        self._add_means({"value/loss": Mean(losses.sum(), mask.sum())})
        return losses.sum() / torch.as_tensor(scale.window_tokens).clamp(min=1.0)

    def _beside(
        self, inputs: dict[str, Any], scored: ScoringPass, aux_loss: Tensor | None, scale: LossScale
    ) -> Tensor | None:
        """The loss of the value head, and the load balance of a mixture of experts (of a part: by its share of rows)."""
        loss: Tensor | None = None
        if self._critic is not None:
            loss = self._value_loss(inputs, scored, trained_tokens(inputs), scale)
        if aux_loss is not None:
            self._metrics[self._mode()]["aux_loss"].append(aux_loss.item())
            share = inputs.get(SHARE, 1.0)
            balance = share * self.router_aux_loss_coef * aux_loss / self._accumulation()
            loss = balance if loss is None else loss + balance
        return loss

    def _loss_scale(self, inputs: dict[str, Any]) -> LossScale:
        """How this micro-batch counts. TRL turns HF's own loss scaling off, so accumulation is divided out here."""
        accumulation = self._accumulation()
        # `num_items_in_batch` counts the tokens of the whole generation batch over all processes; one accumulation
        # window is accumulation / steps_per_generation of it.
        window = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:
            window = window * accumulation / self.args.steps_per_generation
        return LossScale(
            accumulation=accumulation, window_tokens=window, max_completion_length=self.max_completion_length
        )

    def _accumulation(self) -> float:
        return float(self.current_gradient_accumulation_steps) if self.model.training else 1.0
