"""Attention and the head by themselves, each way of computing them timed on the same numbers: rows of gpu_check.py.

In the shape of Llama-3.1-8B on a GPU; small on a CPU, where this only shows that it works.
"""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
LIKE: dict[str, Any] = {"device": "cpu"}
if ON_GPU:  # a T4 has no bfloat16
    LIKE = {
        "device": "cuda",
        "dtype": torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16,
    }
HEADS = (32, 8, 128) if ON_GPU else (4, 2, 16)
"""Of queries, of keys, and the size of one."""
HEAD = (8192, 4096, 128256) if ON_GPU else (64, 32, 512)
"""Tokens, hidden size, vocabulary."""


def attention(way: str, prompt: int, lengths: Callable[[int], list[list[int]]], place: Path) -> dict[str, Any]:
    """One layer's attention over a pack, forward and backward: `varlen` is one call of torch's, anything else the kit's.

    prompt: tokens of each. lengths: of the completions of each prompt, from a seed. `new_seconds` is the mean over lengths
    that were not seen before, as every step brings them.
    """
    from kit.scoring.packing import Group, Layout, packed_attention

    heads, shared, size = HEADS

    def of(seed: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
        groups, start = [], 0
        for some in lengths(seed):
            groups.append(Group(start, prompt - 1, tuple(sorted(some, reverse=True))))
            start += groups[-1].tokens
        inputs = [drawn(seed, 1, n, start, size).requires_grad_() for n in (heads, shared, shared)]
        if way == "varlen":
            return lambda: varlen(*inputs, groups), inputs
        return lambda: packed_attention(*inputs, Layout(groups)), inputs

    once(*of(99))
    new = statistics.mean(once(*of(seed)) for seed in range(1, 5))
    return timed(*of(0), place) | {"new_seconds": new}


def varlen(query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Any]) -> Tensor:
    """(1, h, S, d) -> (1, S, h, d): each segment's queries over the prompt's keys and its own, all in one call."""
    from torch.nn.attention.varlen import varlen_attn

    places: list[Tensor] = []
    queries, keys = [], []
    for group in groups:
        start = group.start + group.prompt
        for number, length in enumerate(group.lengths):
            places += [torch.arange(group.start, group.start + group.prompt), torch.arange(start, start + length)]
            keys.append(group.prompt + length)
            queries.append(length if number else group.prompt + length)
            start += length
    ends = [torch.tensor([0, *some]).cumsum(0).to(query.device, torch.int32) for some in (queries, keys)]
    taken = torch.cat(places).to(query.device)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    k, v, more = k[taken], v[taken], {"enable_gqa": True}
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # as in torch 2.11
        k, v, more = *(one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v)), {}
    found: Tensor = varlen_attn(q, k, v, *ends, max(queries), max(keys), window_size=(-1, 0), **more)
    return found[None]


def head(way: str, place: Path) -> dict[str, Any]:
    """Log-probabilities of 8,192 tokens over 128,256 words by a frozen head, forward and backward: `TRL`'s kernel, or `kit`."""
    from kit.scoring.head import DEFAULT_CHUNK, ChunkedLogProb

    tokens, width, words = HEAD
    hidden, weight = drawn(0, tokens, width).requires_grad_(), drawn(1, words, width) / width**0.5
    targets = torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(2)).to(LIKE["device"])
    function, chunk = ChunkedLogProb, DEFAULT_CHUNK
    if way == "TRL":
        from trl.kernels import ChunkedLogProbFunction  # what `trl.trainer.utils` has may be the kit's by now
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

        function, chunk = ChunkedLogProbFunction, _CHUNKED_LOGPROB_CHUNK_SIZE
    return timed(lambda: function.apply(hidden, weight, None, targets, 1.0, chunk)[0], [hidden], place)


def drawn(seed: int, *shape: int) -> Tensor:
    """The same normal numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(**LIKE)


def once(call: Callable[[], Tensor], inputs: Sequence[Tensor]) -> float:
    """Seconds of a forward and backward pass."""
    for one in inputs:
        one.grad = None
    wait()
    began = time.perf_counter()
    call().float().square().mean().backward()  # type: ignore[no-untyped-call]
    wait()
    return time.perf_counter() - began


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def timed(call: Callable[[], Tensor], inputs: Sequence[Tensor], place: Path) -> dict[str, Any]:
    """Median seconds, peak memory beyond what was there, and how far the gradients are off those in `place`."""
    once(call, inputs)
    for one in inputs:
        one.grad = None
    held = torch.cuda.memory_allocated() if ON_GPU else 0
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"seconds": statistics.median(once(call, inputs) for _ in range(5))}
    if ON_GPU:
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - held
    return found | compared({str(n): one.grad.float().cpu() for n, one in enumerate(inputs)}, place)  # type: ignore[union-attr]


def compared(gradient: Mapping[str, Tensor], place: Path) -> dict[str, float]:
    """The norm of a gradient, and how far it is off the one in this file relative to that one's; the first leaves the file."""
    if not place.is_file():
        torch.save(dict(gradient), place)
        return {"gradient_norm": norm(gradient)}
    first, none = torch.load(place), torch.zeros(())
    off = {name: gradient.get(name, none) - first.get(name, none) for name in first.keys() | gradient.keys()}
    return {"gradient_norm": norm(gradient), "gradient_off": norm(off) / norm(first)}


def norm(of: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(one.norm()) ** 2 for one in of.values()))
