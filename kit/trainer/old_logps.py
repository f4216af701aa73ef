"""Old log-probabilities without a scoring pass of their own.

A step on completions that earlier steps have used needs the log-probabilities of the policy that made them. TRL scores
every rollout for that, before the first step. But the first step scores the same completions with the same weights: what
it finds is kept with them, for the steps that follow. Exact where every completion is first trained on before the first
optimiser step after its rollout, and two passes agree (no dropout). That the weights have not moved is looked at.

A completion that was not scored then (`kit.trainer.loss_in_parts`) has NaN, which stands for the policy as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kit.errors import ObjectiveError

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
KEY = "old_per_token_logps"


class OldLogpsSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before the side that makes rollouts."""

    num_iterations: int
    _weights_at_rollout: tuple[int, int] | None = None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not self.reuses_old_logps:
            kept: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return kept
        iterations = self.num_iterations
        self.num_iterations = 1  # by which TRL knows that it need not score the rollout
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.num_iterations = iterations
        if self.model.training:
            self._weights_at_rollout = self._weights_now()
        return output

    def _old_logps(self, inputs: dict[str, Any], logps: Tensor) -> Tensor:
        """(B, T) nats of the policy that made the completions: as noted, else those of this pass."""
        old: Tensor | None = inputs.get(KEY)
        if old is None:
            self._check_unmoved()
            return logps.detach()
        return torch.where(torch.isnan(old), logps.detach().to(old.dtype), old) if self.reuses_old_logps else old

    def _keep_old_logps(self, inputs: dict[str, Any], logps: Tensor, scored: Tensor | None) -> None:
        """Notes with a micro-batch what its first pass found, for later passes over it. `scored`: (B, 1), None for all."""
        if not (self.reuses_old_logps and self.model.training):
            return
        found = logps.detach().clone()
        if scored is not None:
            found = found.masked_fill(~scored, torch.nan)
        old = inputs.get(KEY)
        inputs[KEY] = found if old is None else torch.where(torch.isnan(old), found.to(old.dtype), old)

    def _weights_now(self) -> tuple[int, int]:
        """A number that every optimiser step changes, and one that a change of a trained weight in place does."""
        return self.state.global_step, sum(
            weight._version for weight in self.model.parameters() if weight.requires_grad
        )

    def _check_unmoved(self) -> None:
        """Raises `ObjectiveError` where a first pass comes too late to give the old log-probabilities."""
        then = self._weights_at_rollout
        if self.reuses_old_logps and self.model.training and then is not None and self._weights_now() != then:
            raise ObjectiveError(
                "The trained weights changed between a rollout and the first pass over its completions (a callback, or a "
                "training loop of your own?), so that this pass cannot tell how likely they were. Set "
                "reuse_old_logps=False (optimisation.reuse_old_logps: false): every rollout is then scored."
            )
