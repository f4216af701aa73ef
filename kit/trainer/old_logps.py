"""Old log-probabilities without a scoring pass of their own.

A step on completions that earlier steps have used needs the log-probabilities of the policy that made them. TRL scores
every rollout for that, before the first step. But the first step scores the same completions with the same weights: what
it finds is kept with them, for the steps that follow. Exact where every completion is first trained on before the first
optimiser step after its rollout, and two passes agree (no dropout). That the weights have not moved is looked at.

A completion that was not scored then (`kit.trainer.policy_loss`) has NaN, which stands for the policy as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kit.errors import ObjectiveError
from kit.trainer.micro_batch import MicroBatch

KEY = "old_per_token_logps"


class OldLogps:
    """Those of one run. reused: the first pass over completions gives them.

    weights_now: a number that every optimiser step changes, and one that a change of a trained weight in place does.
    """

    def __init__(self, weights_now: Callable[[], tuple[int, int]], *, reused: bool = False) -> None:
        self.weights_now, self.reused = weights_now, reused
        self._at_rollout: tuple[int, int] | None = None

    @contextmanager
    def rollout(self, trainer: Any) -> Iterator[None]:
        """Around TRL's rollout: it need not score where they are reused.

        TRL knows by its number of iterations; there is no other switch.
        """
        if not self.reused:
            yield
            return
        iterations, trainer.num_iterations = trainer.num_iterations, 1
        try:
            yield
        finally:
            trainer.num_iterations = iterations
        if trainer.model.training:
            self._at_rollout = self.weights_now()

    def of(self, batch: MicroBatch, logps: Tensor, *, training: bool = True) -> Tensor:
        """(B, T) nats of the policy that made the completions: as noted, else those of this pass.

        Raises `ObjectiveError` where a first pass comes too late to give them.
        """
        old: Tensor | None = batch.get(KEY)
        if old is None:
            if training:
                self._check_unmoved()
            return logps.detach()
        return torch.where(torch.isnan(old), logps.detach().to(old.dtype), old) if self.reused else old

    def note(self, batch: MicroBatch, logps: Tensor, scored: Tensor | None) -> None:
        """Keeps with a micro-batch what its first pass found, for later ones. `scored`: (B, 1), None for all."""
        if not self.reused:
            return
        found = logps.detach().clone()
        if scored is not None:
            found = found.masked_fill(~scored, torch.nan)
        old = batch.get(KEY)
        batch.inputs[KEY] = found if old is None else torch.where(torch.isnan(old), found.to(old.dtype), old)

    def _check_unmoved(self) -> None:
        if self.reused and self._at_rollout is not None and self.weights_now() != self._at_rollout:
            raise ObjectiveError(
                "The trained weights changed between a rollout and the first pass over its completions (a callback, or a "
                "training loop of your own?), so that this pass cannot tell how likely they were. Set "
                "reuse_old_logps=False: every rollout is then scored."
            )
