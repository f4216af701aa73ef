"""A simulated CUDA device: tensors are computed on the CPU and report the simulated device.

`with pretended(PretendedGPU(capability=(9, 0))) as gpu:` makes torch.cuda report a GPU of that capability. Counted by phase
and by line of code:

    kernels     operations that would be launched
    waits       operations for which the host waits for the device: values read, lengths that depend on values, copies to the host
    copies      from the host, which wait until the device has finished its earlier work
    mixed       operands on two devices, which CUDA refuses
    attention   the attention implementation that is called, and the kind of its mask
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import interpreted
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import bias as attention_bias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
REAL_DEVICE = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
REAL_TO, REAL_TOLIST, REAL_NUMPY = Tensor.to, Tensor.tolist, Tensor.numpy
WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
}  # fmt: skip
"""Operations whose result, or the size of it, has to be known to the host."""
BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPIES = {"aten::copy_", "aten::_to_copy", "aten::set_", *BY_INDEX}
"""Operations that CUDA lets take operands of the host."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
PASSED = ("/torch/", "/triton/", "contextlib")
"""Files that no count is put down to."""
TAGS = 20_000
"""Storages that are remembered before those that are gone are forgotten."""


class Thread(threading.local):
    """State of one thread, because several threads move tensors at the same time."""

    making: torch.device | None = None  # device of the tensor that is being created
    silent = False  # inside an operation, devices are the real ones


class PretendedGPU:
    """A simulated GPU that counts kernels, waits and copies by `phase`."""

    current: PretendedGPU | None = None

    def __init__(self, capability: tuple[int, int] = (9, 0), memory: int = 80 * 2**30) -> None:
        self.capability, self.memory, self.phase = capability, memory, "-"
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.copies: Counter[tuple[str, str]] = Counter()
        self.mixed: Counter[tuple[str, str, str]] = Counter()
        self.attention: Counter[tuple[str, ...]] = Counter()
        self.thread = Thread()
        self._places: dict[int, tuple[StorageWeakRef, torch.device]] = {}

    def where(self, tensor: Tensor) -> torch.device:
        storage = _storage(tensor)
        held = self._places.get(storage._cdata) if storage is not None else None
        real: torch.device = REAL_DEVICE(tensor)
        return real if held is None else held[1]

    def put(self, tensor: Tensor, device: torch.device) -> None:
        storage = _storage(tensor)
        if storage is None:
            return
        if len(self._places) > TAGS:
            self._places = {key: held for key, held in self._places.items() if not held[0].expired()}
        self._places[storage._cdata] = StorageWeakRef(storage), device

    def waits_in(self, phase: str) -> int:
        return sum(count for (key, *_), count in self.waits.items() if key == phase)

    def copies_in(self, phase: str) -> int:
        return sum(count for (key, _), count in self.copies.items() if key == phase)

    def wait(self, what: str) -> None:
        self.waits[self.phase, what, _lines()] += 1

    def launched(self, name: str, operands: Sequence[Tensor]) -> None:
        """Count a kernel by its name, and its operands on the host, which are a fault."""
        self.kernels[self.phase] += 1
        for operand in operands:
            if self.where(operand).type == "cpu" and operand.numel():
                self.mixed[self.phase, name, _lines()] += 1

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count operations in the context for this phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def one_kernel(self, name: str, dtype: torch.dtype) -> Iterator[None]:
        """Count the operations in the context as a single attention kernel without waits."""
        counts = self.kernels.copy(), self.waits.copy(), self.copies.copy(), self.mixed.copy(), self.attention.copy()
        yield
        self.kernels, self.waits, self.copies, self.mixed, self.attention = counts
        self.kernels[self.phase] += 1
        self.attention[self.phase, name, str(dtype)] += 1

    @contextlib.contextmanager
    def making_on(self, device: torch.device) -> Iterator[None]:
        before, self.thread.making = self.thread.making, device
        try:
            yield
        finally:
            self.thread.making = before

    def move(self, tensor: Tensor, device: torch.device, *, waits: bool) -> Tensor:
        if self.where(tensor).type == device.type:
            return tensor
        if device.type == "cpu" and waits:
            self.wait("copy to the host")
        elif device.type == "cuda" and waits:
            self.copies[self.phase, _lines()] += 1
        with self.making_on(device):
            moved = tensor.clone()
        self.put(moved, device)
        return moved


