"""Put the torch log-probability function under TRL's fused LM head where its Triton kernel cannot run.

Why: TRL 1.15 calls its Triton function for tensors on any device, so that GRPO on a machine without a GPU stops with
`RuntimeError: 0 active drivers` (or, where Triton is not installed, with `'NoneType' object has no attribute
'apply'`). This can go when TRL's head chooses a fallback by device itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from kit.errors import EnvironmentUnsupported
from kit.models.libraries import TESTED_TRL
from kit.scoring.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProb, LogProbOutputs
from kit.scoring.full_kl import Projection

_NAME = "_ChunkedLogProbFunction"


@dataclass
class HeadRequest:
    """What a scoring pass asks of the head beyond TRL's arguments, and what it is shown."""

    entropy_gradient: bool = True
    keep: bool = False
    seen: Projection | None = None  # the head and the hidden states (N, H) that it was given, if they are kept


# The head is reached through the model's own forward pass, which has no argument for it.
_request: ContextVar[HeadRequest | None] = ContextVar("head_request", default=None)


@contextmanager
def asking_head(entropy_gradient: bool = True, *, keep: bool = False) -> Iterator[HeadRequest]:
    """Inside, the head that a forward pass ends in is asked for this.

    entropy_gradient: whether entropies carry a gradient. TRL asks for entropies on every step, mostly to log them; with a
    frozen head their gradient costs a matrix product more a tile. keep: the hidden states that go into it.
    """
    request = HeadRequest(entropy_gradient, keep)
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


class LogProbDispatcher:
    """Has the `apply` that TRL calls: the GPU kernel for CUDA tensors if there is one, else `ChunkedLogProb`.

    Does what `asking_head` asks for.
    """

    def __init__(self, gpu_kernel: Any | None) -> None:
        self.gpu_kernel = gpu_kernel

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
        *rest: Any,
    ) -> LogProbOutputs:
        request = _request.get() or HeadRequest()
        if request.keep:
            request.seen = Projection(hidden, weight, bias, temperature, final_logit_softcapping, logit_scale)
        args = (weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
        if hidden.device.type == "cuda" and self.gpu_kernel is not None:
            result: LogProbOutputs = self.gpu_kernel.apply(hidden, *args, *rest)
            return result
        return ChunkedLogProb.apply(hidden, *args, request.entropy_gradient)


def install_torch_logprob_kernel() -> None:
    """Install the dispatcher under TRL's fused head for the rest of the process; calling it again changes nothing.

    Call it after `import unsloth`, if that is used: Unsloth's own CUDA kernel is then the one that is dispatched to.

    Raises:
        EnvironmentUnsupported: this TRL has no such head.
    """
    module = _trl_module()
    current = getattr(module, _NAME)
    if not isinstance(current, LogProbDispatcher):
        setattr(module, _NAME, LogProbDispatcher(current))


def _trl_module() -> ModuleType:
    import trl
    from trl.trainer import utils

    for name in (_NAME, "add_fused_lm_head"):
        if hasattr(utils, name):
            continue
        raise EnvironmentUnsupported(
            f"trl {trl.__version__} has no trainer.utils.{name}; grpo-kit was tested with trl {TESTED_TRL}.*. "
            "Install trl>=1.15,<1.16."
        )
    module: ModuleType = utils
    return module
