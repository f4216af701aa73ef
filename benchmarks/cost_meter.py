"""FLOPs, bytes of the allocator, traffic and launches of torch code on CUDA tensors that have no data.

`Meter` is a dispatch mode above a `FakeTensorMode`. What follows from ids, masks and lengths alone carries a real copy on
the CPU (`_known`), so that code which asks for values gets them; values of the model are unknown, and asked for they are 1.

FLOPs are those of matrix products and of attention: only the pairs of query and key that a kernel computes. Bytes are
rounded as the allocator rounds them, kernels' workspaces included. Traffic is every operand and every result of a launch
once. Triton kernels are not run: each is one launch that touches its tensors.
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
"""Bytes to which torch's caching allocator rounds."""
KNOWN_LIMIT = 4_000_000
"""Numbers of a tensor whose value is followed, at most."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_", "aten::_addmm_activation"}
VIEWS = {
    "aten::view", "aten::_unsafe_view", "aten::t", "aten::transpose", "aten::permute", "aten::expand", "aten::slice",
    "aten::select", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias", "aten::as_strided", "aten::split",
    "aten::split_with_sizes", "aten::unbind", "aten::diagonal", "aten::_reshape_alias", "aten::lift_fresh",
}  # fmt: skip
EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
UNKNOWN = ("rand", "dropout", "bernoulli", "empty")
"""In the name of an operation whose result does not follow from its operands."""


class Meter(TorchDispatchMode):
    """Counts what runs inside. rank: of LoRA, whose products are counted apart."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.flops: Counter[str] = Counter()  # by kind: linear, lora, head, attention
        self.traffic: Counter[str] = Counter()  # bytes; by kind: gemm, attention, other
        self.attention: Counter[str] = Counter()  # calls, by kernel and mask
        self.launches = 0
        self.now = 0  # bytes
        self.peaks: Counter[str] = Counter()  # bytes, by pass and phase: each grows evenly with the number of layers
        self._passes, self._backward = 1, False
        self.in_head = False
        self._live: dict[int, Any] = {}  # by storage

    # --- memory -------------------------------------------------------------------------------------------------------

    def hold(self, tensor: Any) -> None:
        """Counts the bytes of a tensor on the device for as long as they live."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        if key in self._live or not size:
            return

        def gone(_: Any) -> None:
            if self._live.pop(key, None) is not None:
                self.now -= size

        self.now += size
        self._live[key] = weakref.ref(storage, gone)

    def _next_phase(self) -> str:
        """That of the operation that is here now, with the number of its pass: a forward pass and its backward pass."""
        if torch._C._current_graph_task_id() != -1:
            backward = "recompute" if torch.is_grad_enabled() and not self.in_head else "backward"
        else:
            backward = "forward" if torch.is_grad_enabled() or self.in_head else "no grad"
        before, self._backward = self._backward, backward in ("backward", "recompute")
        self._passes += before and not self._backward  # they differ by the gradients that are there before them
        return f"{self._passes}: {'head ' if self.in_head else ''}{backward}"

    # --- work ---------------------------------------------------------------------------------------------------------

    def launch(self, tensors: Sequence[Tensor], kind: str = "other") -> None:
        """One kernel that touches these once each."""
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
        """Counts a call; bytes of its workspace, which no tensor shows."""
        bound = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        backward = "backward" in name
        query, key = bound["query"], bound["key"]
        ends = [
            found
            for names in (("cu_seq_q", "cum_seq_q", "cu_seqlens_q"), ("cu_seq_k", "cum_seq_k", "cu_seqlens_k"))
            if (found := next((bound[one] for one in names if bound.get(one) is not None), None)) is not None
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
        dense = any(isinstance(bound.get(one), Tensor) for one in ("attn_bias", "bias", "attn_mask"))
        width = window[0] + 1 if window[0] >= 0 else None
        if ends:
            places = [self._values(one) for one in (ends[0], ends[-1])]
            sizes = [[stop - start for start, stop in pairwise(one)] for one in places]
            pairs = sum(causal_pairs(q, k, width) if causal else q * k for q, k in zip(*sizes, strict=True))
        else:
            pairs = batch * (causal_pairs(queries, keys, width) if causal else queries * keys)
        kernel = next(one for one in ("varlen", "flash", "cudnn", "efficient") if one in name)
        self.attention[f"{kernel}, {'dense mask' if dense else 'causal' if causal else 'full'}"] += 1
        self.flops["attention"] += (10 if backward else 4) * pairs * heads * size
        if not backward:
            return 0
        grouped = 2 * batch * keys * heads * size * key.element_size() if heads != key_heads else 0
        room = queries + 128 * (len(sizes[0]) if ends else 0)  # of float32 sums, each sequence rounded up
        return batch * heads * -(-room // 128) * 128 * (size + 1) * 4 + grouped * (kernel in ("flash", "varlen"))

    @staticmethod
    def _window(bound: dict[str, Any]) -> tuple[int, int]:
        if isinstance(bound.get("window_size"), (list, tuple)):
            return tuple(bound["window_size"])
        left, right = bound.get("window_size_left"), bound.get("window_size_right")
        if bound.get("window_size") is not None:  # of the memory-efficient kernel
            return int(bound["window_size"]) - 1, 0
        return -1 if left is None else int(left), -1 if right is None else int(right)

    # --- values -------------------------------------------------------------------------------------------------------

    def _known(self, value: Any) -> Any:
        """The real tensor behind one; None: unknown."""
        return getattr(value, "_known", None) if isinstance(value, FakeTensor) else value

    def _values(self, tensor: Tensor) -> list[int]:
        known = self._known(tensor)
        assert known is not None, "the lengths of packed sequences are not known"
        with _disable_current_modes():
            return list(map(int, known))

    def _on_cpu(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Operands as real tensors on the CPU; None where one of them is unknown."""
        unknown = False

        def real(value: Any) -> Any:
            nonlocal unknown
            if isinstance(value, Tensor):
                found = self._known(value)
                unknown = unknown or found is None
                return found
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        made = tree_map(real, (args, kwargs))
        return None if unknown else made

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor]) -> None:
        """Gives the result its real value, where that follows."""
        results = [one for one in tree_flatten(out)[0] if isinstance(one, FakeTensor)]
        given = None
        if not any(part in name for part in UNKNOWN) and all(
            one.numel() <= KNOWN_LIMIT for one in (*tensors, *results)
        ):
            given = self._on_cpu(args, kwargs)
        if given is None:
            if func._schema.is_mutable and args and hasattr(args[0], "_known"):
                del args[0]._known
            return
        with _disable_current_modes(), torch.no_grad():
            try:
                real = func(*given[0], **given[1])
            except (RuntimeError, NotImplementedError):  # an operation that the CPU has not
                return
        for one, value in zip(results, (v for v in tree_flatten(real)[0] if isinstance(v, Tensor)), strict=False):
            if one.shape == value.shape:
                one._known = value

    def _made(self, real: Tensor) -> Tensor:
        """A tensor on the device whose value is known."""
        made = torch.empty(real.shape, dtype=real.dtype, device="cuda")
        made._known = real  # type: ignore[attr-defined]
        return made

    def _asked(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The answer to an operation that asks for values; `NotImplemented` for any other."""
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
            both = [self._known(one) for one in args[:2]]
            with _disable_current_modes():
                return None in both or torch.equal(*both)
        if name in ("aten::nonzero", "aten::masked_select"):
            given = self._on_cpu(args[-1:], {})
            assert given is not None, f"{name} of a value of the model"
            with _disable_current_modes():
                mask = given[0][0]
                real = mask.nonzero() if name == "aten::nonzero" else mask.expand(args[0].shape).nonzero()[:, 0]
            made = self._made(real)
            return made if name == "aten::nonzero" else torch.empty(len(real), dtype=args[0].dtype, device="cuda")
        return NotImplemented

    def _without_masks(self, args: Any) -> Any:
        """Operands of an indexing, boolean indices as numbers."""
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8):
                known = self._known(index)
                assert known is not None, "indexed by a mask that is a value of the model"
                with _disable_current_modes():
                    columns = known.nonzero().unbind(1)
                indices += [self._made(column) for column in columns]
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    # --- every operation ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        fakes = [one for one in tensors if isinstance(one, FakeTensor)]
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == "cuda"
        if name in ("aten::_pin_memory", "aten::pin_memory"):
            return args[0]
        if not fakes and not to_device:  # of the host
            with _disable_current_modes():
                return func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if name != "aten::item" and _only_composed(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        answer = self._asked(func, name, args, kwargs)
        if answer is not NotImplemented:
            return answer
        if name in BY_INDEX:
            args = self._without_masks(args)
        if name == "aten::_efficient_attention_backward":  # whose form for tensors without data fails
            out = (*(torch.empty_like(one) for one in args[1:4]), None)
        else:
            out = func(*args, **kwargs)
        self._follow(func, name, args, kwargs, out, tensors)
        results = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
        workspace = 0
        if name not in VIEWS and (to_device or any(one.device.type == "cuda" for one in fakes)):
            kind = "gemm" if name in PRODUCTS else "attention" if "attention" in name or "varlen" in name else "other"
            if kind == "gemm":
                self._product(name, args)
            elif kind == "attention":
                workspace = self._attention(func, name, args, kwargs)
            if name not in EMPTY:
                self.launch([*tensors, *results], kind)
        for one in results:
            self.hold(one)
        phase = self._next_phase()
        self.peaks[phase] = max(self.peaks[phase], self.now + workspace)
        return out

    # --- parts of the code --------------------------------------------------------------------------------------------

    def mark_head(self, function: Any) -> None:
        """What an autograd function does, forward and backward, is the head's."""
        for name in ("forward", "backward"):
            setattr(function, name, staticmethod(_inside_head(self, getattr(function, name))))

    @contextmanager
    def counting_triton(self) -> Iterator[None]:
        """Inside, a Triton kernel is a launch that touches its tensors, and does nothing."""
        from triton.runtime.jit import KernelInterface

        before = KernelInterface.__getitem__
        KernelInterface.__getitem__ = lambda _, grid: lambda *args, **kwargs: self.launch([*args, *kwargs.values()])
        try:
            yield
        finally:
            KernelInterface.__getitem__ = before


def _inside_head(meter: Meter, function: Any) -> Any:
    def marked(*args: Any, **kwargs: Any) -> Any:
        before, meter.in_head = meter.in_head, True
        try:
            return function(*args, **kwargs)
        finally:
            meter.in_head = before

    return marked


def _only_composed(func: Any) -> bool:
    """Whether an operation is made of others, and CUDA has no kernel of its own for it."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return func._can_decompose() and has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CUDA")


def causal_pairs(queries: int, keys: int, window: int | None = None) -> int:
    """Pairs of the last `queries` of `keys` tokens in a row with what they see: themselves and what is before them."""
    if window is None or window >= keys:
        return queries * keys - queries * (queries - 1) // 2
    first = keys - queries
    growing = max(0, min(keys, window) - first)  # tokens with fewer than `window` before them
    return growing * first + growing * (growing + 1) // 2 + (queries - growing) * window


def without_a_gpu() -> None:
    """Lets torch run CUDA's code over tensors without data."""
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