def _storage(tensor: Tensor) -> Any:
    try:
        return torch._C.TensorBase.untyped_storage(tensor)
    except Exception:  # some tensors have no storage
        return None


def _lines() -> str:
    """The three innermost lines of code outside torch, Triton and the simulation."""
    frame, lines = sys._getframe(2), []
    while frame is not None and len(lines) < 3:
        file = frame.f_code.co_filename
        if file not in (__file__, interpreted.__file__) and not any(part in file for part in PASSED):
            lines.append(f"{file.split('site-packages/')[-1]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


def _device(value: Any) -> torch.device:
    device = torch.device(value)
    return CUDA if device.type == "cuda" else device


# --- operations -------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Compute every operation on the CPU, record the device of its results, and count it."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs, name = self.gpu, dict(kwargs or {}), func._schema.name
        tensors = list(interpreted.tensors(args, kwargs))
        places = [gpu.where(tensor) for tensor in tensors]
        on_gpu = any(place.type == "cuda" for place in places)
        place = self._place(kwargs, tensors, on_gpu)
        kwargs.pop("pin_memory", None)
        storages = {storage._cdata for storage in map(_storage, tensors) if storage is not None}
        before, gpu.thread.silent = gpu.thread.silent, True
        try:
            if func._overloadname in ("dtype", "dtype_out") and name in PRODUCTS:
                out = _mixed_product(name, args, kwargs)
            else:
                out = func(*args, **kwargs)
        finally:
            gpu.thread.silent = before
        fresh = False
        for tensor in interpreted.tensors(out) if name != "aten::set_" else ():
            if (storage := _storage(tensor)) is not None and storage._cdata not in storages:
                gpu.put(tensor, place)
                fresh = True
        if (on_gpu or place.type == "cuda") and (fresh or _writes(func)):
            gpu.kernels[gpu.phase] += 1
        if on_gpu:
            self._count(name, func, args, kwargs, tensors, places)
        return out

    def _place(self, kwargs: dict[str, Any], tensors: Sequence[Tensor], on_gpu: bool) -> torch.device:
        """The device of the results; a request for a GPU in `kwargs` is replaced by the CPU."""
        gpu, requested = self.gpu, kwargs.get("device")
        place = CUDA if on_gpu else CPU
        if requested is None:
            return gpu.thread.making if gpu.thread.making is not None and not on_gpu else place
        device = _device(requested)
        if device.type == "cuda":
            kwargs["device"] = CPU
            return device
        if device.type == "cpu" and gpu.thread.making is None and (tensors or torch._C._current_graph_task_id() != -1):
            # torch's C++ code for the options of a tensor reports the CPU for all tensors.
            return CUDA if on_gpu or not tensors else CPU
        return gpu.thread.making or device

    def _count(
        self, name: str, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], places: Sequence[torch.device]
    ) -> None:
        gpu = self.gpu
        if name in WAITS or (name == "aten::repeat_interleave" and func._overloadname == "Tensor"):
            gpu.wait(name)
        if name in BY_INDEX:
            masks = [key for key in args[1] if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8)]
            for _ in masks:
                gpu.wait(f"{name} by a mask")
        if name == "aten::copy_" and places[0].type == "cpu":
            gpu.wait("copy to the host")
        if name == "aten::copy_" and [place.type for place in places] == ["cuda", "cpu"] and tensors[1].dim():
            at_once = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            gpu.copies[gpu.phase, _lines()] += not at_once
        if name in COPIES:
            return
        for arg, place in zip(tensors, places, strict=True):
            if place.type == "cpu" and arg.numel() and (arg.dim() or name in ("aten::cat", "aten::mm", "aten::stack")):
                gpu.mixed[gpu.phase, name, _lines()] += 1


@functools.cache
def _writes(func: Any) -> bool:
    """Return whether an operator changes an operand."""
    return any(value.alias_info is not None and value.alias_info.is_write for value in func._schema.arguments)


