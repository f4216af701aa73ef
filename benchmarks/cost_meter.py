"""Count FLOPs, allocated bytes, memory traffic and kernel launches of torch code that runs on CUDA tensors without data.

`Meter` is a dispatch mode above a `FakeTensorMode`. Tensors that depend only on ids, masks and lengths carry a real copy on
the CPU (`_known`), so that code can read their values. Values of the model are unknown; code that reads one gets 1.

FLOPs are those of matrix products and of attention, for the pairs of query and key that the kernel computes. Bytes are
rounded as the allocator rounds them, and include the workspaces of kernels. Traffic counts each operand and each result of
a launch once. Triton kernels do not run: each counts as one launch that touches its tensors.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

BLOCK = 512
"""Bytes; torch's caching allocator rounds up to multiples of it."""
KNOWN_LIMIT = 4_000_000
"""Elements of the largest tensor whose value is computed on the CPU."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_", "aten::_addmm_activation"}
VIEWS = {
    "aten::view", "aten::_unsafe_view", "aten::t", "aten::transpose", "aten::permute", "aten::expand", "aten::slice",
    "aten::select", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias", "aten::as_strided", "aten::split",
    "aten::split_with_sizes", "aten::unbind", "aten::diagonal", "aten::_reshape_alias", "aten::lift_fresh",
}  # fmt: skip
EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
UNKNOWN = ("rand", "dropout", "bernoulli", "empty")
"""Parts of the names of operations whose result does not depend on their operands alone."""


class Meter(TorchDispatchMode):
    """Counts the operations that run inside the mode. `rank` is the rank of LoRA, whose products are counted apart."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.flops: Counter[str] = Counter()  # by kind: linear, lora, head, attention
        self.traffic: Counter[str] = Counter()  # bytes; by kind: gemm, attention, other
        self.attention: Counter[str] = Counter()  # calls, by kernel and mask
        self.launches = 0
        self.now = 0  # bytes
        self.peaks: Counter[str] = Counter()  # bytes, by pass and phase: each is linear in the number of layers
        self._passes, self._backward = 1, False
        self.in_head = False
        self._live: dict[int, Any] = {}  # by storage

    # --- memory -------------------------------------------------------------------------------------------------------

    def hold(self, tensor: Any) -> None:
        """Count the bytes of a tensor on the device until its storage is freed."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        if key in self._live or not size:
            return

        def release(_: Any) -> None:
            if self._live.pop(key, None) is not None:
                self.now -= size

        self.now += size
        self._live[key] = weakref.ref(storage, release)

    def _next_phase(self) -> str:
        """The phase of the current operation, with the number of its pass (one forward and its backward)."""
        if torch._C._current_graph_task_id() != -1:
            backward = "recompute" if torch.is_grad_enabled() and not self.in_head else "backward"
        else:
            backward = "forward" if torch.is_grad_enabled() or self.in_head else "no grad"
        was_backward, self._backward = self._backward, backward in ("backward", "recompute")
        self._passes += was_backward and not self._backward  # a later pass starts with gradients in memory
        return f"{self._passes}: {'head ' if self.in_head else ''}{backward}"

    # --- work ---------------------------------------------------------------------------------------------------------

    def launch(self, tensors: Sequence[Tensor], kind: str = "other") -> None:
        """Count one kernel that reads or writes each of these tensors once."""
        touched = {id(tensor): tensor for tensor in tensors if isinstance(tensor, FakeTensor)}
        self.launches += 1
        self.traffic[kind] += sum(tensor.numel() * tensor.element_size() for tensor in touched.values())

    def _product(self, name: str, args: Sequence[Any]) -> None:
        left, right = args[:2] if name in ("aten::mm", "aten::bmm") else args[1:3]
        batch = left.shape[0] if left.dim() == 3 else 1
        rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
        kind = "head" if self.in_head else "attention" if left.dim() == 3 else "linear"
        if kind == "linear" and self.rank in (rows, inner, columns):
            kind = "lora"
        self.flops[kind] += 2 * batch * rows * inner * columns

    def _attention(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Count a call of attention and return the bytes of its workspace, for which no tensor exists."""
        bound = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        backward = "backward" in name
        query, key = bound["query"], bound["key"]
        ends = [
            offsets
            for names in (("cu_seq_q", "cum_seq_q", "cu_seqlens_q"), ("cu_seq_k", "cum_seq_k", "cu_seqlens_k"))
            if (offsets := next((bound[name] for name in names if bound.get(name) is not None), None)) is not None
        ]
        if "scaled_dot_product" in name:
            batch, heads, queries, size = query.shape
            keys, key_heads = key.shape[2], key.shape[1]
        else:
            batch, queries, heads, size = (1, *query.shape) if query.dim() == 3 else query.shape
            keys, key_heads = key.shape[-3], key.shape[-2]
        window = self._window(bound)
        causal = bool(bound.get("is_causal")) or int(bound.get("custom_mask_type") or 0) > 0
        causal = causal or (name.startswith("torch_attn") and window != (-1, -1))
        dense = any(isinstance(bound.get(bias), Tensor) for bias in ("attn_bias", "bias", "attn_mask"))
        width = window[0] + 1 if window[0] >= 0 else None
        if ends:
            sizes = [[stop - start for start, stop in pairwise(self._values(end))] for end in (ends[0], ends[-1])]
            pairs = sum(causal_pairs(q, k, width) if causal else q * k for q, k in zip(*sizes, strict=True))
        else:
            pairs = batch * (causal_pairs(queries, keys, width) if causal else queries * keys)
        kernel = next(kernel for kernel in ("varlen", "flash", "cudnn", "efficient") if kernel in name)
        self.attention[f"{kernel}, {'dense mask' if dense else 'causal' if causal else 'full'}"] += 1
        self.flops["attention"] += (10 if backward else 4) * pairs * heads * size
        if not backward:
            return 0
        grouped = 2 * batch * keys * heads * size * key.element_size() if heads != key_heads else 0
        rows = queries + 128 * (len(sizes[0]) if ends else 0)  # of float32 sums; each sequence is rounded up
        return batch * heads * -(-rows // 128) * 128 * (size + 1) * 4 + grouped * (kernel in ("flash", "varlen"))

    @staticmethod
    def _window(bound: dict[str, Any]) -> tuple[int, int]:
        if isinstance(bound.get("window_size"), (list, tuple)):
            return tuple(bound["window_size"])
        left, right = bound.get("window_size_left"), bound.get("window_size_right")
        if bound.get("window_size") is not None:  # the memory-efficient kernel has this argument
            return int(bound["window_size"]) - 1, 0
        return -1 if left is None else int(left), -1 if right is None else int(right)

    # --- values -------------------------------------------------------------------------------------------------------

    def _known(self, value: Any) -> Any:
        """The real tensor behind a tensor without data, or None if its value is unknown."""
        return getattr(value, "_known", None) if isinstance(value, FakeTensor) else value

    def _values(self, tensor: Tensor) -> list[int]:
        known = self._known(tensor)
        assert known is not None, "the lengths of packed sequences are not known"
        with _disable_current_modes():
            return list(map(int, known))

    def _on_cpu(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Operands as real tensors on the CPU, or None if the value of one is unknown."""
        unknown = False

        def real(value: Any) -> Any:
            nonlocal unknown
            if isinstance(value, Tensor):
                known = self._known(value)
                unknown = unknown or known is None
                return known
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        operands = tree_map(real, (args, kwargs))
        return None if unknown else operands

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor]) -> None:
        """Attach the real value to a result that depends on known operands alone."""
        results = [result for result in tree_flatten(out)[0] if isinstance(result, FakeTensor)]
        operands = None
        if not any(part in name for part in UNKNOWN) and all(
            tensor.numel() <= KNOWN_LIMIT for tensor in (*tensors, *results)
        ):
            operands = self._on_cpu(args, kwargs)
        if operands is None:
            if func._schema.is_mutable and args and hasattr(args[0], "_known"):
                del args[0]._known
            return
        with _disable_current_modes(), torch.no_grad():
            try:
                real = func(*operands[0], **operands[1])
            except (RuntimeError, NotImplementedError):  # the CPU has no kernel for it
                return
        for result, value in zip(results, (v for v in tree_flatten(real)[0] if isinstance(v, Tensor)), strict=False):
            if result.shape == value.shape:
                result._known = value

    def _on_device(self, real: Tensor) -> Tensor:
        """A tensor on the device whose value is known."""
        tensor = torch.empty(real.shape, dtype=real.dtype, device="cuda")
        tensor._known = real  # type: ignore[attr-defined]
        return tensor

    def _read_values(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation that reads values; `NotImplemented` for any other operation."""
        if name in ("aten::_local_scalar_dense", "aten::item"):
            known = self._known(args[0])
            with _disable_current_modes():
                return torch.ones((), dtype=args[0].dtype).item() if known is None else known.item()
        if name == "aten::_to_copy" and torch.device(kwargs.get("device") or "cuda").type == "cpu":
            known, dtype = self._known(args[0]), kwargs.get("dtype") or args[0].dtype
            with _disable_current_modes():
                return torch.ones(args[0].shape, dtype=dtype) if known is None else known.to(dtype, copy=True)
        if name == "aten::copy_" and isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor):
            known = self._known(args[1])
            with _disable_current_modes():
                return args[0].fill_(1) if known is None else args[0].copy_(known)
        if name == "aten::equal":
            both = [self._known(tensor) for tensor in args[:2]]
            with _disable_current_modes():
                return None in both or torch.equal(*both)
        if name in ("aten::nonzero", "aten::masked_select"):
            operands = self._on_cpu(args[-1:], {})
            assert operands is not None, f"{name} of a value of the model"
            with _disable_current_modes():
                mask = operands[0][0]
                real = mask.nonzero() if name == "aten::nonzero" else mask.expand(args[0].shape).nonzero()[:, 0]
            indices = self._on_device(real)
            return indices if name == "aten::nonzero" else torch.empty(len(real), dtype=args[0].dtype, device="cuda")
        return NotImplemented

    def _without_masks(self, args: Any) -> Any:
        """Operands of an indexing operation, with boolean masks replaced by integer indices."""
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8):
                known = self._known(index)
                assert known is not None, "indexed by a mask that is a value of the model"
                with _disable_current_modes():
                    columns = known.nonzero().unbind(1)
                indices += [self._on_device(column) for column in columns]
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    # --- every operation ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [tensor for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == "cuda"
        if name in ("aten::_pin_memory", "aten::pin_memory"):
            return args[0]
        if not fakes and not to_device:  # an operation on the CPU
            with _disable_current_modes():
                return func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if name != "aten::item" and _only_composed(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        value = self._read_values(func, name, args, kwargs)
        if value is not NotImplemented:
            return value
        if name in BY_INDEX:
            args = self._without_masks(args)
        if name == "aten::_efficient_attention_backward":  # torch's version for tensors without data fails
            out = (*(torch.empty_like(operand) for operand in args[1:4]), None)
        else:
            out = func(*args, **kwargs)
        self._follow(func, name, args, kwargs, out, tensors)
        results = [result for result in tree_flatten(out)[0] if isinstance(result, Tensor)]
        workspace = 0
        if name not in VIEWS and (to_device or any(tensor.device.type == "cuda" for tensor in fakes)):
            kind = "gemm" if name in PRODUCTS else "attention" if "attention" in name or "varlen" in name else "other"
            if kind == "gemm":
                self._product(name, args)
            elif kind == "attention":
                workspace = self._attention(func, name, args, kwargs)
            if name not in EMPTY:
                self.launch([*tensors, *results], kind)
        for result in results:
            self.hold(result)
        phase = self._next_phase()
        self.peaks[phase] = max(self.peaks[phase], self.now + workspace)
        return out

    # --- parts of the code --------------------------------------------------------------------------------------------

    def mark_head(self, function: Any) -> None:
        """Count the forward and backward pass of an autograd function as the head's."""
        for name in ("forward", "backward"):
            setattr(function, name, staticmethod(_inside_head(self, getattr(function, name))))

    @contextmanager
    def counting_triton(self) -> Iterator[None]:
        """Count each Triton kernel as one launch that touches its tensors, and do not run it."""
        from triton.runtime.jit import KernelInterface

        original = KernelInterface.__getitem__
        KernelInterface.__getitem__ = lambda _, grid: lambda *args, **kwargs: self.launch([*args, *kwargs.values()])
        try:
            yield
        finally:
            KernelInterface.__getitem__ = original


def _inside_head(meter: Meter, function: Any) -> Any:
    def marked(*args: Any, **kwargs: Any) -> Any:
        outer, meter.in_head = meter.in_head, True
        try:
            return function(*args, **kwargs)
        finally:
            meter.in_head = outer

    return marked


def _only_composed(func: Any) -> bool:
    """Whether an operation is a composite of others and has no CUDA kernel of its own."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return func._can_decompose() and has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CUDA")


def causal_pairs(queries: int, keys: int, window: int | None = None) -> int:
    """Number of (query, key) pairs of causal attention for the last `queries` of `keys` tokens, within a sliding window."""
    if window is None or window >= keys:
        return queries * keys - queries * (queries - 1) // 2
    first = keys - queries
    growing = max(0, min(keys, window) - first)  # tokens with fewer than `window` before them
    return growing * first + growing * (growing + 1) // 2 + (queries - growing) * window


def without_a_gpu() -> None:
    """Let torch run its CUDA code paths over tensors without data."""
    import torch._subclasses.fake_tensor as fake
    import torch.cuda.amp.common

    fake.init_gpu_context = lambda *_: None
    torch.cuda._lazy_init = lambda: None  # type: ignore[method-assign]
    torch.cuda.is_bf16_supported = lambda *_, **__: True  # type: ignore[method-assign]
    torch.cuda.is_available = lambda: False  # type: ignore[method-assign]
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False

    def tolist(self: FakeTensor) -> Any:
        real = self.cpu()
        with _disable_current_modes():
            return real.tolist()

    FakeTensor.tolist = tolist
