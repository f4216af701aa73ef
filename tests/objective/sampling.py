"""Random batches for tests: ragged masks, invalid values in the padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.objective import LossOutput, LossScale, Objective, TokenBatch


@dataclass
class Sample:
    """Tensors as a trainer has them; `logps` is the leaf whose gradient is tested."""

    logps: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    entropy: Tensor
    advantages: Tensor  # (B,)
    mask: Tensor
    sampler_logps: Tensor
    full_kl: Tensor
    rewards: Tensor  # (B,)
    truncated: Tensor  # (B,)
    teacher_logps: Tensor
    teacher_kl: Tensor
    step: int = 0

    def batch(self, rows: slice = slice(None), **changes: Any) -> TokenBatch:
        fields = {
            "logps": self.logps[rows],
            "old_logps": self.old_logps[rows],
            "advantages": self.advantages[rows, None],
            "mask": self.mask[rows],
            "ref_logps": self.ref_logps[rows],
            "entropy": self.entropy[rows],
            "sampler_logps": self.sampler_logps[rows],
            "full_kl": self.full_kl[rows],
            "teacher_logps": self.teacher_logps[rows],
            "teacher_kl": self.teacher_kl[rows],
            "rewards": self.rewards[rows, None],
            "truncated": self.truncated[rows, None],
            "step": self.step,
        }
        return TokenBatch(**{**fields, **changes})


def sample(
    seed: int = 0, size: tuple[int, int] = (4, 7), dtype: torch.dtype = torch.float64, spread: float = 0.4
) -> Sample:
    """A random sample; `spread` is the standard deviation (nats) of the log ratios to the old and reference policy."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -normal(*size).abs() - 0.1
    logps = old + spread * normal(*size)
    lengths = torch.randint(1, size[1] + 1, (size[0],), generator=generator)
    lengths[0] = size[1]
    mask = torch.arange(size[1]) < lengths[:, None]
    mask[0, 0] = size[1] < 2  # a hole, as left by a tool call
    reference, entropy, advantages = old + 0.3 * normal(*size), normal(*size).abs(), normal(size[0])
    sampler = old + 0.2 * normal(*size)
    sampler[-1, 0] = torch.nan
    full_kl = normal(*size).abs()
    teacher, teacher_kl = old + 0.3 * normal(*size), normal(*size).abs()
    teacher[1:2] = torch.nan  # no teacher
    return Sample(
        logps=logps.to(dtype).requires_grad_(),
        old_logps=old.to(dtype),
        ref_logps=reference.to(dtype),
        entropy=entropy.to(dtype),
        advantages=advantages.to(dtype),
        mask=mask,
        sampler_logps=sampler.to(dtype),
        full_kl=full_kl.to(dtype),
        teacher_logps=teacher.to(dtype),
        teacher_kl=teacher_kl.to(dtype),
        rewards=torch.tensor([1.0, 0.0, torch.nan, 2.0], dtype=dtype).repeat(size[0])[: size[0]],
        truncated=torch.arange(size[0]) % 3 == 1,
    )


def scale_for(drawn: Sample, accumulation: float = 1.0) -> LossScale:
    """The scale of a window of this one sample."""
    return LossScale(accumulation, drawn.mask.sum(), drawn.mask.shape[1])


def gradient(objective: Objective, drawn: Sample, **changes: Any) -> tuple[LossOutput, Tensor]:
    """The loss, and d loss / d logps."""
    drawn.logps.grad = None
    out = objective.loss(drawn.batch(**changes), scale_for(drawn))
    out.loss.backward()
    assert drawn.logps.grad is not None
    return out, drawn.logps.grad.clone()