def _mixed_product(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Compute cuBLAS's products of half precision with a float32 result, which the CPU lacks."""
    if name in ("aten::mm", "aten::bmm"):
        left, right, dtype = args[:3]
        made: Tensor = left.to(dtype) @ right.to(dtype)
    else:
        total, left, right, dtype = args[:4]
        made = left.to(dtype) @ right.to(dtype) * kwargs.get("alpha", 1) + total.to(dtype) * kwargs.get("beta", 1)
    out = kwargs.get("out")
    return made if out is None else out.copy_(made)


class Calls(TorchFunctionMode):
    """Record the device that a call names for its tensor, and calls of attention."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self.gpu, kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            query = args[0] if args else kwargs["query"]
            if not isinstance(mask, attention_bias.CausalBias) and gpu.where(query).type == "cuda":
                kind = "mask" if mask is not None else "causal" if kwargs.get("is_causal") else "full"
                gpu.attention[gpu.phase, kind, str(query.dtype)] += 1
        requested = kwargs.get("device")
        if requested is None or func is REAL_TO or _device(requested).type not in ("cuda", "cpu"):
            return func(*args, **kwargs)
        device = _device(requested)
        if device.type == "cuda" and func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            gpu.copies[gpu.phase, _lines()] += 1
        with gpu.making_on(device):
            out = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"} | {"device": CPU})
        if isinstance(out, Tensor) and (storage := _storage(out)) is not None:
            own = (_storage(x) for x in interpreted.tensors(args))
            if all(x is None or x._cdata != storage._cdata for x in own):
                gpu.put(out, device)
        return out


# --- properties that torch reports ------------------------------------------------------------------------------------


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    gpu = PretendedGPU.current
    if gpu is None or gpu.thread.silent:
        return REAL_TO(self, *args, **kwargs)
    copy, arguments = kwargs.pop("copy", False), list(args)
    other = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("other")
    if isinstance(other, Tensor):
        device, dtype = gpu.where(other), other.dtype
        at_once, layout = kwargs.get("non_blocking", False), kwargs.get("memory_format")
    elif arguments and isinstance(arguments[0], int):
        device, dtype, at_once, layout = CUDA, None, False, None
    else:
        with torch._C.DisableTorchFunction():
            device, dtype, at_once, layout = torch._C._nn._parse_to(*arguments, **kwargs)
    if device is not None and device.type == "meta":
        return REAL_TO(self, *args, **kwargs)
    out = self
    if dtype is not None and dtype != self.dtype:
        out = REAL_TO(out, dtype=dtype)
    if layout is not None:
        out = REAL_TO(out, memory_format=layout)
    if device is not None:
        out = gpu.move(out, _device(device), waits=not at_once)
    return out.clone() if copy and out is self else out


def _lower_right(*sizes: int) -> Any:
    """torch's causal mask for more keys than queries, an instance of its own tensor class."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return attention_bias.CausalBias(attention_bias.CausalVariant.LOWER_RIGHT, *sizes)


def _causal(gpu: PretendedGPU) -> Any:
    """Attention with that mask: record the kernel that torch chooses, and compute it with a plain mask."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def computed(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float = 0.0, is_causal: bool = False, **more: Any
    ) -> Tensor:  # fmt: skip
        queries, keys = attn_mask.seq_len_q, attn_mask.seq_len_kv
        if queries == keys or attn_mask.variant == attention_bias.CausalVariant.UPPER_LEFT:
            return attend(query, key, value, dropout_p=dropout_p, is_causal=True, **more)
        half = query.dtype in (torch.float16, torch.bfloat16) and query.dtype == key.dtype == value.dtype
        kernel = "flash" if half and gpu.capability >= (8, 0) and query.shape[-1] <= 256 else "efficient"
        gpu.attention[gpu.phase, f"lower right, {kernel}", str(query.dtype)] += 1
        with torch.autocast("cpu", enabled=False):
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
            return attend(query, key, value, attn_mask=mask, dropout_p=dropout_p, **more)

    return staticmethod(computed)


def _by_lengths(gpu: PretendedGPU) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of the kernels that take the lengths of segments, with torch's conditions for them."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, scale: float | None, left: int
    ) -> Tensor:
        def segments(ends: Tensor, size: int) -> tuple[Tensor, Tensor]:
            """For each token: the number of its segment, and its distance to the segment's end."""
            place = torch.arange(size, device=query.device)
            number = torch.searchsorted(ends[1:].contiguous(), place, right=True)
            return number, ends[1:][number] - place

        (of_query, ahead), (of_key, key_ahead) = (
            segments(ends.long(), len(tokens)) for ends, tokens in ((starts, query), (key_starts, key))
        )
        behind = key_ahead - ahead[:, None]
        hidden = (of_query[:, None] != of_key) | (behind < 0) | (behind > (left if left >= 0 else len(key)))
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
        scores = (q.float() @ k.float().transpose(1, 2)) * (q.shape[2] ** -0.5 if scale is None else scale)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v.float()).to(query.dtype).transpose(0, 1)

    def flash(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if gpu.capability < (8, 0):
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        with gpu.one_kernel("flash by lengths", query.dtype):
            return attend(query, key, value, cu_seq_q, cu_seq_k, scale, window_size[0])

    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: None, *rest: Any, scale: Any = None, window_size: Any = None
    ) -> tuple[Any, ...]:
        left = -1 if window_size is None else window_size - 1
        with gpu.one_kernel("efficient by lengths", query.dtype):
            out = attend(query[0], key[0], value[0], rest[0], rest[1], scale, left)[None]
            return out, *(out.new_empty(0) for _ in range(3)), rest[2], rest[3]

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, out: Tensor, *rest: Any, scale: Any, window_size: Any
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        left = -1 if window_size is None else window_size - 1
        with gpu.one_kernel("efficient by lengths, backward", query.dtype):
            slopes = gradients(grad[0], (query[0], key[0], value[0]), rest[0], rest[1], scale, left)
            return *(slope[None] for slope in slopes), None

    def gradients(grad: Tensor, inputs: Sequence[Tensor], *rest: Any) -> Sequence[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            return torch.autograd.grad(attend(*leaves, *rest), leaves, grad)

    def flash_forward(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, *rest: Any, scale: Any = None,
        window_size_left: int | None = None, **_: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        out = flash(
            query, key, value, starts, key_starts, *rest[:2], scale=scale, window_size=(_left(window_size_left), 0)
        )
        return out, *(out.new_empty(0) for _ in range(4))

    def flash_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, starts: Tensor, key_starts: Tensor,
        *rest: Any, scale: Any = None, window_size_left: int | None = None, **_: Any,
    ) -> Sequence[Tensor]:  # fmt: skip
        with gpu.one_kernel("flash by lengths, backward", query.dtype):
            return gradients(grad, (query, key, value), starts, key_starts, scale, _left(window_size_left))

    def _left(window: int | None) -> int:
        return -1 if window is None else window

    from torch.nn.attention import varlen

    yield varlen, "varlen_attn", flash
    operators = {
        "_efficient_attention_forward": forward, "_efficient_attention_backward": backward,
        "_flash_attention_forward": flash_forward, "_flash_attention_backward": flash_backward,
    }  # fmt: skip
    for operator, computed in operators.items():
        yield torch.ops.aten, operator, _Instead(getattr(torch.ops.aten, operator), computed)


class _Instead:
    """An operator of torch with another implementation."""

    def __init__(self, operator: Any, computed: Any) -> None:
        self.operator, self.computed = operator, computed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.computed(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)


def _replacements(gpu: PretendedGPU) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements of the simulated GPU: owner, attribute name, new value."""
    stream = SimpleNamespace(
        synchronize=lambda: gpu.wait("synchronize"),
        wait_stream=lambda _: None,
        cuda_stream=0,
        is_capturing=lambda: False,
    )
    properties = SimpleNamespace(
        name="pretended", major=gpu.capability[0], minor=gpu.capability[1], total_memory=gpu.memory,
        multi_processor_count=132, warp_size=32, gcnArchName="", uuid="0", shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448, L2_cache_size=60 << 20, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, is_integrated=0,
    )  # fmt: skip
    values = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_lazy_init": None, "init": None,
        "get_device_capability": gpu.capability, "get_device_name": "pretended", "get_device_properties": properties,
        "mem_get_info": (gpu.memory - 2**30, gpu.memory), "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "reset_peak_memory_stats": None,
        "memory_stats": {}, "empty_cache": None, "is_bf16_supported": gpu.capability >= (8, 0), "ipc_collect": None,
        "seed_all": None, "manual_seed": None, "manual_seed_all": None, "set_rng_state": None, "set_rng_state_all": None,
        "current_stream": stream, "default_stream": stream, "set_stream": None, "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, value in values.items():
        yield torch.cuda, name, lambda *_, value=value, **__: value
    index_of = torch.cuda._utils._get_device_index
    yield torch.cuda, "set_device", lambda device: index_of(device) and None  # like torch, raises without an index
    state = torch.get_rng_state
    for module in (torch.cuda, torch.cuda.random):
        yield module, "get_rng_state", lambda *_, **__: state()
        yield module, "get_rng_state_all", lambda: [state()]
        for name in ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all"):
            yield module, name, lambda *_, **__: None
    yield torch.cuda, "synchronize", lambda *_, **__: gpu.wait("synchronize")
    accelerator = {
        "current_stream": stream, "current_device_index": 0, "is_available": True, "device_count": 1,
        "current_accelerator": CUDA, "set_device_index": None, "empty_cache": None, "memory_allocated": 0,
        "max_memory_allocated": 0,
    }  # fmt: skip
    for name, value in accelerator.items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, lambda *_, value=value, **__: value
    yield torch.accelerator, "synchronize", lambda *_, **__: gpu.wait("synchronize")
    for name, value in {
        "_cuda_getCurrentRawStream": 0, "_cuda_getDevice": 0, "_cuda_setDevice": None, "_cuda_getDeviceCount": 1,
        "_cuda_exchangeDevice": 0, "_cuda_maybeExchangeDevice": 0, "_get_accelerator": CUDA,
    }.items():  # fmt: skip
        yield torch._C, name, lambda *_, value=value: value

    def device(self: Tensor) -> torch.device:
        return REAL_DEVICE(self) if gpu.thread.silent else gpu.where(self)

    def asked(real: Any) -> Any:
        def ask(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if gpu.where(self).type == "cuda" and real is REAL_NUMPY:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            if gpu.where(self).type == "cuda":
                gpu.wait("tolist")
            return real(self, *args, **kwargs)

        return ask

    yield Tensor, "device", property(device)
    yield Tensor, "is_cuda", property(lambda self: device(self).type == "cuda")
    yield Tensor, "is_cpu", property(lambda self: device(self).type == "cpu")
    yield Tensor, "get_device", lambda self: 0 if device(self).type == "cuda" else -1
    yield Tensor, "to", _to
    yield Tensor, "cpu", lambda self, *_, **__: gpu.move(self, CPU, waits=True)
    yield Tensor, "cuda", lambda self, *_, **__: gpu.move(self, CUDA, waits=True)
    yield Tensor, "pin_memory", lambda self, *_, **__: self
    yield Tensor, "tolist", asked(REAL_TOLIST)
    yield Tensor, "numpy", asked(REAL_NUMPY)

    autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler
    begin_autocast, begin_scaler = autocast.__init__, scaler.__init__
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def autocasting(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        half = torch.float16 if device_type == "cuda" and dtype is None else dtype
        begin_autocast(self, "cpu" if device_type == "cuda" else device_type, half, *args, **kwargs)

    yield autocast, "__init__", autocasting
    yield scaler, "__init__", lambda self, _="cuda", *args, **kwargs: begin_scaler(self, "cpu", *args, **kwargs)
    yield torch, "is_autocast_enabled", lambda _=None: enabled("cpu")
    yield torch, "get_autocast_dtype", lambda _: dtype_of("cpu")

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    yield torch, "Generator", Generator
    yield attention_bias.CausalBias, "_dispatch", _causal(gpu)
    yield from _by_lengths(gpu)
    import kit.scoring.packing as packed

    yield packed, "causal_lower_right", _lower_right
    packed._kernel.cache_clear()  # remove the kernels of another GPU
    with contextlib.suppress(ImportError):  # otherwise Unsloth, as root, runs ldconfig if libcuda is missing
        import triton.backends.nvidia.driver

        yield triton.backends.nvidia.driver, "libcuda_dirs", lambda: []
        yield from interpreted.replacements(gpu)


@contextlib.contextmanager
def pretended(gpu: PretendedGPU) -> Iterator[PretendedGPU]:
    """Simulate this GPU for torch in the context."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(gpu):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(PretendedGPU, "current", gpu))
        stack.enter_context(Calls(gpu))
        stack.enter_context(Operations(gpu))
        yield gpu
