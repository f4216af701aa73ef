"""Triton's interpreter on a simulated GPU: bfloat16 is computed as numbers, and a launch counts as one kernel.

The interpreter stores bfloat16 as 16 bits and multiplies these as integers, so kernels that multiply in the precision of their
weights (norms, gated products) return noise or infinity. Here values are widened to float32, and results rounded to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

if TYPE_CHECKING:
    from pretended_gpu import PretendedGPU


def rounded(numbers: Any) -> Any:
    """Round float32 to the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), nearest).astype(np.uint16)


def widened(bits: Any) -> Any:
    """Convert the bits of bfloat16 to float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def tensors(*operands: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries, faster than torch's own tree functions."""
    for value in operands:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(*value)
        elif isinstance(value, dict):
            yield from tensors(*value.values())


def replacements(gpu: PretendedGPU) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements in the interpreter: owner, attribute name, new value."""
    import triton.language as tl
    from triton.runtime import interpreter

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    convert, launch = interpreter._convert_float, interpreter.GridExecutor.__call__

    def converted(value: Any, of: Any, to: Any, mode: Any) -> Any:
        if (of, to) == (tl.bfloat16, tl.float32):
            return widened(value)
        if (of, to) == (tl.float32, tl.bfloat16):
            return rounded(value)
        return convert(value, of, to, mode)

    def is_half(value: Any) -> bool:
        return isinstance(value, handle) and value.dtype.scalar == tl.bfloat16

    def in_float32(real: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: Any, *args: Any) -> Any:
            if not any(map(is_half, args)):
                return real(self, *args)
            wide = [handle(widened(value.data), tl.float32) if is_half(value) else value for value in args]
            result = real(self, *wide)
            return handle(rounded(result.data), tl.bfloat16) if result.data.dtype == np.float32 else result

        return compute

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _get_current_dispatch_mode() is not None:
            gpu.launched(f"triton {self.fn.__name__}", list(tensors(args, kwargs)))
        with _disable_current_modes(), np.errstate(all="ignore"):  # masked lanes may compute invalid values
            return launch(self, *args, **kwargs)

    yield interpreter, "_convert_float", converted
    for name in ("binary_op", "create_fma", "unary_op", "create_rsqrt", "create_dot"):
        yield builder, name, in_float32(getattr(builder, name))
    yield interpreter.GridExecutor, "__call__", launched
