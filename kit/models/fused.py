"""Fewer GPU kernels for a transformers model, with equal results: fused LoRA layers, and Liger's kernels if installed.

A plain LoRA layer becomes two autograd nodes. The first computes A x, saves all tensors of the layer, and computes the
complete gradient of the layer in the backward pass. The second computes the output and saves nothing. So

- nothing is copied to float32, and there are no temporaries of the size of the output (PEFT's forward has three);
- gradient checkpointing stops when all saved tensors are recomputed, so it does not recompute the last product of a block.

Other layers (see `_plain`) use PEFT's forward pass without its casts to float32 under autocast, which would round the input
back to 16 bits in the next operation.
"""

from __future__ import annotations

import functools
import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

log = logging.getLogger("kit")
LIGER = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True}
"""The kernels of Liger that are used. The kit has its own head and loss."""


class Fused:
    """Installs fused kernels in a model; `remove` restores it. names: the kernels, for the log."""

    def __init__(self, model: Any) -> None:
        self.names: list[str] = []
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if any(type(module).forward.__module__.startswith("unsloth") for module in model.modules()):
            return  # its own kernels are there
        if count := self._lora(model):
            self.names.append(f"{count} fused LoRA layers")
        if self._liger(model):
            self.names.append("Liger's norms, rotary embedding and gated products")

    def __str__(self) -> str:
        return ", ".join(self.names)

    def remove(self) -> None:
        """Restores the model."""
        for namespace, before in self._before:
            for name in namespace.keys() - before.keys():
                del namespace[name]
            namespace.update(before)

    def _keep(self, namespace: dict[str, Any]) -> None:
        self._before.append((namespace, dict(namespace)))

    def _lora(self, model: Any) -> int:
        from peft.tuners.lora import LoraLayer

        count = 0
        for module in model.modules():
            if not isinstance(module, LoraLayer) or "forward" in vars(module):
                continue
            self._keep(vars(module))
            module._cast_input_dtype = functools.partial(_cast_input, module)
            if _frozen(module.get_base_layer()):
                module.forward = functools.partial(_forward, module)
                count += 1
        return count

    def _liger(self, model: Any) -> bool:
        """Installs Liger's kernels for this model only, except the rotary embedding, which is a function of its module."""
        if find_spec("liger_kernel") is None:
            return False
        from transformers.integrations.liger import apply_liger_kernel

        known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if base.config.model_type not in known:
            return False
        namespace = vars(sys.modules[type(base).__module__])
        for module in base.modules():
            self._keep(vars(module))
        self._keep(namespace)
        classes = {name: value for name, value in namespace.items() if isinstance(value, type)}
        apply_liger_kernel(base, LIGER | {"cross_entropy": False, "fused_linear_cross_entropy": False})
        namespace.update(classes)  # so that later models are not changed
        return True


def _cast_input(module: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """PEFT's `_cast_input_dtype`, except under autocast, which casts the operands itself."""
    if x is not None and torch.is_autocast_enabled(x.device.type):
        return x
    cast: Tensor = type(module)._cast_input_dtype(module, x, dtype)
    return cast


def _frozen(base: Any) -> bool:
    """Whether this is a frozen linear layer of 16 or 32 bits, or of 4 bits by bitsandbytes."""
    weight, bias = getattr(base, "weight", None), getattr(base, "bias", None)
    if weight is None or weight.requires_grad or (bias is not None and bias.requires_grad):
        return False
    return type(base) is torch.nn.Linear or (type(base).__name__ == "Linear4bit" and hasattr(weight, "quant_state"))


def _plain(module: Any, x: Tensor) -> tuple[torch.dtype, Any, Any, float] | None:
    """The dtype, A, B and scaling of a layer that computes exactly W x + scaling B A x; None for others."""
    if module.disable_adapters or module.merged or len(module.active_adapters) != 1:
        return None
    (name,) = module.active_adapters
    if name not in module.lora_A or name in module.lora_variant:
        return None
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if type(a) is not torch.nn.Linear or b.bias is not None or (dropout.training and getattr(dropout, "p", 0.0) > 0.0):
        return None
    base = module.base_layer
    if not _frozen(base):
        return None
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    elif x.dtype == a.weight.dtype == (base.weight.dtype if type(base) is torch.nn.Linear else x.dtype):
        dtype = x.dtype
    else:
        return None
    if type(base) is not torch.nn.Linear:
        state = base.weight.quant_state
        if state is None or getattr(state, "packing_format_for_cpu", False) or base.compute_dtype not in (None, dtype):
            return None
        if x.numel() == x.shape[-1]:  # a single token has a separate kernel
            return None
    return dtype, a.weight, b.weight, module.scaling[name]


def _forward(module: Any, x: Tensor, *rest: Any, **keywords: Any) -> Tensor:
    plain = None if rest or keywords else _plain(module, x)
    if plain is None:
        output: Tensor = type(module).forward(module, x, *rest, **keywords)
        return output
    dtype, a, b, scaling = plain
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        low, b, output = _Adapter.apply(flat, a, b, module.base_layer, scaling)  # type: ignore[no-untyped-call]
        result: Tensor = _Base.apply(output, low, b, flat.detach(), module.base_layer)  # type: ignore[no-untyped-call]
    return result.view(*x.shape[:-1], -1)


def _weight(base: Any, dtype: torch.dtype) -> Tensor:
    """The weight (out, in) in this dtype."""
    if type(base) is torch.nn.Linear:
        return base.weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(base.weight.data, base.weight.quant_state)
    return weight.to(dtype)


def _scaled_product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """scaling * left @ right, (n, k), rounded once."""
    out = left.new_empty(left.shape[0], right.shape[1])
    return out.addmm_(left, right, beta=0.0, alpha=scaling)  # with beta 0, `out` is not read


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in this dtype. On CUDA, 16-bit products are added in float32 without rounding in between."""
    if left.device.type == "cuda" and left.itemsize == 2 and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


class _Adapter(torch.autograd.Function):
    """(T, in) -> scaling A x (T, r); B in the dtype of x; and a placeholder of the output, (T, out) without memory.

    It saves all tensors of the layer, and receives the gradient of the output through the placeholder, W x included.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, base: Any, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        dtypes = a.dtype, b.dtype
        a, b = a.to(x.dtype), b.to(x.dtype)
        low = _scaled_product(x, a.t(), scaling)
        ctx.base, ctx.scaling, ctx.dtypes = base, scaling, dtypes
        ctx.save_for_backward(x, low, a, b)
        ctx.mark_non_differentiable(low, b)
        return low, b, x.new_empty(1).expand(len(x), len(b))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _low: None, _b: None, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 5
        x, low, a, b = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad_low, grad_x = _scaled_product(grad, b, ctx.scaling), None  # (T, r)
            grad_a, grad_b = _product(grad_low.t(), x, ctx.dtypes[0]), _product(grad.t(), low, ctx.dtypes[1])
            # Free the recomputed input of this node before its gradient of the same size is allocated.
            del x, low
            if ctx.needs_input_grad[0]:
                grad_x = torch.mm(grad, _weight(ctx.base, grad.dtype)).addmm_(grad_low, a)
        return grad_x, grad_a, grad_b, None, None


class _Base(torch.autograd.Function):
    """The output of the layer, (T, out): bias + B low + W x. It saves nothing."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, low: Tensor, b: Tensor, x: Tensor, base: Any) -> Tensor:
        out = torch.mm(low, b.t()) if base.bias is None else torch.addmm(base.bias.to(x.dtype), low, b.t())
        return out.addmm_(x, _weight(base, x.dtype).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad, None, None, None, None
