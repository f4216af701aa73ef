"""Put the torch log-probability function under TRL's fused LM head where its Triton kernel cannot run.

Why: TRL 1.15 calls its Triton function for tensors on any device, so that GRPO on a machine without a GPU stops with
`RuntimeError: 0 active drivers` (or, where Triton is not installed, with `'NoneType' object has no attribute
'apply'`). This can go when TRL's head chooses a fallback by device itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from kit.errors import EnvironmentUnsupported, ModelError
from kit.training.full_kl import Projection
from kit.training.guards import TESTED_TRL
from kit.training.hidden_states import record
from kit.training.logps import ChunkedLogProb, LogProbOutputs

_NAME = "_ChunkedLogProbFunction"
# config field -> a model that has it; TRL's fused head does not apply these, so its log-probabilities would be wrong
UNSUPPORTED = {"logits_soft_cap": "RecurrentGemma", "output_logit_soft_cap": "xLSTM"}


class LogProbDispatcher:
    """Has the `apply` that TRL calls: the GPU kernel for CUDA tensors if there is one, else `ChunkedLogProb`.

    What goes in is shown to `kit.training.hidden_states.capturing` on the way.
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
        *rest: Any,
    ) -> LogProbOutputs:
        record(Projection(hidden, weight, bias, temperature, final_logit_softcapping, logit_scale))
        args = (weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, *rest)
        if hidden.device.type == "cuda" and self.gpu_kernel is not None:
            result: LogProbOutputs = self.gpu_kernel.apply(hidden, *args)
            return result
        return ChunkedLogProb.apply(hidden, *args)


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


def check_logit_transforms(config: Any) -> None:
    """Refuse a model whose logits pass through a transform that TRL's fused head leaves out.

    Args:
        config: a transformers config; of a multimodal one the text part is looked at.

    Raises:
        ModelError: the config sets one of the fields in `UNSUPPORTED`.
    """
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field, family in UNSUPPORTED.items():
        value = getattr(text_config, field, None)
        if value is not None:
            raise ModelError(
                f"the model config sets {field}={value} (as {family} does), a logit transform that the fused LM head "
                "does not apply: its log-probabilities would be wrong. Choose a model without it."
            )


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
